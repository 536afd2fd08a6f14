"""A lower bound: seconds that no schedule of this work can beat, within each rank's memory."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.schedule.action import Kind
from headway.schedule.work import Work

Row = list[list[float]]
"""[jobs][micro-batches] seconds"""
Near = tuple[tuple[tuple[int, float], ...], ...]
"""[jobs] (another job of the same micro-batch, seconds of the message between)"""
Waits = dict[int, list[tuple[int, int]]]
"""[job] the jobs that it waits for, and how many micro-batches it may be ahead of each"""


def lower_bound(work: Work, room: Sequence[float] | None = None) -> float:
    """Give seconds that every schedule takes at least; `room` is the bytes of activations that each rank may hold.

    For each rank alone: each of its actions cannot start before its head, must be followed by its tail, and the rank
    does one at a time. The best that a rank could do, were it allowed to interrupt its actions, is found exactly by
    Jackson's rule (1955), always the ready action with the longest tail.
    Heads and tails are longest paths through what `needs` demands, through the work that must stand before or after
    an action on its own rank, and through memory: a forward waits until an earlier micro-batch has let go of its bytes.
    """
    heads, tails = heads_and_tails(work, room)
    best = 0.0
    for rank, jobs in enumerate(work.of_rank):
        actions = [(heads[job][m], work.seconds[job], tails[job][m]) for job in jobs for m in range(work.num_micro)]
        best = max(best, _jackson(actions), 0.0 if room is None else _filled(work, room[rank], rank, heads, tails))
    return best


def heads_and_tails(work: Work, room: Sequence[float] | None = None) -> tuple[Row, Row]:
    """Give for each action seconds before which it cannot start, and that must pass after its end."""
    waits = memory_waits(work, room)
    heads = _earliest(work, work.in_order, work.causes, waits, [0.0] * work.num_jobs)
    freed: Waits = {}
    for forward, releases in waits.items():
        for release, kept in releases:
            freed.setdefault(release, []).append((forward, kept))
    # Seen from the end, with time running backwards, tails are heads.
    tails = _earliest(work, work.in_order[::-1], work.needed, freed, work.after)
    return heads, [row[::-1] for row in tails]


def _jackson(actions: Iterable[tuple[float, float, float]]) -> float:
    """Give the least end of (head, seconds, tail) on one machine that may interrupt them."""
    waiting = sorted(actions)
    ready: list[tuple[float, float]] = []
    now = most = 0.0
    at = 0
    while at < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= now:
            heapq.heappush(ready, (-waiting[at][2], waiting[at][1]))
            at += 1
        tail, left = heapq.heappop(ready)
        until = now + left
        if at < len(waiting) and waiting[at][0] < until:
            heapq.heappush(ready, (tail, until - waiting[at][0]))
            now = waiting[at][0]
        else:
            now = until
            most = max(most, now - tail)
    return most


def _filled(work: Work, room: float, rank: int, heads: Row, tails: Row) -> float:
    """Bound a rank by what it can do before its first backward can start: as many forwards as its memory takes."""
    jobs = work.of_rank[rank]
    forwards = [job for job in jobs if work.kinds[job] is Kind.F]
    starts = min(heads[job][0] for job in jobs if job not in forwards)
    left, done = room, 0.0
    for job in sorted(forwards, key=lambda job: work.takes[job] / work.seconds[job] if work.seconds[job] else 0.0):
        count = min(work.num_micro, left / work.takes[job]) if work.takes[job] else work.num_micro
        done += count * work.seconds[job]
        left -= count * work.takes[job]
    total = sum(work.seconds[job] for job in jobs) * work.num_micro
    return starts + max(total - done, 0.0) + min(tails[job][-1] for job in jobs)


def _earliest(work: Work, order: Iterable[int], near: Near, waits: Waits, rest: Sequence[float]) -> Row:
    """Give seconds before which each action cannot start, when each job needs `near` and waits for `waits`.

    `order` lists each job after those near it; `rest[job]` is before its first. What must stand before an action on
    its own rank takes its time there one by one: `_one_by_one`.
    """
    starts: Row = [[] for _ in work.kinds]
    distance = apart(work, near, waits)
    # For each job the actions of its rank that are before it, by start; grown with the micro-batches.
    crowd: list[list[tuple[float, float]]] = [[] for _ in work.kinds]
    for micro in range(work.num_micro):
        for job in order:
            start = starts[job][-1] + work.seconds[job] if micro else rest[job]
            for cause, message in near[job]:
                start = max(start, starts[cause][micro] + work.seconds[cause] + message)
            for release, kept in waits.get(job, ()):
                if micro >= kept:
                    start = max(start, starts[release][micro - kept] + work.seconds[release])
            for other in work.of_rank[work.rank[job]]:
                if micro >= distance[job, other]:
                    insort(crowd[job], (starts[other][micro - int(distance[job, other])], work.seconds[other]))
            starts[job].append(max(start, _one_by_one(crowd[job])))
    return starts


def _one_by_one(actions: Iterable[tuple[float, float]]) -> float:
    """Give the end of (start at the earliest, seconds), sorted, done one at a time."""
    now = 0.0
    for start, seconds in actions:
        now = (start if start > now else now) + seconds
    return now


def apart(work: Work, near: Near, waits: Waits) -> NDArray[np.float64]:
    """Give [job, other] the d for which `other` of micro-batch m - d is before `job` of micro-batch m; inf: never."""
    distance = np.full((work.num_jobs, work.num_jobs), np.inf)
    np.fill_diagonal(distance, 1)
    for job in range(work.num_jobs):
        for other, _ in near[job]:
            distance[job, other] = 0
        for other, kept in waits.get(job, ()):
            distance[job, other] = min(distance[job, other], kept)
    for through in range(work.num_jobs):
        np.minimum(distance, distance[:, through, None] + distance[None, through, :], out=distance)
    return distance


def memory_waits(work: Work, room: Sequence[float] | None) -> Waits:
    """Say how many micro-batches a forward may be ahead of what lets go of memory.

    Its own stage keeps room / bytes micro-batches until their last action. Those whose input gradient is not done are
    kept by every earlier stage of the rank too.
    """
    waits: Waits = {}
    for job, kind in enumerate(work.kinds):
        if room is None or math.isinf(room[work.rank[job]]) or kind is not Kind.F:
            continue
        most, stage = room[work.rank[job]], work.stages[job]
        alone = work.takes[job]
        together = alone + sum(work.takes[other] for other in work.companions(job, work.causes))
        last = next(other for other in work.of_rank[work.rank[job]] if work.stages[other] == stage and work.ends[other])
        gradient = work.job.get((Kind.I, stage), last)
        waits[job] = [
            (other, max(1, int(most // size))) for other, size in ((last, alone), (gradient, together)) if size
        ]
    return waits
