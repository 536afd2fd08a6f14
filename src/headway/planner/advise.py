"""advise: rules that read model, plan and machine, and say what to change, what it brings and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.cost.cluster import Cluster
from headway.cost.memory import activation_bytes
from headway.graph.model import Call, ModelGraph
from headway.planner.explain import count
from headway.planner.plan import Plan
from headway.units import format_bytes, format_seconds

NEAR_LIMIT = 0.9
LARGE_BUBBLE = 0.15
LARGE_REDUCTION = 0.15
LARGE_SCORES = 0.1
FEW_FOR_BATCH_NORM = 16
HALF_SPEEDUP = 3.0


@dataclass(frozen=True)
class Advice:
    """One thing that could be changed: the `reason` with numbers, the `price` of it, and the `remedy`, what to do."""

    id: str
    reason: str
    price: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}\n  Price: {self.price}\n  Try: {self.remedy}"


@dataclass(frozen=True)
class Case:
    """What the rules read."""

    graph: ModelGraph
    plan: Plan
    cluster: Cluster


def advise(graph: ModelGraph, plan: Plan, cluster: Cluster) -> list[Advice]:
    """Return what could be changed about a model, its batch or its plan on a cluster, in the order of the rules.

    `graph` is the program recorded for the plan's micro-batch. Nothing here is done silently: what changes the training
    itself (shorter sequences, a larger batch) is only ever offered.
    """
    case = Case(graph, plan, cluster)
    return [advice for rule in RULES if (advice := rule(case)) is not None]


def idle_ranks(case: Case) -> Advice | None:
    """Some ranks have nothing to do."""
    idle = case.cluster.size - case.plan.size
    if idle < 1:
        return None
    return Advice(
        "idle-ranks",
        f"{count(idle, 'rank')} of {case.cluster.size} have nothing to do: no layout can use them",
        "none for training; a larger global batch changes it",
        f"start {case.plan.size} processes, or a global batch that at least {case.cluster.size} copies can share",
    )


def near_limit(case: Case) -> Advice | None:
    """Memory is predicted to be nearly full."""
    peak, limit = max(case.plan.memory, default=0), case.plan.device_memory
    if not limit or peak < NEAR_LIMIT * limit or case.plan.micro_batch < 2:
        return None
    saved = max(stage.activation_bytes for stage in case.plan.stages) // 2
    return Advice(
        "memory-near-limit",
        f"{format_bytes(peak)} of {format_bytes(limit)} are predicted; what is not modelled may not fit beside it",
        "more, smaller calls: usually a few per cent of a step",
        f'fixed={{"micro_batch": {case.plan.micro_batch // 2}}}: about {format_bytes(saved)} less for each in flight',
    )


def large_bubble(case: Case) -> Advice | None:
    """Stages wait for each other a good part of the step."""
    timeline = case.plan.timeline
    if case.plan.pipeline == 1 or timeline is None or timeline.bubble < LARGE_BUBBLE:
        return None
    stages, micros = case.plan.pipeline, case.plan.num_micro_batches
    turns = micros * case.plan.chunks  # with several stages a rank each turn is shorter
    ideal = (stages - 1) / (2 * turns + stages - 1)
    return Advice(
        "large-bubble",
        f"ranks wait {timeline.bubble:.0%} of a step; with {micros} micro-batches, {stages} equal stages cannot avoid "
        f"{(stages - 1) / (turns + stages - 1):.0%}",
        "a larger global batch is another training: learning rate and number of steps change with it",
        f"a global batch of {2 * case.plan.global_batch} allows twice the micro-batches: at best {ideal:.0%}",
    )


def slow_reduction(case: Case) -> Advice | None:
    """Reducing gradients takes a good part of the step."""
    reduce = max((stage.reduce for stage in case.plan.stages), default=0.0)
    if case.plan.data == 1 or not case.plan.seconds or reduce < LARGE_REDUCTION * case.plan.seconds:
        return None
    return Advice(
        "slow-reduction",
        f"reducing gradients adds {format_seconds(reduce)} to a step of {format_seconds(case.plan.seconds)}",
        "a larger global batch is another training: learning rate and number of steps change with it",
        f"a global batch of {2 * case.plan.global_batch} reduces half as often for each sample",
    )


def batch_norm(case: Case) -> Advice | None:
    """Batch norm sees few samples at a time."""
    found = any(call.function.endswith("batch_norm") for call in case.graph.calls)
    if not found or case.plan.micro_batch >= FEW_FOR_BATCH_NORM:
        return None
    return Advice(
        "batch-norm-small-micro-batch",
        f"batch norm takes its statistics over a micro-batch, here {count(case.plan.micro_batch, 'sample')}",
        "group norm is another model; larger micro-batches take memory, "
        f"{format_bytes(activation_bytes(case.graph, 0, len(case.graph.calls)))} for as many samples again",
        'torch.nn.GroupNorm in its place, or fixed={"micro_batch": ...}',
    )


def attention_scores(case: Case) -> Advice | None:
    """Attention written out keeps a score for each pair of positions."""
    scores = {storage for call in case.graph.calls if _is_scores(case.graph, call) for storage in call.saved}
    size = sum(case.graph.storages[storage] for storage in scores)
    whole = activation_bytes(case.graph, 0, len(case.graph.calls))
    if not whole or size < LARGE_SCORES * whole:
        return None
    return Advice(
        "attention-written-out",
        f"softmax over pairs of positions keeps {format_bytes(size)} of the {format_bytes(whole)} of a micro-batch",
        "results differ by rounding",
        "torch.nn.functional.scaled_dot_product_attention keeps none of it",
    )


def _is_scores(graph: ModelGraph, call: Call) -> bool:
    if not call.function.endswith("softmax") or "log" in call.function or not call.outputs:
        return False
    shape = graph.values[call.outputs[0]].shape
    return len(shape) >= 3 and shape[-1] == shape[-2] > 1


def half_precision(case: Case) -> Advice | None:
    """The device multiplies 16-bit numbers many times faster."""
    device = case.cluster.device
    faster = device.flops_half / device.flops
    if case.plan.precision not in ("float32", "float64") or faster < HALF_SPEEDUP:
        return None
    return Advice(
        "half-precision",
        f"a {device.kind} multiplies 16-bit numbers {faster:.0f} times as fast as {case.plan.precision}",
        "bfloat16 has 8 bits of precision: compare a loss curve before trusting it",
        "torch.autocast around the loss, or torch.set_float32_matmul_precision('high') for TF32",
    )


def unused_parameters(case: Case) -> Advice | None:
    """Some parameters take part in nothing."""
    used = {case.graph.parameter[name].name for call in case.graph.calls for name in call.parameters}
    unused = [p for p in case.graph.parameters if p.trainable and not p.is_buffer and p.name not in used]
    if not unused:
        return None
    size = format_bytes(sum(p.bytes for p in unused))
    names = ", ".join(p.name for p in unused[:3]) + (", ..." if len(unused) > 3 else "")
    return Advice(
        "unused-parameters",
        f"{count(len(unused), 'parameter')} ({size}) take part in nothing: {names}",
        "none, if that is so for every batch",
        "remove them, or requires_grad_(False): they take memory and time in every update",
    )


def value_reads(case: Case) -> Advice | None:
    """The program waits for numbers."""
    reads = [call for call in case.graph.calls if call.reads_value and call.derived]
    if not reads:
        return None
    return Advice(
        "value-reads",
        f"{count(len(reads), 'call')} of a forward read a tensor's content in Python, first at {reads[0].where}: "
        "the device waits there, and every later stage waits for the answer",
        "none for the results",
        "torch.where or a mask in place of the `if`; .item() outside of the loss function",
    )


def long_sequences(case: Case) -> Advice | None:
    """Memory is what binds, and half the sequence would take half of it or less."""
    leaves = [v for v in case.graph.values if v.producer is None and not v.derived and v.dtype == "int64"]
    lengths = [v.shape[1] for v in leaves if len(v.shape) == 2 and v.shape[0] == case.graph.samples]
    if not lengths or max(lengths) < 2 or not case.plan.binding.startswith("memory"):
        return None
    kept = activation_bytes(case.graph, 0, len(case.graph.calls))
    return Advice(
        "long-sequences",
        f"memory binds, and a micro-batch of sequences of {max(lengths)} keeps {format_bytes(kept)}",
        "the model sees half as far",
        f"sequences of {max(lengths) // 2}: at least {format_bytes(kept // 2)} less for each micro-batch in flight, "
        "and at most half the time for each sequence",
    )


RULES: tuple[Callable[[Case], Advice | None], ...] = (
    idle_ranks,
    near_limit,
    large_bubble,
    slow_reduction,
    batch_norm,
    attention_scores,
    half_precision,
    unused_parameters,
    value_reads,
    long_sequences,
)
