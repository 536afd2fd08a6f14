"""Memory: how many bytes this process holds for training, and the most it has held."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class Meter:
    """Counts from a baseline: what the process held before there was a model (CPU), or zero (CUDA)."""

    device: torch.device
    baseline: int

    @staticmethod
    def start(device: torch.device, *, already: int) -> Meter:
        """Begin to count; `already` bytes of what is held now belong to training (the model, say)."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return Meter(device, 0)
        _give_back()
        held = psutil.Process().memory_info().rss
        _forget_peak()
        return Meter(device, max(held - already, 0))

    def peak(self) -> int | None:
        """Give the most bytes held since the start of counting; None where the system does not say."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        peak = _peak_resident()
        return None if peak is None else max(peak - self.baseline, 0)


def _give_back() -> None:
    """Have the C library return what is free to the system (malloc_trim): what planning used must not count as held."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc


def _forget_peak() -> None:
    """Ask Linux to begin its high-water mark of resident memory anew (man 5 proc, clear_refs)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return  # not Linux, or not allowed: the mark then includes what was held before


def _peak_resident() -> int | None:
    try:
        with open(f"/proc/{os.getpid()}/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
