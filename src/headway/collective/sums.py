"""Sums: how buckets of float32 are summed over a group when they are not sent as they are, by the codec's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from headway.collective.bucket import Slot
from headway.collective.codec import CODECS
from headway.collective.hierarchy import Hierarchy
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


def make_sums(world: World, group: Group, codec: str, neighbours: int = 1) -> Sums | None:
    """Return what sums with a codec, host by host when there are several `neighbours` on each.

    None: nothing is better than a plain all-reduce. Every member of the group makes it.
    """
    rank = low_rank(codec)
    if rank is not None:
        return LowRank(world, group, rank)  # its messages are too small to be worth a second way
    coded = None if is_exact(codec) else CODECS[codec]
    if neighbours > 1 and (coded is not None or world.device.type == "cpu"):  # NCCL goes host by host itself
        return Hierarchy(world, group, neighbours, coded)
    return None if coded is None else TwoShot(world, group, coded)


def is_exact(codec: str) -> bool:
    """Tell whether a codec changes nothing. Raises ValueError when there is none of that name."""
    if low_rank(codec) is not None:
        return False
    if codec not in CODECS:
        raise ValueError(f"no codec {codec!r}: one of {', '.join(CODECS)}, {LOW_RANK}, {LOW_RANK}:RANK")
    return CODECS[codec].exact
