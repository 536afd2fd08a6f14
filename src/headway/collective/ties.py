"""Ties: the gradients of parameters that several stages hold, summed over those stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.collective.bucket import Slot
from headway.collective.world import World


def sum_over_stages(world: World, slots: Sequence[Slot], used: list[bool]) -> None:
    """Sum the gradients of the `slots`, which stages share; `used` (by slot number) becomes true where any stage's is.

    Every stage's rank calls it with the same slots in the same order.
    """
    under_way = []
    for slot in slots:
        grad = slot.parameter.grad
        buffer = torch.zeros(slot.parameter.numel() + 1, dtype=slot.parameter.dtype, device=slot.parameter.device)
        if used[slot.number]:
            assert grad is not None
            buffer[:-1].view(slot.parameter.shape).copy_(grad)
            buffer[-1] = 1.0
        awaited = f"the gradient of {slot.name}, which stages share"
        under_way.append((slot, buffer, world.start_all_reduce(buffer, slot.shared, awaited=awaited)))
    for slot, buffer, pending in under_way:
        pending.wait()
        used[slot.number] = bool(buffer[-1].real > 0)
        if used[slot.number]:
            grad = torch.empty_like(slot.parameter, requires_grad=False)
            slot.parameter.grad = grad.copy_(buffer[:-1].view(slot.parameter.shape))
