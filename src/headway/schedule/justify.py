"""Justification: shorter orders by pushing a whole schedule to its end, and then back to its start."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headway.schedule.work import Orders, Work, timed

_NOISE = (0.0, 0.2, 0.4, 0.8, 1.6)
"""Keys are moved by up to so many times the mean seconds of an action."""
_PATIENCE = (0.0, 0.5, 1.0, 1.0, 2.0)
_WORSE = 0.003
"""So much longer, relative, may be what is gone on from, at first; at the end nothing."""


def justify(
    work: Work, orders: Orders, room: Sequence[float], tries: int, take: Callable[[Orders], bool]
) -> Iterator[None]:
    """Build orders anew from the times of the last ones, backwards and then forwards; yield after each round.

    `take` is shown each of the ever shorter orders, and says whether they are good in every other way.
    Backwards: time runs from the end, and of what is ready a rank takes what ended last; so everything moves as far to
    the end as the rest lets it. Forwards: a rank takes what then started first. That alone shortens most schedules
    (Tormos and Lova 2001; Valls, Ballestin and Quintanilla 2005); noise on the keys, of whole jobs and of single
    actions, makes it a search. Each round is O(actions (log actions + jobs of a rank)).
    """
    chance = random.Random(0)
    found = timed(work, orders)
    if found is None:
        return
    best, ends = found
    length, micros = best, work.num_micro
    there, back = _Lister(work, room), _Lister(_backwards(work), room, work.after)
    mean = sum(work.seconds) / work.num_jobs
    for turn in range(tries):
        of_job, of_action = chance.choice((0.0, *_NOISE)) * mean, chance.choice(_NOISE) * mean
        patience, strict = chance.choice(_PATIENCE), chance.random() < 0.5
        keys = []
        for job in range(work.num_jobs):
            moved = of_job * (2 * chance.random() - 1)
            keys += [
                moved - ends[job * micros + micro] + of_action * (2 * chance.random() - 1)
                for micro in reversed(range(micros))
            ]
        _, late = back.run(keys, patience, strict)
        # From the end, what starts last has the latest end.
        keys = [-late[job * micros + micro] for job in range(work.num_jobs) for micro in reversed(range(micros))]
        orders, _ = there.run(keys, patience, strict)
        found = timed(work, orders)
        assert found is not None, "orders that were built in time can be run in time"
        if found[0] <= length * (1 + _WORSE * (1 - turn / tries) * chance.random()):
            length, ends = found
        if found[0] < best and take(orders):
            best = found[0]
        yield


def _backwards(work: Work) -> Work:
    """Give the work seen from its end: what was needed needs, and memory is taken by what let it go."""
    through = {(job, other): link for job, row in enumerate(work.sends) for other, _, link in row}
    sends = tuple(
        tuple((cause, seconds, through[cause, job]) for cause, seconds in row) for job, row in enumerate(work.causes)
    )
    return replace(work, causes=work.needed, sends=sends, takes=work.frees, frees=work.takes)


class _Lister:
    """Lists of actions: a free rank takes what is ready and has the least key, or waits a little for a lesser one."""

    def __init__(self, work: Work, room: Sequence[float], rest: Sequence[float] = ()) -> None:
        self.work, self.room = work, room
        self.rest = rest or [0.0] * work.num_jobs
        self.takers = [[job for job in jobs if work.takes[job]] for jobs in work.of_rank]
        closing = {work.stages[job]: job for job in range(work.num_jobs) if work.frees[job]}
        self.closings = [[closing[work.stages[job]] for job in jobs] for jobs in self.takers]

    def run(self, keys: Sequence[float], patience: float, strict: bool) -> tuple[Orders, list[float]]:
        """Return orders, and the end of each action.

        A rank waits for a lesser key for up to `patience` times the seconds of what it could do meanwhile. If `strict`,
        memory that actions with lesser keys will take is kept for them.
        """
        work, micros = self.work, self.work.num_micro
        self.keys, self.patience, self.strict = keys, patience, strict
        self.missing = [len(causes) for causes in work.causes for _ in range(micros)]
        self.ready = [0.0] * len(self.missing)
        self.ready[::micros] = self.rest
        self.ends = [0.0] * len(self.missing)
        self.done, self.free = [0] * work.num_jobs, [0.0] * work.num_ranks
        self.link, self.left = [0.0] * work.num_links, list(self.room)
        orders: Orders = [[] for _ in range(work.num_ranks)]
        clock = [(0.0, rank) for rank in range(work.num_ranks)]
        left = len(self.missing)
        while left:
            now, rank = heapq.heappop(clock)
            if self.free[rank] > now:
                continue
            job, until = self._choose(rank, now)
            if job is not None:
                orders[rank].append(job)
                left -= 1
                self._start(job, now, clock)
            elif until < math.inf:
                heapq.heappush(clock, (until, rank))
        return orders, self.ends

    def _choose(self, rank: int, now: float) -> tuple[int | None, float]:
        """Give the job that a free rank starts now; or None, and until when it waits."""
        micros, done, ready, keys = self.work.num_micro, self.done, self.ready, self.keys
        best: int | None = None
        least = math.inf
        coming: list[tuple[float, float]] = []
        for job in self.work.of_rank[rank]:
            micro = done[job]
            entry = job * micros + micro
            if micro == micros or self.missing[entry] or keys[entry] >= least:
                continue
            if self.work.takes[job] and not self._admits(rank, job, micro):
                continue
            if ready[entry] > now:
                coming.append((keys[entry], ready[entry]))
            else:
                best, least = job, keys[entry]
        if best is None:
            return None, min((moment for _, moment in coming), default=math.inf)
        latest = now + self.patience * self.work.seconds[best]
        until = min((moment for key, moment in coming if key < least and moment < latest), default=math.inf)
        return (best, now) if math.isinf(until) else (None, until)

    def _admits(self, rank: int, job: int, micro: int) -> bool:
        """Tell whether memory allows this now, and the oldest micro-batch of the rank to finish after it."""
        takes, done, micros, keys = self.work.takes, self.done, self.work.num_micro, self.keys
        oldest = min(done[closing] for closing in self.closings[rank])
        if micro == oldest:
            return True
        left = self.left[rank] - takes[job]
        if left < sum(takes[other] for other in self.takers[rank] if done[other] <= oldest):
            return False
        if not self.strict:
            return True
        key = keys[job * micros + micro]
        before = [
            takes[other]
            for other in self.takers[rank]
            if other != job and done[other] < micros and keys[other * micros + done[other]] < key
        ]
        return left >= sum(before)

    def _start(self, job: int, now: float, clock: list[tuple[float, int]]) -> None:
        work, micros, rank = self.work, self.work.num_micro, self.work.rank[job]
        micro = self.done[job]
        self.done[job] = micro + 1
        self.left[rank] += work.frees[job] - work.takes[job]
        end = self.ends[job * micros + micro] = now + work.seconds[job]
        for other, length, through in work.sends[job]:
            arrives = end
            if through >= 0:
                arrives = self.link[through] = max(end, self.link[through]) + length
                if not work.overlap:
                    end = arrives
            entry = other * micros + micro
            self.ready[entry] = max(self.ready[entry], arrives)
            self.missing[entry] -= 1
            if not self.missing[entry] and work.rank[other] != rank:
                heapq.heappush(clock, (self.ready[entry], work.rank[other]))
        self.free[rank] = end
        heapq.heappush(clock, (end, rank))
