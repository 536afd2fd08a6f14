"""Buckets: which gradients travel together, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter

from headway.collective.two_shot import Reduction
from headway.collective.world import Group, Pending
from headway.errors import RankError

MEBIBYTE = 1 << 20
ALIGNMENT = 16  # elements: each view starts where vector instructions like it
FLAG_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # exact up to at least 256 ranks
SMALL = MEBIBYTE // 4  # a bucket of up to so many bytes takes little longer than an empty one


@dataclass(eq=False)
class Slot:
    """One parameter: its place in a flat bucket (`view`; None: it is reduced in place), and this step's state."""

    name: str
    parameter: Parameter
    number: int
    shared: Group | None  # other stages that hold it
    stride: tuple[int, ...]  # of its gradient: the parameter's own when that is dense
    start: int = 0  # of its values in a bucket
    view: torch.Tensor | None = None
    bucket: Bucket | None = None
    seen: bool = False
    earlier: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Return the size of the gradient."""
        return self.parameter.numel() * self.parameter.element_size()

    def place_in(self, values: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a bucket's values [n], in its gradient's shape and strides."""
        return torch.as_strided(values, tuple(self.parameter.shape), self.stride, values.storage_offset() + self.start)


@dataclass(eq=False)
class Bucket:
    """What one all-reduce takes: one gradient as it lies, or several in `flat`, perhaps with the flags behind them."""

    slots: list[Slot]
    flat: torch.Tensor | None = None
    values: torch.Tensor | None = None  # the part of `flat` that holds gradients
    flags: torch.Tensor | None = None  # the part that counts, for each parameter of the reducer, who had a gradient
    residual: torch.Tensor | None = None  # what a codec lost of `values`, added to the next ones
    number: int = 0
    awaited: str = ""
    missing: int = 0
    pending: list[Pending | Reduction] = field(default_factory=list)


def make_slot(name: str, parameter: Parameter, number: int, shared: Group | None) -> Slot:
    """Return the slot of a parameter."""
    stride = torch.empty_like(parameter, device="meta").stride()
    return Slot(name, parameter, number, shared, stride)


def make_buckets(slots: Sequence[Slot], *, bucket_bytes: int, direct_bytes: int, block: int = 1) -> list[Bucket]:
    """Put slots, in the order in which they become ready, into buckets, and give each its place and its memory.

    A bucket's turn comes with the last of its parameters. The last bucket carries the flags of all. Each parameter of
    float32 begins at a multiple of `block` values, so that it shares no scale of a codec with its neighbours.
    """
    packs = _pack(slots, bucket_bytes, direct_bytes)
    flat = [pack for pack in packs if _is_flat(pack, direct_bytes) and pack[0].parameter.dtype in FLAG_DTYPES]
    carrier: list[Slot] = []
    if flat and (flat[-1] is packs[-1] or sum(slot.bytes for slot in flat[-1]) <= SMALL):
        # Small enough to wait for the others without loss.
        carrier = flat[-1]
    packs = [pack for pack in packs if pack is not carrier]
    buckets = [_fill(pack, block) if _is_flat(pack, direct_bytes) else _single(pack[0]) for pack in packs]
    buckets.append(_fill(carrier, block, flags=len(slots), device=slots[0].parameter.device))
    for number, bucket in enumerate(buckets):
        bucket.number = number
        bucket.missing = len(bucket.slots)
        names = [slot.name for slot in bucket.slots]
        what = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        bucket.awaited = f"gradients of {what or 'no one'} (bucket {number + 1} of {len(buckets)})"
    return buckets


def _is_flat(pack: list[Slot], direct_bytes: int) -> bool:
    return pack[0].shared is None and pack[0].bytes < direct_bytes


def _pack(slots: Sequence[Slot], bucket_bytes: int, direct_bytes: int) -> list[list[Slot]]:
    """Return the slots in packs, ordered by the last of each."""
    closed: list[tuple[int, list[Slot]]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    last: dict[int, int] = {slot.number: place for place, slot in enumerate(slots)}
    limit = min(bucket_bytes, MEBIBYTE)  # the first is small, so that the wire has work soon
    for slot in slots:
        if not _is_flat([slot], direct_bytes):
            closed.append((last[slot.number], [slot]))
            continue
        pack = filling.setdefault((slot.parameter.dtype, slot.parameter.device), [])
        if pack and sum(member.bytes for member in pack) + slot.bytes > limit:
            closed.append((last[pack[-1].number], list(pack)))
            pack.clear()
            limit = bucket_bytes
        pack.append(slot)
    closed += [(last[pack[-1].number], pack) for pack in filling.values()]
    return [pack for _, pack in sorted(closed, key=lambda item: item[0])]


def _single(slot: Slot) -> Bucket:
    bucket = Bucket([slot])
    slot.view, slot.bucket, slot.start = None, bucket, 0
    return bucket


def _fill(pack: list[Slot], block: int, flags: int = 0, device: torch.device | None = None) -> Bucket:
    """Return a bucket with one flat buffer and a view of it, in the parameter's own strides, for each slot."""
    starts, total = [], 0
    like = pack[0].parameter if pack else None
    step = max(ALIGNMENT, block) if like is not None and like.dtype == torch.float32 else ALIGNMENT
    for slot in pack:
        starts.append(total)
        total += -(-slot.parameter.numel() // step) * step
    flat = torch.zeros(
        total + flags,
        dtype=like.dtype if like is not None else torch.float32,
        device=like.device if like is not None else device,
    )
    bucket = Bucket(pack, flat, flat[:total], flat[total:] if flags else None)
    for slot, start in zip(pack, starts, strict=True):
        slot.bucket, slot.start = bucket, start
        slot.view = slot.place_in(flat)
    return bucket


def flat(grad: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient as it lies in memory, [numel]."""
    return torch.as_strided(grad.detach(), (grad.numel(),), (1,))


def alone_in_memory(grad: torch.Tensor) -> bool:
    """Tell whether nothing else sees this gradient's memory, so that it may be written.

    Autograd gives a parameter the very memory of a gradient that flows on to others when it reached it through a view.
    No public name counts the users of a storage; where the private one is missing the answer is no, and costs a copy.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    # Two users: the gradient, and the storage object that this line makes.
    return count is not None and count(grad.untyped_storage()._cdata) <= 2


def watch(
    slot: Slot,
    armed: Callable[[], Container[str]],
    ready: Callable[[Slot, torch.Tensor], None],
    ranks: tuple[int, ...],
) -> Any:
    """Have `ready(slot, gradient)` called when autograd has a parameter's gradient, if it is among those `armed` then.

    Returns a handle whose `remove()` ends that. A second gradient before the slot is begun again raises RankError.
    """

    def complete(parameter: torch.Tensor) -> None:
        if slot.name not in armed() or parameter.grad is None:  # autograd calls hooks for gradients of nothing, too
            return
        if slot.seen:
            raise RankError(
                f"{slot.name} got a second gradient in one backward",
                place=f"the reduction over ranks {ranks}",
                remedy="call backward once after arm(), or use checkpoint(..., use_reentrant=False)",
            )
        ready(slot, parameter.grad)

    return slot.parameter.register_post_accumulate_grad_hook(complete)
