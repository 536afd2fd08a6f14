"""The words for a plan: ten lines that say what, why and what it costs, and the long form with every stage."""

from __future__ import annotations

from collections.abc import Mapping

from headway.planner.choice import Choice
from headway.planner.plan import Plan, RunnerUp
from headway.units import format_bytes, format_seconds

MAX_REASONS = 3
MAX_RUNNERS_UP = 3

SHARED: Mapping[str, str] = {
    "none": "",
    "optimizer": " that share out optimizer states",
    "gradients": " that share out gradients and states",
    "parameters": " that share out parameters, gradients and states",
}


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Write "1 copy", "2 copies"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def layout_text(of: Plan | RunnerUp | Choice) -> str:
    """Write a layout in words: "2 copies of 2 stages, one_f_one_b, 4 micro-batches of 3 samples"."""
    copies = count(of.data, "copy", "copies")
    stages = count(of.pipeline * of.chunks, "stage")
    what = f"{copies} of {stages}, {of.schedule}" if of.pipeline * of.chunks > 1 else f"{copies} of the whole model"
    on = f", {of.chunks} on each rank" if of.chunks > 1 else ""
    on += SHARED[of.shard] if of.data > 1 else ""
    size = f"{'up to ' if of.num_micro_batches > 1 else ''}{count(of.micro_batch, 'sample')}"
    return f"{what}{on}, {count(of.num_micro_batches, 'micro-batch', 'micro-batches')} of {size}"


def short(plan: Plan) -> str:
    """Return at most ten lines: chosen, why, expected, instead, what binds."""
    lines = [f"plan     {_chosen(plan)}"]
    lines += _labelled("why", plan.reasons[:MAX_REASONS])
    if plan.seconds is not None and plan.memory:
        lines.append(f"expect   {_expected(plan)}")
    lines += _labelled("instead", [_instead(plan, other) for other in plan.runners_up[:MAX_RUNNERS_UP]])
    if plan.binding:
        lines.append(f"binds    {plan.binding}")
    return "\n".join(lines)


def long(plan: Plan) -> str:
    """Return the whole explanation: the short one, all reasons, each stage with its cost, messages and cuts."""
    lines = [f"plan     {_chosen(plan)}"]
    if plan.cluster:
        lines.append(f"machine  {plan.cluster}")
    lines += _labelled("why", plan.reasons)
    if plan.seconds is not None and plan.memory:
        lines.append(f"expect   {_expected(plan)}")
    lines += _labelled("instead", [_instead(plan, other) for other in plan.runners_up])
    if plan.binding:
        lines.append(f"binds    {plan.binding}")
    if plan.stages:
        lines += ["", *_stage_table(plan)]
    lines += _labelled("message", [_message(plan, index) for index in range(len(plan.messages))])
    lines.append(
        f"fields   shard={plan.shard} shard_ranks={plan.shard_ranks or plan.data} tensor={plan.tensor} "
        f"chunks={plan.chunks} recompute={plan.recompute} "
        f"precision={plan.precision} codec={plan.codec} neighbours={plan.neighbours} "
        f"bucket_bytes={format_bytes(plan.bucket_bytes)} sync_every={plan.sync_every} "
        f"reduction={plan.reduction}"
    )
    if 1 < plan.pipeline <= 8 and plan.num_micro_batches <= 16 and plan.split is not None:
        lines += ["", str(plan.lowered)]  # a line for each rank of one copy
    return "\n".join(lines)


def _labelled(label: str, texts: list[str] | tuple[str, ...]) -> list[str]:
    return [f"{label if index == 0 else '':<8} {text}" for index, text in enumerate(texts)]


def _chosen(plan: Plan) -> str:
    layout = layout_text(plan)
    layout += f", shared out in groups of {plan.shard_ranks}" if plan.shard_ranks else ""
    cuts = f", cut at {', '.join(plan.cuts)}" if plan.cuts and len(plan.cuts) <= 4 else ""
    return f"{layout} (global batch {plan.global_batch}){cuts}"


def _expected(plan: Plan) -> str:
    assert plan.seconds is not None
    least, most = format_bytes(min(plan.memory)), format_bytes(max(plan.memory))
    memory = most if least == most else f"{least} to {most}"
    limit = f" of {format_bytes(plan.device_memory)}" if plan.device_memory else ""
    text = f"{format_seconds(plan.seconds)} a step, {memory}{limit} on each rank"
    timeline = plan.timeline if plan.pipeline > 1 else None
    return text + (f", bubble {timeline.bubble:.0%}" if timeline is not None else "")


def _instead(plan: Plan, other: RunnerUp) -> str:
    text = f"{layout_text(other)}: {format_seconds(other.seconds)}"
    if plan.seconds:
        text += f" ({other.seconds / plan.seconds - 1:+.0%})"
    return text + f", {format_bytes(other.memory)}" + ("" if other.fits else ", does not fit")


def _stage_table(plan: Plan) -> list[str]:
    head = ("stage", "begins at", "calls", "forward", "backward", "reduce", "update", "static", "activations", "peak")
    rows: list[tuple[str, ...]] = [head]
    for index, stage in enumerate(plan.stages):
        begins = plan.cuts[index - 1] if index else "the batch"
        times = (stage.forward, stage.backward, stage.reduce, stage.update)
        peak = plan.memory[plan.lowered.placement[index] * plan.data] if plan.memory and plan.split else 0
        sizes = (stage.static_bytes, stage.activation_bytes, peak)
        rows.append((str(index), begins, str(stage.num_calls), *map(format_seconds, times), *map(format_bytes, sizes)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _message(plan: Plan, index: int) -> str:
    message = plan.messages[index]
    return (
        f"stage {message.source} -> {message.target}, each micro-batch: "
        f"{format_bytes(message.forward_bytes)} in {format_seconds(message.forward_seconds)}, "
        f"back {format_bytes(message.backward_bytes)} in {format_seconds(message.backward_seconds)}"
    )
