"""Templates: the result of something that is passed over, remembered for arguments that look the same.

Absent tensors have nothing but a shape, so the same objects serve every pass; a call that changes a shape in place must
have the templates forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from headway.graph.absent import bare_twin
from headway.graph.frame import Answered
from headway.graph.model import Position
from headway.graph.walk import map_tensors
from headway.layout.split import Crossing

WANTS_GRADIENT = "headway_wants_gradient"
"""Attribute of an absent tensor that needs a gradient; it never does by itself, so that nothing on meta is a graph."""

CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)

Receive = Callable[[Crossing, torch.Tensor], torch.Tensor]
Template = tuple[list[Callable[[list[Any], Receive], Any]], Any]


class Known(Answered):
    """A module's result for exactly these arguments; good for as long as the same objects come again."""

    __slots__ = ("args", "module", "result", "training")

    def __init__(
        self, position: Position, path: str, occurrence: int, module: nn.Module, args: tuple[Any, ...],
        result: torch.Tensor,
    ) -> None:  # fmt: skip
        super().__init__(position, path, occurrence)
        self.module, self.training, self.args, self.result = module, module.training, args, result

    def fits(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Say whether a call is this one again."""
        if module is not self.module or module.training is not self.training or len(args) != len(self.args):
            return False
        return all(map(is_, args, self.args))


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


def template(
    result: Any, inputs: list[Any], received: Mapping[int, Crossing] = MappingProxyType({})
) -> Template | None:
    """Find, for each leaf of a result, what makes it again; None when that is not possible.

    `received` says which leaves, by their number, came from another stage.
    """
    leaves, spec = tree_flatten(result)
    makers: list[Callable[[list[Any], Receive], Any]] = []
    for number, leaf in enumerate(leaves):
        place = next((i for i, item in enumerate(inputs) if item is leaf), None)
        if number in received:
            absent = bare_twin(leaf)
            absent = mark(absent) if leaf.requires_grad else absent
            makers.append(lambda items, receive, c=received[number], a=absent: receive(c, a))  # type: ignore[misc]
        elif place is not None:
            makers.append(lambda items, receive, i=place: items[i])  # type: ignore[misc]
        elif isinstance(leaf, torch.Tensor):
            if not leaf.is_meta:
                return None
            makers.append(lambda items, receive, absent=leaf: absent)  # type: ignore[misc]
        elif leaf is None or (isinstance(leaf, CONSTANTS) and not isinstance(leaf, float)):
            # what has no fraction follows from shapes; one like a weight of a loss may be set anew at any time
            makers.append(lambda items, receive, constant=leaf: constant)  # type: ignore[misc]
        else:
            return None
    return makers, spec


def nothing_received(crossing: Crossing, absent: torch.Tensor) -> torch.Tensor:
    """Receive nothing: for results of single calls, whose tensors are received where the call stands."""
    return absent


def make(known: Template, inputs: list[Any], receive: Receive = nothing_received) -> Any:
    """Make a result again from a template, for other arguments that look the same."""
    makers, spec = known
    return tree_unflatten([maker(inputs, receive) for maker in makers], spec)


def shapes_of(result: Any) -> Any:
    """Say what a result looks like, in a message to a stage that does not compute it."""
    return map_tensors(result, lambda tensor: (tuple(tensor.shape), tensor.dtype))


def absent_of(shapes: Any) -> Any:
    """Make the absent tensors of what `shapes_of` said."""
    if isinstance(shapes, tuple) and len(shapes) == 2 and isinstance(shapes[1], torch.dtype):
        return torch.empty(shapes[0], dtype=shapes[1], device="meta")
    return type(shapes)(absent_of(part) for part in shapes) if isinstance(shapes, tuple | list) else shapes
