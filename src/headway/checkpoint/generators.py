"""Generators: the states of the random generators that scripts draw from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def states() -> dict[str, Any]:
    """Return the generators' states as nested plain values and tensors."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": (version, torch.tensor(words), gauss)}
    numpy = sys.modules.get("numpy")
    if numpy:
        kind, words, position, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = (kind, torch.from_numpy(words.copy()), int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_states(found: dict[str, Any]) -> None:
    """Set the generators to states that `states` returned; one that this process does not use is left alone."""
    torch.set_rng_state(found["torch"])
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in found:
        kind, words, *rest = found["numpy"]
        numpy.random.set_state((kind, words.numpy(), *rest))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
