"""Where a candidate is cut: the exact balancer under memory limits, checked against the exact memory of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from headway.cost.cluster import Link
from headway.cost.memory import runtime_bytes
from headway.errors import PlanError
from headway.graph.model import ModelGraph
from headway.layout.optimum import Ints
from headway.layout.partition import balance, least_bottleneck
from headway.layout.ranks import balance_ranks
from headway.planner.bound import least_seconds, least_step, most_bytes, surely_too_large
from headway.planner.choice import Choice, Setting
from headway.planner.price import Estimate, Priced, estimates, price, priced
from headway.planner.program import Program

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

    @cached_property
    def _before(self) -> Ints:
        return np.array(self.before, dtype=np.int64)

    def bytes(self, first: Ints, last: Ints) -> Ints:
        """Bytes of each of the ranges first..last-1."""
        held = self._before[last] - self._before[first]
        for call, earlier, size in self.again:
            held -= size * ((first <= earlier) & (call < last))
        return held


def cut_and_price(program: Program, choice: Choice, setting: Setting, cuts: Sequence[str] | None = None) -> Priced:
    """Cut a candidate as well as can be and price it.

    Given cuts are taken as they are. Else they are those of the least bottleneck that fit in a device's memory; when
    none do, those that need the least memory by the balancer's measure, so that what is missing can be named.
    """
    seen = look(program, choice, setting, cuts)
    if seen.ways is not None:
        return priced(seen.ways, setting)
    memory = setting.cluster.device.memory_bytes
    free = price(program, choice, fastest_cuts(program, choice, setting), setting)
    if free.peak <= memory:
        return free
    search = _Search(program, choice, setting)
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


@dataclass(frozen=True)
class Look:
    """What is known of a candidate before it is simulated.

    `ways` are those of the cuts that it will get, None where only its price can tell which; `fits` says whether it is
    sure that it fits, or that it does not; `least` bounds its seconds in case it fits.
    """

    ways: tuple[Estimate, ...] | None
    fits: bool | None
    least: float


def look(program: Program, choice: Choice, setting: Setting, cuts: Sequence[str] | None = None) -> Look:
    """Find out which cuts a candidate gets and whether it fits, as far as bounds of its memory tell."""
    memory, search = setting.cluster.device.memory_bytes, _Search(program, choice, setting)
    if choice.num_stages == 1 or cuts is not None:
        ways = estimates(program, choice, tuple(cuts or ()), setting)
        return Look(ways, True if surely_fit(ways, memory) else None, min(map(least_step, ways)))
    if not surely_too_large(program, choice, setting):
        ways = estimates(program, choice, fastest_cuts(program, choice, setting), setting)
        if surely_fit(ways, memory):
            return Look(ways, True, min(map(least_step, ways)))
        longest = search.longest(memory) if choice.shard == "none" else 0.0
        if longest is not None:
            return Look(None, None, least_seconds(program, choice, setting, longest))
    ways = estimates(program, choice, search.leanest(), setting)  # no cuts fit
    return Look(ways, False, min(map(least_step, ways)))


def surely_fit(ways: Sequence[Estimate], memory: int) -> bool:
    """Tell whether bounds say that a candidate fits, in whichever of its ways."""
    choice = ways[0].choice
    every = (choice.num_micro_batches,) * choice.num_stages  # holds for every order; the own one says more
    return all(most_bytes(way, every) <= memory or most_bytes(way, choice.order.in_flight) <= memory for way in ways)


def fastest_cuts(program: Program, choice: Choice, setting: Setting) -> tuple[str, ...]:
    """Return the cuts of the least bottleneck, whatever the memory: the same for all schedules placed alike.

    Where ranks hold several stages it is the ranks that are balanced, up to `MOST_MOVED` stages.
    """
    link, placement = setting.cluster.link(choice.mesh.group(0, "pipeline")), choice.placement
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

    program: Program
    choice: Choice
    setting: Setting

    @cached_property
    def places(self) -> tuple[tuple[bool, ...], tuple[float, ...]]:
        """Where stages may begin, and the seconds that a cut adds."""
        return _places(self.program, self.setting.cluster.link(self.choice.mesh.group(0, "pipeline")))

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Bytes that each call is the first to save; the batch is there anyway."""
        graph, leaves = self.program.graph, self.program.shape.storages.leaves
        return tuple(sum(graph.storages[s] for s in call.saved if s not in leaves) for call in graph.calls)

    @cached_property
    def held(self) -> Held:
        """Bytes of the parameters of ranges of calls."""
        return Held.of(self.program.graph, self.setting.optimizer_states)

    @cached_property
    def constant(self) -> int:
        """Bytes that each stage holds, whatever is in it."""
        return runtime_bytes(self.setting.cluster.device) + self.program.batch_bytes(self.setting.global_batch)

    @property
    def kept(self) -> tuple[int, ...]:
        """Micro-batches in flight on each stage."""
        return self.choice.order.in_flight

    def static(self, first: Ints, last: Ints, stage: int) -> Ints:
        """Return the bytes that stages hold for the whole step, for each range of calls."""
        return self.held.bytes(first, last) + self.constant

    def balanced(self, limits: Sequence[float]) -> tuple[str, ...]:
        """Return the cuts of the least bottleneck within memory limits; PlanError when there are none."""
        result = balance(
            self.program.weights,
            len(self.kept),
            allowed=self.places[0],
            boundary=self.places[1],
            memory=self.saved,
            in_flight=self.kept,
            static=self.static,
            limits=limits,
        )
        return _names(self.program.graph, result.cuts)

    def longest(self, memory: int) -> float | None:
        """Return seconds of calls that some stage has at least, if all fit; None when they cannot.

        The balancer's measure is no more than what a stage takes.
        """
        return least_bottleneck(
            self.program.weights,
            len(self.kept),
            allowed=self.places[0],
            memory=self.saved,
            in_flight=self.kept,
            static=self.static,
            limits=[float(memory)] * self.choice.num_stages,
        )

    def measure(self, names: Sequence[str]) -> list[float]:
        """Return the bytes of each stage as the balancer adds them up."""
        bounds = [0, *(self.program.graph.cut[name].index for name in names), len(self.saved)]
        static = self.static(np.array(bounds[:-1]), np.array(bounds[1:]), 0).tolist()
        stages = zip(self.kept, bounds, bounds[1:], static, strict=False)
        return [kept * sum(self.saved[first:last]) + own for kept, first, last, own in stages]

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
        calls = np.arange(len(self.saved))
        alone = (self.held.bytes(calls, calls + 1) - self.held.bytes(calls, calls)).tolist()
        mean = sum(self.kept) / len(self.kept)
        weights = [mean * saved + own for saved, own in zip(self.saved, alone, strict=True)]
        return _names(self.program.graph, balance(weights, len(self.kept), allowed=self.places[0]).cuts)
