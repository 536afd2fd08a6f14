"""Which nodes each stage holds: the exact balancer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import PlanError
from headway.layout.optimum import Floats, Ints, Line
from headway.units import format_bytes

_ROUNDING = 1e-11
"""Loads closer than this, relative to the bottleneck, are the same: sums of float64 are not known any better."""

Held = Callable[[Ints, Ints, int], NDArray[Any]]
"""(first nodes, nodes after the last, stage) -> bytes of each of these ranges"""


@dataclass(frozen=True)
class Balance:
    """Where the stages begin, and the proof that no contiguous partition has a smaller bottleneck.

    `cuts` are the nodes with which stages 1, 2, ... begin; `loads` the seconds of each stage; `bottleneck` the greatest
    of them; `bound` a proved lower bound of every partition's bottleneck, equal to `bottleneck`.
    """

    cuts: tuple[int, ...]
    bottleneck: float
    loads: tuple[float, ...]
    bound: float


def balance(
    weights: Sequence[float],
    num_stages: int,
    *,
    allowed: Sequence[bool] | None = None,
    boundary: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    in_flight: Sequence[float] | None = None,
    static: Sequence[float] | Held | None = None,
    limits: Sequence[float] | None = None,
) -> Balance:
    """Cut nodes into contiguous stages, none empty, so that the most loaded stage has the least load possible.

    The load of stage s with nodes first..last-1 is, in seconds,

        sum(weights[first:last]) / speeds[s] + boundary[first] + boundary[last]

    A boundary weighs on both its neighbours, and the two ends of the model have none. `boundary[i]` is for the cut
    before node i (`boundary[0]` is not read); `allowed[i]` says whether a stage may begin at node i.
    With `limits`, bytes of each stage, every stage satisfies

        in_flight[s] * sum(memory[first:last]) + static(first, last, s) <= limits[s]

    `memory` is per micro-batch, and `in_flight[s]` how many of them the schedule keeps (`Schedule.in_flight`). `static`
    adds up over nodes when it is a sequence; a callable, which is given many ranges at once, serves what does not add
    up, such as tied parameters, and must not shrink when the range grows.

    Among the partitions of least bottleneck it takes the most equal loads (least sum of squares, loads compared in
    steps of 1/4096 of the bottleneck), then the least sum of boundaries, then the smaller first stages, which keep the
    most micro-batches.

    Exact. Bisection over the bottleneck, each value tested in O(k n), O(k n log n) with limits, for n allowed cuts and
    k stages; then one dynamic program over the cuts that the optimum leaves open, O(k n w), w the cuts that one stage
    can hold. A callable `static` is called k log n times. Loads within 1e-11 of each other, relative, are equal.
    Raises PlanError when no partition exists or fits, naming the node; ValueError for numbers that make no sense.
    """
    _check(weights, num_stages, allowed, boundary, speeds, memory, in_flight, static, limits)
    nodes = cut_places(len(weights), num_stages, allowed)
    edges = np.zeros(len(weights) + 1) if boundary is None else np.array([0.0, *boundary[1:], 0.0], dtype=np.float64)
    held = _Memory.of(nodes, num_stages, memory, in_flight, static, limits)
    rates = np.ones(num_stages) if speeds is None else np.asarray(speeds, dtype=np.float64)
    line = Line(prefix(weights, len(weights))[nodes], edges[nodes], rates, held.earliest())
    least, most = line.bounds()
    if not line.feasible(most * (1 + _ROUNDING)):
        raise _refusal(line, held, most * (1 + _ROUNDING))
    value, below = _bisect(line, least, most * (1 + _ROUNDING))
    places = line.most_equal(value * (1 + _ROUNDING))
    loads = tuple(line.load(*ends, stage) for stage, ends in enumerate(zip(places, places[1:], strict=False)))
    proved = below >= max(loads) * (1 - 10 * _ROUNDING)
    return Balance(tuple(int(nodes[p]) for p in places[1:-1]), max(loads), loads, max(loads) if proved else below)


def least_bottleneck(
    weights: Sequence[float],
    num_stages: int,
    *,
    allowed: Sequence[bool] | None = None,
    memory: Sequence[float] | None = None,
    in_flight: Sequence[float] | None = None,
    static: Sequence[float] | Held | None = None,
    limits: Sequence[float] | None = None,
    precision: float = 1e-3,
) -> float | None:
    """Return a bottleneck that no partition is below, at most by this part less than the best; None when none fits.

    Arguments are those of `balance`, boundaries cost nothing, and the partition itself is not worked out.
    """
    nodes = cut_places(len(weights), num_stages, allowed)
    held = _Memory.of(nodes, num_stages, memory, in_flight, static, limits)
    work = prefix(weights, len(weights))[nodes]
    line = Line(work, np.zeros(len(nodes)), np.ones(num_stages), held.earliest())
    least, most = line.bounds()
    if not line.feasible(most * (1 + _ROUNDING)):
        return None
    return _bisect(line, least, most * (1 + _ROUNDING), precision)[1]


def _bisect(line: Line, least: float, most: float, precision: float = _ROUNDING / 10) -> tuple[float, float]:
    """Give a bottleneck that can be reached, and one little below it, relative, that cannot, or nearly so."""
    if line.feasible(least):
        return least, least
    below, value = least, most
    while value - below > precision * value:
        middle = (below + value) / 2
        if line.feasible(middle):
            value = middle
        else:
            below = middle
    return value, below


@dataclass(frozen=True)
class _Memory:
    """The bytes of a stage between two places, against its limit; place i is node `nodes[i]`."""

    nodes: Ints
    num_stages: int
    kept: Floats
    sums: Floats
    """[places] bytes per micro-batch before each place"""
    static: Floats | Held
    """[places] other bytes before each place, or the function"""
    limits: Floats | None

    @classmethod
    def of(
        cls,
        nodes: Ints,
        num_stages: int,
        memory: Sequence[float] | None,
        in_flight: Sequence[float] | None,
        static: Sequence[float] | Held | None,
        limits: Sequence[float] | None,
    ) -> _Memory:
        count = int(nodes[-1])
        kept = np.ones(num_stages) if in_flight is None else np.asarray(in_flight, dtype=np.float64)
        fixed = static if callable(static) else prefix(static, count)[nodes]
        most = None if limits is None else np.asarray(limits, dtype=np.float64)
        return cls(nodes, num_stages, kept, prefix(memory, count)[nodes], fixed, most)

    def bytes(self, first: int, last: int, stage: int) -> float:
        """Give the bytes of a stage from place to place."""
        kept = self.kept[stage] * (self.sums[last] - self.sums[first])
        if callable(self.static):
            return float(kept + self.static(self.nodes[[first]], self.nodes[[last]], stage)[0])
        return float(kept + self.static[last] - self.static[first])

    def earliest(self) -> tuple[Ints | None, ...]:
        """Give, for each stage, the earliest place at which it may begin, for each place where it may end."""
        if self.limits is None:
            return (None,) * self.num_stages
        return tuple(self._earliest(stage, float(limit)) for stage, limit in enumerate(self.limits))

    def _earliest(self, stage: int, limit: float) -> Ints:
        if not callable(self.static):
            total = self.kept[stage] * self.sums + self.static
            return np.asarray(np.searchsorted(total, total - limit), dtype=np.int64)
        last = np.arange(len(self.nodes))
        least, most = np.zeros_like(last), last.copy()  # an empty range always fits
        while (open_ := least < most).any():
            middle = (least + most) // 2
            held = self.static(self.nodes[middle], self.nodes[last], stage)
            fits = self.kept[stage] * (self.sums[last] - self.sums[middle]) + held <= limit
            most = np.where(open_ & fits, middle, most)
            least = np.where(open_ & ~fits, middle + 1, least)
        return least


def _refusal(line: Line, held: _Memory, value: float) -> PlanError:
    """Say which node does not fit."""
    assert held.limits is not None, "without limits every number of stages up to the places is possible"
    stages = range(held.num_stages)
    largest = int(held.limits.argmax())
    for place in range(len(held.nodes) - 1):
        if all(held.bytes(place, place + 1, stage) > held.limits[stage] for stage in stages):
            least = min(held.bytes(place, place + 1, stage) for stage in stages)
            return PlanError(
                f"{_name(held.nodes, place)} does not fit on any stage: it needs {format_bytes(least)}",
                place=f"the largest limit is {format_bytes(held.limits[largest])}, of stage {largest}",
                remedy="more memory, smaller micro-batches, or a cut inside it",
            )
    # Where 0, 1, .. stages can end, the end of the model aside.
    starts = [np.flatnonzero(reached[:-1]) for reached in line.reached(value)]
    stage = next((stage for stage in stages if not starts[stage + 1].size), held.num_stages)
    node = _name(held.nodes, int(starts[stage][-1]))
    if stage < held.num_stages:
        return PlanError(
            f"stage {stage} is left with nothing that fits: the stages before it end before {node} at the latest",
            place=f"its limit is {format_bytes(held.limits[stage])}",
            remedy="more memory on this stage, or fewer stages",
        )
    return PlanError(
        f"{held.num_stages} stages are too small for the model: {node} is beyond them",
        place=f"limits: {', '.join(format_bytes(limit) for limit in held.limits)}",
        remedy="more stages, more memory, smaller micro-batches, or fewer of them in flight",
    )


def _name(nodes: Ints, place: int) -> str:
    first, last = int(nodes[place]), int(nodes[place + 1]) - 1
    return f"node {first}" if first == last else f"the uncut run of nodes {first}..{last}"


def cut_places(count: int, num_stages: int, allowed: Sequence[bool] | None) -> Ints:
    """List the nodes at which a stage may begin, and the end."""
    inner = [node for node in range(1, count) if allowed is None or allowed[node]]
    if len(inner) + 1 < num_stages:
        raise PlanError(
            f"{num_stages} stages are asked for, and the model can be cut into {len(inner) + 1} at most",
            place=f"{count} nodes, {len(inner)} of them allowed to begin a stage",
            remedy=f"at most {len(inner) + 1} stages",
        )
    return np.array([0, *inner, count], dtype=np.int64)


def prefix(values: Sequence[float] | None, count: int) -> Floats:
    """Sum up before each index, rounded once: equal loads must come out equal."""
    sums = np.zeros(count + 1, dtype=np.longdouble)
    if values is not None:
        np.cumsum(np.asarray(values, dtype=np.longdouble), out=sums[1:])
    return sums.astype(np.float64)


def _check(
    weights: Sequence[float],
    num_stages: int,
    allowed: Sequence[bool] | None,
    boundary: Sequence[float] | None,
    speeds: Sequence[float] | None,
    memory: Sequence[float] | None,
    in_flight: Sequence[float] | None,
    static: Sequence[float] | Held | None,
    limits: Sequence[float] | None,
) -> None:
    if num_stages < 1 or not len(weights):
        raise ValueError(f"{len(weights)} nodes cannot be cut into {num_stages} stages")
    rows: dict[str, tuple[Sequence[float] | None, int]] = {
        "weights": (weights, len(weights)),
        "allowed": (allowed, len(weights)),
        "boundary": (boundary, len(weights)),
        "memory": (memory, len(weights)),
        "static": (None if callable(static) else static, len(weights)),
        "speeds": (speeds, num_stages),
        "in_flight": (in_flight, num_stages),
        "limits": (limits, num_stages),
    }
    for name, (row, length) in rows.items():
        if row is None:
            continue
        values = np.asarray(row, dtype=np.float64)
        if len(values) != length:
            raise ValueError(f"{name} has {len(values)} entries for {length}")
        if not np.isfinite(values).all() or (values < 0).any() or (name == "speeds" and not values.all()):
            raise ValueError(f"{name} must be finite and not negative" + ", nor zero" * (name == "speeds"))
