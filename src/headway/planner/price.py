"""Price: what one candidate plan costs, with its cuts: seconds by simulation, bytes by lifetimes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from headway.cost.cluster import Cluster, Link
from headway.cost.memory import StageMemory, batch_bytes, parameter_bytes, runtime_bytes, stage_memory
from headway.cost.model import Times, accumulate_seconds, all_reduce_seconds, update_seconds, weight_part
from headway.graph.model import ModelGraph
from headway.layout.mesh import Mesh
from headway.layout.split import Split, StagePart, split
from headway.planner.estimate import MessageEstimate, StageEstimate, costs_of, lowered, order_of
from headway.planner.route import Route
from headway.planner.shard import Sharing, divide, ways, why_shared
from headway.planner.wire import EXACT, Reduction, Wire, bytes_by_kind, float32_shapes, neighbours, pick
from headway.schedule.action import Schedule
from headway.schedule.catalogue import CATALOGUE
from headway.schedule.simulate import simulate

STAGE_SECONDS = 0.4e-3
OWN_SECONDS = 2e-6
OTHER_SECONDS = 0.2e-6
"""Seconds of following the model's Python in a stage: once, for each call of its own, and for each other call; seen by
benchmarks/stage_overhead.py."""

SPLIT_SECONDS = 25e-6
"""Seconds of each call of a stage whose backward is to be split, beyond what it takes whole; seen with a small GPT."""

Family = tuple[int, int, int, str, str]


@dataclass(frozen=True)
class Choice:
    """A candidate: copies, ranks and stages, schedule, and each copy's micro-batches (samples at most, how many)."""

    data: int
    pipeline: int
    schedule: str
    micro_batch: int
    num_micro_batches: int
    chunks: int = 1
    given: tuple[str, ...] = ()  # an order of computations that is no named schedule's, a line for each rank
    shard: str = "none"

    @property
    def splits(self) -> bool:
        """Whether backwards are done in two parts."""
        return bool(self.order.split) if self.given else CATALOGUE[self.schedule].split

    @property
    def family(self) -> Family:
        """All but the micro-batches."""
        return self.data, self.pipeline, self.chunks, self.schedule, self.shard

    @property
    def num_stages(self) -> int:
        """Number of stages: `chunks` on each of `pipeline` ranks."""
        return self.pipeline * self.chunks

    @cached_property
    def order(self) -> Schedule:
        """The schedule, without messages."""
        return order_of(self.schedule, self.given, self.pipeline, self.num_micro_batches, self.chunks)

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks that hold a stage, one for each copy."""
        return self._copies[self.order.placement[stage]]

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        return self.mesh.groups("data")

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
    sync_every: int = 1
    shard_ranks: int | None = None  # as asked


@dataclass(frozen=True)
class Program:
    """A recorded graph for micro-batches of some size with its times; sums over ranges of calls in O(1)."""

    graph: ModelGraph
    times: Times
    memories: dict[tuple[int, int, tuple[str, ...]], StageMemory] = field(
        default_factory=dict, compare=False, repr=False
    )
    splits: dict[tuple[str, ...], Split] = field(default_factory=dict, compare=False, repr=False)
    cuts: dict[tuple[tuple[int, ...], Link], tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)

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
    def _weight(self) -> list[float]:
        calls = self.graph.calls
        return list(accumulate((self.times.backward[c.index] * weight_part(self.graph, c) for c in calls), initial=0.0))

    def weight(self, first: int, last: int) -> float:
        """Seconds of a stage's backward that make weight gradients which can wait."""
        return self._weight[last] - self._weight[first]

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

    def split(self, cuts: tuple[str, ...]) -> Split:
        """Divide the graph into the stages between these cuts."""
        if cuts not in self.splits:
            self.splits[cuts] = split(self.graph, cuts)
        return self.splits[cuts]

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
    """A candidate with its cuts and what it costs; `memory` is the peak bytes on the ranks of each pipeline rank."""

    choice: Choice
    cuts: tuple[str, ...]
    split: Split
    stages: tuple[StageEstimate, ...]
    messages: tuple[MessageEstimate, ...]
    seconds: float
    memory: tuple[int, ...]
    codec: str = "fp32"
    why_codec: str | None = None
    neighbours: int = 1
    bucket_bytes: int = 0
    shard_ranks: int | None = None
    why_shared: str | None = None

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(self.memory)


