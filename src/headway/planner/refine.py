"""Refine: a schedule searched for the costs of the best plan, where it is shorter than every named one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from headway.planner.choice import Setting
from headway.planner.estimate import costs_of, reduces
from headway.planner.price import SPLIT_SECONDS, Estimate, Priced, simulated
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
    tries = TRIES if asked else QUICK_TRIES
    # Splitting a backward has a price, which the stages of a plan without splits do not have in them.
    kinds = [(0.0, True)] if choice.splits else [(0.0, False), (SPLIT_SECONDS, True)]
    found = [_searched(best, setting, passing, split, tries) for passing, split in kinds]
    result, bound = min(found, key=lambda pair: pair[0].seconds)
    if not asked and result.seconds >= best.seconds * (1 - worth):
        return best, None
    return result, (
        f"the order is searched for these costs: a step takes {format_seconds(result.seconds)}, "
        f"with {choice.schedule} {format_seconds(best.seconds)}, in no order less than {format_seconds(bound)}"
    )


def _searched(best: Priced, setting: Setting, passing: float, split: bool, tries: int) -> tuple[Priced, float]:
    """Price the plan under a searched schedule; `passing` seconds are added to each call. Give its lower bound too."""
    choice = best.choice
    stages = tuple(replace(stage, forward=stage.forward + passing * stage.num_calls) for stage in best.stages)
    # What reads an order again knows no edges: it takes each stage to get something from the one before.
    edges = {*best.split.edges, *pairwise(range(len(stages)))}
    found = searched(
        costs_of(stages, best.messages),
        choice.order.placement,
        choice.num_micro_batches,
        limits=[setting.cluster.device.memory_bytes] * choice.pipeline,
        split=split,
        edges=tuple(sorted(edges)),
        reduce=reduces(best.split, choice.data),
        tries=tries,
    )
    own = replace(choice, schedule=SEARCHED, given=write_rows(found.schedule))
    result = simulated(Estimate(own, best.cuts, best.split, stages, best.messages))
    changed = replace(best, choice=own, stages=stages, seconds=result.seconds, memory=result.memory)
    return changed, result.seconds - found.makespan + found.bound
