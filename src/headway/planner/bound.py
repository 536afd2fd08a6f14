"""Bound: the seconds and bytes of a candidate, from below and from above, before it is simulated."""

from __future__ import annotations

from collections.abc import Iterator

from headway.cost.memory import runtime_bytes
from headway.cost.model import accumulate_seconds, update_seconds
from headway.planner.choice import Choice, Setting
from headway.planner.price import Estimate, passing_seconds
from headway.planner.program import Program

ROUNDING = 1e-9
"""Sums of float64 in another order may differ by this part."""


def least_seconds(program: Program, choice: Choice, setting: Setting, longest: float = 0.0) -> float:
    """Return a lower bound on the seconds of a step, over all cuts with a stage whose calls take `longest` seconds.

    A rank works m times through its load, T >= m W / p for loads w that add up to W, and some rank does so with the
    longest run without a cut. A stage s waits while the first micro-batch comes through the stages before, and after
    its last input gradient (or whole backward) they are still to do theirs: T >= m w_s + sum of w_i for i < s, w
    without weight gradients that can wait. The least T makes these equal for all k stages: T = W / (1 - (1 - 1/m)^k).
    Where they can wait a stage waits at first all the same, for forwards that are at least the part f of each load:
    T = f W / (1 - (1 - f/m)^k). The slowest rank updates its part of the parameters.
    """
    share, device = -(-setting.global_batch // choice.data), setting.cluster.device
    count, ranks, stages = choice.num_micro_batches, choice.pipeline, choice.num_stages
    scale = share / (count * program.graph.samples)
    calls, every = program.work * scale, program.batch_only * scale
    adding = accumulate_seconds(program.shape.trainable, count, device)
    passing = (stages - 1) * passing_seconds(program, choice, 0) + passing_seconds(program, choice, program.num_calls)
    fixed = every + passing_seconds(program, choice, 0)  # what each stage takes at least, whatever it holds
    work = calls + stages * every + adding + passing
    later = program.weight(0, program.num_calls) * scale + adding if choice.splits else 0.0
    least = max(
        count * work / ranks,
        count * (max(longest, program.largest) * scale + fixed),
        (work - later) / (1 - (1 - 1 / count) ** stages),
    )
    part = program.forward_part
    if choice.splits and part > 0:
        least = max(least, count * fixed + part * calls / (1 - (1 - part / count) ** stages))
    if choice.shard == "none":
        least += update_seconds(program.shape.trainable, setting.optimizer_states, device) / ranks
    return least * (1 - ROUNDING)


def least_bytes(program: Program, choice: Choice, setting: Setting, kept: int = 1) -> int:
    """Return a lower bound on the bytes of the fullest rank, over all cuts; 0 where copies share something out.

    All ranks together hold every parameter with its gradient and states, and every activation of as many micro-batches
    (`kept`) as each rank keeps at once for all of its stages: one at least, while the last of them is at its first.
    """
    if choice.shard != "none" and choice.data > 1:
        return 0
    constant = runtime_bytes(setting.cluster.device) + program.batch_bytes(setting.global_batch)
    static = program.shape.parameters + (1 + setting.optimizer_states) * program.shape.trainable
    return constant + (static + kept * program.activations) // choice.pipeline


def surely_too_large(program: Program, choice: Choice, setting: Setting) -> bool:
    """Tell whether bounds say that a candidate does not fit, wherever it is cut."""
    memory = setting.cluster.device.memory_bytes
    if least_bytes(program, choice, setting) > memory:
        return True
    if least_bytes(program, choice, setting, choice.num_micro_batches) <= memory:
        return False  # no order keeps more
    return least_bytes(program, choice, setting, min(choice.order.in_flight_together)) > memory


def least_step(estimate: Estimate) -> float:
    """Return a lower bound on the seconds of a step with these stages and messages, in any order of its kind.

    A rank begins when a micro-batch can have come to the first of its stages; then it has all its work before it, and
    after the last input gradient (or whole backward) those of the stages before.
    """
    choice, stages = estimate.choice, estimate.stages
    count, splits = choice.num_micro_batches, choice.splits
    there = {(m.source, m.target): m.forward_seconds for m in estimate.messages}
    back = {(m.source, m.target): m.backward_seconds for m in estimate.messages}
    inputs = [stage.backward - stage.weight if splits else stage.backward for stage in stages]
    heads, tails = [0.0] * len(stages), [stage.reduce for stage in stages]
    for source, target in estimate.split.edges:  # in order of their sources, which have their own head by then
        head = heads[source] + stages[source].forward + there.get((source, target), 0.0)
        heads[target] = max(heads[target], head)
    for source, target in sorted(estimate.split.edges, key=lambda edge: edge[1]):
        tail = back.get((source, target), 0.0) + inputs[source] + tails[source]
        tails[target] = max(tails[target], tail)
    least = 0.0
    for mine in _ranks(choice):
        head, tail = min(heads[s] for s in mine), min(tails[s] for s in mine)
        urgent = count * sum(stages[s].forward + inputs[s] for s in mine)
        whole = sum(count * (stages[s].forward + stages[s].backward) + stages[s].reduce for s in mine)
        least = max(least, head + urgent + tail, head + whole)
    return (least + estimate.update) * (1 - ROUNDING)


def most_bytes(estimate: Estimate, kept: tuple[int, ...]) -> int:
    """Return an upper bound on the bytes of the fullest rank; `kept` are the micro-batches that each stage may keep.

    A message and its gradient are on their way, or wait, only while their source keeps the micro-batch.
    """
    stages, crossing = estimate.stages, [0] * len(estimate.stages)
    for message in estimate.messages:
        size = kept[message.source] * (message.forward_bytes + message.backward_bytes)
        crossing[message.source] += size
        crossing[message.target] += size
    most = 0
    for mine in _ranks(estimate.choice):
        static = sum(stages[s].static_bytes for s in mine)
        held = sum(kept[s] * stages[s].activation_bytes + crossing[s] for s in mine)
        largest = max(max(stages[s].update_bytes, held + stages[s].temporary_bytes) for s in mine)
        most = max(most, static + largest, *(stages[s].build_bytes for s in mine))
    return most


def _ranks(choice: Choice) -> Iterator[list[int]]:
    """Yield the stages of each rank."""
    found: list[list[int]] = [[] for _ in range(choice.pipeline)]
    for stage, rank in enumerate(choice.placement):
        found[rank].append(stage)
    yield from found
