"""Shard: what it saves and what it costs when the copies share out optimizer states, gradients or parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

from headway.cost.cluster import Device, Link
from headway.cost.memory import parameter_bytes
from headway.cost.model import all_reduce_seconds, update_seconds
from headway.errors import PlanError
from headway.graph.model import ModelGraph, ModuleCall
from headway.graph.repeat import repeated_blocks
from headway.layout.ownership import in_flight_bytes, share_out
from headway.layout.split import Split
from headway.planner.estimate import StageEstimate
from headway.planner.route import Route
from headway.planner.wire import EXACT, Reduction, Wire
from headway.units import format_bytes, format_seconds

SHARDS: Mapping[str, str] = MappingProxyType(
    {
        "none": "each copy keeps everything",
        "optimizer": "each copy keeps a part of the optimizer's states",
        "gradients": "each copy keeps a part of gradients and states",
        "parameters": "each copy keeps a slice of parameters, gradients and states",
    }
)
"""What `shard` may be, from the least shared out to the most."""

MESSAGE_BYTES = 12 << 20
"""Messages on their way to an owner, at most: what a courier keeps."""

SPREAD_BYTES = 1 << 20
"""New values that come at once, about: a large parameter, or several small ones."""

BLOCKS_WHOLE = 12
"""Times the largest block's bytes: two blocks gathered, as messages and as parameters, gradients, three sums; and half
as much again that was freed and not given back, as seen."""


@dataclass(frozen=True)
class Divided:
    """Bytes of one stage that sharding is about: `parameters`, those that are `trainable`, and of these the most that
    one owner has; of the parameters that are gathered, the largest `block` and what is in none (`rest`)."""

    parameters: int
    trainable: int
    fullest: int
    block: int = 0
    rest: int = 0


def divide(
    graph: ModelGraph,
    parts: Split,
    own: Sequence[Sequence[str]],
    copies: int,
    placement: Sequence[int],
    blocks: Sequence[str],
) -> list[Divided]:
    """Measure each stage; `own` are the parameters that count for it, `blocks` what `gathered` gives."""
    trained = {info.name: info.bytes for info in graph.parameters if info.trainable and not info.is_buffer}
    owners = share_out(trained, parts.holders(), copies, placement)
    found = []
    for names in own:
        loads = [0] * copies
        for name in names:
            if name in trained:
                loads[owners[name]] += trained[name]
        sizes = [parameter_bytes(graph, [name for name in names if name.startswith(f"{path}.")]) for path in blocks]
        whole = parameter_bytes(graph, names)
        found.append(Divided(whole, sum(loads), max(loads), max(sizes, default=0), whole - sum(sizes)))
    return found


class Costing(Protocol):
    """What is compared of two ways to share out."""

    @property
    def seconds(self) -> float: ...
    @property
    def peak(self) -> int: ...
    @property
    def shard_ranks(self) -> int | None: ...


def ways(copies: int, asked: int | None, reductions: Sequence[Reduction]) -> list[int]:
    """Return among how many copies at a time to share out: all of them, or those of each host where there are several.

    Hosts then hold the same, and sums cross between them as in an all-reduce; new values stay on the fast link.
    """
    if asked is not None:
        return [asked]
    each = {reduction.route.neighbours for reduction in reductions}
    near = each.pop() if len(each) == 1 else 1
    return [copies, near] if 1 < near < copies else [copies]


def why_shared(copies: int, best: Costing, other: Costing | None, memory: int) -> str | None:
    """Say among how many copies something is shared out, and what the other way would come to."""
    if best.shard_ranks is None and other is None:
        return None
    each = best.shard_ranks or copies
    groups = f"the {each} copies of each host; hosts hold the same" if other else f"{each} copies at a time, as asked"
    how = f"shared out among {groups if best.shard_ranks else f'all {each} copies'}"
    if other is None:
        return how
    if other.peak > memory:
        what = f"{format_bytes(other.peak)} of {format_bytes(memory)}"
    else:
        what = f"{format_seconds(other.seconds)} a step, this {format_seconds(best.seconds)}"
    there = f"among the {other.shard_ranks} of each host" if other.shard_ranks else f"among all {copies}"
    return f"{how}: {there} would take {what}"


@dataclass(frozen=True)
class Sharing:
    """How `copies` share out what `shard` says, `ranks` of them at a time, in steps of so many micro-batches.

    `states` are those of the optimizer for each parameter.
    """

    shard: str
    copies: int
    ranks: int
    micro_batches: int
    states: int
    device: Device

    def stages(
        self, divided: Sequence[Divided], stages: Sequence[StageEstimate], reductions: Sequence[Reduction], wire: Wire
    ) -> list[StageEstimate]:
        """Return the estimates of stages when their copies share, and gradients cross by `wire`."""
        return [self._stage(*each, wire) for each in zip(stages, divided, reductions, strict=True)]

    def reductions(
        self, divided: Sequence[Divided], stages: Sequence[StageEstimate], reductions: Sequence[Reduction]
    ) -> list[Reduction]:
        """Return what stages reduce, with the seconds that it takes when their copies share."""
        found: list[Reduction] = []
        for stage, parts, reduction in zip(stages, divided, reductions, strict=True):
            rest = reduction.rest - stage.update + self._stage(stage, parts, reduction, EXACT).update
            cost = partial(self._seconds, stage, parts, reduction)
            found.append(SharedReduction(**{**vars(reduction), "rest": rest}, cost=cost))
        return found

    def _seconds(self, stage: StageEstimate, parts: Divided, reduction: Reduction, wire: Wire) -> float:
        return self._stage(stage, parts, reduction, wire).reduce

    def _stage(self, stage: StageEstimate, parts: Divided, reduction: Reduction, wire: Wire) -> StageEstimate:
        way = self._slices if self.shard == "parameters" else self._owners
        return way(stage, parts, reduction, wire)

    def _owners(self, stage: StageEstimate, parts: Divided, reduction: Reduction, wire: Wire) -> StageEstimate:
        """Price owners of whole parameters.

        optimizer   to owners: half of an all-reduce, beside the last backward; new values back: the other half, beside
                    the first forward. Memory: states of the fullest owner.
        gradients   to owners after every backward. Memory: gradients of the fullest owner and what is on its way.
        """
        link, part = self._near(reduction), part_of(reduction, wire)
        pieces = -(-parts.trainable // reduction.bucket_bytes(wire))
        spread = gather_seconds(parts.trainable, self.ranks, link)
        there = spread * (part if self.ranks == self.copies else 1.0)
        saved = self.states * (parts.trainable - parts.fullest)
        reduce = reduction.tied + self._work(reduction, wire)
        reduce += _exposed(there + self._across(parts, reduction.route, part), stage.backward, pieces)
        reduce += _exposed(spread, stage.forward, -(-parts.trainable // SPREAD_BYTES))
        if self.shard == "gradients":
            kept = parts.fullest + in_flight_bytes(parts.trainable)
            saved += parts.trainable - min(parts.trainable, kept)
            reduce += (self.micro_batches - 1) * max(0.0, there - stage.backward - stage.forward)
        return replace(
            stage,
            reduce=reduce,
            update=update_seconds(parts.fullest, self.states, self.device),
            static_bytes=stage.static_bytes - saved + min(MESSAGE_BYTES, parts.trainable),
            update_bytes=stage.update_bytes if self.device.is_cpu else parts.fullest,
        )

    def _slices(self, stage: StageEstimate, parts: Divided, reduction: Reduction, wire: Wire) -> StageEstimate:
        """Price slices: gathered for every forward and backward, summed after every backward.

        Memory: a slice of everything (of gradients two, one arriving), the blocks that are whole, and twice, values and
        gradients, with their messages, what is in no block.
        """
        link, part = self._near(reduction), part_of(reduction, wire)
        own, held = -(-parts.trainable // self.ranks), -(-parts.parameters // self.ranks)
        gather = gather_seconds(parts.parameters, self.ranks, link)
        sums = gather_seconds(parts.trainable, self.ranks, link) * (part if self.ranks == self.copies else 1.0)
        exposed = max(0.0, gather - stage.forward) + max(0.0, gather + sums - stage.backward)
        first = gather_seconds(parts.block + parts.rest, self.ranks, link)
        pieces = max(1, parts.parameters // max(1, parts.block + parts.rest))
        saved = parts.parameters - held + (1 + self.states) * parts.trainable - (2 + self.states) * own
        return replace(
            stage,
            reduce=reduction.tied
            + self.micro_batches * (exposed + first)
            + _exposed(self._across(parts, reduction.route, part), stage.backward, pieces),
            update=update_seconds(own, self.states, self.device),
            static_bytes=stage.static_bytes - saved + min(MESSAGE_BYTES, parts.trainable),
            temporary_bytes=stage.temporary_bytes + BLOCKS_WHOLE * parts.block + 4 * parts.rest,
            update_bytes=stage.update_bytes if self.device.is_cpu else own,
        )

    def _near(self, reduction: Reduction) -> Link:
        """Return the link among those who share, as if each rank had it to itself."""
        route = reduction.route
        if self.ranks == self.copies:
            return route.as_link(coded=False, by_host=False)
        return route.near if route.near is not None and route.neighbours % self.ranks == 0 else route.link

    def _across(self, parts: Divided, route: Route, part: float) -> float:
        """Return the seconds of summing over the groups: each host's link carries all its owners' pieces."""
        return all_reduce_seconds(parts.trainable * part, self.copies // self.ranks, route.link)

    def _work(self, reduction: Reduction, wire: Wire) -> float:
        """Return the seconds of the codec's own work: of all that is sent to owners, or of an owner's part."""
        return wire.work * reduction.coded_bytes / (1 if self.ranks == self.copies else self.ranks)


@dataclass(frozen=True)
class SharedReduction(Reduction):
    """What a stage reduces when its copies share something out, which takes what `cost` says of a wire."""

    cost: Callable[[Wire], float] = lambda wire: 0.0

    def seconds(self, wire: Wire) -> float:
        """Return the seconds that it adds to the step."""
        return self.cost(wire)


def part_of(reduction: Reduction, wire: Wire) -> float:
    """Return how many of the bytes a codec puts on the wire, as a part."""
    every = reduction.coded_bytes + reduction.other_bytes
    return (reduction.coded_bytes * wire.part + reduction.other_bytes) / every if every else 1.0


def _exposed(seconds: float, beside: float, pieces: int) -> float:
    """Return how long messages last, of so many pieces, that begin with the first and go on beside a computation."""
    return max(seconds - beside * (1 - 1 / pieces), seconds / pieces) if pieces else 0.0


def not_sliced() -> PlanError:
    """Return the refusal of shard="parameters" with an optimizer that does not work on slices."""
    return PlanError(
        'shard="parameters" gives an optimizer slices of parameters, and torch has none of this optimizer for them',
        place='fixed={"shard": "parameters"}',
        remedy='fixed={"shard": "gradients"}, which keeps parameters whole, or AdamW or SGD',
    )


def gather_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds until every rank has what each rank has a part of: n-1 latencies, (n-1)/n of the bytes."""
    return (num_ranks - 1) * (link.latency + num_bytes / num_ranks / link.bandwidth) if num_ranks > 1 else 0.0


