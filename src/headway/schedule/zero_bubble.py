"""Builders of zero-bubble schedules: the weight gradients wait until a rank would have nothing to do."""

from __future__ import annotations

from headway.schedule.action import Action, Kind, Schedule


def zero_bubble(num_stages: int, num_micro: int, *, ahead: int = 1) -> Schedule:
    """Return ZB-H1 (`ahead=1`) or ZB-H2 (`ahead=2`): 1F1B whose backward is split into I and W.

    Stage s of p runs `ahead` times p-1-s forwards ahead, and its weight gradients `ahead` times s micro-batches late.
    With 2p (H1) or 3p (H2) micro-batches or more a rank idles at most (p-1)(F+I-W) or (p-1)(F+I-2W) seconds between its
    first and last action, for W no longer than F and I. Activations kept: at most p, or 2p-1. Qi et al. 2023,
    arXiv:2401.10241. Raises ValueError for numbers below 1, and for `ahead` beside 1 and 2.
    """
    if num_stages < 1 or num_micro < 1 or ahead not in (1, 2):
        raise ValueError(
            "zero_bubble needs at least 1 stage and 1 micro-batch, and is 1 or 2 ahead, "
            f"got {num_stages}, {num_micro} and {ahead}"
        )
    orders = tuple(tuple(_delayed(stage, num_stages, num_micro, ahead)) for stage in range(num_stages))
    return Schedule("zero_bubble", num_stages, num_micro, orders, tuple(range(num_stages)))


def _delayed(stage: int, num_stages: int, num_micro: int, ahead: int) -> list[Action]:
    early, late = min(ahead * (num_stages - 1 - stage), num_micro), ahead * stage
    actions = [Action(Kind.F, stage, micro) for micro in range(early)]
    for micro in range(num_micro):
        if micro + early < num_micro:
            actions.append(Action(Kind.F, stage, micro + early))
        actions.append(Action(Kind.I, stage, micro))
        if micro >= late:
            actions.append(Action(Kind.W, stage, micro - late))
    return actions + [Action(Kind.W, stage, micro) for micro in range(max(num_micro - late, 0), num_micro)]


def zero_bubble_v(num_stages: int, num_micro: int) -> Schedule:
    """Return ZB-V: p = num_stages / 2 ranks, rank r holds stages r and 2p-1-r, so the last stage is beside the first.

    No idle seconds between a rank's first and last action when F, I and W take the same time and m >= 2p - 1, in the
    memory of 1F1B: 2p activations of half-size stages. Qi et al. 2024, arXiv:2405.15362. Raises ValueError unless
    num_stages is even and both are at least 1.
    """
    if num_stages < 2 or num_stages % 2 or num_micro < 1:
        raise ValueError(
            f"zero_bubble_v needs an even number of stages and at least 1 micro-batch, got {num_stages} and {num_micro}"
        )
    num_ranks = num_stages // 2
    orders = tuple(
        # Built for as many micro-batches as fill the pipeline; those that do not exist drop out.
        tuple(action for action in _vee(rank, num_ranks, max(num_micro, 2 * num_ranks - 1)) if action.micro < num_micro)
        for rank in range(num_ranks)
    )
    placement = tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    return Schedule("zero_bubble_v", num_stages, num_micro, orders, placement)


def _vee(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """Give the order of one rank: down the V is its first stage, up its second."""
    down, up = rank, 2 * num_ranks - 1 - rank
    done: dict[tuple[Kind, int], int] = {}
    actions: list[Action] = []

    def take(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            micro = done.get((kind, stage), 0)
            done[kind, stage] = micro + 1
            actions.append(Action(kind, stage, micro))

    F, B, W = Kind.F, Kind.I, Kind.W
    for _ in range(2 * (num_ranks - rank) - 1):
        take(down, F)
    for _ in range(rank):
        take(up, F)
        take(down, F)
    for _ in range(num_ranks - rank):
        take(up, F, B, W)
    while done[F, up] < done[F, down] or done[F, down] < num_micro:
        if done[F, down] < num_micro:
            take(down, F)
        take(down, B, W)
        take(up, F, B, W)
    for _ in range(rank):
        take(down, B)
        take(up, B)
    for _ in range(num_ranks - rank):
        take(down, B, W)
    for stage in (up, down):
        while done.get((W, stage), 0) < done[B, stage]:
            take(stage, W)
    return actions
