"""Draws: random torch calls done one sample at a time, so that a sample's numbers do not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any

import torch
from torch.nn import functional

from headway.graph.chance import DRAWN_IN_PLACE, DRAWN_WITH_ROWS, DRAWN_WITHOUT_ROWS, argument, sample_dim

Seed = Callable[[int], object]
"""Seeds the generators for a sample, by its number within the micro-batch."""

HEADS: Signature = signature(functional.multi_head_attention_forward)


def by_sample(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int, seed: Seed
) -> list[Any] | None:
    """Do a random call for each sample; returns [result], or None for one that cannot be taken apart.

    That is one whose shape does not tell which numbers are whose (`sample_dim`), or with a generator of its own.
    """
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return None
    if name == "multi_head_attention_forward":
        return _attend(func, args, kwargs, samples, seed)
    if name in DRAWN_WITHOUT_ROWS:
        return _fill(name, func, args, kwargs, samples, seed)
    if name not in DRAWN_WITH_ROWS and name not in DRAWN_IN_PLACE:
        return None
    first = argument(args, kwargs, 0, "input", None)
    if not isinstance(first, torch.Tensor) or first.dim() < 1 + (name == "multinomial"):
        return None
    dim = sample_dim(first.shape, samples)
    if dim is None:
        return None
    if name == "gumbel_softmax" and argument(args, kwargs, 4, "dim", -1) in (dim, dim - first.dim()):
        return None
    rows = first.shape[dim] // samples

    def part(value: Any, number: int) -> Any:
        whole = isinstance(value, torch.Tensor) and value.dim() == first.dim() and value.shape[dim] == first.shape[dim]
        return value.narrow(dim, number * rows, rows) if whole else value

    results = []
    for number in range(samples):
        seed(number)
        own = {key: part(value, number) for key, value in kwargs.items()}
        results.append(func(*(part(value, number) for value in args), **own))
    return [first if name in DRAWN_IN_PLACE else torch.cat(results, dim)]


def _fill(name: str, func: Any, args: Any, kwargs: Any, samples: int, seed: Seed) -> list[Any] | None:
    """Make a new tensor, and draw it sample by sample: rand, randn and randint."""
    result = func(*args, **kwargs)
    dim = sample_dim(result.shape, samples)
    if dim is None:
        return None
    bounds = [value for value in args if isinstance(value, int)] if name == "randint" else []
    bounds = [*bounds[:2], *(kwargs[key] for key in ("low", "high") if key in kwargs)]
    low, high = (0, *bounds)[-2:] if bounds else (0, 1)
    with torch.no_grad():
        for number, own in enumerate(result.chunk(samples, dim)):
            seed(number)
            if name == "rand":
                drawn = torch.empty_like(own, memory_format=torch.contiguous_format).uniform_()
            elif name == "randn":
                drawn = torch.empty_like(own, memory_format=torch.contiguous_format).normal_()
            else:
                drawn = torch.empty(own.shape, dtype=torch.int64, device=own.device).random_(low, high)
            own.copy_(drawn)
    return [result]


def _attend(func: Any, args: Any, kwargs: Any, samples: int, seed: Seed) -> list[Any] | None:
    """Do attention with dropped weights for each sample: queries are [length, samples, width]."""
    given = HEADS.bind(*args, **kwargs)
    given.apply_defaults()
    table = given.arguments
    query, heads, mask = table["query"], table["num_heads"], table["attn_mask"]
    if query.dim() != 3 or query.shape[1] != samples or table["static_k"] is not None or table["static_v"] is not None:
        return None
    outputs, weights = [], []
    for number in range(samples):
        seed(number)
        own = {key: table[key][:, number : number + 1] for key in ("query", "key", "value")}
        if table["key_padding_mask"] is not None:
            own["key_padding_mask"] = table["key_padding_mask"][number : number + 1]
        if mask is not None and mask.dim() == 3:
            own["attn_mask"] = mask[number * heads : (number + 1) * heads]
        output, weight = func(**{**table, **own})
        outputs.append(output)
        weights.append(weight)
    return [(torch.cat(outputs, 1), None if weights[0] is None else torch.cat(weights))]
