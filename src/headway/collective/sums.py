"""Sums: how buckets of float32 are summed over a group when they are not sent as they are, by the codec's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from headway.collective.bucket import Slot
from headway.collective.codec import CODECS
from headway.collective.low_rank import LowRank
from headway.collective.two_shot import Reduction, TwoShot
from headway.collective.world import Group, World
from headway.planner.wire import LOW_RANK, low_rank


class Sums(Protocol):
    """Sums float32 [n] in place, in the order of `start`, beside backward; every rank ends with the same bits.

    `block` values are best kept together. With `feedback` what is lost is kept in `residual` [n], and added first.
    """

    feedback: bool
    block: int

    def start(
        self, values: torch.Tensor, awaited: str, *, residual: torch.Tensor | None, slots: Sequence[Slot]
    ) -> Reduction:
        """Begin to sum `values`, in which the parameters of `slots` lie."""
        ...

    def close(self) -> None:
        """End, after what was started."""
        ...


def make_sums(world: World, group: Group, codec: str) -> Sums:
    """Return what sums with a codec that is not exact. Every member of the group makes it."""
    rank = low_rank(codec)
    return TwoShot(world, group, CODECS[codec]) if rank is None else LowRank(world, group, rank)


def is_exact(codec: str) -> bool:
    """Tell whether a codec changes nothing. Raises ValueError when there is none of that name."""
    if low_rank(codec) is not None:
        return False
    if codec not in CODECS:
        raise ValueError(f"no codec {codec!r}: one of {', '.join(CODECS)}, {LOW_RANK}, {LOW_RANK}:RANK")
    return CODECS[codec].exact
