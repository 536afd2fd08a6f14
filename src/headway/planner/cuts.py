"""Where a candidate is cut: the exact balancer under memory limits, checked against the exact memory of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from headway.cost.cluster import Link
from headway.cost.memory import batch_bytes, runtime_bytes
from headway.errors import PlanError
from headway.graph.model import ModelGraph
from headway.layout.partition import balance
from headway.layout.ranks import balance_ranks
from headway.planner.price import Choice, Priced, Program, Setting, price

MOST_MOVED = 16
"""Up to so many stages cuts are moved to balance ranks that hold several: a second at most."""

ATTEMPTS = 8
"""The balancer's memory adds up over calls, the exact one does not: limits are corrected this often at most."""


@dataclass(frozen=True)
class Held:
    """Bytes of the parameters that a range of calls uses, with gradients and states, each parameter once."""

    before: tuple[int, ...]  # [calls + 1] bytes at every use of calls before each
    again: tuple[tuple[int, int, int], ...]  # (call, earlier call with the same parameter, bytes)

    @classmethod
    def of(cls, graph: ModelGraph, optimizer_states: int) -> Held:
        """Read the uses of parameters off a graph."""
        at = [0] * len(graph.calls)
        again: list[tuple[int, int, int]] = []
        latest: dict[str, int] = {}
        for call in graph.calls:
            for name in call.parameters:
                info = graph.parameter[name]
                size = info.bytes * (2 + optimizer_states if info.trainable else 1)
                at[call.index] += size
                if info.name in latest:
                    again.append((call.index, latest[info.name], size))
                latest[info.name] = call.index
        return cls(tuple(accumulate(at, initial=0)), tuple(again))

    def bytes(self, first: int, last: int) -> int:
        """Bytes of the range first..last-1."""
        twice = sum(size for call, earlier, size in self.again if first <= earlier and call < last)
        return self.before[last] - self.before[first] - twice


def cut_and_price(program: Program, choice: Choice, setting: Setting, cuts: Sequence[str] | None = None) -> Priced:
    """Cut a candidate as well as can be and price it.

    Given cuts are taken as they are. Else they are those of the least bottleneck that fit in a device's memory; when
    none do, those that need the least memory by the balancer's measure, so that what is missing can be named.
    """
    if choice.num_stages == 1 or cuts is not None:
        return price(program, choice, tuple(cuts or ()), setting)
    memory = setting.cluster.device.memory_bytes
    free = price(program, choice, fastest_cuts(program, choice, setting), setting)
    if free.peak <= memory:
        return free
    search = _Search.of(program, choice, setting)
    # What the exact memory of stages has above the balancer's measure is taken off its limits.
    limits = search.corrected(free, memory)
    tried: dict[tuple[str, ...], Priced] = {free.cuts: free}
    for _ in range(ATTEMPTS):
        try:
            names = search.balanced(limits)
        except PlanError:
            break
        if names in tried:
            break
        tried[names] = price(program, choice, names, setting)
        limits = search.corrected(tried[names], memory)
    fitting = [found for found in tried.values() if found.peak <= memory]
    if fitting:
        return min(fitting, key=lambda found: found.seconds)
    return price(program, choice, search.leanest(), setting)


def fastest_cuts(program: Program, choice: Choice, setting: Setting) -> tuple[str, ...]:
    """Return the cuts of the least bottleneck, whatever the memory: the same for all schedules placed alike.

    Where ranks hold several stages it is the ranks that are balanced, up to `MOST_MOVED` stages.
    """
    link, placement = setting.cluster.link(choice.mesh.group(0, "pipeline")), choice.order.placement
    if choice.chunks == 1 or choice.num_stages > MOST_MOVED:
        placement = tuple(range(choice.num_stages))
    key = (placement, link)
    if key not in program.cuts:
        allowed, boundary = _places(program, link)
        found = balance_ranks(program.weights, placement, allowed=allowed, boundary=boundary)
        program.cuts[key] = _names(program.graph, found.cuts)
    return program.cuts[key]


def _places(program: Program, link: Link) -> tuple[tuple[bool, ...], tuple[float, ...]]:
    """Return for each call whether a stage may begin there, and the seconds that a cut adds.

    The boundary goes forward and its gradient back; both neighbours have a hand in each.
    """
    places, calls = {cut.index: cut for cut in program.graph.cuts}, range(program.num_calls)
    boundary = tuple(2 * link.seconds(places[i].bytes) if i in places else 0.0 for i in calls)
    return tuple(index in places for index in calls), boundary


def _names(graph: ModelGraph, indices: Sequence[int]) -> tuple[str, ...]:
    names = {cut.index: cut.name for cut in graph.cuts}
    return tuple(names[index] for index in indices)


@dataclass(frozen=True)
class _Search:
    """The balancer's view of one candidate."""

    graph: ModelGraph
    weights: tuple[float, ...]
    allowed: tuple[bool, ...]
    boundary: tuple[float, ...]
    saved: tuple[int, ...]  # bytes that each call is the first to save
    kept: tuple[int, ...]  # micro-batches in flight on each stage
    static: Callable[[int, int, int], float]

    @classmethod
    def of(cls, program: Program, choice: Choice, setting: Setting) -> _Search:
        graph, cluster = program.graph, setting.cluster
        allowed, boundary = _places(program, cluster.link(choice.mesh.group(0, "pipeline")))
        constant = runtime_bytes(cluster.device) + batch_bytes(graph, setting.global_batch)
        held = Held.of(graph, setting.optimizer_states)
        return cls(
            graph,
            program.weights,
            allowed,
            boundary,
            tuple(sum(graph.storages[storage] for storage in call.saved) for call in graph.calls),
            choice.order.in_flight,
            lambda first, last, stage: float(held.bytes(first, last) + constant),
        )

    def balanced(self, limits: Sequence[float]) -> tuple[str, ...]:
        """Return the cuts of the least bottleneck within memory limits; PlanError when there are none."""
        result = balance(
            self.weights,
            len(self.kept),
            allowed=self.allowed,
            boundary=self.boundary,
            memory=self.saved,
            in_flight=self.kept,
            static=self.static,
            limits=limits,
        )
        return _names(self.graph, result.cuts)

    def measure(self, names: Sequence[str]) -> list[float]:
        """Return the bytes of each stage as the balancer adds them up."""
        bounds = [0, *(self.graph.cut[name].index for name in names), len(self.saved)]
        stages = enumerate(zip(bounds, bounds[1:], strict=False))
        return [self.kept[s] * sum(self.saved[first:last]) + self.static(first, last, s) for s, (first, last) in stages]

    def corrected(self, found: Priced, memory: int) -> list[float]:
        """Return limits for each stage, less what its rank takes beyond the balancer's measure; stages of one share."""
        own, order = self.measure(found.cuts), found.choice.order
        limits = [0.0] * len(own)
        for rank in range(order.num_ranks):
            stages = order.stages(rank)
            beyond = found.memory[rank] - sum(own[stage] for stage in stages)
            for stage in stages:
                limits[stage] = max(0.0, (memory - beyond) / len(stages))
        return limits

    def leanest(self) -> tuple[str, ...]:
        """Return cuts that share bytes out as evenly as stages can hold them: the less in flight, the more calls."""
        alone = [self.static(index, index + 1, 0) - self.static(index, index, 0) for index in range(len(self.saved))]
        mean = sum(self.kept) / len(self.kept)
        weights = [mean * saved + own for saved, own in zip(self.saved, alone, strict=True)]
        return _names(self.graph, balance(weights, len(self.kept), allowed=self.allowed).cuts)
