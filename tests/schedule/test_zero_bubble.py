"""Zero-bubble schedules against the closed forms of their papers."""

from __future__ import annotations

import pytest

from headway.schedule.action import Kind, Schedule, chain
from headway.schedule.check import check
from headway.schedule.lower import lower
from headway.schedule.simulate import Costs, Timeline, simulate
from headway.schedule.zero_bubble import zero_bubble, zero_bubble_v

MICROS = (1, 2, 3, 5, 7, 12, 18, 21)


def price(schedule: Schedule, forward: float, gradient: float, weight: float) -> Timeline:
    n = schedule.num_stages
    whole = gradient + weight
    return simulate(
        schedule,
        Costs((forward,) * n, (whole,) * n, input=(gradient,) * n, weight=(weight,) * n, activation_bytes=(1,) * n),
    )


def idle(timeline: Timeline) -> float:
    """Give the most seconds that a rank waits between its first and its last action."""
    rows = [timeline.of(rank) for rank in range(timeline.num_ranks)]
    return max(row[-1].end - row[0].start - timeline.busy(rank) for rank, row in enumerate(rows))


def is_sound(schedule: Schedule) -> None:
    check(schedule)
    check(lower(schedule, chain(schedule.num_stages)))
    for stage in range(schedule.num_stages):
        for kind in (Kind.F, Kind.I, Kind.W):
            order = [a.micro for row in schedule.ranks for a in row if (a.kind, a.stage) == (kind, stage)]
            assert order == list(range(schedule.num_micro))


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_micro", MICROS)
@pytest.mark.parametrize("ahead", [1, 2])
def test_h1_and_h2(num_stages: int, num_micro: int, ahead: int) -> None:
    """Table 2 of the paper: idle (p-1)(F+I-W), p activations; (p-1)(F+I-2W), 2p-1 activations."""
    schedule = zero_bubble(num_stages, num_micro, ahead=ahead)
    is_sound(schedule)
    assert max(schedule.in_flight) <= (num_stages if ahead == 1 else 2 * num_stages - 1)
    if num_micro < (ahead + 1) * num_stages:
        return
    assert max(schedule.in_flight) == (num_stages if ahead == 1 else 2 * num_stages - 1)
    for forward, gradient, weight in ((1, 1, 1), (2, 2, 1), (4, 5, 3), (1, 2, 1), (1, 1, 0)):
        expected = (num_stages - 1) * (forward + gradient - ahead * weight)
        assert idle(price(schedule, forward, gradient, weight)) == expected


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("num_micro", MICROS)
def test_v(num_ranks: int, num_micro: int) -> None:
    """No idle time with equal F, I and W, in at most 2p activations of half-size stages."""
    schedule = zero_bubble_v(2 * num_ranks, num_micro)
    is_sound(schedule)
    assert schedule.placement == (*range(num_ranks), *reversed(range(num_ranks)))
    timeline = price(schedule, 1, 1, 1)
    assert all(timeline.peak_bytes(rank) <= 2 * num_ranks for rank in range(num_ranks))
    if num_micro >= 2 * num_ranks - 1:
        assert idle(timeline) == 0
        assert timeline.makespan == 6 * num_micro + num_ranks - 1


def test_what_makes_no_sense_is_refused() -> None:
    for arguments in ((0, 1, 1), (1, 0, 1), (2, 2, 3)):
        with pytest.raises(ValueError, match="zero_bubble needs"):
            zero_bubble(arguments[0], arguments[1], ahead=arguments[2])
    for stages, micros in ((3, 2), (0, 2), (2, 0)):
        with pytest.raises(ValueError, match="zero_bubble_v needs an even number"):
            zero_bubble_v(stages, micros)
