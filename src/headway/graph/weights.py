"""Weights: a model's parameters and buffers by their first names, tied ones with their other names."""

from __future__ import annotations

import torch
from torch import nn

from headway.graph.keras import variables
from headway.graph.model import ParameterInfo


def name_weights(model: nn.Module) -> tuple[list[ParameterInfo], dict[int, tuple[torch.Tensor, str, bool]]]:
    """List parameters and buffers by their first names, with the other names of tied ones."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    table: dict[int, tuple[torch.Tensor, str, bool]] = {}
    named: list[tuple[str, torch.Tensor, bool]] = [
        (n, p, False) for n, p in model.named_parameters(remove_duplicate=False)
    ]
    named += [(n, b, True) for n, b in model.named_buffers(remove_duplicate=False)]
    for name, tensor, is_buffer in named:
        if id(tensor) in first:
            aliases[first[id(tensor)]].append(name)
            continue
        first[id(tensor)] = name
        aliases[name] = []
        table[id(tensor)] = (tensor, name, is_buffer)
    infos = [
        ParameterInfo(
            name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."),
            bytes=t.numel() * t.element_size(), trainable=t.requires_grad, is_buffer=is_buffer,
            aliases=tuple(aliases[name]),
        )
        for t, name, is_buffer in table.values()
    ]  # fmt: skip
    return infos, table


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give by name what a program may change without gradients: buffers, and the frozen variables of Keras models."""
    state = dict(model.named_buffers(remove_duplicate=False))
    frozen = {id(v._value) for v in variables(model) if not v._value.requires_grad}
    if frozen:
        state.update((n, p) for n, p in model.named_parameters(remove_duplicate=False) if id(p) in frozen)
    return state
