"""resized: a schedule's order for another number of micro-batches."""

from __future__ import annotations

from dataclasses import replace

from headway.schedule.action import Action, Kind, Schedule


def resized(schedule: Schedule, num_micro: int) -> Schedule:
    """Return the order for `num_micro` micro-batches: rounds of the whole schedule, the last one cut short.

        rank 0  F0  F1  .   B0  B1          rank 0  F0  F1  .   B0  B1  F2  .   B2
        rank 1  .   F0  B0  F1  B1          rank 1  .   F0  B0  F1  B1  .   F2  B2   (two micro-batches; three)

    Leaving micro-batches out of an order that can finish leaves one that can, and no rank keeps more activations than
    before. Raises ValueError for fewer than one micro-batch, and for a schedule that has its messages already.
    """
    if num_micro < 1 or schedule.edges is not None:
        raise ValueError(f"{num_micro} micro-batches of a schedule {'with' if schedule.edges else 'without'} messages")
    if num_micro == schedule.num_micro:
        return schedule
    rounds = range(0, num_micro, schedule.num_micro)
    ranks = tuple(
        tuple(
            Action(action.kind, action.stage, action.micro + first)
            for first in rounds
            for action in actions
            if action.micro + first < num_micro and action.kind is not Kind.REDUCE
        )
        for actions in schedule.ranks
    )
    return replace(schedule, num_micro=num_micro, ranks=ranks)
