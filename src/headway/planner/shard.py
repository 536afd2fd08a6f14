"""Shard: what it saves and what it costs when the copies share out optimizer states, gradients or parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from headway.cost.cluster import Device, Link
from headway.cost.memory import parameter_bytes
from headway.cost.model import update_seconds
from headway.errors import PlanError
from headway.graph.model import ModelGraph, ModuleCall
from headway.graph.repeat import repeated_blocks
from headway.layout.ownership import in_flight_bytes, share_out
from headway.layout.split import Split
from headway.planner.estimate import StageEstimate
from headway.planner.wire import Reduction, Wire

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
    graph: ModelGraph, parts: Split, own: Sequence[Sequence[str]], copies: int, placement: Sequence[int]
) -> list[Divided]:
    """Measure each stage; `own` are the parameters that count for it."""
    trained = {info.name: info.bytes for info in graph.parameters if info.trainable and not info.is_buffer}
    owners = share_out(trained, parts.holders(), copies, placement)
    blocks = gathered(graph)
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


@dataclass(frozen=True)
class Sharing:
    """How `copies` share out what `shard` says, in steps of so many micro-batches, with an optimizer of some states."""

    shard: str
    copies: int
    micro_batches: int
    states: int
    device: Device
    wire: Wire

    def stages(
        self, divided: Sequence[Divided], stages: Sequence[StageEstimate], reductions: Sequence[Reduction]
    ) -> list[StageEstimate]:
        """Return the estimates of stages when their copies share."""
        way = self._slices if self.shard == "parameters" else self._owners
        return [way(*each) for each in zip(stages, divided, reductions, strict=True)]

    def _owners(self, stage: StageEstimate, parts: Divided, reduction: Reduction) -> StageEstimate:
        """Price owners of whole parameters.

        optimizer   to owners: half of an all-reduce, beside the last backward; new values back: the other half, hidden
                    by nothing. Memory: states of the fullest owner.
        gradients   to owners after every backward. Memory: gradients of the fullest owner and what is on its way.
        """
        half = replace(reduction, coded_bytes=reduction.coded_bytes // 2, other_bytes=reduction.other_bytes // 2)
        spread = gather_seconds(parts.trainable, self.copies, reduction.route.link)
        saved = self.states * (parts.trainable - parts.fullest)
        reduce = half.seconds(self.wire) + spread
        if self.shard == "gradients":
            kept = parts.fullest + in_flight_bytes(parts.trainable)
            saved += parts.trainable - min(parts.trainable, kept)
            between = max(0.0, spread * self.wire.part - stage.backward - stage.forward)
            reduce += (self.micro_batches - 1) * between
        return replace(
            stage,
            reduce=reduce,
            update=update_seconds(parts.fullest, self.states, self.device),
            static_bytes=stage.static_bytes - saved + min(MESSAGE_BYTES, parts.trainable),
            update_bytes=stage.update_bytes if self.device.is_cpu else parts.fullest,
        )

    def _slices(self, stage: StageEstimate, parts: Divided, reduction: Reduction) -> StageEstimate:
        """Price slices: gathered for every forward and backward, summed after every backward.

        Memory: a slice of everything (of gradients two, one arriving), the blocks that are whole, and twice, values and
        gradients, with their messages, what is in no block.
        """
        link = reduction.route.link
        part, held = -(-parts.trainable // self.copies), -(-parts.parameters // self.copies)
        gather = gather_seconds(parts.parameters, self.copies, link)
        sums = gather_seconds(parts.trainable, self.copies, link) * self.wire.part
        exposed = max(0.0, gather - stage.forward) + max(0.0, gather + sums - stage.backward)
        first = gather_seconds(parts.block + parts.rest, self.copies, link)
        saved = parts.parameters - held + (1 + self.states) * parts.trainable - (2 + self.states) * part
        return replace(
            stage,
            reduce=reduction.tied + self.micro_batches * (exposed + first),
            update=update_seconds(part, self.states, self.device),
            static_bytes=stage.static_bytes - saved + min(MESSAGE_BYTES, parts.trainable),
            temporary_bytes=stage.temporary_bytes + BLOCKS_WHOLE * parts.block + 4 * parts.rest,
            update_bytes=stage.update_bytes if self.device.is_cpu else part,
        )


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
