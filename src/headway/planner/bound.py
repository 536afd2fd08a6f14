"""Bound: seconds that a candidate's step takes at least, wherever it is cut, known before it is cut and simulated."""

from __future__ import annotations

from headway.planner.price import Choice, Program, Setting


def least_seconds(program: Program, choice: Choice, setting: Setting) -> float:
    """Return a lower bound on the makespan of a candidate's schedule, over all cuts.

    A rank works m times through its load w_r. With one stage a rank and whole backwards it also waits while the first
    micro-batch comes through the stages before, and after its last backward they are still to do theirs:
    T >= m w_r + sum of w_s for s < r. The least T for loads that add up to W makes all of these equal, so that
    T = W / (1 - (1 - 1/m)^p). For other schedules T >= m W / p.
    """
    share = -(-setting.global_batch // choice.data)
    count, ranks = choice.num_micro_batches, choice.pipeline
    work = sum(program.weights) * share / (count * program.graph.samples)
    if choice.chunks > 1 or choice.splits:
        return count * work / ranks
    return work / (1 - (1 - 1 / count) ** ranks)
