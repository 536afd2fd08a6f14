"""Same: what the ranks of a group must hold alike before their gradients can be summed, and what no codec takes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from headway.collective.bucket import Slot
from headway.collective.world import Group, World
from headway.errors import RankError


def check_same(world: World, group: Group, slots: Sequence[Slot], settings: str) -> None:
    """Raise RankError, on every rank of the group, unless all hold the same parameters and have the same settings."""
    mine = [
        (slot.name, tuple(slot.parameter.shape), str(slot.parameter.dtype), slot.parameter.stride()) for slot in slots
    ]
    digest = hashlib.sha256(repr((settings, mine)).encode()).hexdigest()
    if len(set(world.gather_objects(digest, group))) == 1:
        return
    answers = world.gather_objects((settings, mine), group)
    for rank, (told, theirs) in zip(group.ranks, answers, strict=True):
        if told != answers[0][0]:
            raise RankError(
                f"ranks {group.ranks[0]} and {rank} reduce differently: {answers[0][0]} on the one and {told} on the "
                "other",
                remedy="give every rank the same plan",
            )
        first = answers[0][1]
        for number in range(max(len(first), len(theirs))):
            ours, other = (these[number] if number < len(these) else None for these in (first, theirs))
            if ours != other:
                raise RankError(
                    f"ranks {group.ranks[0]} and {rank} do not hold the same parameters: number {number} is "
                    f"{_written(ours)} on the one and {_written(other)} on the other",
                    remedy="build the same model on every rank",
                )


def not_coded(slots: Sequence[Slot], codec: str) -> tuple[str, ...]:
    """Say which gradients are reduced exactly although a codec was asked for, and why: a sentence each dtype."""
    names: dict[torch.dtype, list[str]] = {}
    for slot in slots:
        if slot.parameter.dtype != torch.float32:
            names.setdefault(slot.parameter.dtype, []).append(slot.name)
    return tuple(
        f"{found[0]}{', ...' if len(found) > 1 else ''}: {len(found)} of {str(dtype).removeprefix('torch.')}, "
        f"reduced exactly: {codec} is for float32"
        for dtype, found in names.items()
    )


def _written(parameter: tuple[Any, ...] | None) -> str:
    return "absent" if parameter is None else f"{parameter[0]} {list(parameter[1])} {parameter[2]}"
