"""Headway trains an ordinary PyTorch script on many devices: it decides how, says why, and does it."""
