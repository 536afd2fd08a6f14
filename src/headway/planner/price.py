"""Price: what one candidate plan costs, with its cuts: seconds by simulation, bytes by lifetimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headway.cost.cluster import Cluster
from headway.cost.memory import parameter_bytes
from headway.cost.model import accumulate_seconds, all_reduce_seconds, update_seconds
from headway.graph.model import ModelGraph
from headway.layout.split import Split, StagePart
from headway.planner.choice import Choice, Setting
from headway.planner.estimate import MessageEstimate, StageEstimate, costs_of, lowered
from headway.planner.program import Cuts, Program
from headway.planner.route import Route
from headway.planner.shard import Sharing, divide, ways, why_shared
from headway.planner.wire import Reduction, Wire, neighbours, pick
from headway.schedule.simulate import totals

STAGE_SECONDS = 0.4e-3
OWN_SECONDS = 2e-6
OTHER_SECONDS = 0.2e-6
"""Seconds of following the model's Python in a stage: once, for each call of its own, and for each other call; seen by
benchmarks/stage_overhead.py."""

SPLIT_SECONDS = 25e-6
"""Seconds of each call of a stage whose backward is to be split, beyond what it takes whole; seen with a small GPT."""


@dataclass(frozen=True)
class Estimate:
    """A candidate with its cuts and what its stages and messages cost; nothing of it is simulated yet.

    `shard_ranks` is given where not all copies share something out together.
    """

    choice: Choice
    cuts: Cuts
    split: Split
    stages: tuple[StageEstimate, ...]
    messages: tuple[MessageEstimate, ...]
    codec: str = "fp32"
    why_codec: str | None = None
    neighbours: int = 1
    bucket_bytes: int = 0
    shard_ranks: int | None = None

    @property
    def update(self) -> float:
        """Seconds of the slowest rank's optimizer."""
        updates = [0.0] * self.choice.pipeline
        for stage, rank in zip(self.stages, self.choice.placement, strict=True):
            updates[rank] += stage.update
        return max(updates)


@dataclass(frozen=True)
class Priced(Estimate):
    """A candidate and what it costs; `memory` is the peak bytes on the ranks of each pipeline rank."""

    seconds: float = 0.0
    memory: tuple[int, ...] = ()
    why_shared: str | None = None

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(self.memory)


def price(program: Program, choice: Choice, cuts: Cuts, setting: Setting) -> Priced:
    """Price a candidate cut at `cuts`: simulate its schedule, add the optimizer's step, replay its memory."""
    return priced(estimates(program, choice, cuts, setting), setting)


def priced(ways: Sequence[Estimate], setting: Setting) -> Priced:
    """Simulate the ways in which one candidate can be carried out, and return the fastest that fits."""
    memory = setting.cluster.device.memory_bytes
    found = [simulated(way) for way in ways]
    best, *others = sorted(found, key=lambda one: (max(0, one.peak - memory), one.seconds))
    if best.choice.shard == "none" or best.choice.data == 1:
        return best
    why = why_shared(best.choice.data, best, others[0] if others else None, memory)
    return replace(best, why_shared=why)


