"""Actions, schedules, the rule of order, and the grid."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import PlanError
from headway.schedule.action import Action, Kind, Schedule, needs, walk
from headway.schedule.build import forward_only, gpipe, one_f_one_b
from headway.schedule.lower import lower
from tests.schedule.drawing import demands, edges, replaced, schedules

F, B, W = Kind.F, Kind.B, Kind.W


def test_the_picture_of_the_design() -> None:
    assert str(one_f_one_b(3, 5)) == "\n".join(
        [
            "rank 0  F0  F1  F2  .   .   B0  F3  B1  F4  B2  .   B3  .   B4",
            "rank 1  .   F0  F1  .   B0  F2  B1  F3  B2  F4  B3  .   B4  .",
            "rank 2  .   .   F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  .   .",
        ]
    )


def test_lowering_does_not_change_the_picture() -> None:
    schedule = one_f_one_b(4, 3)
    assert str(lower(schedule, [(0, 1), (1, 2), (2, 3), (0, 3)])) == str(schedule)


def test_a_rank_with_several_stages_names_them() -> None:
    orders = ((Action(F, 0, 0), Action(F, 2, 0)), (Action(F, 1, 0),))
    assert str(Schedule("v", 3, 1, orders, (0, 1, 0))) == "rank 0  0F0  .    2F0\nrank 1  .    1F0  ."


def test_the_picture_of_a_deadlock_marks_what_never_starts() -> None:
    schedule = replaced(one_f_one_b(2, 1), 1, [Action(B, 1, 0), Action(F, 1, 0)])
    assert str(schedule) == "rank 0  F0   !B0\nrank 1  !B0  !F0"


def test_columns_are_as_wide_as_the_longest_label() -> None:
    rows = str(gpipe(11, 11)).splitlines()
    assert rows[0].startswith("rank 0   F0   F1 ") and rows[10].startswith("rank 10  .    . ")
    assert max(map(len, rows)) == 9 + (11 + 10) * 2 * 5 - 2


@pytest.mark.parametrize(
    ("action", "text", "words"),
    [
        (Action(F, 2, 0), "2F0", "F0 of stage 2"),
        (Action(Kind.SEND, 1, 3, 2), "1SEND3>2", "SEND of micro-batch 3 from stage 1 to stage 2"),
        (Action(Kind.RECV, 2, 3, 1), "2RECV3<1", "RECV of micro-batch 3 from stage 1 to stage 2"),
        (Action(Kind.SEND_GRAD, 2, 3, 1), "2SEND_GRAD3>1", "SEND_GRAD of micro-batch 3 from stage 2 to stage 1"),
        (Action(Kind.RECV_GRAD, 1, 3, 2), "1RECV_GRAD3<2", "RECV_GRAD of micro-batch 3 from stage 2 to stage 1"),
        (Action(Kind.REDUCE, 1, 0), "1REDUCE", "REDUCE of stage 1"),
    ],
)
def test_actions_as_text(action: Action, text: str, words: str) -> None:
    assert (str(action), action.describe()) == (text, words)


def test_needs_along_a_chain() -> None:
    assert needs(Action(F, 0, 3), 4) == ()
    assert needs(Action(F, 2, 3), 4) == (Action(F, 1, 3),)
    assert needs(Action(B, 3, 3), 4) == (Action(F, 3, 3),)
    assert needs(Action(B, 2, 3), 4) == (Action(F, 2, 3), Action(B, 3, 3))
    assert needs(Action(Kind.I, 2, 3), 4) == (Action(F, 2, 3), Action(Kind.I, 3, 3))
    assert needs(Action(W, 2, 3), 4) == (Action(Kind.I, 2, 3),)
    with pytest.raises(ValueError, match="needs a schedule"):
        needs(Action(Kind.REDUCE, 0, 0), 4)
    with pytest.raises(ValueError, match="needs a peer"):
        needs(Action(Kind.RECV, 1, 0), 4)


def test_a_backward_waits_for_all_its_consumers() -> None:
    lowered = lower(gpipe(3, 2), [(0, 1), (0, 2), (1, 2)])
    assert needs(Action(B, 0, 1), lowered) == (
        Action(F, 0, 1),
        Action(Kind.RECV_GRAD, 0, 1, 1),
        Action(Kind.RECV_GRAD, 0, 1, 2),
    )
    assert needs(Action(Kind.REDUCE, 0, 0), lowered) == (Action(B, 0, 0), Action(B, 0, 1))


@given(st.data())
def test_needs_are_the_demands_of_the_naive_statement(data) -> None:
    schedule = data.draw(schedules())
    if data.draw(st.booleans()):
        schedule = lower(schedule, data.draw(edges(schedule.num_stages)))
    for action in (action for actions in schedule.ranks for action in actions):
        assert sorted(needs(action, schedule)) == sorted(demands(action, schedule))


@given(schedules())
def test_walk_takes_everything_once_after_what_it_needs(schedule: Schedule) -> None:
    steps = list(walk(schedule))
    place = {action: index for index, (_, action, _) in enumerate(steps)}
    assert len(place) == len(steps) == sum(map(len, schedule.ranks))
    for rank, actions in enumerate(schedule.ranks):
        assert [action for owner, action, _ in steps if owner == rank] == list(actions)
    for _, action, needed in steps:
        assert needed == needs(action, schedule)
        assert all(place[need] < place[action] for need in needed)


def test_walk_does_all_it_can_before_it_gives_up() -> None:
    schedule = replaced(gpipe(2, 2), 1, [Action(F, 1, 0), Action(B, 1, 1), Action(F, 1, 1), Action(B, 1, 0)])
    steps = []
    with pytest.raises(PlanError, match="can never finish"):
        for _, action, _ in walk(schedule):
            steps.append(str(action))
    assert sorted(steps) == ["0F0", "0F1", "1F0"]


def test_in_flight_counts_what_each_stage_keeps() -> None:
    assert gpipe(3, 5).in_flight == (5, 5, 5)
    assert one_f_one_b(3, 5).in_flight == (3, 2, 1)
    assert forward_only(3, 5).in_flight == (1, 1, 1)
    kept = (
        Action(F, 0, 0),
        Action(Kind.I, 0, 0),
        Action(F, 0, 1),
        Action(Kind.I, 0, 1),
        Action(W, 0, 0),
        Action(W, 0, 1),
    )
    assert Schedule("late weights", 1, 2, (kept,), (0,)).in_flight == (2,)


def test_values_compare_hash_and_travel() -> None:
    schedule = lower(one_f_one_b(2, 3), [(0, 1)])
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule and hash(again) == hash(schedule)
    assert str(again) == str(schedule)
