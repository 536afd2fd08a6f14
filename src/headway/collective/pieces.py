"""Pieces: which rank sums which part of a tensor, what a message loses, and the sum in one round by collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headway.collective.codec import Codec
from headway.collective.world import Group, World


def part_of(values: torch.Tensor, owner: int, num_ranks: int, block: int) -> torch.Tensor:
    """Return the piece of `values` [n] that the group's rank number `owner` sums; whole blocks but for the last."""
    each = -(-values.numel() // (num_ranks * block)) * block
    return values[min(owner * each, values.numel()) : (owner + 1) * each]


def lost(
    codec: Codec, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Overwrite `residual` by what `message` lost of `values`; 0 where either is not finite, as it would stay so."""
    codec.decode(message, residual, scratch)
    torch.sub(values, residual, out=residual)
    residual.nan_to_num_(0.0, 0.0, 0.0)


def by_collectives(
    world: World,
    group: Group,
    codec: Codec,
    values: torch.Tensor,
    awaited: str = "a sum",
    residual: torch.Tensor | None = None,
) -> None:
    """Sum `values` in place in one round, by an all-to-all and an all-gather: for devices whose messages have no tags.

    The same sums as in rounds, where the codec's scales do not depend on the size of a message (not so for fp16).
    """
    assert group.index is not None
    peers = world.others(group)
    if residual is not None:
        values.add_(residual)
    parts = [part_of(values, owner, group.size, codec.block) for owner in range(group.size)]
    owed = [None if residual is None else part_of(residual, o, group.size, codec.block) for o in range(group.size)]
    size = -(-codec.wire_bytes(parts[0].numel()) // 16) * 16
    mine = parts[group.index]
    scratch = torch.empty(parts[0].numel(), device=values.device)
    out = torch.zeros(group.size, size, dtype=torch.uint8, device=values.device)
    into = torch.empty_like(out)
    for owner, part in enumerate(parts):
        if owner != group.index and part.numel():
            message = out[owner, : codec.wire_bytes(part.numel())]
            codec.encode(part, message, scratch)
            if (remains := owed[owner]) is not None:
                lost(codec, part, message, remains, scratch)
    call = lambda: dist.all_to_all_single(into, out, group=group.handle, async_op=True)  # noqa: E731
    world.begin(call, awaited, peers, (into, out)).wait()
    result = torch.zeros(size, dtype=torch.uint8, device=values.device)
    if mine.numel():
        length = codec.wire_bytes(mine.numel())
        for step in range(1, group.size):
            codec.accumulate(into[(group.index + step) % group.size, :length], mine, scratch)
        codec.encode(mine, result[:length], scratch)
        if (remains := owed[group.index]) is not None:
            lost(codec, mine, result[:length], remains, scratch)
    flat = into.view(-1)
    call = lambda: dist.all_gather_single(flat, result, group=group.handle, async_op=True)  # noqa: E731
    world.begin(call, awaited, peers, (into, result)).wait()
    for owner, part in enumerate(parts):
        if part.numel():
            codec.decode(into[owner, : codec.wire_bytes(part.numel())], part, scratch)
