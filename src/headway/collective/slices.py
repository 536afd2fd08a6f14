"""Slices: tensors of which each rank has some rows (torch's DTensor), and how they are read and written as a whole."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def is_sliced(tensor: torch.Tensor) -> bool:
    """Tell whether ranks have slices of a tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a tensor, the memory itself; a plain one is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sliced tensor, on every rank; all ranks call it. A plain one is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite `target`, sliced or plain, by its part of the whole `values`."""
    with torch.no_grad():
        local(target).copy_(part_like(target, values))


def sliced_like(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return whole `values` as `like` is sliced, when they have as many rows; else whole on every rank."""
    if not isinstance(like, DTensor) or values.shape[:1] != like.shape[:1]:
        return values
    part = part_like(like, values).clone()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=values.shape, stride=values.stride()
    )


def part_like(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the rows of whole `values` that this rank has of `like`."""
    if not isinstance(like, DTensor):
        return values
    rank, size = like.device_mesh.get_local_rank(), like.device_mesh.size()
    each = -(-values.shape[0] // size)  # as torch.chunk
    return values[min(rank * each, values.shape[0]) : (rank + 1) * each]
