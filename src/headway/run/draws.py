"""Draws: random torch calls done one sample at a time, so that a sample's numbers do not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from headway.graph.chance import DRAWN_IN_PLACE, DRAWN_WITH_ROWS, DRAWN_WITHOUT_ROWS, argument
from headway.graph.rows import Rows
from headway.graph.walk import tensors_of

Seed = Callable[[int], object]
"""Seeds the generators for a sample, by its number within the micro-batch."""


def take(tensor: torch.Tensor, dim: int, parts: tuple[int, int], samples: int, number: int) -> torch.Tensor:
    """Give what belongs to one sample of a tensor whose `dim` is [outer, samples, inner] in one."""
    outer, inner = parts
    if outer == 1:
        return tensor.narrow(dim, number * inner, inner)
    return tensor.unflatten(dim, (outer, samples, inner)).select(dim + 1, number).flatten(dim, dim + 1)


def put(tensor: torch.Tensor, dim: int, parts: tuple[int, int], samples: int, number: int, own: torch.Tensor) -> None:
    """Write what belongs to one sample where `take` finds it."""
    outer, inner = parts
    tensor.unflatten(dim, (outer, samples, inner)).select(dim + 1, number).copy_(own.unflatten(dim, parts))


def join(results: Sequence[torch.Tensor], dim: int, parts: tuple[int, int]) -> torch.Tensor:
    """Put together what `take` gave of each sample."""
    if parts[0] == 1:
        return torch.cat(list(results), dim)
    return torch.stack([own.unflatten(dim, parts) for own in results], dim + 1).flatten(dim, dim + 2)


def by_sample(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int, rows: Rows, seed: Seed
) -> list[Any] | None:
    """Do a random call for each sample; returns [result], or None for one that cannot be taken apart.

    `rows` says which numbers are whose. A call with a generator of its own stays whole.
    """
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return None
    tensors = tensors_of((args, kwargs), [])
    if name in DRAWN_WITHOUT_ROWS or (name == "normal" and not tensors):
        return _fill(name, func, args, kwargs, samples, rows, seed)
    if (name not in DRAWN_WITH_ROWS and name not in DRAWN_IN_PLACE) or not tensors:
        return None
    first, dim = tensors[0], rows.dim
    parts = rows.parts(first.shape, samples)
    apart = dim > 0 or (rows.outer or 2) > 1  # whether a sample's numbers may lie in several pieces
    if parts is None or (name == "multinomial" and first.dim() < 2):
        return None
    if name == "gumbel_softmax" and argument(args, kwargs, 4, "dim", -1) in (dim, dim - first.dim()):
        return None

    def part(value: Any, number: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != first.dim() or value.shape[dim] != first.shape[dim]:
            return value
        own = take(value, dim, parts, samples, number)
        return own.contiguous() if apart else own  # numbers are drawn in the order of memory

    results = []
    for number in range(samples):
        seed(number)
        own = {key: part(value, number) for key, value in kwargs.items()}
        result = func(*(part(value, number) for value in args), **own)
        if name in DRAWN_IN_PLACE and apart:
            put(first, dim, parts, samples, number, result)
        results.append(result)
    return [first if name in DRAWN_IN_PLACE else join(results, dim, parts)]


def _fill(name: str, func: Any, args: Any, kwargs: Any, samples: int, rows: Rows, seed: Seed) -> list[Any] | None:
    """Make a new tensor, and draw it sample by sample: rand, randn, randint and normal around one number."""
    result = func(*args, **kwargs)
    parts = rows.parts(result.shape, samples)
    if parts is None:
        return None
    bounds = [value for value in args if isinstance(value, int)] if name == "randint" else []
    bounds = [*bounds[:2], *(kwargs[key] for key in ("low", "high") if key in kwargs)]
    low, high = (0, *bounds)[-2:] if bounds else (0, 1)
    mean, std = argument(args, kwargs, 0, "mean", 0.0), argument(args, kwargs, 1, "std", 1.0)
    with torch.no_grad():
        for number in range(samples):
            seed(number)
            own = take(result, rows.dim, parts, samples, number)
            if name == "randint":
                drawn = torch.empty(own.shape, dtype=torch.int64, device=own.device).random_(low, high)
            else:
                drawn = torch.empty_like(own, memory_format=torch.contiguous_format)
                drawn = drawn.uniform_() if name == "rand" else drawn.normal_()
                drawn = drawn.mul_(std).add_(mean) if name == "normal" else drawn
            put(result, rows.dim, parts, samples, number, drawn)
    return [result]


def by_head(func: Any, args: Any, kwargs: Any, drop: Callable[..., Any], attend: Callable[..., Any]) -> Any:
    """Do attention as torch's `multi_head_attention_forward` is written, with other functions for what draws in it.

    `drop` stands for its dropout, of weights [batch x heads, targets, sources], and `attend` for its
    scaled_dot_product_attention, of [batch, heads, length, width].
    """
    # a mode around it, as of a split backward, must see the calls inside: told of the whole, it would do torch's own
    seen = {"has_torch_function": lambda tensors: False}
    names = {**func.__globals__, **seen, "dropout": drop, "scaled_dot_product_attention": attend}
    own = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    own.__kwdefaults__ = func.__kwdefaults__
    return own(*args, **kwargs)


def packed_order(module: nn.Module, args: tuple[Any, ...]) -> list[int] | None:
    """Give the samples of what an LSTM, GRU or RNN is called with, if its sequences are packed by their length."""
    if not isinstance(module, nn.RNNBase) or not args or not isinstance(args[0], PackedSequence):
        return None
    order = args[0].sorted_indices
    return None if order is None or order.is_meta else [int(number) for number in order.tolist()]


def by_layer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drop: Callable[..., torch.Tensor]) -> Any:
    """Compute LSTM, GRU or RNN layer by layer, so that what is dropped between layers can be drawn for each sample.

    `drop(output, layer, p, batch_sizes)` drops from what goes on to the next layer: [length, samples, width] as the
    call has it, or [rows, width] and `batch_sizes` where sequences are packed. Returns what the call does; None for
    one that is not made as torch.nn makes it.
    """
    if len(args) != 9 or kwargs:
        return None
    sizes = None
    if isinstance(args[3], tuple | list):
        x, sizes, hidden, weights, *options = args
    else:
        x, hidden, weights, *options = args
    biases, layers, p, training = options[:4]
    packed = () if sizes is None else (sizes,)
    each, directions = len(weights) // layers, 2 if options[4] else 1
    states = tuple(hidden) if isinstance(hidden, tuple | list) else (hidden,)
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(layers):
        own = tuple(state.narrow(0, layer * directions, directions) for state in states)
        part = weights[layer * each : (layer + 1) * each]
        x, *end = func(x, *packed, own if len(own) > 1 else own[0], part, biases, 1, 0.0, training, *options[4:])
        last.append(tuple(end))
        if layer + 1 < layers:
            x = drop(x, layer, p, sizes)
    return (x, *(torch.cat(ends) for ends in zip(*last, strict=True)))
