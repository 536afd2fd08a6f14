"""Adds sends, receives and reduces to a schedule of computations, along the edges of the model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from headway.errors import PlanError
from headway.schedule.action import BACKWARDS, Action, Edge, Kind, Schedule


def lower(schedule: Schedule, edges: Collection[Edge], *, reduce: bool = True) -> Schedule:
    """Return the schedule with its messages and reductions.

    `edges` are the (source stage, target stage) between which values pass, skip connections included; the source
    comes before the target. For each edge whose stages are on different ranks:

        source rank   F  SEND          ...          RECV_GRAD  B
        target rank        RECV  F     ...     B  SEND_GRAD

    A SEND follows at once the F that makes the value, nearest target first, and does not wait. A RECV stands right
    before the F that uses it: as late as is correct, so an executor gains by posting it earlier. Gradients likewise,
    around B or I; the backward of a stage waits for the gradients of all its targets. REDUCE follows the last B or W
    of its stage. The result can finish when `schedule` could: along a chain of stages every edge only repeats, or
    spares, an order that the schedule kept already.

    Raises PlanError when the schedule was lowered before, or an edge does not lead to a later stage.
    """
    if schedule.edges is not None:
        raise PlanError(f"schedule {schedule.name!r} has its messages already", remedy="lower a schedule once")
    for source, target in edges:
        if not 0 <= source < target < schedule.num_stages:
            raise PlanError(
                f"an edge from stage {source} to stage {target}: values pass to later stages only",
                place=f"schedule {schedule.name!r} with stages 0..{schedule.num_stages - 1}",
            )
    plan = replace(schedule, edges=tuple(sorted(set(edges))))
    last = {a.stage: a for actions in schedule.ranks for a in actions if a.kind in BACKWARDS} if reduce else {}
    far = {stage: _far(plan, stage) for stage in range(plan.num_stages)}
    ranks = tuple(
        tuple(step for action in actions for step in _around(action, *far[action.stage], last.get(action.stage)))
        for actions in schedule.ranks
    )
    return replace(plan, ranks=ranks)


def _far(plan: Schedule, stage: int) -> tuple[list[int], list[int]]:
    """List the sources and targets of a stage that are on other ranks."""
    sources = [source for source in plan.sources.get(stage, ()) if not plan.local(source, stage)]
    return sources, [target for target in plan.targets.get(stage, ()) if not plan.local(target, stage)]


def _around(action: Action, sources: list[int], targets: list[int], last: Action | None) -> list[Action]:
    """Give the action with the messages before and after it, and the stage's REDUCE after its last backward."""
    kind, stage, micro = action.kind, action.stage, action.micro
    steps = [action]
    if kind is Kind.F:
        before = [Action(Kind.RECV, stage, micro, source) for source in sources]
        steps = [*before, action, *(Action(Kind.SEND, stage, micro, target) for target in targets)]
    elif kind is Kind.B or kind is Kind.I:
        before = [Action(Kind.RECV_GRAD, stage, micro, target) for target in reversed(targets)]
        steps = [*before, action, *(Action(Kind.SEND_GRAD, stage, micro, source) for source in reversed(sources))]
    if action == last:
        steps.append(Action(Kind.REDUCE, stage, 0))
    return steps
