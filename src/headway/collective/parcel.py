"""Parcels: which gradients travel together to the rank that owns their parameters, and in what order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headway.collective.bucket import ALIGNMENT, MEBIBYTE, Slot
from headway.collective.courier import Delivery


@dataclass(eq=False)
class Parcel:
    """What one owner gets at once: one gradient as it lies (`flat` None), or several copied into `flat`."""

    owner: int  # index in the group
    slots: list[Slot]
    starts: tuple[int, ...] = ()  # of each slot in `flat`
    flat: torch.Tensor | None = None
    awaited: str = ""
    missing: int = 0
    delivery: Delivery | None = None
    current: torch.Tensor | None = None  # what is under way, where it is summed
    total: torch.Tensor | None = None  # of this step's deliveries so far, where it is summed

    @property
    def bytes(self) -> int:
        """Return the size of its gradients."""
        return sum(slot.bytes for slot in self.slots)

    @property
    def arrived(self) -> bool:
        """Tell whether waiting for it would return at once."""
        return self.delivery is None or self.delivery.complete.is_set()

    def view(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the gradient of one of its slots as it lies in `flat`, [n]."""
        slot = self.slots[number]
        start = self.starts[number] if self.starts else 0
        return torch.as_strided(flat, tuple(slot.parameter.shape), slot.stride, flat.storage_offset() + start)


def make_parcels(
    slots: Sequence[Slot], owners: Mapping[str, int], *, parcel_bytes: int, direct_bytes: int, block: int = 1
) -> list[Parcel]:
    """Put slots, in the order in which they become ready, into parcels, ordered by the last of each.

    A gradient of `direct_bytes` or more is a parcel by itself; smaller ones of one owner, dtype and device share one of
    up to `parcel_bytes` (the first of each owner up to 1 MiB, so that the wire has work soon). Each begins at a
    multiple of `block` values, so that it shares no scale of a codec with its neighbours.
    """
    closed: list[tuple[int, Parcel]] = []
    filling: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, Slot]]] = {}
    full: set[int] = set()

    def close(owner: int, pack: list[tuple[int, Slot]]) -> None:
        closed.append((pack[-1][0], _flat([slot for _, slot in pack], owner, block)))
        full.add(owner)
        pack.clear()

    for place, slot in enumerate(slots):
        owner = owners[slot.name]
        if slot.bytes >= direct_bytes:
            slot.view = None
            closed.append((place, Parcel(owner, [slot])))
            continue
        pack = filling.setdefault((owner, slot.parameter.dtype, slot.parameter.device), [])
        limit = parcel_bytes if owner in full else min(parcel_bytes, MEBIBYTE)
        if pack and sum(member.bytes for _, member in pack) + slot.bytes > limit:
            close(owner, pack)
        pack.append((place, slot))
    for (owner, _, _), pack in filling.items():
        close(owner, pack)
    parcels = [parcel for _, parcel in sorted(closed, key=lambda item: item[0])]
    for number, parcel in enumerate(parcels):
        parcel.missing = len(parcel.slots)
        names = [slot.name for slot in parcel.slots]
        what = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        parcel.awaited = f"gradients of {what} (parcel {number + 1} of {len(parcels)})"
    return parcels


def _flat(slots: list[Slot], owner: int, block: int) -> Parcel:
    """Return a parcel with one flat buffer, and a view of it for each slot."""
    like = slots[0].parameter
    step = max(ALIGNMENT, block) if like.dtype == torch.float32 else ALIGNMENT
    starts, end = [], 0
    for slot in slots:
        starts.append(end)
        end += -(-slot.parameter.numel() // step) * step
    flat = torch.zeros(end, dtype=like.dtype, device=like.device)
    parcel = Parcel(owner, slots, tuple(starts), flat)
    for number, slot in enumerate(slots):
        slot.view = parcel.view(number, flat)
    return parcel
