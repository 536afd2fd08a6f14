"""Weights: a model's parameters and buffers by their first names, tied ones with their other names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from headway.graph.chance import argument
from headway.graph.keras import variables
from headway.graph.model import ParameterInfo
from headway.graph.walk import short_name

SWITCH = MappingProxyType({"batch_norm": "training", "instance_norm": "use_input_stats"})
"""The argument that says whether a normalisation uses, and changes, statistics of the batch."""


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


def running_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """List the running statistics that a normalisation changes without counting it as a change."""
    name = short_name(func)
    if name not in ("batch_norm", "instance_norm") or not argument(args, kwargs, 5, SWITCH[name], name[0] == "i"):
        return []
    given = (argument(args, kwargs, 1, "running_mean", None), argument(args, kwargs, 2, "running_var", None))
    return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
