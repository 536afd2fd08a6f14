"""Twin: a model with values in the place of one on meta, for programs that read what they computed."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import psutil
import torch
from torch import nn

SHARE = 0.5
"""Part of the free memory that a twin's parameters may take; the rest is for what a pass computes and keeps."""


def twin_of(model: nn.Module) -> nn.Module | None:
    """Copy a model with random values for what is on meta, about as large as a fresh initialisation makes them.

    Matrices draw from N(0, 1 / fan-in), so that what flows through them keeps its size; scales and variances are 1,
    biases and other buffers 0. Always the same numbers. None when they do not fit into the free memory.
    """
    named: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    absent = [(name, tensor) for name, tensor in named if tensor.is_meta]
    if sum(t.numel() * t.element_size() for _, t in absent) > SHARE * psutil.virtual_memory().available:
        return None
    generator = torch.Generator().manual_seed(0)
    known: dict[int, Any] = {}
    for name, tensor in absent:
        values = _values(name, tensor, generator)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, requires_grad=tensor.requires_grad)
        known[id(tensor)] = values
    return deepcopy(model, known)


def _values(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    if like.dim() > 1:
        drawn = torch.empty(like.shape, dtype=torch.float32).normal_(generator=generator)
        return drawn.mul_(1.0 / math.sqrt(max(like[0].numel(), 1))).to(like.dtype)
    ones = name.endswith(("weight", "scale", "gamma", "var"))
    return torch.full(like.shape, float(ones), dtype=like.dtype)
