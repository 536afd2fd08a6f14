"""Quantised: a weight of a tensor subclass that holds 8-bit numbers and scales, as quantising libraries make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

aten = torch.ops.aten


class Quantised(torch.Tensor):
    """Numbers of 8 bits, [rows, columns], and a scale for each row."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Quantised:
        return cls(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return Product.apply(args[0], args[1], args[2] if len(args) > 2 else None)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].numbers), func(args[0].scale))
        raise NotImplementedError(f"{func} of a quantised weight")


class Product(torch.autograd.Function):
    """x w' + b of a quantised w, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Quantised, bias: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return (x @ weight.numbers.to(x.dtype).T) * weight.scale + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        return (gradient * ctx.weight.scale) @ ctx.weight.numbers.to(gradient.dtype), None, gradient.sum(0)


def quantise(layer: nn.Linear) -> None:
    """Put a frozen, quantised weight in the place of a layer's own."""
    weight = layer.weight.detach()
    scale = weight.abs().amax(1) / 127
    numbers = (weight / scale[:, None]).round().to(torch.int8)
    layer.weight = nn.Parameter(Quantised(numbers, scale), requires_grad=False)
