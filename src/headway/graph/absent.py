"""Absent tensors: meta tensors of the right shape that stand for what this process does not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headway.graph.chance import is_random
from headway.graph.walk import map_tensors, short_name, tensors_of

META = torch.device("meta")

LOWERED = frozenset(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d scaled_dot_product_attention _convolution mv addmv chain_matmul bilinear".split()
)
"""Functions that autocast computes in its lower precision."""


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
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    twin: Callable[[torch.Tensor], torch.Tensor],
    hidden: Callable[[torch.Tensor], bool] | None = None,
) -> Any:
    """Compute the shapes of one call: every tensor is replaced by its `twin` on meta, every device by meta.

    `hidden(tensor)` says that a tensor with values must not be looked into; by default all may be. Raises whatever
    torch raises when the call has no shape rule for meta tensors.
    """
    name = short_name(func)
    if name in ("cpu", "cuda", "pin_memory", "contiguous") and args and isinstance(args[0], torch.Tensor):
        if name != "contiguous":
            return args[0] if args[0].is_meta else twin(args[0])
    if name in ("__getitem__", "__setitem__"):
        args = (args[0], _static_index(args[1]), *args[2:])
    if name == "__deepcopy__":
        return twin(args[0]).clone()
    if name == "grad" and getattr(func, "__module__", "") == "torch.autograd" and not torch.is_grad_enabled():
        return _gradients_of(args, kwargs, twin)
    given = args, kwargs
    moved = tuple(_on_meta(item, twin, name) for item in args)
    named = {key: _on_meta(item, twin, name, key) for key, item in kwargs.items()}
    low = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None) if name in LOWERED else None
    if low is not None:
        to = torch.get_autocast_dtype(low)
        moved, named = map_tensors((moved, named), lambda t: t.to(to) if t.dtype is torch.float32 else t)
    try:
        return func(*moved, **named)
    except Exception as error:
        if name in ("_grouped_mm", "grouped_mm"):  # the rule for meta knows bfloat16 alone
            half = map_tensors((moved, named), lambda t: t.bfloat16() if t.is_floating_point() else t)
            return func(*half[0], **half[1]).to(moved[0].dtype)
        if "meta" not in str(error):
            raise
        plain = map_tensors(given, lambda t: _as_number(t, hidden))
        if not _numbers(plain, given):
            raise
        moved = tuple(_on_meta(item, twin, name) for item in plain[0])
        return func(*moved, **{key: _on_meta(item, twin, name, key) for key, item in plain[1].items()})


def _as_number(tensor: torch.Tensor, hidden: Callable[[torch.Tensor], bool] | None) -> Any:
    """Turn a known whole number into a Python int: sizes and bounds may be given as tensors."""
    if tensor.is_meta or tensor.dim() or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor if tensor.dtype is torch.bool or (hidden is not None and hidden(tensor)) else int(tensor)


def _numbers(plain: Any, given: Any) -> bool:
    return len(tensors_of(plain, [])) < len(tensors_of(given, []))


def _gradients_of(args: tuple[Any, ...], kwargs: dict[str, Any], twin: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Give gradients by their shapes alone when there is no graph to follow (torch.autograd.grad)."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return tuple(torch.empty_like(t if t.is_meta else twin(t), requires_grad=False) for t in inputs)


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


def bare_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Give an absent tensor of the same looks that is part of no graph: the tensor itself if it is absent."""
    return tensor if tensor.is_meta else meta_twin(tensor, gradient=False)


def meta_twin(tensor: torch.Tensor, *, gradient: bool = True) -> torch.Tensor:
    """Make an absent tensor with the shape, strides, dtype and `requires_grad` of `tensor`."""
    with torch.no_grad():
        if tensor.layout is torch.strided:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
        else:
            twin = torch.empty_like(tensor, device=META)
    if gradient and tensor.requires_grad:
        twin.requires_grad_()
    return twin


class Inside(TorchFunctionMode):
    """Surrounds a call whose inside is not followed: notes the tensors it takes, and keeps it on meta if it is there.

    A custom function, or one that torch.func transforms, may use weights that are not among its arguments; those are
    found by `seen`. Where `absent(tensor)` holds for a tensor of a call inside, that call is computed on meta.
    """

    def __init__(
        self,
        seen: Callable[[torch.Tensor], None],
        absent: Callable[[torch.Tensor], bool],
        twin: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.seen, self.absent, self.twin, self.device = seen, absent, twin, device
        self.random = False  # some call inside draws random numbers

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Route one torch call inside (torch's protocol for modes)."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return answer_fact(func, func.__self__.__name__, args, kwargs, self.device)
        tensors = tensors_of((args, kwargs), [])
        for tensor in tensors:
            self.seen(tensor)
        self.random = self.random or is_random(func, args, kwargs)
        if any(t.is_meta or self.absent(t) for t in tensors):
            return call_on_meta(func, args, kwargs, self.twin, self.absent)
        return func(*args, **kwargs)
