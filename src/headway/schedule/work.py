"""Work: the actions of a step as numbers, for searching among their orders; one micro-batch stands for all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from headway.schedule.action import COMPUTES, Action, Edge, Kind, Schedule, chain, needs
from headway.schedule.costs import Costs

Orders = list[list[int]]
"""[ranks][actions of the rank] jobs: the m-th time that a job stands there is its micro-batch m"""


@dataclass(frozen=True)
class Work:
    """What a step has to do: jobs, each a (kind, stage), each done once for every micro-batch, in their order.

    Micro-batches are alike, so nothing is lost by taking them in order at every job: give the m-th start of each job
    to micro-batch m, and whatever was done before it still is.
    """

    num_micro: int
    placement: tuple[int, ...]
    kinds: tuple[Kind, ...]
    stages: tuple[int, ...]
    seconds: tuple[float, ...]
    """[jobs] of one micro-batch, the launch gap before it included"""
    after: tuple[float, ...]
    """[jobs] what follows its last micro-batch: the reduction of its stage"""
    causes: tuple[tuple[tuple[int, float], ...], ...]
    """[jobs] the jobs that it needs, and the seconds of the message from each; 0 on the same rank"""
    sends: tuple[tuple[tuple[int, float, int], ...], ...]
    """[jobs] the jobs that need it: which, seconds of the message, its link; link -1 on the same rank"""
    overlap: bool
    """whether a rank computes while what it sent is on its way"""
    takes: tuple[int, ...]
    """[jobs] bytes of activations held from its start"""
    frees: tuple[int, ...]
    """[jobs] bytes of activations let go at its end"""

    @property
    def num_jobs(self) -> int:
        """Count the jobs."""
        return len(self.kinds)

    @cached_property
    def num_ranks(self) -> int:
        """Count the pipeline ranks."""
        return max(self.placement) + 1

    @cached_property
    def split(self) -> frozenset[int]:
        """Give the stages whose backward is done as I and W."""
        return frozenset(stage for kind, stage in self.job if kind is Kind.W)

    @cached_property
    def num_links(self) -> int:
        """Count the directed pairs of ranks with messages."""
        return 1 + max((link for sends in self.sends for _, _, link in sends), default=-1)

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Give the rank of each job."""
        return tuple(self.placement[stage] for stage in self.stages)

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """List the jobs of each rank."""
        return tuple(
            tuple(job for job in range(self.num_jobs) if self.rank[job] == rank) for rank in range(self.num_ranks)
        )

    @cached_property
    def job(self) -> dict[tuple[Kind, int], int]:
        """Find a job by kind and stage."""
        return {pair: job for job, pair in enumerate(zip(self.kinds, self.stages, strict=True))}

    @cached_property
    def needed(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """[jobs] the jobs that need it, and the seconds of the message to each."""
        return tuple(tuple((job, seconds) for job, seconds, _ in sends) for sends in self.sends)

    @cached_property
    def ends(self) -> tuple[bool, ...]:
        """[jobs] whether it is the last that its stage does with a micro-batch."""
        return tuple(kind is Kind.W or kind is Kind.B for kind in self.kinds)

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """List the jobs, each after all that it needs."""
        found: list[int] = []
        while len(found) < self.num_jobs:
            found += [
                job
                for job in range(self.num_jobs)
                if job not in found and all(cause in found for cause, _ in self.causes[job])
            ]
        return tuple(found)

    def companions(self, job: int, way: tuple[tuple[tuple[int, float], ...], ...]) -> tuple[int, ...]:
        """List the jobs of its rank that come before it (`way` is causes) or after it (needed) in a micro-batch."""
        found: set[int] = set()
        ahead = [job]
        while ahead:
            reached = {other for other, _ in way[ahead.pop()]} - found
            found |= reached
            ahead += reached
        return tuple(sorted(other for other in found if self.rank[other] == self.rank[job]))

    def schedule(self, name: str, orders: Orders) -> Schedule:
        """Write orders of jobs as a Schedule."""
        ranks = []
        for order in orders:
            done = [0] * self.num_jobs
            actions = []
            for job in order:
                actions.append(Action(self.kinds[job], self.stages[job], done[job]))
                done[job] += 1
            ranks.append(tuple(actions))
        return Schedule(name, len(self.placement), self.num_micro, tuple(ranks), self.placement)

    def orders(self, schedule: Schedule) -> Orders:
        """Read a schedule as orders of jobs; whole backwards of a stage that is split here become I and W at once."""
        parts = {(kind, stage): [job] for (kind, stage), job in self.job.items()}
        for stage in self.split:
            parts[Kind.B, stage] = [self.job[Kind.I, stage], self.job[Kind.W, stage]]
        return [[job for a in actions for job in parts[a.kind, a.stage]] for actions in schedule.ranks]


def work_of(
    costs: Costs,
    placement: Sequence[int],
    num_micro: int,
    *,
    split: Collection[int],
    edges: Collection[Edge] | None = None,
    reduce: bool = False,
) -> Work:
    """Number the jobs of a step: F and B of each stage, F, I and W of those in `split`; what they need is of `needs`.

    With `edges` messages go along them, as `lower` sends them, and stages are reduced at the end if `reduce`.
    """
    num_stages = len(placement)
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        kinds = (Kind.F, Kind.I, Kind.W) if stage in split else (Kind.F, Kind.B)
        rows[rank] += [Action(kind, stage, 0) for kind in kinds]
    along = tuple(sorted(set(chain(num_stages) if edges is None else edges)))
    one = Schedule("one micro-batch", num_stages, 1, tuple(map(tuple, rows)), tuple(placement), along)
    actions = [action for row in rows for action in row]
    index = {action: job for job, action in enumerate(actions)}
    links: dict[object, int] = {}
    causes: list[tuple[tuple[int, float], ...]] = []
    sends: list[list[tuple[int, float, int]]] = [[] for _ in actions]
    for job, action in enumerate(actions):
        found = []
        for cause in _causes(action, one):
            pair = placement[cause.stage], placement[action.stage]
            local = pair[0] == pair[1]
            seconds = 0.0 if local else costs.transfer(cause.stage, action.stage)
            found.append((index[cause], seconds))
            sends[index[cause]].append(
                (job, seconds, -1 if local else links.setdefault(costs.links.get(pair, pair), len(links)))
            )
        causes.append(tuple(found))
    table = {kind: costs.seconds(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.REDUCE)}
    held = costs.activation_bytes or (0,) * num_stages
    lasts = Kind.B, Kind.W
    return Work(
        num_micro=num_micro,
        placement=tuple(placement),
        kinds=tuple(action.kind for action in actions),
        stages=tuple(action.stage for action in actions),
        seconds=tuple(costs.gap + table[action.kind][action.stage] for action in actions),
        after=tuple(
            costs.gap + table[Kind.REDUCE][action.stage] if reduce and action.kind in lasts else 0.0
            for action in actions
        ),
        causes=tuple(causes),
        # As `lower` sends them: the nearest stage first.
        sends=tuple(
            tuple(send for _, send in sorted((abs(actions[send[0]].stage - action.stage), send) for send in row))
            for action, row in zip(actions, sends, strict=True)
        ),
        overlap=costs.overlap,
        takes=tuple(held[action.stage] if action.kind is Kind.F else 0 for action in actions),
        frees=tuple(held[action.stage] if action.kind in lasts else 0 for action in actions),
    )


def _causes(action: Action, within: Schedule) -> Iterator[Action]:
    """Yield the computations that an action waits for, through the messages between."""
    for need in needs(action, within):
        if need.kind in COMPUTES:
            yield need
        else:
            yield from _causes(need, within)


def timed(work: Work, orders: Orders) -> tuple[float, list[float]] | None:
    """Give the makespan, and the end of each (job x num_micro + micro-batch); None when the orders deadlock.

    The times are those of `simulate`, but for pairs of ranks that share a link: who sends first is only guessed there.
    """
    micros, rank_of, seconds, sends = work.num_micro, work.rank, work.seconds, work.sends
    ends = [0.0] * (work.num_jobs * micros)
    ready = [0.0] * len(ends)
    missing = [len(causes) for causes in work.causes for _ in range(micros)]
    done = [0] * work.num_jobs
    free = [0.0] * work.num_ranks
    link = [0.0] * work.num_links
    cursor = [0] * work.num_ranks
    stack = list(range(work.num_ranks))
    left = sum(map(len, orders))
    while stack:
        rank = stack.pop()
        order, at, now = orders[rank], cursor[rank], free[rank]
        count = len(order)
        while at < count:
            job = order[at]
            micro = done[job]
            entry = job * micros + micro
            if missing[entry]:
                break
            start = ready[entry]
            now = (start if start > now else now) + seconds[job]
            ends[entry] = now
            done[job] = micro + 1
            at += 1
            for other, length, through in sends[job]:
                arrives = now
                if through >= 0:
                    if link[through] > arrives:
                        arrives = link[through]
                    arrives += length
                    link[through] = arrives
                    if not work.overlap:
                        now = arrives
                entry = other * micros + micro
                if arrives > ready[entry]:
                    ready[entry] = arrives
                missing[entry] -= 1
                if not missing[entry] and rank_of[other] != rank:
                    stack.append(rank_of[other])
            if done[job] == micros:
                now += work.after[job]
        left -= at - cursor[rank]
        cursor[rank], free[rank] = at, now
    return None if left else (max(free), ends)


def fits(work: Work, orders: Orders, room: Sequence[float]) -> bool:
    """Tell whether each rank's activations stay within its room, in bytes; that depends on its own order alone."""
    return all(peak(work, order) <= most for order, most in zip(orders, room, strict=True))


def peak(work: Work, order: Sequence[int]) -> int:
    """Give the most bytes of activations that a rank holds at once in this order."""
    now = most = 0
    for job in order:
        now += work.takes[job]
        most = max(most, now)
        now -= work.frees[job]
    return most
