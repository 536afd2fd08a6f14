"""A Timeline of what happened is the same value as one that is planned."""

from __future__ import annotations

import pytest

from headway.schedule.action import Action, Kind
from headway.schedule.build import one_f_one_b
from headway.schedule.simulate import Costs, Timeline, recorded, simulate

F0, F1 = Action(Kind.F, 0, 0), Action(Kind.F, 1, 0)


def test_a_recording_of_what_was_planned_is_what_was_planned() -> None:
    planned = simulate(one_f_one_b(3, 4), Costs((1.0,) * 3, (2.0,) * 3, activation_bytes=(5,) * 3))
    clock = 1e6
    spans = [(s.rank, s.action, s.start + clock, s.end + clock) for s in reversed(planned.spans)]
    memory = [[(time + clock, size) for time, size in row] for row in planned.memory]
    happened = recorded(spans, memory=memory)
    assert happened.num_ranks == 3
    assert happened.makespan == pytest.approx(planned.makespan)
    assert happened.bubble == pytest.approx(planned.bubble)
    for rank in range(3):
        assert [s.action for s in happened.of(rank)] == [s.action for s in planned.of(rank)]
        assert happened.busy(rank) == pytest.approx(planned.busy(rank))
        assert happened.peak_bytes(rank) == planned.peak_bytes(rank)


def test_waits_and_messages_are_not_work() -> None:
    receive = Action(Kind.RECV, 1, 0, 0)
    happened = recorded([(0, F0, 5.0, 6.0), (1, receive, 5.0, 7.0), (1, F1, 7.0, 9.0)])
    assert [happened.busy(0), happened.busy(1)] == [1.0, 2.0]
    assert happened.makespan == 4.0
    assert happened.bubble == pytest.approx(1 - 3 / 8)


def test_nothing_recorded_is_an_empty_timeline() -> None:
    empty = recorded([], num_ranks=2)
    assert empty == Timeline(2, ())
    assert (empty.makespan, empty.bubble, empty.peak_bytes(1), empty.of(1)) == (0.0, 0.0, 0, ())


def test_impossible_recordings_are_refused() -> None:
    with pytest.raises(ValueError, match="0F0 on rank 0 ends at 1.0, before it starts at 2.0"):
        recorded([(0, F0, 2.0, 1.0)])
    with pytest.raises(ValueError, match="1F0 is on rank 1; there are 1 ranks"):
        recorded([(1, F1, 0.0, 1.0)], num_ranks=1)
    with pytest.raises(ValueError, match="memory of 1 ranks for 2"):
        recorded([(1, F1, 0.0, 1.0)], memory=[[(0.0, 1)]])
