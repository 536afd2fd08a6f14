"""Price: what one candidate plan costs, with its cuts: seconds by simulation, bytes by lifetimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from headway.cost.cluster import Cluster
from headway.cost.memory import StageMemory, parameter_bytes, stage_memory
from headway.cost.model import Times, accumulate_seconds, all_reduce_seconds, update_seconds
from headway.graph.model import ModelGraph
from headway.layout.mesh import Mesh
from headway.layout.split import Split, split
from headway.planner.estimate import MessageEstimate, StageEstimate, costs_of, lowered
from headway.planner.wire import EXACT, Reduction, Wire, bytes_by_kind, pick
from headway.schedule.simulate import simulate

PASS_SECONDS = 10e-6
"""Seconds that a stage spends on each call of the program, its own or passed over, to follow the model's Python."""


@dataclass(frozen=True)
class Choice:
    """A candidate: copies, stages, schedule, and the micro-batches of each copy (samples at most, how many)."""

    data: int
    pipeline: int
    schedule: str
    micro_batch: int
    num_micro_batches: int

    @property
    def mesh(self) -> Mesh:
        """Axes over ranks; copies innermost, so that those who reduce the most are neighbours."""
        return Mesh((("pipeline", self.pipeline), ("data", self.data)))


@dataclass(frozen=True)
class Setting:
    """What all candidates share: the machine, the samples of a step, the optimizer's states, the codecs there are."""

    cluster: Cluster
    global_batch: int
    optimizer_states: int
    wires: tuple[Wire, ...] = (EXACT,)


@dataclass(frozen=True)
class Program:
    """A recorded graph for micro-batches of some size with its times; sums over ranges of calls in O(1)."""

    graph: ModelGraph
    times: Times
    memories: dict[tuple[int, int, tuple[str, ...]], StageMemory] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def num_calls(self) -> int:
        """Number of calls in the program."""
        return len(self.graph.calls)

    @cached_property
    def _forward(self) -> list[float]:
        return list(accumulate((self.times.forward[c.index] * c.derived for c in self.graph.calls), initial=0.0))

    @cached_property
    def _backward(self) -> list[float]:
        return list(accumulate((self.times.backward[c.index] for c in self.graph.calls), initial=0.0))

    @cached_property
    def batch_only(self) -> float:
        """Seconds of the calls that depend on the batch alone, which every stage computes."""
        return sum(self.times.forward[call.index] for call in self.graph.calls if not call.derived)

    def forward(self, first: int, last: int) -> float:
        """Seconds of a stage's forward."""
        return self._forward[last] - self._forward[first] + self.batch_only

    def backward(self, first: int, last: int) -> float:
        """Seconds of a stage's backward."""
        return self._backward[last] - self._backward[first]

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Seconds of each call, forward and backward, that the stage with it alone computes."""
        pairs = zip(self.graph.calls, self.times.forward, self.times.backward, strict=True)
        return tuple(forward * call.derived + backward for call, forward, backward in pairs)

    @cached_property
    def values(self) -> Mapping[tuple[tuple[int, ...], int], int]:
        """Bytes of each value by the position of its call and its place in the result."""
        calls = self.graph.calls
        return {(calls[v.producer].position, v.output): v.bytes for v in self.graph.values if v.producer is not None}

    def memory(self, first: int, last: int, names: tuple[str, ...], setting: Setting) -> StageMemory:
        """Bytes of the stage that computes calls first..last-1 and holds these parameters."""
        key = (first, last, names)
        if key not in self.memories:
            self.memories[key] = stage_memory(
                self.graph, first, last, setting.cluster.device,
                names=names, optimizer_states=setting.optimizer_states, global_batch=setting.global_batch,
            )  # fmt: skip
        return self.memories[key]


@dataclass(frozen=True)
class Priced:
    """A candidate with its cuts and what it costs; `memory` is the peak bytes of each stage's ranks."""

    choice: Choice
    cuts: tuple[str, ...]
    split: Split
    stages: tuple[StageEstimate, ...]
    messages: tuple[MessageEstimate, ...]
    seconds: float
    memory: tuple[int, ...]
    codec: str = "fp32"
    why_codec: str | None = None

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(self.memory)


