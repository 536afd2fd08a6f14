"""Which nodes each stage holds when ranks hold several stages: the load of a rank is the sum of its stages'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from headway.layout.optimum import Floats
from headway.layout.partition import Held, balance, cut_places, prefix

_WINDOW = 2
"""How far two cuts are moved together, in places to cut."""


@dataclass(frozen=True)
class RankBalance:
    """Where the stages begin, the seconds of each rank, the greatest of them, and a proved lower bound of that.

    Unlike `balance`'s, the bound may be below what can be reached; `gap` is the most that a better one could gain.
    """

    cuts: tuple[int, ...]
    bottleneck: float
    loads: tuple[float, ...]
    bound: float

    @property
    def gap(self) -> float:
        """Give how much above the bound the bottleneck is, as a share of the bound."""
        return self.bottleneck / self.bound - 1 if self.bound > 0 else 0.0


def balance_ranks(
    weights: Sequence[float],
    placement: Sequence[int],
    *,
    allowed: Sequence[bool] | None = None,
    boundary: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    in_flight: Sequence[float] | None = None,
    static: Sequence[float] | Held | None = None,
    limits: Sequence[float] | None = None,
) -> RankBalance:
    """Cut nodes into contiguous stages so that the most loaded rank has little load; stage s is on rank placement[s].

    Arguments are those of `balance`, but `speeds` and `limits` are of ranks: a rank's load is the sum of the loads of
    its stages, its bytes the sum of their bytes. Where each rank holds one stage it is `balance`, and exact. Otherwise
    it begins with what `balance` gives when each stage may have an equal share of its rank, and moves one cut, or two
    together, for as long as the worst rank, then the sum of squared loads of the ranks, then of the stages, gets less.
    Never worse than that beginning, and not always the best: see `gap`.
    Raises PlanError when no partition fits such shares; ValueError for numbers that make no sense.
    """
    num_ranks = max(placement, default=-1) + 1
    if set(placement) != set(range(num_ranks)) or not placement:
        raise ValueError(f"a rank without a stage: {tuple(placement)}")
    for name, row in (("speeds", speeds), ("limits", limits)):
        if row is not None and len(row) != num_ranks:
            raise ValueError(f"{name} has {len(row)} entries for {num_ranks} ranks")
    count = [list(placement).count(rank) for rank in placement]
    start = balance(
        weights,
        len(placement),
        allowed=allowed,
        boundary=boundary,
        speeds=None if speeds is None else [speeds[rank] / n for rank, n in zip(placement, count, strict=True)],
        memory=memory,
        in_flight=in_flight,
        static=static,
        limits=None if limits is None else [limits[rank] / n for rank, n in zip(placement, count, strict=True)],
    )
    nodes = cut_places(len(weights), len(placement), allowed)
    edges = np.zeros(len(weights) + 1) if boundary is None else np.array([0.0, *boundary[1:], 0.0])
    rates = np.ones(num_ranks) if speeds is None else np.asarray(speeds, dtype=np.float64)
    task = _Task(
        nodes=tuple(int(node) for node in nodes),
        work=prefix(weights, len(weights))[nodes],
        boundary=edges[nodes],
        placement=tuple(placement),
        rates=rates,
        kept=tuple(in_flight or [1.0] * len(placement)),
        bytes=prefix(memory, len(weights)),
        static=static if callable(static) else prefix(static, len(weights)),
        limits=None if limits is None else tuple(limits),
    )
    at = {node: place for place, node in enumerate(task.nodes)}
    found = _descend(task, (0, *(at[cut] for cut in start.cuts), len(nodes) - 1))
    loads = tuple(task.loads(found))
    largest = float(np.diff(task.work).max() / rates.max())
    bound = start.bound if num_ranks == len(placement) else max(float(task.work[-1] / rates.sum()), largest)
    return RankBalance(tuple(task.nodes[place] for place in found[1:-1]), max(loads), loads, min(bound, max(loads)))


@dataclass(frozen=True)
class _Task:
    """Places to cut, and what ranks carry for given cuts; cuts are places, those of both ends among them."""

    nodes: tuple[int, ...]
    work: Floats
    boundary: Floats
    placement: tuple[int, ...]
    rates: Floats
    kept: tuple[float, ...]
    bytes: Floats
    static: Floats | Held
    limits: tuple[float, ...] | None

    def stages(self, cuts: Sequence[int]) -> list[float]:
        """Give the load of each stage."""
        return [
            float((self.work[b] - self.work[a]) / self.rates[rank] + self.boundary[a] + self.boundary[b])
            for rank, a, b in zip(self.placement, cuts, cuts[1:], strict=False)
        ]

    def loads(self, cuts: Sequence[int]) -> list[float]:
        """Give the load of each rank."""
        return self._sums(self.stages(cuts))

    def fits(self, cuts: Sequence[int]) -> bool:
        """Tell whether every rank stays within its limit."""
        if self.limits is None:
            return True
        held = []
        for stage, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
            first, last = self.nodes[a], self.nodes[b]
            more = self.static(first, last, stage) if callable(self.static) else self.static[last] - self.static[first]
            held.append(float(self.kept[stage] * (self.bytes[last] - self.bytes[first]) + more))
        return all(size <= most for size, most in zip(self._sums(held), self.limits, strict=True))

    def _sums(self, row: Sequence[float]) -> list[float]:
        sums = [0.0] * len(self.rates)
        for rank, value in zip(self.placement, row, strict=True):
            sums[rank] += value
        return sums

    def cost(self, cuts: Sequence[int]) -> tuple[float, float, float]:
        """Give what is to become less: the worst rank, then squares of ranks, then of stages, rounded to compare."""
        stages = self.stages(cuts)
        loads = self._sums(stages)
        rows = max(loads), sum(load * load for load in loads), sum(load * load for load in stages)
        worst, ranks, each = (float(f"{value:.10e}") for value in rows)
        return worst, ranks, each


def _descend(task: _Task, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Move cuts for as long as it helps."""
    best, cost = cuts, task.cost(cuts)
    better = True
    while better:
        better = False
        for other in (*_one_moved(best), *_two_moved(best)):
            if (found := task.cost(other)) < cost and task.fits(other):
                best, cost, better = other, found, True
                break
    return best


def _one_moved(cuts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List the cuts with one of them elsewhere: by one place, two, four, ..., as far as its neighbours leave it."""
    found = []
    for index in range(1, len(cuts) - 1):
        for way in (-1, 1):
            step = way
            while cuts[index - 1] < cuts[index] + step < cuts[index + 1]:
                found.append((*cuts[:index], cuts[index] + step, *cuts[index + 1 :]))
                step *= 2
    return found


def _two_moved(cuts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List the cuts with two of them a little elsewhere."""
    steps = [step for step in range(-_WINDOW, _WINDOW + 1) if step]
    found = []
    for (one, two), (here, there) in product(combinations(range(1, len(cuts) - 1), 2), product(steps, steps)):
        moved = list(cuts)
        moved[one] += here
        moved[two] += there
        if all(before < after for before, after in zip(moved, moved[1:], strict=False)):
            found.append(tuple(moved))
    return found
