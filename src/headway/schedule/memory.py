"""Replays the lifetimes of tensors over a timed schedule: the bytes that each rank holds, over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.schedule.action import COMPUTES, Kind
from headway.schedule.costs import Costs
from headway.schedule.numbered import Numbered
from headway.schedule.timeline import Steps

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """Seconds of each action of a numbered schedule; of those that send, when the message leaves and has arrived."""

    started: list[float]
    ended: list[float]
    left: list[float]
    arrived: list[float]


Lives = tuple[int, Floats, Floats, int]
"""(rank, from seconds, to seconds, bytes) of the micro-batches"""


def replay(work: Numbered, costs: Costs, times: Times) -> tuple[Steps, ...]:
    """Give for each rank its bytes over time, from what lives when:

        static        always
        activations   start of F .. end of B (of W where split; of F when there is no backward)
        temporary     start .. end of each F, B, I and W
        boundary      at its maker    end of F        .. all has arrived
                      at its user     send starts     .. start of the F that uses it
        its gradient  at its maker    end of B or I   .. all has arrived
                      at its user     send starts     .. end of the B or I that uses it

    What passes between two stages of one rank lives from the end of its maker until its user frees it.
    """
    found = []
    for begin, times_of_rank, totals in _held(work, costs, times):
        steps = tuple(zip(times_of_rank.tolist(), totals.tolist(), strict=True))
        found.append(steps if steps and steps[0][0] == 0 else ((0.0, begin), *steps))
    return tuple(found)


def peaks(work: Numbered, costs: Costs, times: Times) -> tuple[int, ...]:
    """Give the most bytes that each rank holds at once, as `replay` has them."""
    return tuple(max(begin, int(totals.max(initial=0))) for begin, _, totals in _held(work, costs, times))


def _held(work: Numbered, costs: Costs, times: Times) -> Iterator[tuple[int, Floats, NDArray[np.int64]]]:
    """Yield for each rank the bytes before anything happens, the moments at which they change, and those from then."""
    schedule = work.schedule
    table = _Table(work, times)
    moments: list[list[Floats]] = [[] for _ in schedule.ranks]
    changes: list[list[tuple[int, int]]] = [[] for _ in schedule.ranks]
    for rank, starts, ends, size in (*_own(table, costs), *_passed(table, costs)):
        moments[rank] += [starts, ends]
        changes[rank] += [(size, len(starts)), (-size, len(ends))]
    for rank in range(schedule.num_ranks):
        begin = sum(costs.static_bytes[stage] for stage in schedule.stages(rank)) if costs.static_bytes else 0
        yield begin, *_sums(begin, moments[rank], changes[rank])


class _Table:
    """Times by kind and stage, one row of micro-batches each; NaN where an action is not done."""

    def __init__(self, work: Numbered, times: Times) -> None:
        self.work, self.schedule = work, work.schedule
        there = np.zeros(len(work.causes), dtype=bool)
        for row in work.rows:
            there[row] = True
        shape = len(work.jobs), work.num_micro
        self.rows = {
            name: np.where(there, np.array(seconds), np.nan).reshape(shape)
            for name, seconds in (("start", times.started), ("end", times.ended))
        } | {"leave": np.array(times.left).reshape(shape), "arrive": np.array(times.arrived).reshape(shape)}
        self.index = {job: number for number, job in enumerate(work.jobs)}

    def row(self, name: str, *job: tuple[Kind, int, int | None]) -> Floats:
        """Give the times of the first of some jobs that is done, micro-batch by micro-batch."""
        found = np.full(self.work.num_micro, np.nan)
        for one in job:
            if one in self.index:
                done = ~np.isnan(self.rows["end"][self.index[one]]) & np.isnan(found)
                found[done] = self.rows[name][self.index[one]][done]
        return found


def _own(table: _Table, costs: Costs) -> Iterator[Lives]:
    """Yield what a stage holds for itself: activations and temporaries."""
    for kind, stage, peer in table.work.jobs:
        if kind not in COMPUTES:
            continue
        rank, start = table.schedule.placement[stage], table.row("start", (kind, stage, peer))
        if costs.temporary_bytes:
            end = table.row("end", (kind, stage, peer))
            done = ~np.isnan(start)
            yield rank, start[done], end[done], costs.temporary_bytes[stage]
        if costs.activation_bytes and kind is Kind.F:
            lasts = (Kind.W, Kind.B) if table.schedule.trains else (Kind.F,)
            yield rank, start, table.row("end", *((last, stage, None) for last in lasts)), costs.activation_bytes[stage]


def _passed(table: _Table, costs: Costs) -> Iterator[Lives]:
    """Yield what passes between stages, forward and backward."""
    if not costs.boundary_bytes:
        return
    schedule = table.schedule
    for source, targets in schedule.targets.items():
        for target in targets:
            used = table.row("start", (Kind.F, target, None))
            yield from _crossing(table, costs, source, target, (Kind.F,), Kind.SEND, used)
            if schedule.trains:
                kinds = Kind.I, Kind.B
                freed = table.row("end", *((kind, source, None) for kind in kinds))
                yield from _crossing(table, costs, target, source, kinds, Kind.SEND_GRAD, freed)


def _crossing(
    table: _Table, costs: Costs, maker: int, user: int, kinds: tuple[Kind, ...], sent: Kind, freed: Floats
) -> Iterator[Lives]:
    schedule, size = table.schedule, costs.boundary(maker, user)
    makers = [(kind, maker, None) for kind in kinds]
    made = table.row("end", *makers)
    if schedule.local(maker, user):
        yield schedule.placement[user], made, freed, size
        return
    senders = makers if schedule.edges is None else [(sent, maker, user)]
    yield schedule.placement[maker], made, table.row("arrive", *senders), size
    yield schedule.placement[user], table.row("leave", *senders), freed, size


def _sums(begin: int, moments: list[Floats], changes: list[tuple[int, int]]) -> tuple[Floats, NDArray[np.int64]]:
    """Sum up what is taken and freed; all that happens at one time is one step."""
    if not moments:
        return np.zeros(0), np.zeros(0, dtype=np.int64)
    sizes = np.repeat(*(np.array(column) for column in zip(*changes, strict=True)))
    times, which = np.unique(np.concatenate(moments), return_inverse=True)
    totals = np.zeros(len(times), dtype=np.int64)
    np.add.at(totals, which, sizes)
    return times, begin + np.cumsum(totals)
