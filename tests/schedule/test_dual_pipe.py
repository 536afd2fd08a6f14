"""DualPipeV against its closed forms, and what makes it one: forwards beside backwards of other micro-batches."""

from __future__ import annotations

import pytest

from headway.schedule.action import Kind, chain
from headway.schedule.check import check
from headway.schedule.dual_pipe import dual_pipe_v
from headway.schedule.lower import lower
from tests.schedule.test_zero_bubble import MICROS, price


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("num_micro", MICROS)
def test_time_and_memory(num_ranks: int, num_micro: int) -> None:
    """Idle (p-1)(F+I-W) with m >= 2p, at most 2p+1 activations, each stage's micro-batches in order."""
    schedule = dual_pipe_v(2 * num_ranks, num_micro)
    check(schedule)
    check(lower(schedule, chain(2 * num_ranks)))
    assert schedule.placement == (*range(num_ranks), *reversed(range(num_ranks)))
    for stage in range(schedule.num_stages):
        for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
            order = [a.micro for row in schedule.ranks for a in row if a.stage == stage and a.kind in kinds]
            assert order == list(range(num_micro))
    assert max(price(schedule, 1, 1, 1).peak_bytes(rank) for rank in range(num_ranks)) <= 2 * num_ranks + 1
    if num_micro < 2 * num_ranks:
        return
    for forward, gradient, weight in ((1, 1, 1), (2, 2, 1), (3, 2, 1), (5, 3, 3), (4, 4, 0)):
        timeline = price(schedule, forward, gradient, weight)
        for rank in range(num_ranks):
            idle = timeline.makespan - timeline.busy(rank)
            assert idle == (num_ranks - 1) * (forward + gradient - weight)


def test_in_the_middle_forwards_and_whole_backwards_of_the_two_stages_take_turns() -> None:
    num_ranks, num_micro = 4, 20
    for rank, actions in enumerate(dual_pipe_v(2 * num_ranks, num_micro).ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        pairs = [(a, b) for a, b in zip(actions, actions[1:], strict=False) if (a.kind, b.kind) == (Kind.F, Kind.B)]
        assert len(pairs) >= 2 * (num_micro - 2 * num_ranks + rank + 1) - 1
        assert all(a.micro != b.micro and {a.stage, b.stage} == {down, up} for a, b in pairs)


def test_what_makes_no_sense_is_refused() -> None:
    for stages, micros in ((3, 2), (0, 2), (2, 0)):
        with pytest.raises(ValueError, match="dual_pipe_v needs an even number"):
            dual_pipe_v(stages, micros)
