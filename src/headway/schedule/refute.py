"""Refutation: raises a lower bound by proving that shorter makespans are impossible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.schedule.bound import Near, Waits, apart, heads_and_tails, memory_waits
from headway.schedule.work import Work

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_LARGEST = 1024
"""Actions of a rank above which the tables of pairs are too large."""
_FEWEST = 8
"""Passes that there must be work for, to begin at all."""
_PASSES = 12
"""Times that windows are narrowed before a makespan is given up as possible."""


def refuted(
    work: Work, room: Sequence[float], low: float, high: float, *, enough: float = 1e-3, cells: int = 10**7
) -> float:
    """Give the largest makespan found between `low` and `high` that every schedule exceeds, `low` if none is.

    Suppose that a schedule takes T seconds: then each action has a window, from its head to T less its tail. Windows
    are narrowed by `needs` and memory, as in `bound`; by what must stand before an action on its rank, for `needs` or
    because the other way round the windows are too small; and by edge finding (Carlier and Pinson 1989): where actions
    of one rank and another one would not end in time if that one were not the last of them, it is the last. When a
    window is too small, or the actions of a rank do not fit into theirs, T is refuted. T is found by bisection, to
    `enough` / 2. `cells` bounds the work: a pass takes the square of its actions for each rank.
    """
    sizes = [len(jobs) * work.num_micro for jobs in work.of_rank]
    if max(sizes) > _LARGEST or _FEWEST * sum(size**2 for size in sizes) > cells:
        return low
    windows = _Windows(work, room, cells)
    while high - low > enough / 2 * high and windows.cells > 0:
        middle = (low + high) / 2
        if windows.refute(middle):
            low = middle
        else:
            high = middle
    return low


class _Windows:
    """The windows of all actions; heads and tails are [jobs, micro-batches]."""

    def __init__(self, work: Work, room: Sequence[float], cells: int) -> None:
        self.work, self.cells = work, cells
        self.waits = memory_waits(work, room)
        self.freed: Waits = {}
        for forward, releases in self.waits.items():
            for release, kept in releases:
                self.freed.setdefault(release, []).append((forward, kept))
        heads, tails = heads_and_tails(work, room)
        self.heads, self.tails = np.array(heads), np.array(tails)
        self.seconds = np.array(work.seconds)
        distance = apart(work, work.causes, self.waits)
        self.before = [_before(jobs, distance, work.num_micro) for jobs in work.of_rank]
        self.length = [np.repeat(self.seconds[list(jobs)], work.num_micro) for jobs in work.of_rank]

    def refute(self, makespan: float) -> bool:
        """Tell whether no schedule takes `makespan` seconds or less; False is no proof that one does."""
        heads, tails = self.heads.copy(), self.tails.copy()
        close = 1e-9 * makespan
        for _ in range(_PASSES):
            known = heads.sum() + tails.sum()
            for rank, jobs in enumerate(self.work.of_rank):
                rows = list(jobs)
                first, last = heads[rows].ravel(), tails[rows].ravel()
                self.cells -= len(first) ** 2
                found = _narrowed(first, makespan - last, self.length[rank], self.before[rank], close)
                if found is None:
                    return True
                # Seen from the end, tails are heads.
                seen = _narrowed(last, makespan - found, self.length[rank], self.before[rank].T, close)
                if seen is None:
                    return True
                heads[rows], tails[rows] = found.reshape(len(rows), -1), seen.reshape(len(rows), -1)
            self._along(heads, self.work.in_order, self.work.causes, self.waits)
            back = tails[:, ::-1].copy()
            self._along(back, self.work.in_order[::-1], self.work.needed, self.freed)
            tails = back[:, ::-1].copy()
            if bool((heads + self.seconds[:, None] + tails > makespan + close).any()):
                return True
            if heads.sum() + tails.sum() <= known + close * len(heads) or self.cells <= 0:
                return False
        return False

    def _along(self, starts: Floats, order: Sequence[int], near: Near, waits: Waits) -> None:
        """Raise starts by what each job needs, waits for in memory, and by its earlier micro-batches."""
        micros = self.work.num_micro
        for _ in range(2 if waits else 1):
            for job in order:
                row = starts[job].copy()
                for cause, message in near[job]:
                    np.maximum(row, starts[cause] + (self.seconds[cause] + message), out=row)
                for release, kept in waits.get(job, ()):
                    if kept < micros:
                        np.maximum(row[kept:], starts[release][:-kept] + self.seconds[release], out=row[kept:])
                steps = self.seconds[job] * np.arange(micros)
                starts[job] = np.maximum.accumulate(row - steps) + steps


def _before(jobs: Sequence[int], distance: Floats, micros: int) -> Flags:
    """Give [one, other] whether one action of a rank is before another in every schedule, whatever its makespan."""
    numbers = np.arange(micros)
    found = np.zeros((len(jobs) * micros, len(jobs) * micros), dtype=bool)
    for column, job in enumerate(jobs):
        for row, other in enumerate(jobs):
            if np.isfinite(distance[job, other]):
                block = slice(row * micros, (row + 1) * micros), slice(column * micros, (column + 1) * micros)
                found[block] = numbers[:, None] <= numbers[None, :] - distance[job, other]
    np.fill_diagonal(found, False)
    return found


def _narrowed(starts: Floats, limits: Floats, length: Floats, before: Flags, close: float) -> Floats | None:
    """Raise the starts of a rank's actions, given when each must have ended; None when they do not fit."""
    order = np.argsort(starts, kind="stable")
    first, seconds, last = starts[order], length[order], limits[order]
    # What must stand before an action takes its time one by one.
    ahead = before | ((starts + length)[None, :] + length[:, None] > limits[:, None] + close)
    np.fill_diagonal(ahead, False)
    ahead = ahead[order]
    ends = first[:, None] + np.cumsum((ahead * seconds[:, None])[::-1], axis=0)[::-1]
    found = np.maximum(starts, np.where(ahead, ends, -np.inf).max(axis=0))
    later = _last_of_all(first, seconds, last, close)
    if later is None:
        return None
    found[order] = np.maximum(found[order], later)
    return found