def gathered(graph: ModelGraph) -> tuple[str, ...]:
    """Return the paths of the modules whose parameters are gathered one module at a time, in program order.

    Those of the repeated blocks that are called once and whose parameters nothing else uses.
    """
    found: dict[str, None] = {}
    for block in repeated_blocks(graph):
        for span in block.spans:
            for module in _outermost(graph, span):
                if _alone(graph, module):
                    found[module.path] = None
    return tuple(found)


def _outermost(graph: ModelGraph, span: tuple[int, int]) -> Iterable[ModuleCall]:
    inside = [
        m
        for m in graph.modules
        if m.path and m.kind != "checkpoint" and span[0] <= m.first < m.last <= span[1] and "<" not in m.path
    ]
    for module in inside:
        if not any(o is not module and module.position[: len(o.position)] == o.position for o in inside):
            yield module


def _alone(graph: ModelGraph, module: ModuleCall) -> bool:
    prefix = f"{module.path}."
    used = False
    for call in graph.calls:
        for name in call.parameters:
            info = graph.parameter[name]
            mine = [n.startswith(prefix) for n in (info.name, *info.aliases)]
            if any(mine) and not (all(mine) and module.first <= call.index < module.last):
                return False
            used = used or any(mine)
    return used and sum(m.path == module.path for m in graph.modules) == 1