def estimates(program: Program, choice: Choice, cuts: Cuts, setting: Setting) -> tuple[Estimate, ...]:
    """Estimate the stages and messages of a candidate cut at `cuts`.

    One for each way to carry it out: what copies share out may be shared among all, or among those of each host.
    The program is recorded for the largest micro-batch, which decides memory; seconds are scaled to the mean one.
    """
    device, parts = setting.cluster.device, program.split(cuts)
    share = -(-setting.global_batch // choice.data)
    scale = share / (choice.num_micro_batches * program.graph.samples)
    stages: list[StageEstimate] = []
    reductions: list[Reduction] = []
    held = program.stages(cuts, choice.placement, setting)
    shares = choice.shard != "none" and choice.data > 1
    holders, apart = parts.holders(), False
    for one in held:
        memory, first, last = one.memory, one.first, one.last
        adding = accumulate_seconds(one.weights.trainable, choice.num_micro_batches, device)
        stage = StageEstimate(
            forward=program.forward(first, last) * scale + passing_seconds(program, choice, last - first),
            backward=program.backward(first, last) * scale + adding,
            reduce=0.0,
            update=update_seconds(one.weights.trainable, setting.optimizer_states, device),
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
        ranks = choice.ranks(one.part.index)
        apart = apart or setting.cluster.host(ranks[0]) != setting.cluster.host(ranks[-1])
        route = replace(Route.of(setting.cluster, ranks), to_each=shares)
        tied = _tied_seconds(program.graph, holders, one.part, choice, setting.cluster)
        coded, other, shapes = one.weights.coded, one.weights.other, one.weights.shapes
        reductions.append(Reduction(coded, other, route, stage.backward, tied, rest, shapes, setting.sync_every))
    messages = message_estimates(program, parts, choice, setting.cluster)
    whole = Estimate(choice, cuts, parts, tuple(stages), messages)
    if shares:
        return tuple(_sharing(program, whole, setting, [one.weights.names for one in held], reductions, apart))
    wire, why = pick(setting.wires, reductions, apart)
    final = [
        replace(s, reduce=r.seconds(wire), static_bytes=s.static_bytes + r.buffer_bytes(wire))
        for s, r in zip(stages, reductions, strict=True)
    ]
    return (_crossing(replace(whole, stages=tuple(final)), reductions, wire, why),)


def _sharing(
    program: Program, whole: Estimate, setting: Setting, held: Sequence[Sequence[str]],
    reductions: list[Reduction], apart: bool,
) -> list[Estimate]:  # fmt: skip
    """Estimate copies that share out: among all of them, and among those of each host.

    Each with the codec that its own messages ask for.
    """
    choice, device, found = whole.choice, setting.cluster.device, []
    for ranks in ways(choice.data, setting.shard_ranks, reductions):
        divided = divide(program.graph, whole.split, held, ranks, choice.placement, program.shape.blocks)
        way = Sharing(choice.shard, choice.data, ranks, choice.num_micro_batches, setting.optimizer_states, device)
        wire, why = pick(setting.wires, way.reductions(divided, whole.stages, reductions), apart)
        stages = way.stages(divided, whole.stages, reductions, wire)
        each = ranks if ranks < choice.data else None
        one = replace(whole, stages=tuple(stages), shard_ranks=each)
        found.append(_crossing(one, reductions, wire, why))
    return found


def _crossing(estimate: Estimate, reductions: Sequence[Reduction], wire: Wire, why: str | None) -> Estimate:
    """Note how gradients cross between copies."""
    near = neighbours(wire, reductions)
    if near > 1:
        how = f"summed by the {near} ranks of each host first, then across hosts"
        why = f"{why}; {how}" if why else f"gradients are {how}"
    return replace(
        estimate, codec=wire.codec, why_codec=why, neighbours=near,
        bucket_bytes=max(reduction.bucket_bytes(wire) for reduction in reductions),
    )  # fmt: skip


def passing_seconds(program: Program, choice: Choice, num_calls: int) -> float:
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


def simulated(estimate: Estimate) -> Priced:
    """Simulate estimates.

    Seconds = makespan + the slowest update; bytes of a rank = the worst of the schedule, the update and the build.
    """
    choice, stages = estimate.choice, estimate.stages
    schedule = lowered(choice.order, estimate.split, choice.data)
    makespan, peaks = totals(schedule, costs_of(stages, estimate.messages))
    memory = []
    for rank in range(schedule.num_ranks):
        mine = [stages[stage] for stage in schedule.stages(rank)]
        updating = sum(stage.static_bytes for stage in mine) + max(stage.update_bytes for stage in mine)
        memory.append(max(peaks[rank], updating, *(stage.build_bytes for stage in mine)))
    return Priced(**vars(estimate), seconds=makespan + estimate.update, memory=tuple(memory))


def message_estimates(program: Program, parts: Split, choice: Choice, cluster: Cluster) -> tuple[MessageEstimate, ...]:
    """Return what crosses between each pair of stages: values forward, gradients of differentiable ones back."""
    found = []
    for source, target in parts.edges:
        if choice.placement[source] == choice.placement[target]:
            continue  # handed over within the rank
        crossings = parts.crossings(source, target)
        # what has no value in the recording is a spare: sent only by a batch that goes another way
        forward = sum(program.values.get(c.key, 0) for c in crossings)
        backward = sum(program.values.get(c.key, 0) for c in crossings if c.differentiable)
        pairs = zip(choice.ranks(source), choice.ranks(target), strict=True)
        link = max((cluster.link(pair) for pair in pairs), key=lambda link: link.seconds(forward))
        found.append(
            MessageEstimate(
                source, target, forward, backward, link.seconds(forward), link.seconds(backward) if backward else 0.0
            )
        )
    return tuple(found)