def _last_of_all(first: Floats, seconds: Floats, last: Floats, close: float) -> Floats | None:
    """Find edges: give the start of each action behind those sets of which it must be the last; None for no fit.

    Actions are sorted by `first`. A set [one, limit] is all that start no earlier than `one` and end by a limit.
    """
    size = len(first)
    by_limit = np.argsort(last, kind="stable")
    limit = last[by_limit]
    table = np.zeros((size, size))
    table[by_limit, np.arange(size)] = seconds[by_limit]
    total = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
    ends = np.where(total > 0, first[:, None] + total, -np.inf)
    if bool((ends > limit + close).any()):
        return None
    # The latest end of a set and of the smaller ones in it; of the larger ones, and which of them that is.
    within = np.maximum.accumulate(ends[::-1], axis=0)[::-1]
    around = np.maximum.accumulate(ends, axis=0)
    which = np.maximum.accumulate(np.where(ends >= around, np.arange(size)[:, None], 0), axis=0)
    outside = last[:, None] > limit + close
    # One that starts within the set's span, and one that could start before it.
    late = outside & (around + seconds[:, None] > limit + close)
    behind = np.where(late, np.take_along_axis(within, which, axis=0), -np.inf).max(axis=1)
    early = np.zeros((size, size), dtype=bool)
    early[:-1] = outside[:-1] & (total[1:] > 0) & ((first + seconds)[:-1, None] + total[1:] > limit + close)
    follows = np.full((size, size), -np.inf)
    follows[:-1] = within[1:]
    return np.maximum(behind, np.where(early, follows, -np.inf).max(axis=1))
