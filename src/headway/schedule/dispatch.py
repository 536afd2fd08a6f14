"""Dispatch: builds orders event by event; whenever a rank is free it takes the ready job that a rule prefers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from headway.schedule.action import Kind
from headway.schedule.rules import Rules, Table
from headway.schedule.work import Orders, Work


def dispatch(work: Work, rules: Rules, tables: Mapping[str, Table], room: Sequence[float]) -> Orders:
    """Return the orders that rules give, with at most `room` bytes of activations on each rank.

    Every rank keeps enough room for its oldest micro-batch to go all the way, so memory never ends in a deadlock; the
    room must hold one micro-batch. O(actions (log actions + jobs of a rank)).
    """
    return _Dispatch(work, rules, tables, room).run()


class _Dispatch:
    """The state of one pass."""

    def __init__(self, work: Work, rules: Rules, tables: Mapping[str, Table], room: Sequence[float]) -> None:
        self.work, self.rules = work, rules
        self.tables = [tables[name] for name in rules.prefer]
        self.left = list(room)
        self.missing = [len(causes) for causes in work.causes for _ in range(work.num_micro)]
        self.ready = [0.0] * len(self.missing)
        self.done = [0] * work.num_jobs
        self.free = [0.0] * work.num_ranks
        self.link = [0.0] * work.num_links
        self.orders: Orders = [[] for _ in range(work.num_ranks)]
        self.urgent = [[job for job in jobs if work.kinds[job] is not Kind.W] for jobs in work.of_rank]
        self.fillers = [[job for job in jobs if work.kinds[job] is Kind.W] for jobs in work.of_rank]
        self.forwards = [[job for job in jobs if work.kinds[job] is Kind.F] for jobs in work.of_rank]
        self.closing = {work.stages[job]: job for job in range(work.num_jobs) if work.ends[job]}
        self.closings = [[self.closing[work.stages[job]] for job in jobs] for jobs in self.forwards]

    def run(self) -> Orders:
        """Go from one moment at which something ends or arrives to the next, until all is done."""
        clock = [(0.0, rank) for rank in range(self.work.num_ranks)]
        for _ in self.missing:
            job = None
            while job is None:
                now, rank = heapq.heappop(clock)
                job = self._choose(rank, now) if self.free[rank] <= now else None
            self._start(rank, job, now, clock)
        return self.orders

    def _choose(self, rank: int, now: float) -> int | None:
        """Give the job that a free rank starts now; None to wait until something arrives."""
        micros, done, ready, missing = self.work.num_micro, self.done, self.ready, self.missing
        table = self.tables[rank]
        best, least, soonest, hungry = None, math.inf, math.inf, False
        for job in self.urgent[rank]:
            micro = done[job]
            entry = job * micros + micro
            if micro == micros or missing[entry]:
                continue
            if self.work.kinds[job] is Kind.F and not self._admits(rank, job, micro):
                hungry = hungry or ready[entry] <= now
            elif ready[entry] > now:
                soonest = min(soonest, ready[entry])
            elif (key := table[job][micro]) < least:
                best, least = job, key
        if best is not None and not (hungry and self.rules.hungry[rank]):
            return best
        for job in self.fillers[rank]:
            micro = done[job]
            if micro < micros and not missing[job * micros + micro]:
                patience = self.rules.patience[rank] * self.work.seconds[job]
                return None if best is None and not hungry and soonest - now < patience else job
        return best

    def _admits(self, rank: int, job: int, micro: int) -> bool:
        """Tell whether memory allows this forward now, and the oldest micro-batch of the rank to finish after it."""
        work, done = self.work, self.done
        stage = work.stages[job]
        if micro - done[self.closing[stage]] >= self.rules.most[stage]:
            return False
        if not work.takes[job]:
            return True
        oldest = min(done[closing] for closing in self.closings[rank])
        if micro == oldest:
            return True
        reserve = sum(work.takes[other] for other in self.forwards[rank] if done[other] <= oldest)
        return self.left[rank] - work.takes[job] >= reserve

    def _start(self, rank: int, job: int, now: float, clock: list[tuple[float, int]]) -> None:
        work, micros = self.work, self.work.num_micro
        micro = self.done[job]
        end = now + work.seconds[job]
        self.done[job] = micro + 1
        self.orders[rank].append(job)
        self.left[rank] += work.frees[job] - work.takes[job]
        for other, length, through in work.sends[job]:
            arrives = end
            if through >= 0:
                arrives = self.link[through] = max(end, self.link[through]) + length
                if not work.overlap:
                    end = arrives
            entry = other * micros + micro
            self.ready[entry] = max(self.ready[entry], arrives)
            self.missing[entry] -= 1
            if not self.missing[entry]:
                heapq.heappush(clock, (self.ready[entry], work.rank[other]))
        self.free[rank] = end + (work.after[job] if micro + 1 == micros else 0.0)
        heapq.heappush(clock, (self.free[rank], rank))
