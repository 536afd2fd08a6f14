"""Builders: functions that return a Schedule for a number of stages and of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.schedule.action import Action, Kind, Schedule


def gpipe(num_stages: int, num_micro: int) -> Schedule:
    """Return GPipe's schedule: all forwards, then all backwards, both in the order of the micro-batches.

        rank 0  F0  F1  F2  .   .   B0  B1  B2
        rank 1  .   F0  F1  F2  B0  B1  B2  .        (two stages; three micro-batches)

    Bubble (p-1)/(m+p-1) for p equal stages, m micro-batches; every stage keeps m activations. Huang et al. 2019,
    arXiv:1811.06965. Raises ValueError unless both numbers are at least 1.
    """
    micros = range(num_micro)
    return _one_stage_a_rank(
        "gpipe",
        num_stages,
        num_micro,
        lambda stage: [*_each(Kind.F, stage, micros), *_each(Kind.B, stage, micros)],
    )


def one_f_one_b(num_stages: int, num_micro: int) -> Schedule:
    """Return 1F1B: stage s runs p-1-s forwards ahead, then one forward and one backward in turn.

        rank 0  F0  F1  .   B0  F2  B1  .   B2
        rank 1  .   F0  B0  F1  B1  F2  B2  .        (two stages; three micro-batches)

    Bubble (p-1)/(m+p-1) as GPipe, but stage s keeps only min(p-s, m) activations. Narayanan et al. 2021,
    arXiv:2104.04473 (PipeDream-Flush). Raises ValueError unless both numbers are at least 1.
    """

    def actions(stage: int) -> list[Action]:
        ahead = min(num_stages - 1 - stage, num_micro)
        steady = [
            action
            for micro in range(ahead, num_micro)
            for action in (Action(Kind.F, stage, micro), Action(Kind.B, stage, micro - ahead))
        ]
        warm_up, cool_down = range(ahead), range(num_micro - ahead, num_micro)
        return [*_each(Kind.F, stage, warm_up), *steady, *_each(Kind.B, stage, cool_down)]

    return _one_stage_a_rank("one_f_one_b", num_stages, num_micro, actions)


def forward_only(num_stages: int, num_micro: int, placement: Sequence[int] | None = None) -> Schedule:
    """Return the schedule of evaluation and prediction: forwards in the order of the micro-batches, no backward.

    `placement[stage]` is the rank of a stage, by default its own number. Of what a rank could do next it does that
    which is fewest steps from the start. Bubble (p-1)/(m+p-1) for p equal stages, one a rank. Raises ValueError unless
    both numbers are at least 1.
    """
    if placement is None:
        return _one_stage_a_rank(
            "forward_only", num_stages, num_micro, lambda stage: _each(Kind.F, stage, range(num_micro))
        )
    steps = sorted((micro + stage, micro, stage) for stage in range(num_stages) for micro in range(num_micro))
    ranks = tuple(
        tuple(Action(Kind.F, stage, micro) for _, micro, stage in steps if placement[stage] == rank)
        for rank in range(max(placement) + 1)
    )
    return Schedule("forward_only", num_stages, num_micro, ranks, tuple(placement))


def _one_stage_a_rank(name: str, num_stages: int, num_micro: int, actions: Callable[[int], list[Action]]) -> Schedule:
    """Return the schedule in which rank s does `actions(s)`."""
    if num_stages < 1 or num_micro < 1:
        raise ValueError(f"{name} needs at least 1 stage and 1 micro-batch, got {num_stages} and {num_micro}")
    ranks = tuple(tuple(actions(stage)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_micro, ranks, tuple(range(num_stages)))


def _each(kind: Kind, stage: int, micros: range) -> list[Action]:
    return [Action(kind, stage, micro) for micro in micros]
