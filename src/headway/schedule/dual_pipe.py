"""Builder of DualPipeV: a V of stages, forwards of one half of the rank beside backwards of the other."""

from __future__ import annotations

from headway.schedule.action import Action, Kind, Schedule


def dual_pipe_v(num_stages: int, num_micro: int) -> Schedule:
    """Return DualPipeV: p = num_stages / 2 ranks, rank r holds stages r and 2p-1-r: the last stage is beside the first.

    In its middle each forward stands beside a backward of another micro-batch, so that the messages of one pass beside
    the work of the other. Backwards are whole there. They are split into I and W at the start, where that shortens the
    way, and at the end, where weight gradients fill the gaps.
    A rank idles (p-1)(F+I-W) seconds with m >= 2p micro-batches and W <= I <= F <= I+W, and keeps at most 2p+1
    activations of half-size stages. DeepSeek-AI 2024, arXiv:2412.19437, in the V form of the code published with it.
    Raises ValueError unless num_stages is even and both are at least 1.
    """
    if num_stages < 2 or num_stages % 2 or num_micro < 1:
        raise ValueError(
            f"dual_pipe_v needs an even number of stages and at least 1 micro-batch, got {num_stages} and {num_micro}"
        )
    orders = tuple(
        # Built for as many micro-batches as fill the pipeline; those that do not exist drop out.
        tuple(
            action for action in _order(rank, num_stages // 2, max(num_micro, num_stages)) if action.micro < num_micro
        )
        for rank in range(num_stages // 2)
    )
    placement = tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    return Schedule("dual_pipe_v", num_stages, num_micro, orders, placement)


def _order(rank: int, num_ranks: int, num_micro: int) -> list[Action]:
    """Give the order of one rank: down the V is its first stage, up its second."""
    down, up = rank, 2 * num_ranks - 1 - rank
    after = num_ranks - 1 - rank
    done = {(kind, stage): 0 for kind in (Kind.F, Kind.B) for stage in (down, up)}
    actions: list[Action] = []
    later: list[Action] = []

    def forward(stage: int) -> None:
        actions.append(Action(Kind.F, stage, done[Kind.F, stage]))
        done[Kind.F, stage] += 1

    def backward(stage: int, *, split: bool = False) -> None:
        micro = done[Kind.B, stage]
        actions.append(Action(Kind.I if split else Kind.B, stage, micro))
        done[Kind.B, stage] += 1
        if split:
            later.append(Action(Kind.W, stage, micro))

    def weight() -> None:
        if later:
            actions.append(later.pop(0))

    for _ in range(2 * after):
        forward(down)
    for _ in range(rank + 1):
        forward(down)
        forward(up)
    for _ in range(after):
        backward(up, split=True)
        weight()
        forward(up)
    for _ in range(num_micro - num_ranks - after):
        forward(down)
        backward(up)
        forward(up)
        backward(down)
    for _ in range(after):
        backward(up)
        forward(up)
        backward(down)
    half = (rank + 1) // 2
    for turn in range(rank + 1):
        # From the middle on weight gradients wait, one backward later on even ranks.
        backward(up, split=turn > half or (turn == half and rank % 2 == 1))
        backward(down, split=turn >= half)
    for _ in range(after):
        weight()
        backward(down, split=True)
    while later:
        weight()
    return actions
