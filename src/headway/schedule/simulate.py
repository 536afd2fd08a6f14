"""Schedule + costs -> Timeline of work and memory; or the deadlock, named."""

from __future__ import annotations

from dataclasses import dataclass

from headway.schedule.action import COMPUTES, Kind, Schedule, chain
from headway.schedule.costs import Costs
from headway.schedule.lower import lower
from headway.schedule.memory import Times, peaks, replay
from headway.schedule.numbered import Job, Numbered, in_any_order, in_time, numbered
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
    work, times = _walked(schedule, costs)
    new, show = tuple.__new__, schedule.edges is not None
    spans = []
    for rank, (actions, row) in enumerate(zip(schedule.ranks, work.rows, strict=True)):
        for action, number in zip(actions, row, strict=True):
            # A message's span is its way over the link.
            sent = show and action.kind in (Kind.SEND, Kind.SEND_GRAD)
            first, last = (times.left, times.arrived) if sent else (times.started, times.ended)
            spans.append(new(Span, (rank, action, first[number], last[number])))
    return Timeline(schedule.num_ranks, tuple(spans), replay(work, costs, times))


def totals(schedule: Schedule, costs: Costs) -> tuple[float, tuple[int, ...]]:
    """Return the makespan of a lowered schedule and each rank's peak bytes: as `simulate` does, without a timeline.

    Raises as `simulate` does.
    """
    costs.check(schedule)
    work, times = _walked(schedule, costs)
    return max(max(times.ended, default=0.0), max(times.arrived, default=0.0)), peaks(work, costs, times)


def _walked(schedule: Schedule, costs: Costs) -> tuple[Numbered, Times]:
    work = numbered(schedule)
    return work, _timed(work, _prices(work, costs), costs)


@dataclass(frozen=True)
class _Prices:
    """What the actions of each job cost: seconds before and during them (None for messages), and what they send."""

    gap: float
    seconds: list[float | None]
    ways: list[tuple[object, float] | None]
    """the link to another rank, and the seconds over it"""


def _prices(work: Numbered, costs: Costs) -> _Prices:
    schedule = work.schedule
    table = {kind: costs.seconds(kind) for kind in (*COMPUTES, Kind.REDUCE)}
    seconds = [table[kind][stage] if kind in table and table[kind] else None for kind, stage, _ in work.jobs]
    ways: list[tuple[object, float] | None] = []
    for job in work.jobs:
        receiver = _receiver(job, schedule)
        pair = schedule.placement[job[1]], schedule.placement[job[1] if receiver is None else receiver]
        far = receiver is not None and pair[0] != pair[1]
        ways.append(
            (costs.links.get(pair, pair), costs.transfer(job[1], receiver)) if far and receiver is not None else None
        )
    return _Prices(costs.gap, seconds, ways)


def _receiver(job: Job, schedule: Schedule) -> int | None:
    """Give the stage to which an action itself sends: before lowering computations hand on along the chain."""
    kind, stage, peer = job
    if schedule.edges is not None:
        return peer if kind in (Kind.SEND, Kind.SEND_GRAD) else None
    if kind is Kind.F:
        return stage + 1 if stage + 1 < schedule.num_stages else None
    return stage - 1 if kind in (Kind.B, Kind.I) and stage > 0 else None


def _timed(work: Numbered, prices: _Prices, costs: Costs) -> Times:
    """Give the times of all actions."""
    micros, causes, placement = work.num_micro, work.causes, work.schedule.placement
    size = len(causes)
    started, ended, left, arrived = ([0.0] * size for _ in range(4))
    owner = [placement[stage] for _, stage, _ in work.jobs]
    free = [0.0] * len(work.rows)
    link: dict[object, float] = {}

    def moment(rank: int, action: int) -> float:
        """Give when a rank can start something: what it needs is here, and it is free."""
        now = free[rank]
        for offset in causes[action]:
            cause = action + offset
            here = ended[cause] if owner[cause // micros] == rank else arrived[cause]
            if here > now:
                now = here
        return now

    for rank, action in in_time(work, moment) if costs.links else in_any_order(work):
        job = action // micros
        seconds, way = prices.seconds[job], prices.ways[job]
        now = moment(rank, action)
        if seconds is None:
            started[action] = free[rank]
        else:
            started[action] = now = now + prices.gap
            now += seconds
        ended[action] = free[rank] = arrived[action] = now
        if way is not None:
            through, length = way
            leaves = link.get(through, 0.0)
            if now > leaves:
                leaves = now
            left[action], arrived[action] = leaves, leaves + length
            link[through] = leaves + length
            if not costs.overlap:
                free[rank] = leaves + length
    return Times(started, ended, left, arrived)
