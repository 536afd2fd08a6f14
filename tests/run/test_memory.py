"""The meter of a process's memory against tensors of known size."""

from __future__ import annotations

import sys

import pytest
import torch

from headway.run.memory import Meter

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
def test_the_peak_is_what_was_held_at_most_since_the_start() -> None:
    before = torch.ones(64 * MIB, dtype=torch.uint8)
    meter = Meter.start(torch.device("cpu"), already=before.numel())
    first = meter.peak()
    assert first is not None and abs(first - 64 * MIB) < 16 * MIB
    held = torch.ones(96 * MIB, dtype=torch.uint8)
    del held
    second = meter.peak()
    assert second is not None and abs(second - 160 * MIB) < 16 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_what_was_freed_before_the_start_does_not_hide_what_comes_after() -> None:
    small = [torch.ones(8 * 1024, dtype=torch.uint8) for _ in range(6000)]
    pin = small[-1]  # the heap cannot shrink below it, so the C library keeps what is freed
    del small
    meter = Meter.start(torch.device("cpu"), already=0)
    again = [torch.ones(8 * 1024, dtype=torch.uint8) for _ in range(6000)]
    peak = meter.peak()
    assert peak is not None and peak > 30 * MIB
    del again, pin
