"""check names the first fault, and passes whatever can finish."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.errors import PlanError
from headway.schedule.action import Action, Kind, Schedule
from headway.schedule.build import forward_only, gpipe, one_f_one_b
from headway.schedule.check import check
from headway.schedule.lower import lower
from tests.schedule.drawing import can_finish, edges, replaced, schedules, swapped

F, B, W = Kind.F, Kind.B, Kind.W


@given(st.data())
def test_what_can_finish_passes_and_what_cannot_is_refused(data) -> None:
    """Any two neighbours exchanged: brute force says whether the order still works."""
    schedule = data.draw(schedules())
    check(schedule)
    lowered = lower(schedule, data.draw(edges(schedule.num_stages)))
    check(lowered)
    schedule = data.draw(st.sampled_from([schedule, lowered]))
    spots = [(rank, index) for rank, row in enumerate(schedule.ranks) for index in range(len(row) - 1)]
    assume(spots)
    other = swapped(schedule, *data.draw(st.sampled_from(spots)))
    # An exchange that puts two messages of one edge out of order can still finish, and is refused all the same.
    if can_finish(other) and schedule.edges is None:
        check(other)
    elif not can_finish(other):
        with pytest.raises(PlanError):
            check(other)


@given(st.data())
def test_whatever_is_missing_or_twice_is_named(data) -> None:
    schedule = data.draw(schedules())
    if data.draw(st.booleans()):
        schedule = lower(schedule, data.draw(edges(schedule.num_stages)), reduce=False)
    rank, index = data.draw(
        st.sampled_from([(rank, index) for rank, row in enumerate(schedule.ranks) for index in range(len(row))])
    )
    actions = list(schedule.ranks[rank])
    action = actions[index]
    with pytest.raises(PlanError) as caught:
        check(replaced(schedule, rank, [*actions[: index + 1], *actions[index:]]))
    assert f"{action.describe()} a second time" in str(caught.value)
    rest = replaced(schedule, rank, actions[:index] + actions[index + 1 :])
    assume(rest.trains == schedule.trains)  # without any backward it is whole again, for evaluation
    with pytest.raises(PlanError) as caught:
        check(rest)
    # Without its I, what is wrong is the W that is left.
    named = Action(W, action.stage, action.micro) if action.kind is Kind.I else action
    assert named.describe() in str(caught.value)


def broken(rank: int, index: int, action: Action, schedule: Schedule | None = None) -> Schedule:
    """Put another action in the place of one of a good schedule."""
    schedule = schedule or gpipe(2, 2)
    actions = list(schedule.ranks[rank])
    actions[index] = action
    return replaced(schedule, rank, actions)


@pytest.mark.parametrize(
    ("schedule", "fact"),
    [
        (broken(0, 1, Action(F, 2, 1)), r"F1 of stage 2 is of an unknown stage; stages are 0\.\.1"),
        (broken(0, 1, Action(F, 0, 2)), r"F2 of stage 0 is of an unknown micro-batch; micro-batches are 0\.\.1"),
        (broken(0, 1, Action(F, 1, 1)), "F1 of stage 1 is on the wrong rank: rank 1 holds stage 1"),
        (broken(0, 1, Action(F, 0, 0)), r"F0 of stage 0 a second time \(first on rank 0\)"),
        (broken(0, 2, Action(W, 0, 0)), "W0 of stage 0 has no I"),
        (broken(0, 2, Action(Kind.I, 0, 0)), "W0 of stage 0 is missing"),
        (broken(0, 2, Action(Kind.I, 0, 1)), "B1 of stage 0 is whole and split at once"),
        (broken(0, 1, Action(F, 0, 1, 1)), "has a peer, stage 1, but is no message"),
        (broken(0, 1, Action(Kind.SEND, 0, 1)), "has no peer stage"),
        (broken(0, 1, Action(Kind.SEND, 0, 1, 1)), "is a message, but the schedule was not lowered"),
        (replace(gpipe(2, 2), placement=(0,)), "places 1 stages, has 2"),
        (replace(gpipe(2, 2), placement=(0, 2)), r"stage 1 is placed on rank 2; ranks are 0\.\.1"),
        (replace(gpipe(2, 2), num_micro=0), "at least one stage"),
        (replace(gpipe(2, 2), edges=((1, 0),)), "an edge from stage 1 to stage 0"),
        (replace(gpipe(2, 2), edges=((0, 1),)), "SEND of micro-batch 0 from stage 0 to stage 1 is missing"),
    ],
)
def test_the_fault_is_named(schedule: Schedule, fact: str) -> None:
    with pytest.raises(PlanError, match=fact):
        check(schedule)


def test_the_place_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        check(broken(1, 2, Action(F, 1, 0)))
    assert caught.value.place == "rank 1, action 2"


def test_messages_on_no_edge_or_on_one_rank_are_refused() -> None:
    lowered = lower(gpipe(3, 1), [(0, 1), (1, 2)])
    wrong = replaced(lowered, 0, [*lowered.ranks[0], Action(Kind.SEND, 0, 0, 2)])
    with pytest.raises(PlanError, match="is on no edge: stage 2 uses nothing that stage 0 makes"):
        check(wrong)
    local = Schedule(
        "local", 2, 1, ((Action(F, 0, 0), Action(Kind.SEND, 0, 0, 1), Action(F, 1, 0)),), (0, 0), ((0, 1),)
    )
    with pytest.raises(PlanError, match="two stages of the same rank"):
        check(local)


def test_messages_of_an_edge_keep_their_order() -> None:
    lowered = lower(forward_only(2, 2), [(0, 1)])
    turned = replaced(lowered, 1, [*lowered.ranks[1][2:], *lowered.ranks[1][:2]])
    with pytest.raises(PlanError, match="RECV of micro-batch 1 from stage 0 to stage 1 is out of order") as caught:
        check(turned)
    assert "rank 1 waits for it where rank 0 sends micro-batch 0" in str(caught.value)


def test_a_deadlock_is_named_as_the_circle_that_it_is() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it starts 1; rank 1 wants micro-batch 1 first."""
    orders = (
        (Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),
        (Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)),
    )
    with pytest.raises(PlanError) as caught:
        check(Schedule("stuck", 2, 2, orders, (0, 1)))
    text = str(caught.value)
    assert "'stuck' can never finish: 2 of 2 ranks" in text
    assert "rank 0 stops at B0 of stage 0: it needs B0 of stage 1, which is behind on rank 1" in text
    assert "rank 1 stops at F1 of stage 1: it needs F1 of stage 0, which is behind on rank 0" in text


def test_only_the_circle_is_named_not_those_who_wait_for_it() -> None:
    schedule = one_f_one_b(4, 2)
    turned = swapped(swapped(schedule, 2, 0), 2, 2)
    with pytest.raises(PlanError) as caught:
        check(replaced(turned, 2, [Action(B, 2, 0), Action(F, 2, 0), Action(F, 2, 1), Action(B, 2, 1)]))
    place = str(caught.value.place)
    assert place.startswith("rank 2 stops at B0 of stage 2: it needs F0 of stage 2, which comes later on the same rank")
    assert "rank 0" not in place
