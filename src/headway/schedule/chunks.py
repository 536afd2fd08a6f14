"""Builders of schedules whose ranks hold several stages, dealt round: stage s is on rank s % p."""

from __future__ import annotations

from headway.schedule.action import Action, Kind, Schedule


def interleaved(num_stages: int, num_micro: int, *, chunks: int = 2) -> Schedule:
    """Return interleaved 1F1B: p = num_stages / chunks ranks, each holding `chunks` stages.

    Micro-batches go through in groups of p: all of a group through a rank's first stage, then through its second, ...;
    the last group may be smaller. Bubble (p-1)/(m v+p-1) for v chunks where p divides m micro-batches, and otherwise
    no longer than for the next m that p divides.
    Narayanan et al. 2021, arXiv:2104.04473. Raises ValueError unless chunks divides num_stages and all are at least 1.
    """
    num_ranks = _ranks("interleaved", num_stages, num_micro, chunks)
    groups = -(-num_micro // num_ranks)
    orders = [
        # Built for whole groups; leaving micro-batches out of an order that can finish leaves one that can finish.
        [action for action in _alternating(rank, num_ranks, groups, chunks) if action.micro < num_micro]
        for rank in range(num_ranks)
    ]
    return _dealt_round("interleaved", num_stages, num_micro, num_ranks, orders)


def _alternating(rank: int, num_ranks: int, groups: int, chunks: int) -> list[Action]:
    """Give a rank's forwards and backwards in turn, after those forwards that fill the pipeline."""
    turns = [
        (chunk, group * num_ranks + micro)
        for group in range(groups)
        for chunk in range(chunks)
        for micro in range(num_ranks)
    ]
    forwards = [Action(Kind.F, chunk * num_ranks + rank, micro) for chunk, micro in turns]
    backwards = [Action(Kind.B, (chunks - 1 - chunk) * num_ranks + rank, micro) for chunk, micro in turns]
    distance = num_ranks - 1 - rank
    ahead = min(distance if chunks == 1 else (chunks - 1) * num_ranks + 2 * distance, len(turns))
    steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *steady, *backwards[len(turns) - ahead :]]


def breadth_first(num_stages: int, num_micro: int, *, chunks: int = 2) -> Schedule:
    """Return the breadth-first schedule: all micro-batches through a rank's first stage, its second, ..., and back.

    Bubble (p-1)/(m v+p-1) for p ranks, v chunks and m >= p micro-batches; every stage keeps m activations, and each
    stage's gradients are ready early, all at once. Lamy-Poirier 2022, arXiv:2211.05953. Raises ValueError unless chunks
    divides num_stages and all are at least 1.
    """
    num_ranks = _ranks("breadth_first", num_stages, num_micro, chunks)
    orders = [
        [Action(Kind.F, stage, micro) for stage in range(rank, num_stages, num_ranks) for micro in range(num_micro)]
        + [
            Action(Kind.B, stage, micro)
            for stage in reversed(range(rank, num_stages, num_ranks))
            for micro in range(num_micro)
        ]
        for rank in range(num_ranks)
    ]
    return _dealt_round("breadth_first", num_stages, num_micro, num_ranks, orders)


def _ranks(name: str, num_stages: int, num_micro: int, chunks: int) -> int:
    if num_stages < 1 or num_micro < 1:
        raise ValueError(f"{name} needs at least 1 stage and 1 micro-batch, got {num_stages} and {num_micro}")
    if chunks < 1 or num_stages % chunks:
        raise ValueError(f"{name} needs {chunks} stages on each rank, which does not divide {num_stages} stages")
    return num_stages // chunks


def _dealt_round(name: str, num_stages: int, num_micro: int, num_ranks: int, orders: list[list[Action]]) -> Schedule:
    placement = tuple(stage % num_ranks for stage in range(num_stages))
    return Schedule(name, num_stages, num_micro, tuple(map(tuple, orders)), placement)
