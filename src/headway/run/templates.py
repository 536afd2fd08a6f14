"""Templates: the result of something that is passed over, remembered for arguments that look the same.

Absent tensors have nothing but a shape, so the same objects serve every pass; a call that changes a shape in place must
have the templates forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from headway.graph.walk import map_tensors

WANTS_GRADIENT = "headway_wants_gradient"
"""Attribute of an absent tensor that needs a gradient; it never does by itself, so that nothing on meta is a graph."""

CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)

Template = tuple[list[Callable[[list[Any]], Any]], Any]


@dataclass(frozen=True, slots=True)
class Known:
    """A module's result for exactly these arguments; good for as long as the same objects come again."""

    module: nn.Module
    training: bool
    args: tuple[Any, ...]
    result: torch.Tensor

    def fits(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Say whether a call is this one again."""
        if module is not self.module or module.training is not self.training or len(args) != len(self.args):
            return False
        return all(a is b for a, b in zip(args, self.args, strict=True))


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Note that an absent tensor needs a gradient."""
    setattr(tensor, WANTS_GRADIENT, True)
    return tensor


def signature(value: Any, inputs: list[Any], is_hidden: Callable[[torch.Tensor], bool]) -> Any:
    """Describe arguments for as far as the shape of a result can depend on them; collects the `inputs` among them."""
    if isinstance(value, torch.Tensor):
        inputs.append(value)
        hidden = is_hidden(value)
        number = None
        if not hidden and not value.dim() and not value.is_floating_point() and not value.is_complex():
            number = int(value)  # a size or a bound may be given as a tensor
        wants = value.requires_grad or hasattr(value, WANTS_GRADIENT)
        return (value.shape, value.dtype, wants, hidden, number)
    if isinstance(value, tuple | list):
        return (type(value), *(signature(item, inputs, is_hidden) for item in value))
    if isinstance(value, dict):
        return (type(value), *((key, signature(item, inputs, is_hidden)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, *(signature(part, inputs, is_hidden) for part in (value.start, value.stop, value.step)))
    if value is None or value is Ellipsis or isinstance(value, CONSTANTS):
        return (type(value), value)
    inputs.append(value)
    return type(value)


def template(result: Any, inputs: list[Any]) -> Template | None:
    """Find, for each leaf of a result, what makes it again; None when that is not possible."""
    leaves, spec = tree_flatten(result)
    makers: list[Callable[[list[Any]], Any]] = []
    for leaf in leaves:
        place = next((i for i, item in enumerate(inputs) if item is leaf), None)
        if place is not None:
            makers.append(lambda items, i=place: items[i])  # type: ignore[misc]
        elif isinstance(leaf, torch.Tensor):
            if not leaf.is_meta:
                return None
            makers.append(lambda items, absent=leaf: absent)  # type: ignore[misc]
        elif leaf is None or isinstance(leaf, CONSTANTS):
            makers.append(lambda items, constant=leaf: constant)  # type: ignore[misc]
        else:
            return None
    return makers, spec


def make(known: Template, inputs: list[Any]) -> Any:
    """Make a result again from a template, for other arguments that look the same."""
    makers, spec = known
    return tree_unflatten([maker(inputs) for maker in makers], spec)


def shapes_of(result: Any) -> Any:
    """Say what a result looks like, in a message to a stage that does not compute it."""
    return map_tensors(result, lambda tensor: (tuple(tensor.shape), tensor.dtype))


def absent_of(shapes: Any) -> Any:
    """Make the absent tensors of what `shapes_of` said."""
    if isinstance(shapes, tuple) and len(shapes) == 2 and isinstance(shapes[1], torch.dtype):
        return torch.empty(shapes[0], dtype=shapes[1], device="meta")
    return type(shapes)(absent_of(part) for part in shapes) if isinstance(shapes, tuple | list) else shapes