def price(program: Program, choice: Choice, cuts: tuple[str, ...], setting: Setting) -> Priced:
    """Price a candidate cut at `cuts`: simulate its schedule, add the optimizer's step, replay its memory.

    The program is recorded for the largest micro-batch, which decides memory; seconds are scaled to the mean one.
    """
    graph, device = program.graph, setting.cluster.device
    parts = split(graph, cuts)
    bounds = [0, *(graph.cut[name].index for name in cuts), program.num_calls]
    share = -(-setting.global_batch // choice.data)
    scale = share / (choice.num_micro_batches * graph.samples)
    messages = message_estimates(program, parts, choice, setting.cluster)
    holders = parts.holders()
    buffers = tuple(info.name for info in graph.parameters if info.is_buffer)
    stages: list[StageEstimate] = []
    reductions: list[Reduction] = []
    for part, first, last in zip(parts.stages, bounds, bounds[1:], strict=False):
        memory = program.memory(first, last, part.parameters + buffers, setting)
        passing = PASS_SECONDS * program.num_calls if choice.pipeline > 1 else 0.0
        trainable = parameter_bytes(graph, part.parameters, trainable=True)
        adding = accumulate_seconds(trainable, choice.num_micro_batches, device)
        backward = program.backward(first, last) * scale + adding
        group = choice.mesh.group(part.index * choice.data, "data")
        tied = 0.0
        for name in part.parameters:
            if len(holders[name]) > 1:  # tied: its gradient is summed over the stages that hold it, after everything
                ranks = [choice.mesh.rank(pipeline=stage) for stage in holders[name]]
                size = parameter_bytes(graph, [name], trainable=True)
                tied += all_reduce_seconds(size, len(ranks), setting.cluster.link(ranks))
        stages.append(
            StageEstimate(
                forward=program.forward(first, last) * scale + passing,
                backward=backward,
                reduce=0.0,
                update=update_seconds(trainable, setting.optimizer_states, device),
                parameter_bytes=memory.parameters,
                static_bytes=memory.static,
                activation_bytes=memory.activation,
                temporary_bytes=memory.temporary,
                update_bytes=memory.update,
                build_bytes=memory.build,
                num_calls=last - first,
            )
        )
        rest = choice.num_micro_batches * (stages[-1].forward + backward) + stages[-1].update
        coded, other = bytes_by_kind(graph, part.parameters)
        link = setting.cluster.link(group)
        reductions.append(Reduction(coded, other, choice.data, link, backward, tied, rest))
    groups = choice.mesh.groups("data")
    apart = any(len({setting.cluster.host(rank) for rank in group}) > 1 for group in groups)
    wire, why = pick(setting.wires, reductions, apart)
    final = [
        replace(s, reduce=r.seconds(wire), static_bytes=s.static_bytes + r.buffer_bytes(wire))
        for s, r in zip(stages, reductions, strict=True)
    ]
    return replace(priced(choice, cuts, parts, tuple(final), messages), codec=wire.codec, why_codec=why)


def priced(
    choice: Choice,
    cuts: tuple[str, ...],
    parts: Split,
    stages: tuple[StageEstimate, ...],
    messages: tuple[MessageEstimate, ...],
) -> Priced:
    """Simulate estimates.

    Seconds = makespan + the slowest update; bytes of a rank = the worst of the schedule, the update and the build.
    """
    schedule = lowered(choice.schedule, parts, choice.num_micro_batches, choice.data)
    timeline = simulate(schedule, costs_of(stages, messages))
    memory = tuple(
        max(timeline.peak_bytes(schedule.placement[index]), stage.static_bytes + stage.update_bytes, stage.build_bytes)
        for index, stage in enumerate(stages)
    )
    seconds = timeline.makespan + max(stage.update for stage in stages)
    return Priced(choice, cuts, parts, stages, messages, seconds, memory)


def message_estimates(program: Program, parts: Split, choice: Choice, cluster: Cluster) -> tuple[MessageEstimate, ...]:
    """Return what crosses between each pair of stages: values forward, gradients of differentiable ones back."""
    found = []
    for source, target in parts.edges:
        crossings = parts.crossings(source, target)
        forward = sum(program.values[c.key] for c in crossings)
        backward = sum(program.values[c.key] for c in crossings if c.differentiable)
        pairs = zip(
            choice.mesh.group(source * choice.data, "data"),
            choice.mesh.group(target * choice.data, "data"),
            strict=True,
        )
        link = max((cluster.link(pair) for pair in pairs), key=lambda link: link.seconds(forward))
        found.append(
            MessageEstimate(
                source, target, forward, backward, link.seconds(forward), link.seconds(backward) if backward else 0.0
            )
        )
    return tuple(found)
