"""Whose numbers Python's and numpy's generators give, told by records with two numbers of samples."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest

from headway.graph.host import Gaps, seed_host, skip, whose

Draw = Callable[[int], object]

CASES: dict[str, tuple[str, Draw]] = {
    "nothing": ("", lambda n: None),
    "a coin of Python's": ("0 0", lambda n: random.random()),
    "a coin of numpy's": ("0 0", lambda n: numpy.random.rand()),
    "a normal number, which leaves another": ("0 0", lambda n: (random.gauss(0, 1), numpy.random.randn())),
    "rows of Python's": ("6 0", lambda n: [random.random() for _ in range(3 * n)]),
    "rows of numpy's": ("0 6", lambda n: numpy.random.rand(n, 3)),
    "many rows": ("0 2000", lambda n: numpy.random.rand(n, 1000)),
    "bits": ("1 0", lambda n: [random.getrandbits(30) for _ in range(n)]),
    "a coin and rows": ("? 0", lambda n: [random.random() for _ in range(n + 1)]),
    "rows that are tried until they fit": ("0 ?", lambda n: numpy.random.permutation(5 * n)),
}


@pytest.mark.parametrize("name", CASES)
def test_whose(name: str) -> None:
    want, draw = CASES[name]
    state, other = random.getstate(), numpy.random.get_state()
    ends = []
    for samples in (4, 3):
        gaps = Gaps(seed_host)
        draw(samples)
        gaps.look()
        assert not gaps.look()
        random.random()
        assert gaps.look()
        ends.append(gaps.ends)
    told = whose(ends[0], ends[1], (4, 3))
    assert told == ((want, "0 0") if want else ("0 0",))
    random.setstate(state)
    numpy.random.set_state(other)


def test_gaps_do_not_depend_on_each_other() -> None:
    seen = []
    for number in (1, 700):
        gaps = Gaps(seed_host)
        numpy.random.rand(number)
        gaps.look()
        seen.append((numpy.random.rand(), random.random()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("words", [2, 624, 1300])
def test_what_is_skipped_is_what_others_draw(words: int) -> None:
    seed_host(3)
    all_of_it = [random.random() for _ in range(words)], numpy.random.rand(words)
    seed_host(3)
    skip(words, words)
    half = words // 2
    assert [random.random() for _ in range(half)] == all_of_it[0][half : 2 * half]
    assert (numpy.random.rand(half) == all_of_it[1][half : 2 * half]).all()


def test_other_gaps_are_not_told_apart() -> None:
    assert whose([(1, 2)], [(1, 2), (3, 4)], (2, 3)) == ("? ?",)
