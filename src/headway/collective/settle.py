"""Settle: what becomes of one gradient: put where it is reduced; then scaled, and added to an earlier one."""

from __future__ import annotations

import torch

from headway.collective.bucket import Slot, alone_in_memory
from headway.errors import RankError


def take(slot: Slot, grad: torch.Tensor, scale: float) -> None:
    """Put a complete gradient, times `scale`, where it will be reduced. Raises RankError for a sparse one."""
    if grad.layout != torch.strided:
        raise RankError(
            f"the gradient of {slot.name} is sparse ({grad.layout}), and only dense ones are reduced",
            remedy="build the embedding with sparse=False",
        )
    if grad.requires_grad:  # backward(create_graph=True)
        grad = grad.detach()
    if slot.view is not None:
        if scale == 1.0:
            slot.view.copy_(grad)
        else:
            torch.mul(grad, scale, out=slot.view)
        slot.parameter.grad = slot.view
    else:
        if grad.stride() != slot.stride or not alone_in_memory(grad):
            grad = slot.parameter.grad = torch.empty_like(slot.parameter, requires_grad=False).copy_(grad)
        if scale != 1.0:
            grad.mul_(scale)
    slot.seen = True
    assert slot.bucket is not None
    slot.bucket.missing -= 1


def settle(slot: Slot, used: bool, scale: float, num_ranks: int) -> None:
    """Scale a reduced gradient, unless its bucket was, and add the earlier one; `num_ranks` of 1 reduced nothing."""
    grad = slot.parameter.grad
    earlier, slot.earlier = slot.earlier, None
    if used and slot.view is not None:
        grad = slot.parameter.grad = slot.view  # other ranks' sum, when this one had none
    if not used or grad is None:
        _put_back(slot, scale, num_ranks)
        slot.parameter.grad = earlier
        return
    if scale != 1.0 and slot.view is None:
        # What was reduced was alone from then on; gloo's threads may still hold it for a moment.
        if slot.bucket is None and not alone_in_memory(grad):
            grad = slot.parameter.grad = grad.clone()
        grad.detach().mul_(scale)
    if earlier is None:
        return
    if slot.view is not None:
        grad.detach().add_(earlier)
    elif earlier.requires_grad or grad.requires_grad or not alone_in_memory(earlier):
        slot.parameter.grad = earlier + grad
    else:
        slot.parameter.grad = earlier.add_(grad)


def _put_back(slot: Slot, scale: float, num_ranks: int) -> None:
    """Keep what the wire owed to a parameter that nobody used: it was sent, and nobody takes it."""
    residual = None if slot.bucket is None else slot.bucket.residual
    sent = slot.parameter.grad if slot.view is None else slot.view
    if residual is not None and sent is not None and scale != 0.0:
        slot.place_in(residual).add_(sent, alpha=1.0 / (num_ranks * (1.0 if slot.view is None else scale)))
