"""Reasons: why a plan was chosen, what binds it, and what is missing when none fits, in sentences with numbers."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from headway.errors import PlanError
from headway.planner.choice import Choice, Setting
from headway.planner.estimate import costs_of, lowered
from headway.planner.explain import count, layout_text
from headway.planner.field import Field, Which
from headway.planner.price import Priced, price
from headway.planner.program import Program
from headway.schedule.simulate import simulate
from headway.units import format_bytes, format_seconds

WORTH_SAYING = 0.05
"""The part of a step that another way must save to be mentioned."""

STATES = MappingProxyType({0: "no optimizer states", 1: "one optimizer state", 2: "AdamW's states"})


def reasons(best: Priced, field: Field, program: Program) -> tuple[str, ...]:
    """Return the reasons for the chosen plan, the most important first."""
    setting = field.setting
    found = _why_layout(best, field)
    found += _why_micro_batches(best, field)
    found += _why_schedule(best, field)
    used, size = best.choice.data * best.choice.pipeline, setting.cluster.size
    if used < size:
        found.insert(0, f"{count(size - used, 'process', 'processes')} of {size} stay idle: no layout uses all of them")
    if best.choice.num_stages > 1:
        loads = [stage.forward + stage.backward for stage in best.stages]
        found.append(
            f"cut for the least bottleneck: stages of {format_seconds(min(loads))} to {format_seconds(max(loads))} "
            "for each micro-batch"
        )
    if best.why_codec is not None:
        found.insert(1 if best.codec != "fp32" else len(found), best.why_codec)
    if best.why_shared is not None:
        found.insert(1, best.why_shared)
    found += _would_share(best, setting, program)
    if setting.sync_every > 1:
        found.insert(
            1,
            f"copies meet every {setting.sync_every} steps, as asked: not the training of one process. Between, each "
            "trains on its own samples alone; then the mean of their changes moves the model, with Nesterov's momentum",
        )
    if program.times.estimated > 0.05:
        found.append(f"{program.times.estimated:.0%} of the time of calls is estimated ({program.times.origin})")
    found += program.graph.notes
    return tuple(found)


def _why_layout(best: Priced, field: Field) -> list[str]:
    setting, memory = field.setting, field.memory
    if best.choice.shard != "none" and best.choice.data > 1:
        return [_why_shared(best, field), *(_against(best, field, _sliced) if best.choice.pipeline == 1 else [])]
    if best.choice.pipeline == 1:
        fits = (
            f"a whole model fits: with gradients and {states_text(setting)} it needs {format_bytes(best.peak)}, "
            f"a rank has {format_bytes(memory)}"
        )
        return [fits, *_against(best, field, _sliced)]
    copies = field.every(lambda choice: not _sliced(choice))
    if not copies:
        return [
            f"{count(best.choice.num_stages, 'stage')}: copies of the whole model alone are left out by what is fixed"
        ]
    if any(c.peak <= memory for c in copies):
        against = _against(best, field, lambda choice: not _sliced(choice))
        return ["slices of the model are faster than copies alone", *against]
    least = min(copies, key=lambda c: c.peak)
    return [
        f"a whole model does not fit: with gradients and {states_text(setting)} it needs {format_bytes(least.peak)} "
        f"even {count(least.choice.micro_batch, 'sample')} at a time, a rank has {format_bytes(memory)}"
    ]


def _sliced(choice: Choice) -> bool:
    return choice.pipeline > 1


def _why_shared(best: Priced, field: Field) -> str:
    """Say what sharing out saves, against the leanest plan of the same layout that keeps everything everywhere."""
    memory, layout = format_bytes(field.memory), best.choice.family[:2]
    plain = field.by_bytes(lambda choice: choice.shard == "none" and choice.family[:2] == layout)
    what = f"when copies share out {best.choice.shard}"
    if best.choice.shard == "optimizer":
        what = "when copies share out the optimizer's states"
    least = next(plain, None)
    if least is None:
        return f"{what}, as asked, a rank needs {format_bytes(best.peak)} of {memory}"
    whole = "a whole model" if best.choice.num_stages == 1 else count(best.choice.num_stages, "stage")
    return (
        f"{whole} with gradients and {states_text(field.setting)} needs {format_bytes(least.peak)} even "
        f"{count(least.choice.micro_batch, 'sample')} at a time, a rank has {memory}; {what} it needs "
        f"{format_bytes(best.peak)}"
    )


def _would_share(best: Priced, setting: Setting, program: Program) -> list[str]:
    """Say what a step would take if plain copies on several hosts shared out states: half of the bytes cross later."""
    if best.choice.data == 1 or best.choice.shard != "none" or setting.cluster.hosts == 1 or setting.sync_every > 1:
        return []
    other = price(program, replace(best.choice, shard="optimizer"), best.cuts, setting)
    if other.peak > setting.cluster.device.memory_bytes or other.seconds > (1 - WORTH_SAYING) * best.seconds:
        return []
    return [
        f"a step would take {format_seconds(other.seconds)}, this {format_seconds(best.seconds)}, with "
        'fixed={"shard": "optimizer"}: each copy updates a part, and new values cross beside the next forward'
    ]


def _against(best: Priced, field: Field, which: Which) -> list[str]:
    other = next(field.by_seconds(which, fit=True), None)
    if other is None:
        return []
    what = count(other.choice.num_stages, "stage") if other.choice.pipeline > 1 else "copies"
    reduce = max(stage.reduce for stage in other.stages)
    spent = f" ({format_seconds(reduce)} of it reducing gradients)" if reduce > 0.05 * other.seconds else ""
    return [f"{what} would take {format_seconds(other.seconds)} a step{spent}, this {format_seconds(best.seconds)}"]


def _why_micro_batches(best: Priced, field: Field) -> list[str]:
    """Compare with the nearest smaller and larger number of micro-batches."""
    chosen, mine = best.choice.family, best.choice.num_micro_batches
    tried = {choice.num_micro_batches for choice in field.choices if choice.family == chosen}
    fewer, more = (number for number in tried if number < mine), (number for number in tried if number > mine)
    parts = []
    for number in (max(fewer, default=None), min(more, default=None)):
        for other in field.every(lambda c: c.family == chosen and c.num_micro_batches == number):  # noqa: B023
            if other.peak > field.memory:
                parts.append(f"{number} would need {format_bytes(other.peak)}")
            else:
                parts.append(f"{number} would take {other.seconds / best.seconds - 1:+.0%}")
    if not parts:
        return []
    return [f"{count(mine, 'micro-batch', 'micro-batches')} a copy: {', '.join(parts)}"]


def _why_schedule(best: Priced, field: Field) -> list[str]:
    """Compare with the best other schedule of the same layout and micro-batches."""
    chosen = best.choice
    if chosen.pipeline == 1:
        return []

    def other_order(c: Choice) -> bool:
        same = (c.data, c.pipeline, c.num_micro_batches) == (chosen.data, chosen.pipeline, chosen.num_micro_batches)
        return same and (c.schedule, c.chunks) != (chosen.schedule, chosen.chunks)

    other = next((one for fit in (True, False) for one in field.by_seconds(other_order, fit=fit)), None)
    if other is None:
        return []
    return [
        f"{chosen.schedule} takes {format_seconds(best.seconds)} and {format_bytes(best.peak)}, "
        f"{other.choice.schedule} {format_seconds(other.seconds)} and {format_bytes(other.peak)}"
    ]


def binding(best: Priced, field: Field) -> str:
    """Say what keeps a step from being faster: memory, the link, the bubble, or the device's speed.

    Memory binds when a candidate that does not fit would be more than 1 % faster. The other parts are shares of the
    step on the average rank: computing; waiting for links, by which the step shrinks if messages and reductions are
    free; updating; and the rest, the bubble.
    """
    other = next(field.by_seconds(lambda choice: True, fit=False, below=0.99 * best.seconds), None)
    parts = shares_of_step(best)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
    if other is not None:
        return (
            f"memory: {text_of(other.choice)} would take {format_seconds(other.seconds)} "
            f"but needs {format_bytes(other.peak)} ({shares})"
        )
    return f"{max(parts, key=lambda name: parts[name])} ({shares})"


def shares_of_step(best: Priced) -> dict[str, float]:
    """Return the parts of a step, on the average rank, of compute, link, bubble and update; they add up to 1."""
    schedule = lowered(best.choice.order, best.split, best.choice.data)
    costs = costs_of(best.stages, best.messages)
    free = {pair: 0.0 for pair in costs.message}
    ideal = replace(
        costs, message=free, reduce=(), static_bytes=(), activation_bytes=(), boundary_bytes={}, temporary_bytes=()
    )
    makespan = simulate(schedule, costs).makespan
    without_links = simulate(schedule, ideal)
    ranks = schedule.num_ranks
    compute = sum(without_links.busy(rank) for rank in range(ranks)) / ranks
    return {
        "compute": compute / best.seconds,
        "link": (makespan - without_links.makespan) / best.seconds,
        "bubble": (without_links.makespan - compute) / best.seconds,
        "update": (best.seconds - makespan) / best.seconds,
    }


def nothing_fits(field: Field) -> PlanError:
    """Return the refusal when no candidate fits: the smallest need, where, and what would help."""
    memory, setting = field.memory, field.setting
    least = next(field.by_bytes(lambda choice: True))
    stage = max(range(len(least.memory)), key=lambda index: least.memory[index])
    estimate = least.stages[stage]
    if estimate.build_bytes >= least.peak:
        why = f"the whole model exists once on each rank while it is built: {format_bytes(estimate.build_bytes)}"
    else:
        why = (
            f"{format_bytes(estimate.static_bytes)} for parameters, gradients, {states_text(setting)}, batch and "
            f"runtime, {format_bytes(estimate.activation_bytes)} for each micro-batch in flight"
        )
    remedies = [f"a device memory of {format_bytes(least.peak)} or more"]
    if estimate.build_bytes < least.peak:
        remedies.append("more processes (more stages)")
        if least.choice.micro_batch > 1:
            remedies.append("a smaller micro-batch")
        if setting.optimizer_states > 1:
            remedies.append("an optimizer with fewer states (SGD)")
    return PlanError(
        f"nothing fits: the leanest plan needs {format_bytes(least.peak)} on a rank, a rank has {format_bytes(memory)}",
        place=f"{text_of(least.choice)}, stage {stage}: {why}",
        remedy=", ".join(remedies),
    )


def states_text(setting: Setting) -> str:
    """Name the optimizer's states in a sentence."""
    return STATES.get(setting.optimizer_states, f"{setting.optimizer_states} optimizer states")


def text_of(choice: Choice) -> str:
    """Write a candidate in words."""
    return layout_text(choice)
