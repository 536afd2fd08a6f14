"""Schedule + costs -> Timeline of work and memory; or the deadlock, named."""

from __future__ import annotations

from headway.schedule.action import COMPUTES, Action, Kind, Schedule, chain, walk, walk_in_time
from headway.schedule.costs import Costs
from headway.schedule.lower import lower
from headway.schedule.memory import replay
from headway.schedule.timeline import Span, Timeline, recorded

__all__ = ["Costs", "Span", "Timeline", "recorded", "simulate"]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Price a schedule: when each action starts and ends, and what each rank holds over time.

    Takes a schedule of computations, in which each stage hands its result to the next, or a lowered one, whose messages
    then are in the timeline too: a SEND's span is its way over the link, a RECV's the wait of its rank.
    A rank does one thing at a time in its own order; messages pass beside that (`costs.overlap`), one at a time on each
    link, in the order in which they were sent; between stages of one rank nothing is sent.
    Where each directed pair of ranks has its own link, that order is known beforehand, and one pass over the actions
    in any order that `needs` allows is enough: O(actions), and O(actions log actions) for the replay of memory. Where
    pairs share links (`costs.links`), actions are taken in the order of time.

    Raises PlanError naming the deadlock, ValueError when the costs are of another number of stages.
    """
    costs.check(schedule)
    if costs.links and schedule.edges is None:
        lowered = simulate(lower(schedule, chain(schedule.num_stages), reduce=False), costs)
        return Timeline(lowered.num_ranks, tuple(s for s in lowered.spans if s.action.kind in COMPUTES), lowered.memory)
    table = {kind: costs.seconds(kind) for kind in (*COMPUTES, Kind.REDUCE)}
    ways = _ways(schedule, costs)
    gap, overlap, lowered_already = costs.gap, costs.overlap, schedule.edges is not None
    free = [0.0] * schedule.num_ranks
    link: dict[object, float] = {}
    known: dict[Action, tuple[int, float, float]] = {}
    flights: dict[Action, tuple[float, float]] = {}
    spans: list[Span] = []
    new = tuple.__new__

    def moment(rank: int, needed: tuple[Action, ...]) -> float:
        """Give when a rank can start something: what it needs is here, and it is free."""
        now = free[rank]
        for need in needed:
            owner, ended, arrived = known[need]
            here = ended if owner == rank else arrived
            if here > now:
                now = here
        return now

    for rank, action, needed in walk_in_time(schedule, moment) if costs.links else walk(schedule):
        kind, stage, _, peer = action
        start, now = free[rank], moment(rank, needed)
        seconds = table.get(kind)
        if seconds is not None:
            start = now + gap
            now = start + seconds[stage]
        free[rank] = now
        way = ways.get((kind, stage, peer))
        if way is None:
            known[action] = rank, now, now
        else:
            through, length = way
            leaves = max(now, link.get(through, 0.0))
            arrives = link[through] = leaves + length
            known[action] = rank, now, arrives
            flights[action] = leaves, arrives
            if not overlap:
                free[rank] = arrives
            if lowered_already:
                start, now = leaves, arrives
        spans.append(new(Span, (rank, action, start, now)))
    return Timeline(schedule.num_ranks, tuple(spans), replay(schedule, costs, spans, flights))


def _ways(schedule: Schedule, costs: Costs) -> dict[tuple[Kind, int, int | None], tuple[object, float]]:
    """Give the link, and the seconds over it, of each (kind, stage, peer) that sends to another rank.

    Once lowered those are SEND and SEND_GRAD; before, the computations, which hand on along the chain.
    """
    found: dict[tuple[Kind, int, int | None], tuple[object, float]] = {}
    for source, targets in schedule.targets.items():
        for target in targets:
            for maker, user, sent, makers in (
                (source, target, Kind.SEND, (Kind.F,)),
                (target, source, Kind.SEND_GRAD, (Kind.B, Kind.I)),
            ):
                pair = schedule.placement[maker], schedule.placement[user]
                if pair[0] == pair[1]:
                    continue
                way = costs.links.get(pair, pair), costs.transfer(maker, user)
                if schedule.edges is not None:
                    found[sent, maker, user] = way
                else:
                    found |= {(kind, maker, None): way for kind in makers}
    return found
