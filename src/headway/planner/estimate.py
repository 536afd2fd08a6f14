"""Estimates: what a stage and a message are expected to cost, and the schedule and costs they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.layout.split import Split
from headway.schedule.action import Schedule
from headway.schedule.catalogue import build
from headway.schedule.exchange import read_rows
from headway.schedule.lower import lower
from headway.schedule.resize import resized
from headway.schedule.simulate import Costs


@dataclass(frozen=True)
class StageEstimate:
    """What one stage is expected to cost on each rank that holds it: seconds and bytes.

    `forward`, `backward`: seconds for one micro-batch, of which `weight` are those of weight gradients that a split
    backward leaves for later (W); `reduce`: seconds of gradient reduction that backward does not
    hide; `update`: seconds of the optimizer's step. `static_bytes` stay for the whole step (parameters, gradients,
    optimizer states, batch, runtime); `activation_bytes` are kept for each micro-batch between its F and its B;
    `temporary_bytes` come and go within one action, `update_bytes` within the optimizer's step; `build_bytes` are
    needed once, while the whole model still exists.
    """

    forward: float
    backward: float
    reduce: float
    update: float
    parameter_bytes: int
    static_bytes: int
    activation_bytes: int
    temporary_bytes: int
    update_bytes: int
    build_bytes: int
    num_calls: int
    weight: float = 0.0


@dataclass(frozen=True)
class MessageEstimate:
    """What crosses from stage `source` to stage `target` for one micro-batch: bytes and seconds, each way."""

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    forward_seconds: float
    backward_seconds: float


def costs_of(stages: Sequence[StageEstimate], messages: Sequence[MessageEstimate]) -> Costs:
    """Turn estimates into the simulator's costs."""
    forward = {(m.source, m.target): m.forward_seconds for m in messages}
    backward = {(m.target, m.source): m.backward_seconds for m in messages}
    forward_bytes = {(m.source, m.target): m.forward_bytes for m in messages}
    backward_bytes = {(m.target, m.source): m.backward_bytes for m in messages}
    return Costs(
        forward=tuple(stage.forward for stage in stages),
        backward=tuple(stage.backward for stage in stages),
        input=tuple(stage.backward - stage.weight for stage in stages),
        weight=tuple(stage.weight for stage in stages),
        message=forward | backward,
        reduce=tuple(stage.reduce for stage in stages),
        static_bytes=tuple(stage.static_bytes for stage in stages),
        activation_bytes=tuple(stage.activation_bytes for stage in stages),
        boundary_bytes=forward_bytes | backward_bytes,
        temporary_bytes=tuple(stage.temporary_bytes for stage in stages),
    )


def order_of(name: str, rows: Sequence[str], num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """Return the order of computations: that of `rows` (as `write_rows` gives them), else the one called `name`.

    Raises PlanError for a name that nobody knows, or rows that are no schedule.
    """
    if rows:
        return resized(read_rows(rows, name=name), num_micro_batches)
    return build(name, num_ranks, num_micro_batches, chunks)


def reduces(parts: Split, data: int) -> bool:
    """Say whether there is something to reduce: between copies, or between stages that hold the same parameter."""
    return data > 1 or any(len(stages) > 1 for stages in parts.holders().values())


def lowered(order: Schedule, parts: Split, data: int) -> Schedule:
    """Add the messages of these stages to a schedule, and reductions where there is something to reduce."""
    return lower(order, parts.edges, reduce=reduces(parts, data))
