"""Which nodes each stage holds when ranks hold several stages: the load of a rank is the sum of its stages'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from headway.layout.optimum import Floats
from headway.layout.partition import Held, balance, cut_places, prefix

Places = NDArray[np.int64]

_WINDOW = 2
"""How far two cuts are moved together, in places to cut."""

DIGITS = 10
"""Costs that agree to so many digits of what they were at first are the same."""


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
    found = np.array([0, *(at[cut] for cut in start.cuts), len(nodes) - 1])
    found = _descend(task, found) if num_ranks < len(placement) else found
    loads = tuple((task.stages(found) @ task.on).tolist())
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

    @cached_property
    def on(self) -> Floats:
        """[stages, ranks]: 1 where a stage is on a rank."""
        return np.eye(len(self.rates))[list(self.placement)]

    def stages(self, cuts: Places) -> Floats:
        """Give the load of each stage, [..., stages], for cuts [..., stages + 1]."""
        first, last = cuts[..., :-1], cuts[..., 1:]
        own = (self.work[last] - self.work[first]) / self.rates[list(self.placement)]
        return own + self.boundary[first] + self.boundary[last]

    def costs(self, cuts: Places) -> Floats:
        """Give what is to become less, [..., 3]: the worst rank, then squares of ranks, then of stages."""
        stages = self.stages(cuts)
        ranks = stages @ self.on
        return np.stack([ranks.max(-1), (ranks**2).sum(-1), (stages**2).sum(-1)], -1)

    def fits(self, cuts: Places) -> bool:
        """Tell whether every rank stays within its limit."""
        if self.limits is None:
            return True
        held = []
        bounds = np.array([self.nodes[place] for place in cuts])
        for stage, (first, last) in enumerate(zip(bounds[:-1, None], bounds[1:, None], strict=True)):
            more = self.static(first, last, stage) if callable(self.static) else self.static[last] - self.static[first]
            held.append(float((self.kept[stage] * (self.bytes[last] - self.bytes[first]) + more)[0]))
        return bool((np.asarray(held) @ self.on <= np.asarray(self.limits)).all())


def _descend(task: _Task, cuts: Places) -> Places:
    """Move cuts, each time those that help the most, for as long as it helps."""
    moves = _moves(len(cuts), int(cuts[-1]))
    scale = np.maximum(task.costs(cuts), np.finfo(np.float64).tiny)
    best = np.round(task.costs(cuts) / scale, DIGITS)
    while True:
        others = cuts + moves
        others = others[(np.diff(others, axis=1) > 0).all(1)]
        costs = np.round(task.costs(others) / scale, DIGITS)
        order = np.lexsort(costs.T[::-1])
        better = (index for index in order if tuple(costs[index]) < tuple(best))
        found = next((index for index in better if task.fits(others[index])), None)
        if found is None:
            return cuts
        cuts, best = others[found], costs[found]


def _moves(count: int, places: int) -> Places:
    """List moves of `count` cuts, [moves, count]: one by one place, two, four, ...; two together a little."""
    inner = range(1, count - 1)
    far = [way << power for power in range(places.bit_length()) for way in (-1, 1)]
    near = [step for step in range(-_WINDOW, _WINDOW + 1) if step]
    steps = [((index, step),) for index, step in product(inner, far)]
    pairs = [((a, here), (b, there)) for (a, b), here, there in product(combinations(inner, 2), near, near)]
    moves = np.zeros((len(steps) + len(pairs), count), dtype=np.int64)
    for row, move in enumerate([*steps, *pairs]):
        for index, step in move:
            moves[row, index] = step
    return moves
