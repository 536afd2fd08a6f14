"""A real memory limit, in a process of its own: what is within the budget works, what is above raises."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.screen.terminal import environment

PROBE = """
import torch
from headway.launch.identity import Identity
from headway.launch.limit import held_bytes, lift_limit, limit_memory
MIB = 2**20
limit_memory(200 * MIB, Identity())
before = held_bytes()
def fits(mib):
    try:
        torch.ones(mib * MIB // 4)
        return True
    except RuntimeError:
        return False
print(fits(190), fits(215), fits(190))
kept = [torch.ones(10 * MIB // 4) for _ in range(15)]
print(fits(40), fits(65))
del kept
print(fits(190), held_bytes() - before < 8 * MIB)
lift_limit()
print(fits(400))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA bounds memory on Linux alone")
def test_the_budget_is_what_can_be_allocated() -> None:
    malloc = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment(**malloc), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True False True", "True False", "True True", "True"]
