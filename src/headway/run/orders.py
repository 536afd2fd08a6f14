"""Orders: what this rank and all others do in a step: sizes of micro-batches, actions, when gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.planner.plan import Plan, micro_batches, shares
from headway.run.execute import sums_after
from headway.run.microbatch import Share
from headway.schedule.action import Action, Schedule
from headway.schedule.build import forward_only
from headway.schedule.check import check
from headway.schedule.lower import lower

EVERY_BACKWARD = ("gradients", "parameters")
"""Under these values of `shard` gradients are summed over the copies after each micro-batch, not once a step."""


@dataclass(frozen=True)
class Order:
    """A schedule, and after which of a rank's actions the gradients of which parameters are summed over copies."""

    schedule: Schedule
    last: Mapping[int, frozenset[str]]


@dataclass(frozen=True)
class Orders:
    """The orders of a plan for pipeline rank `line`; each is built, and checked, when first asked for.

    `placement[stage]` is the pipeline rank that holds a stage.
    """

    plan: Plan
    line: int
    placement: tuple[int, ...]
    known: dict[tuple[int, bool], Order] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(plan: Plan, line: int) -> Orders:
        """Make the orders of a plan."""
        return Orders(plan, line, plan.order_for(plan.num_micro_batches).placement)

    def sizes(self, share: Share, samples: int) -> tuple[int, ...]:
        """Give the sizes of a copy's micro-batches: as planned, or of at most the planned size for another batch."""
        if samples == 0:
            return ()
        plan = self.plan
        each = shares(share.total, plan.data) if plan.shard == "parameters" else (samples,)
        count = plan.num_micro_batches if share.total == plan.global_batch else -(-max(each) // plan.micro_batch)
        count = max(1, min(count, samples, *each))  # with sharded parameters the copies have equally many
        return micro_batches(samples, count, max(plan.micro_batch, -(-samples // count)))

    def order(self, count: int, train: bool) -> Order:
        """Give the order for so many micro-batches. Raises PlanError for one that would never finish."""
        key = (count, train)
        if key not in self.known:
            plan = self.plan
            assert plan.split is not None
            if train:
                built = plan.order_for(count)
            else:
                built = forward_only(plan.split.num_stages, count, self.placement)
            lowered = lower(built, plan.split.edges, reduce=train and plan.data > 1)
            check(lowered)  # what would deadlock is refused before it runs
            each = plan.shard in EVERY_BACKWARD
            self.known[key] = Order(lowered, sums_after(lowered, self.line, plan.split, every_backward=each))
        return self.known[key]

    def actions(self, share: Share, train: bool) -> list[tuple[Action, ...]]:
        """List the actions of each rank of the world; copies may have different numbers of micro-batches."""
        per_copy = []
        for samples in shares(share.total, self.plan.data):
            sizes = self.sizes(share, samples)
            per_copy.append(self.order(len(sizes), train).schedule.ranks if sizes else ((),) * self.plan.pipeline)
        return [ranks[line] for line in range(self.plan.pipeline) for ranks in per_copy]
