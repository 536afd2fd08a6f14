"""Absent tensors: meta tensors of the right shape that stand for what this process does not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headway.graph.walk import map_tensors, short_name

META = torch.device("meta")


def is_absent(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a shape but no values."""
    return tensor.is_meta


def answer_fact(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Answer a question about a tensor; an absent one says that it lives on `device`."""
    if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
        if name == "device":
            return device
        if name in ("is_meta", "is_cpu", "is_cuda", "is_xpu", "is_mps"):
            return name == f"is_{device.type}"
        if name == "get_device":
            return device.index if device.index is not None else (-1 if device.type == "cpu" else 0)
    return func(*args, **kwargs)


def call_on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], twin: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """Compute the shapes of one call: every tensor is replaced by its `twin` on meta, every device by meta.

    Raises whatever torch raises when the call has no shape rule for meta tensors.
    """
    name = short_name(func)
    if name in ("cpu", "cuda", "pin_memory", "contiguous") and args and isinstance(args[0], torch.Tensor):
        if name != "contiguous":
            return args[0] if args[0].is_meta else twin(args[0])
    if name in ("__getitem__", "__setitem__"):
        args = (args[0], _static_index(args[1]), *args[2:])
    if name == "__deepcopy__":
        return twin(args[0]).clone()
    moved = tuple(_on_meta(item, twin, name) for item in args)
    named = {key: _on_meta(item, twin, name, key) for key, item in kwargs.items()}
    return func(*moved, **named)


def _static_index(index: Any) -> Any:
    """Put 0 for each integer index that is a scalar tensor: any value gives the same shape, and meta has none."""
    if isinstance(index, tuple):
        return tuple(_static_index(part) for part in index)
    scalar = isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype not in (torch.bool, torch.uint8)
    return 0 if scalar else index


def _on_meta(item: Any, twin: Callable[[torch.Tensor], torch.Tensor], function: str, key: str | None = None) -> Any:
    if isinstance(item, torch.device):
        return META
    if isinstance(item, str) and (key == "device" or (function == "to" and key is None)):
        return META
    if isinstance(item, int) and not isinstance(item, bool) and key == "device":
        return META
    return map_tensors(item, lambda t: t if t.is_meta else twin(t))


def meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Make an absent tensor with the shape, strides, dtype and `requires_grad` of `tensor`."""
    with torch.no_grad():
        if tensor.layout is torch.strided:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
        else:
            twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
    if tensor.requires_grad:
        twin.requires_grad_()
    return twin
