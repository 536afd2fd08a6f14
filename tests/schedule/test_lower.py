"""Lowering: every value that crosses ranks has its messages, where they belong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import PlanError
from headway.schedule.action import MESSAGES, Action, Kind, Schedule, chain
from headway.schedule.build import forward_only, gpipe, one_f_one_b
from headway.schedule.catalogue import CATALOGUE, build
from headway.schedule.check import check
from headway.schedule.lower import lower
from tests.schedule.drawing import edges, schedules


def texts(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def test_two_stages() -> None:
    lowered = lower(one_f_one_b(2, 2), [(0, 1)])
    assert [texts(actions) for actions in lowered.ranks] == [
        "0F0 0SEND0>1 0F1 0SEND1>1 0RECV_GRAD0<1 0B0 0RECV_GRAD1<1 0B1 0REDUCE",
        "1RECV0<0 1F0 1B0 1SEND_GRAD0>0 1RECV1<0 1F1 1B1 1SEND_GRAD1>0 1REDUCE",
    ]


def test_a_skip_connection_goes_straight_to_its_user() -> None:
    lowered = lower(gpipe(3, 1), [(0, 1), (1, 2), (0, 2)], reduce=False)
    assert [texts(actions) for actions in lowered.ranks] == [
        "0F0 0SEND0>1 0SEND0>2 0RECV_GRAD0<2 0RECV_GRAD0<1 0B0",
        "1RECV0<0 1F0 1SEND0>2 1RECV_GRAD0<2 1B0 1SEND_GRAD0>0",
        "2RECV0<0 2RECV0<1 2F0 2B0 2SEND_GRAD0>1 2SEND_GRAD0>0",
    ]


def test_a_split_backward_sends_its_gradient_before_the_weights() -> None:
    F, W = Kind.F, Kind.W
    orders = tuple((Action(F, s, 0), Action(Kind.I, s, 0), Action(W, s, 0)) for s in range(2))
    lowered = lower(Schedule("split", 2, 1, orders, (0, 1)), [(0, 1)])
    assert [texts(actions) for actions in lowered.ranks] == [
        "0F0 0SEND0>1 0RECV_GRAD0<1 0I0 0W0 0REDUCE",
        "1RECV0<0 1F0 1I0 1SEND_GRAD0>0 1W0 1REDUCE",
    ]


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    orders = tuple(Action(Kind.F, s, 0) for s in range(2)) + tuple(Action(Kind.B, s, 0) for s in (1, 0))
    lowered = lower(Schedule("one rank", 2, 1, (orders,), (0, 0)), [(0, 1)])
    assert texts(lowered.ranks[0]) == "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE"


def test_evaluation_sends_activations_alone() -> None:
    lowered = lower(forward_only(2, 1), [(0, 1)])
    assert [texts(actions) for actions in lowered.ranks] == ["0F0 0SEND0>1", "1RECV0<0 1F0"]
    check(lowered)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("num_micro", [1, 2, 3, 5, 8])
def test_every_schedule_can_finish_with_its_messages(name: str, num_ranks: int, num_micro: int) -> None:
    """Chain alone, every skip connection there is, and no edge at all."""
    schedule = build(name, num_ranks, num_micro, CATALOGUE[name].least)
    num_stages = schedule.num_stages
    pairs = [(a, b) for a in range(num_stages) for b in range(a + 1, num_stages)]
    for given_edges in (chain(num_stages), pairs, ()):
        check(lower(schedule, given_edges))


@given(st.data())
def test_only_messages_and_reductions_are_added(data) -> None:
    schedule = data.draw(schedules())
    pairs = data.draw(edges(schedule.num_stages))
    lowered = lower(schedule, [*pairs, *pairs])
    check(lowered)
    for before, after in zip(schedule.ranks, lowered.ranks, strict=True):
        assert [a for a in after if a.kind not in MESSAGES and a.kind is not Kind.REDUCE] == list(before)
    crossing = {(a, b) for a, b in pairs if schedule.placement[a] != schedule.placement[b]}
    for kind in (Kind.SEND, Kind.RECV, Kind.SEND_GRAD, Kind.RECV_GRAD):
        ends = [
            (a.stage, a.peer) if kind in (Kind.SEND, Kind.RECV_GRAD) else (a.peer, a.stage)
            for actions in lowered.ranks
            for a in actions
            if a.kind is kind
        ]
        happens = schedule.trains or kind in (Kind.SEND, Kind.RECV)
        assert sorted(ends) == sorted(list(crossing) * (schedule.num_micro if happens else 0))
    reduces = [a.stage for actions in lowered.ranks for a in actions if a.kind is Kind.REDUCE]
    assert sorted(reduces) == (list(range(schedule.num_stages)) if schedule.trains else [])


def test_wrong_edges_and_a_second_lowering_are_refused() -> None:
    for edge in ((1, 0), (0, 0), (0, 2), (-1, 1)):
        with pytest.raises(PlanError, match="values pass to later stages only"):
            lower(gpipe(2, 1), [edge])
    with pytest.raises(PlanError, match="has its messages already"):
        lower(lower(gpipe(2, 1), [(0, 1)]), [(0, 1)])
