"""Equal V: a step of 8 ranks with two equal stages each, whose optimum, 65.0 s, is known by proof."""

from __future__ import annotations

from headway.schedule.costs import Costs
from headway.schedule.work import Work, work_of


def equal_v() -> Work:
    """Give the work of 8 micro-batches; forwards and input gradients take 1 s, weights' and messages 0.6 s."""
    stages = 16
    costs = Costs(
        (1.0,) * stages,
        (1.6,) * stages,
        input=(1.0,) * stages,
        weight=(0.6,) * stages,
        message={(s, s + 1): 0.6 for s in range(stages - 1)},
    )
    placement = tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return work_of(costs, placement, 8, split=range(stages))
