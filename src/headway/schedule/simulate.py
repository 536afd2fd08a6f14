"""Schedule + costs -> Timeline of work and memory; or the deadlock, named."""

from __future__ import annotations

from headway.schedule.action import COMPUTES, Action, Edge, Kind, Schedule, walk
from headway.schedule.costs import Costs
from headway.schedule.memory import replay
from headway.schedule.timeline import Span, Timeline, recorded

__all__ = ["Costs", "Span", "Timeline", "recorded", "simulate"]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Price a schedule: when each action starts and ends, and what each rank holds over time.

    Takes a schedule of computations, in which each stage hands its result to the next, or a lowered one, whose messages
    then are in the timeline too: a SEND's span is its way over the link, a RECV's the wait of its rank.
    A rank does one thing at a time in its own order; messages pass beside that, one at a time on each directed pair of
    ranks, in the order in which they were sent; between stages of one rank nothing is sent.
    Since that order is known beforehand, one pass over the actions in any order that `needs` allows is enough:
    O(actions), and O(actions log actions) for the replay of memory.

    Raises PlanError naming the deadlock, ValueError when the costs are of another number of stages.
    """
    costs.check(schedule)
    table = {kind: costs.seconds(kind) for kind in (*COMPUTES, Kind.REDUCE)}
    placement, lowered = schedule.placement, schedule.edges is not None
    free = [0.0] * schedule.num_ranks
    link: dict[Edge, float] = {}
    ended: dict[Action, float] = {}
    flights: dict[Action, tuple[float, float]] = {}
    spans: list[Span] = []
    for rank, action, needed in walk(schedule):
        kind, stage = action.kind, action.stage
        start = now = free[rank]
        for need in needed:
            now = max(now, ended[need] if placement[need.stage] == rank else flights[need][1])
        if kind in table:
            start = now + costs.gap
            now = start + table[kind][stage]
        free[rank] = ended[action] = now
        receiver = _receiver(action, schedule)
        if receiver is not None and placement[receiver] != rank:
            pair = rank, placement[receiver]
            leaves = max(now, link.get(pair, 0.0))
            arrives = link[pair] = leaves + costs.transfer(stage, receiver)
            flights[action] = leaves, arrives
            start, now = (leaves, arrives) if lowered else (start, now)
        spans.append(Span(rank, action, start, now))
    return Timeline(schedule.num_ranks, tuple(spans), replay(schedule, costs, spans, flights))


def _receiver(action: Action, schedule: Schedule) -> int | None:
    """Give the stage to which this action itself sends: before lowering computations hand on along the chain."""
    if schedule.edges is not None:
        return action.peer if action.kind in (Kind.SEND, Kind.SEND_GRAD) else None
    if action.kind is Kind.F:
        return action.stage + 1 if action.stage + 1 < schedule.num_stages else None
    return action.stage - 1 if action.kind is not Kind.W and action.stage > 0 else None
