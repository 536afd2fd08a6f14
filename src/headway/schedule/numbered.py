"""Numbered: the actions of a schedule as numbers, so that a million of them are walked in seconds."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway.errors import PlanError
from headway.schedule.action import Action, Kind, Schedule, deadlock, needs

Job = tuple[Kind, int, int | None]
"""(kind, stage, peer): an action without its micro-batch"""
Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Numbered:
    """Actions as numbers: action (job j, micro-batch m) is j x num_micro + m.

    `needs` is asked once for each job where all micro-batches are split alike, else for each micro-batch.
    """

    schedule: Schedule
    num_micro: int
    jobs: tuple[Job, ...]
    rows: tuple[list[int], ...]
    """[ranks] the actions of each"""
    causes: list[Offsets]
    """[actions] the actions that it needs, as distances from it"""

    def action(self, number: int) -> Action:
        """Give back the action."""
        job, micro = divmod(number, self.num_micro)
        kind, stage, peer = self.jobs[job]
        return Action(kind, stage, micro, peer)

    def deadlock(self, waiting: dict[int, list[int]], cursor: list[int]) -> PlanError:
        """Name a deadlock; `waiting` gives for what is missing the ranks that wait for it."""
        missing = {rank: self.action(number) for number, ranks in waiting.items() for rank in ranks}
        return deadlock(self.schedule, missing, cursor)


def numbered(schedule: Schedule) -> Numbered:
    """Number the actions of a schedule, those too that are needed and that no rank does."""
    index: dict[Job, int] = {}
    num_micro = max((a.micro + 1 for actions in schedule.ranks for a in actions), default=0)
    num_micro = max(num_micro, schedule.num_micro)
    rows = []
    for actions in schedule.ranks:
        row = []
        for action in actions:
            key = action.kind, action.stage, action.peer
            job = index.get(key)
            if job is None:
                job = index[key] = len(index)
            row.append(job * num_micro + action.micro)
        rows.append(row)
    counts = Counter(stage for stage, _ in schedule.split)
    mixed = {stage for stage, count in counts.items() if count != num_micro}

    def offsets(job: int, micro: int) -> Offsets:
        kind, stage, peer = jobs[job]
        needed = needs(Action(kind, stage, micro, peer), schedule)
        numbers = (index.setdefault((n.kind, n.stage, n.peer), len(index)) * num_micro + n.micro for n in needed)
        return tuple(number - (job * num_micro + micro) for number in numbers)

    jobs = list(index)
    causes: list[Offsets] = []
    for job, (kind, stage, _) in enumerate(jobs):
        if kind is Kind.REDUCE:
            causes += [offsets(job, 0)] * num_micro
        elif mixed.isdisjoint((stage, *schedule.targets.get(stage, ()))):
            causes += [offsets(job, 0)] * num_micro
        else:
            causes += [offsets(job, micro) for micro in range(num_micro)]
    causes += [()] * ((len(index) - len(jobs)) * num_micro)
    return Numbered(schedule, num_micro, tuple(index), tuple(rows), causes)


def in_any_order(work: Numbered) -> Iterator[tuple[int, int]]:
    """Yield (rank, action) in an order that `needs` and each rank's own order allow, in O(actions).

    Sends do not wait for their receiver. Raises PlanError, after all that can be done, when the rest never can.
    """
    done = bytearray(len(work.causes))
    cursor = [0] * len(work.rows)
    waiting: dict[int, list[int]] = {}
    ready = deque(range(len(work.rows)))
    causes = work.causes
    while ready:
        rank = ready.popleft()
        row, at = work.rows[rank], cursor[rank]
        count = len(row)
        while at < count:
            action = row[at]
            for offset in causes[action]:
                if not done[action + offset]:
                    waiting.setdefault(action + offset, []).append(rank)
                    break
            else:
                yield rank, action
                done[action] = True
                at += 1
                if action in waiting:
                    ready.extend(waiting.pop(action))
                continue
            break
        cursor[rank] = at
    if waiting:
        raise work.deadlock(waiting, cursor)


def in_time(work: Numbered, moment: Callable[[int, int], float]) -> Iterator[tuple[int, int]]:
    """Yield as `in_any_order` does, always what starts next: `moment(rank, action)` is when, and never goes back.

    Of what starts at the same time the lowest rank goes first. O(actions log ranks).
    """
    done = bytearray(len(work.causes))
    cursor = [0] * len(work.rows)
    waiting: dict[int, list[int]] = {}
    ready: list[tuple[float, int]] = []

    def look(rank: int) -> None:
        if cursor[rank] == len(work.rows[rank]):
            return
        action = work.rows[rank][cursor[rank]]
        missing = next((action + offset for offset in work.causes[action] if not done[action + offset]), None)
        if missing is None:
            heapq.heappush(ready, (moment(rank, action), rank))
        else:
            waiting.setdefault(missing, []).append(rank)

    for rank in range(len(work.rows)):
        look(rank)
    while ready:
        _, rank = heapq.heappop(ready)
        action = work.rows[rank][cursor[rank]]
        yield rank, action
        done[action] = True
        cursor[rank] += 1
        for other in (rank, *waiting.pop(action, ())):
            look(other)
    if waiting:
        raise work.deadlock(waiting, cursor)