def price(program: Program, choice: Choice, cuts: tuple[str, ...], setting: Setting) -> Priced:
    """Price a candidate cut at `cuts`: simulate its schedule, add the optimizer's step, replay its memory.

    The program is recorded for the largest micro-batch, which decides memory; seconds are scaled to the mean one.
    """
    graph, device = program.graph, setting.cluster.device
    parts = program.split(cuts)
    bounds = [0, *(graph.cut[name].index for name in cuts), program.num_calls]
    share = -(-setting.global_batch // choice.data)
    scale = share / (choice.num_micro_batches * graph.samples)
    messages = message_estimates(program, parts, choice, setting.cluster)
    stages: list[StageEstimate] = []
    reductions: list[Reduction] = []
    held: list[list[str]] = []
    shares = choice.shard != "none" and choice.data > 1
    holders = parts.holders()
    for part, own, memory, (first, last) in _held(program, parts, bounds, choice, setting):
        trainable = parameter_bytes(graph, own, trainable=True)
        adding = accumulate_seconds(trainable, choice.num_micro_batches, device)
        stage = StageEstimate(
            forward=program.forward(first, last) * scale + _passing(program, choice, last - first),
            backward=program.backward(first, last) * scale + adding,
            reduce=0.0,
            update=update_seconds(trainable, setting.optimizer_states, device),
            parameter_bytes=memory.parameters,
            static_bytes=memory.static,
            activation_bytes=memory.activation,
            temporary_bytes=memory.temporary,
            update_bytes=memory.update,
            build_bytes=memory.build,
            num_calls=last - first,
            weight=program.weight(first, last) * scale + adding,
        )
        stages.append(stage)
        rest = choice.num_micro_batches * (stage.forward + stage.backward) + stage.update
        coded, other = bytes_by_kind(graph, own)
        route = Route.of(setting.cluster, choice.ranks(part.index))
        route = replace(route, to_each=shares)
        held.append(own)
        tied = _tied_seconds(graph, holders, part, choice, setting.cluster)
        shapes = float32_shapes(graph, own)
        reductions.append(Reduction(coded, other, route, stage.backward, tied, rest, shapes, setting.sync_every))
    apart = any(len({setting.cluster.host(rank) for rank in group}) > 1 for group in choice.mesh.groups("data"))
    wire, why = pick(setting.wires, reductions, apart)
    final = [
        replace(s, reduce=r.seconds(wire), static_bytes=s.static_bytes + r.buffer_bytes(wire))
        for s, r in zip(stages, reductions, strict=True)
    ]
    found = priced(choice, cuts, parts, tuple(final), messages)
    if shares:
        found = _shared(program, choice, setting, held, reductions, replace(found, stages=tuple(stages)), apart)
        wire, why = next(wire for wire in setting.wires if wire.codec == found.codec), found.why_codec
    near = neighbours(wire, reductions)
    if near > 1:
        how = f"summed by the {near} ranks of each host first, then across hosts"
        why = f"{why}; {how}" if why else f"gradients are {how}"
    return replace(
        found, codec=wire.codec, why_codec=why, neighbours=near,
        bucket_bytes=max(reduction.bucket_bytes(wire) for reduction in reductions),
    )  # fmt: skip


def _shared(
    program: Program, choice: Choice, setting: Setting, held: list[list[str]], reductions: list[Reduction],
    whole: Priced, apart: bool,
) -> Priced:  # fmt: skip
    """Price copies that share out: among all of them, or among those of each host; the faster that fits, and why.

    Each with the codec that its own messages ask for.
    """
    device, found = setting.cluster.device, []
    for ranks in ways(choice.data, setting.shard_ranks, reductions):
        divided = divide(program.graph, whole.split, held, ranks, choice.order.placement)
        way = Sharing(choice.shard, choice.data, ranks, choice.num_micro_batches, setting.optimizer_states, device)
        wire, why = pick(setting.wires, way.reductions(divided, whole.stages, reductions), apart)
        stages = way.stages(divided, whole.stages, reductions, wire)
        one = priced(choice, whole.cuts, whole.split, tuple(stages), whole.messages)
        each = ranks if ranks < choice.data else None
        found.append(replace(one, shard_ranks=each, codec=wire.codec, why_codec=why))
    best, *others = sorted(found, key=lambda one: (max(0, one.peak - device.memory_bytes), one.seconds))
    return replace(best, why_shared=why_shared(choice.data, best, others[0] if others else None, device.memory_bytes))


def _held(
    program: Program, parts: Split, bounds: list[int], choice: Choice, setting: Setting
) -> Iterator[tuple[StagePart, list[str], StageMemory, tuple[int, int]]]:
    """Yield each stage with its parameters, its memory, and its range of calls.

    What a rank holds for several of its stages (tied parameters, buffers, the batch, the runtime) counts for the first.
    """
    graph = program.graph
    buffers = tuple(info.name for info in graph.parameters if info.is_buffer)
    constant = runtime_bytes(setting.cluster.device) + batch_bytes(graph, setting.global_batch)
    counted: list[set[str]] = [set() for _ in range(choice.pipeline)]
    for part, first, last in zip(parts.stages, bounds, bounds[1:], strict=False):
        already = counted[choice.order.placement[part.index]]
        names = tuple(name for name in part.parameters + buffers if name not in already)
        memory = program.memory(first, last, names, setting)
        if already:
            memory = replace(memory, static=memory.static - constant)
        already.update(names)
        yield part, [name for name in names if name in part.parameters], memory, (first, last)


def _passing(program: Program, choice: Choice, num_calls: int) -> float:
    """Return the seconds of following the model's Python once, in a stage with so many calls, and of splitting them."""
    if choice.num_stages == 1:
        return 0.0
    passing = STAGE_SECONDS + OWN_SECONDS * num_calls + OTHER_SECONDS * (program.num_calls - num_calls)
    return passing + (SPLIT_SECONDS * num_calls if choice.splits else 0.0)


def _tied_seconds(
    graph: ModelGraph, holders: Mapping[str, tuple[int, ...]], part: StagePart, choice: Choice, cluster: Cluster
) -> float:
    """Return the seconds of summing tied parameters over the ranks that hold them, after everything else."""
    seconds = 0.0
    for name in (name for name in part.parameters if len(holders[name]) > 1):
        ranks = sorted({choice.ranks(stage)[0] for stage in holders[name]})
        if len(ranks) > 1:
            size = parameter_bytes(graph, [name], trainable=True)
            seconds += all_reduce_seconds(size, len(ranks), cluster.link(ranks))
    return seconds


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
    schedule = lowered(choice.order, parts, choice.data)
    timeline = simulate(schedule, costs_of(stages, messages))
    memory, updates = [], []
    for rank in range(schedule.num_ranks):
        mine = [stages[stage] for stage in schedule.stages(rank)]
        updating = sum(stage.static_bytes for stage in mine) + max(stage.update_bytes for stage in mine)
        memory.append(max(timeline.peak_bytes(rank), updating, *(stage.build_bytes for stage in mine)))
        updates.append(sum(stage.update for stage in mine))
    return Priced(choice, cuts, parts, stages, messages, timeline.makespan + max(updates), tuple(memory))


def message_estimates(program: Program, parts: Split, choice: Choice, cluster: Cluster) -> tuple[MessageEstimate, ...]:
    """Return what crosses between each pair of stages: values forward, gradients of differentiable ones back."""
    found = []
    for source, target in parts.edges:
        crossings = parts.crossings(source, target)
        # what has no value in the recording is a spare: sent only by a batch that goes another way
        forward = sum(program.values.get(c.key, 0) for c in crossings)
        backward = sum(program.values.get(c.key, 0) for c in crossings if c.differentiable)
        if choice.order.local(source, target):
            continue  # handed over within the rank
        pairs = zip(choice.ranks(source), choice.ranks(target), strict=True)
        link = max((cluster.link(pair) for pair in pairs), key=lambda link: link.seconds(forward))
        found.append(
            MessageEstimate(
                source, target, forward, backward, link.seconds(forward), link.seconds(backward) if backward else 0.0
            )
        )
    return tuple(found)
