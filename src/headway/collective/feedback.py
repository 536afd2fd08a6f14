"""Feedback: what a codec lost of a parameter's gradients is kept under its name, and added to its next gradient.

A rank keeps what its own messages lost; the sum over the ranks is what the wire owes. So a checkpoint can be loaded by
another number of ranks: each takes an equal part of the sum. Seide et al. 2014, "1-bit Stochastic Gradient Descent".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from headway.collective.bucket import Bucket


def lay(buckets: Iterable[Bucket], kept: Mapping[str, torch.Tensor], *, everywhere: bool) -> None:
    """Give the float32 buckets memory for what was lost, and put what is `kept` there by name.

    With `everywhere` each has it, else only those for which something is kept.
    """
    for bucket in buckets:
        names = [slot.name for slot in bucket.slots if slot.name in kept]
        first = bucket.slots[0].parameter if bucket.slots else None
        if first is None or first.dtype != torch.float32 or not (everywhere or names):
            bucket.residual = None
            continue
        count = first.numel() if bucket.values is None else bucket.values.numel()
        bucket.residual = torch.zeros(count, device=first.device)
        for slot in bucket.slots:
            if slot.name in kept:
                slot.place_in(bucket.residual).copy_(kept[slot.name])


def lost_by_name(buckets: Iterable[Bucket]) -> dict[str, torch.Tensor]:
    """Return what was lost of each parameter's gradients, by name, in the parameter's shape."""
    return {
        slot.name: slot.place_in(bucket.residual)
        for bucket in buckets
        if bucket.residual is not None
        for slot in bucket.slots
    }
