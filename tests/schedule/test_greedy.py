"""backward_first is 1F1B in time and memory where stages are equal, and keeps its rule where they are not."""

from __future__ import annotations

import random

import pytest

from headway.schedule.action import Action, Kind, chain, needs
from headway.schedule.build import one_f_one_b
from headway.schedule.check import check
from headway.schedule.greedy import backward_first
from headway.schedule.lower import lower
from headway.schedule.simulate import Costs, simulate


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_micro", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("seconds", [(1, 1), (1, 2), (2, 3)])
def test_equal_stages_give_1f1b(num_stages: int, num_micro: int, seconds: tuple[int, int]) -> None:
    forward, backward = ([length] * num_stages for length in seconds)
    schedule = backward_first(num_stages, num_micro, forward=forward, backward=backward)
    assert schedule.ranks == one_f_one_b(num_stages, num_micro).ranks


def test_no_forward_starts_while_a_backward_is_ready() -> None:
    """Unequal stages: priced with the seconds that it was built for, the order keeps its rule."""
    draw = random.Random(0)
    for _ in range(100):
        num_stages, num_micro = draw.randint(1, 5), draw.randint(1, 9)
        forward, backward = ([draw.randint(1, 5) for _ in range(num_stages)] for _ in range(2))
        schedule = backward_first(num_stages, num_micro, forward=forward, backward=backward)
        check(schedule)
        check(lower(schedule, chain(num_stages)))
        timeline = simulate(schedule, Costs(tuple(forward), tuple(backward)))
        end = {span.action: span.end for span in timeline.spans}
        for rank in range(num_stages):
            row = timeline.of(rank)
            for index, span in enumerate(row):
                backwards = sum(earlier.action.kind is Kind.B for earlier in row[:index])
                if span.action.kind is Kind.F and backwards < num_micro:
                    causes = needs(Action(Kind.B, rank, backwards), schedule)
                    assert max(end[cause] for cause in causes) > span.start


def test_in_flight_is_bounded_as_asked() -> None:
    draw = random.Random(0)
    for _ in range(50):
        num_stages, num_micro = draw.randint(1, 6), draw.randint(1, 12)
        room = tuple(draw.randint(1, 5) for _ in range(num_stages))
        schedule = backward_first(num_stages, num_micro, in_flight=room)
        check(schedule)
        assert all(kept <= most for kept, most in zip(schedule.in_flight, room, strict=True))


def test_what_makes_no_sense_is_refused() -> None:
    for call in (
        lambda: backward_first(0, 1),
        lambda: backward_first(1, 0),
        lambda: backward_first(2, 2, in_flight=(1,)),
        lambda: backward_first(2, 2, in_flight=(1, 0)),
        lambda: backward_first(2, 2, forward=(0, 1)),
        lambda: backward_first(2, 2, backward=(1, 1, 1)),
    ):
        with pytest.raises(ValueError, match="backward_first needs"):
            call()
