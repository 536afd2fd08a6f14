"""Flops: counts what runs by torch's own formulas, and runs attention on meta as the fused kernel would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headway.graph.absent import call_on_meta


def _fused_layers(given: torch.Tensor, weights: Iterable[Any]) -> int:
    """Count the FLOPs of recurrent layers: each matrix meets each row of the input ([time, batch, features]) once."""
    rows = given.numel() // max(given.shape[-1], 1)
    return sum(2 * rows * w.numel() for w in weights if isinstance(w, torch.Tensor) and w.dim() == 2)


FUSED = MappingProxyType({
    torch.ops.aten.mkldnn_rnn_layer: lambda given, *rest, **_: _fused_layers(given, rest[:2]),
    torch.ops.aten._cudnn_rnn: lambda given, weights, *_, **__: _fused_layers(given, weights),
})  # fmt: skip
"""Operators of which torch's table has no formula."""


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of the operators that run, by torch's own table of formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator (torch's protocol for modes)."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        elif func.overloadpacket in FUSED:
            self.flops += FUSED[func.overloadpacket](*args, **kwargs)
        return out


def attention_on_meta(
    counter: FlopCounter, twin: Callable[[torch.Tensor], torch.Tensor], func: Any,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Record attention as the fused kernel does it: on meta torch takes the plain path, which saves every score."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (twin(t) if not t.is_meta else t for t in (given["query"], given["key"], given["value"]))
    mask, dropout = given.get("attn_mask"), float(given.get("dropout_p", 0.0))
    before = counter.flops
    fused = dropout == 0.0 and not given.get("enable_gqa") and query.dim() == key.dim() == value.dim() == 4
    fused = fused and query.shape[-1] == key.shape[-1] == value.shape[-1] and query.dtype is value.dtype
    fused = fused and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
    if fused:
        if mask is not None:
            mask = mask if mask.is_meta else twin(mask)
            if mask.dtype is torch.bool:
                mask = torch.empty(mask.shape, dtype=query.dtype, device="meta")
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = kernel(
            query, key, value, 0.0, bool(given.get("is_causal", False)), attn_mask=mask, scale=given.get("scale")
        )[0]
    else:
        out = call_on_meta(func, args, kwargs, twin)
    batch_heads = query.shape[:-2].numel()
    pairs = query.shape[-2] * key.shape[-2]
    counter.flops = before + 2 * batch_heads * pairs * (query.shape[-1] + value.shape[-1])
    return out
