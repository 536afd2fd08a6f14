"""Refine: a schedule searched for the costs of the best plan, where it is shorter than every named one."""

from __future__ import annotations

from dataclasses import replace

from headway.planner.estimate import costs_of, reduces
from headway.planner.price import PASS_SECONDS, Priced, Setting, priced
from headway.schedule.exchange import write_rows
from headway.schedule.searched import searched
from headway.units import format_seconds

SEARCHED = "searched"
"""What a plan calls a schedule that was searched for its own costs; its order is kept in the plan."""

MOST_ACTIONS = 2048
"""Without being asked, a schedule is searched for at most so many stages x micro-batches."""

TRIES, QUICK_TRIES = 400, 60
"""Random changes that a search may try: when it was asked for, and when it was not."""


def refined(best: Priced, setting: Setting, *, asked: bool, worth: float) -> tuple[Priced, str | None]:
    """Search a schedule for the best candidate's stages and messages; return it, with the reason, when it is shorter.

    It has to save more than the part `worth` of a step; when it was asked for (fixed={"schedule": "searched"}) it is
    taken in any case.
    """
    choice = best.choice
    actions = choice.num_stages * choice.num_micro_batches
    if choice.pipeline == 1 or choice.given or (not asked and actions > MOST_ACTIONS):
        return best, None
    # Splitting a backward has a price, which the stages of a plan without splits do not have in them.
    passing = 0.0 if choice.splits else PASS_SECONDS
    stages = tuple(replace(stage, forward=stage.forward + passing * stage.num_calls) for stage in best.stages)
    found = searched(
        costs_of(stages, best.messages),
        choice.order.placement,
        choice.num_micro_batches,
        limits=[setting.cluster.device.memory_bytes] * choice.pipeline,
        edges=best.split.edges,
        reduce=reduces(best.split, choice.data),
        tries=TRIES if asked else QUICK_TRIES,
    )
    own = replace(choice, schedule=SEARCHED, given=write_rows(found.schedule))
    if not own.splits:
        stages = best.stages
    result = priced(own, best.cuts, best.split, stages, best.messages)
    result = replace(best, choice=own, stages=stages, seconds=result.seconds, memory=result.memory)
    if not asked and result.seconds >= best.seconds * (1 - worth):
        return best, None
    return result, (
        f"the order is searched for these costs: {format_seconds(found.makespan)} for a schedule, "
        f"{choice.schedule} takes {format_seconds(best.seconds - result.seconds + found.makespan)}, "
        f"and no order of this work less than {format_seconds(found.bound)}"
    )
