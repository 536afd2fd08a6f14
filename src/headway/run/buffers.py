"""Buffers: what a model changes without gradients, made the same on all copies as if one process had done it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headway.collective.world import Group, World
from headway.graph.weights import state_of

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Before:
    """The changed buffers of one stage as they were before a step."""

    values: Mapping[str, torch.Tensor]

    @staticmethod
    def of(model: nn.Module, names: Sequence[str]) -> Before:
        """Keep copies of the buffers with these names."""
        table = state_of(model)
        return Before({name: table[name].detach().clone() for name in names if name in table})


def agree(world: World, group: Group, model: nn.Module, before: Before) -> None:
    """Make the changed buffers equal on all copies of a stage.

    The result is that of one process running the micro-batches of copy 0, then of copy 1, and so on. Batch norm keeps
    r <- (1 - f) r + f b for each micro-batch's b; from r, k micro-batches of one copy make a r + c with
    a = (1 - f)^k, and the copies' maps are composed in order (with momentum None: the mean over all micro-batches).
    Counters (integers) add up. Any other buffer is that of copy 0.
    """
    if group.size == 1 or not before.values:
        return
    assert group.index is not None
    now = state_of(model)
    momentum = _momenta(model)
    counters = [name for name, old in before.values.items() if not old.is_floating_point()]
    steps = torch.zeros(group.size, len(counters), dtype=torch.int64)
    for column, name in enumerate(counters):
        steps[group.index, column] = int((now[name] - before.values[name]).sum()) if now[name].numel() == 1 else 0
    if counters:
        world.all_reduce(steps, group)
    pieces, rests = {}, {}
    for name, old in before.values.items():
        if name in counters:
            continue
        counter = f"{name.rpartition('.')[0]}.num_batches_tracked".lstrip(".")
        known = name in momentum and counter in counters
        counts = steps[:, counters.index(counter)] if known else None
        start = int(before.values[counter]) if counts is not None else 0
        pieces[name], rests[name] = _piece(now[name], old, group.index, counts, momentum.get(name), start)
    if pieces:
        flat = torch.cat([piece.reshape(-1).double() for piece in pieces.values()])
        world.all_reduce(flat, group)
        for (name, piece), part in zip(pieces.items(), flat.split([p.numel() for p in pieces.values()]), strict=True):
            now[name].copy_((part.reshape(piece.shape) + rests[name].double()).to(piece.dtype))
    for column, name in enumerate(counters):
        if now[name].numel() == 1:
            now[name].copy_(before.values[name] + int(steps[:, column].sum()))


def _momenta(model: nn.Module) -> dict[str, float | None]:
    table: dict[str, float | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.track_running_stats:
            for buffer in ("running_mean", "running_var"):
                table[f"{name}.{buffer}" if name else buffer] = module.momentum
    return table


def _piece(
    now: torch.Tensor, old: torch.Tensor, index: int, counts: torch.Tensor | None, momentum: float | None, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what this copy adds to the common value, and what is added once."""
    if counts is None:
        return (now if index == 0 else torch.zeros_like(now)), torch.zeros_like(now)
    mine, total = int(counts[index]), int(counts.sum())
    if momentum is None:
        whole = max(start + total, 1)
        return (now * (start + mine) - old * start) / whole, old * (start / whole)
    keep = 1.0 - momentum
    later = int(counts[index + 1 :].sum())
    return (now - keep**mine * old) * keep**later, old * keep**total
