"""Host: Python's and numpy's random numbers, drawn between torch calls where no mode sees them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from headway.graph.chance import host_state

LONGEST = 1 << 20
"""Numbers that are counted for one gap between calls; more are not told apart."""

State = tuple[Any, Any]


def seed_host(number: int, other: int | None = None) -> None:
    """Seed the global generators of Python and numpy, that of numpy with `other` if it is given."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed((number if other is None else other) % 2**32)


def skip(python: int, numpy: int) -> None:
    """Draw so many words of 32 bits from the global generators of Python and numpy, and drop them."""
    if python:
        random.getrandbits(32 * python)
    if numpy:
        sys.modules["numpy"].random.bytes(4 * numpy)


class Gaps:
    """The gaps between events of a program in which Python's or numpy's numbers are drawn, in order.

    After each gap the generators are seeded anew by `seed(number of the next gap)`, so what is drawn in one does not
    depend on how much was drawn before.
    """

    def __init__(self, seed: Callable[[int], None]) -> None:
        self.seed = seed
        self.ends: list[State] = []
        self.seed(0)
        self.before = host_state()

    def look(self) -> bool:
        """Say whether numbers were drawn since the last event."""
        if host_state() == self.before:
            return False
        self.ends.append(_states())
        self.seed(len(self.ends))
        self.before = host_state()
        return True


def whose(ends: Sequence[State], other: Sequence[State], samples: tuple[int, int]) -> tuple[str, ...]:
    """Say for each gap how many words of Python's and of numpy's generator belong to a sample: "0 0", "4 0", "? 0".

    `ends` are the states after the gaps for samples[0] samples, `other` those for samples[1]: 0 where the same numbers
    were drawn for both, "?" where they grow in another way than with the samples.
    """
    if len(ends) != len(other):
        return ("? ?",) * len(ends)
    found = []
    for number, (mine, theirs) in enumerate(zip(ends, other, strict=True)):
        words = []
        for kind in (0, 1):
            if mine[kind] == theirs[kind]:
                words.append("0")
                continue
            here, there = (_words(number, kind, state[kind]) for state in (mine, theirs))
            even = here and there and not here % samples[0] and here * samples[1] == there * samples[0]
            words.append(str(here // samples[0]) if even else "?")
        found.append(" ".join(words))
    return tuple(found)


def _states() -> State:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    state = numpy.random.get_state(legacy=False)
    words = state.get("state", {})
    return random.getstate(), (bytes(words["key"]), words["pos"], state["has_gauss"], state["gauss"])


def _words(gap: int, kind: int, end: Any) -> int:
    """Count the words of 32 bits that were drawn in a gap since its generator was seeded; 0 when they are too many."""
    at = end[1][-1] if kind == 0 else end[1]  # both are Mersenne twisters, which make 624 words at a time
    python, numpy = random.Random(gap), sys.modules.get("numpy")
    legacy = numpy.random.RandomState(gap) if numpy else None
    for turn in range(LONGEST // 624):
        number = 624 if turn else at
        if kind == 0:
            python.getrandbits(32 * number)
            if python.getstate()[1] == end[1]:
                return int(at + 624 * turn)
        elif legacy is not None:
            legacy.bytes(4 * number)
            state = legacy.get_state(legacy=False)["state"]
            if state["pos"] == at and bytes(state["key"]) == end[0]:
                return int(at + 624 * turn)
    return 0
