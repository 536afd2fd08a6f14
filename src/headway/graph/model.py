"""ModelGraph: the calls that loss(model, batch) makes, in program order, and the tensors between them; frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Position = tuple[int, ...]
"""Place of an event (a torch call or a module's call) in the program: two numbers for each enclosing module call.

The first counts the module calls so far in that frame (landmarks), the second the events since the last of them:
(3, 0, 1, 2) is the second torch call after the first module call inside the third module call of the loss function.
Tuples compare in program order. What is dynamic inside one module call does not shift what is outside it, and torch
calls more or fewer than recorded do not shift the modules after them.
"""


BETWEEN = 1 << 20
"""Count of the first module call that is known to stand between two landmarks; the second has twice this, and so on."""


def position_text(position: Position) -> str:
    """Write a position as "3.0.5"."""
    return ".".join(map(str, position))


def parse_position(text: str) -> Position:
    """Read a position from "3.0.5"; "" is the start of the program."""
    return tuple(int(part) for part in text.split(".")) if text else ()


@dataclass(frozen=True)
class Ref:
    """In `Call.arguments`: the tensor with this value id."""

    value: int


@dataclass(frozen=True)
class Weight:
    """In `Call.arguments`: the parameter or buffer of this name."""

    name: str


@dataclass(frozen=True)
class Value:
    """One tensor object of the program: who makes it and what it looks like."""

    id: int
    shape: tuple[int, ...]
    dtype: str  # "float32"
    bytes: int
    producer: int | None  # index of the call that makes it; None for a leaf of the batch or a tensor from outside
    output: int  # which of the producer's tensors, counted over the flattened result
    derived: bool  # depends on a parameter (or a derived value): a later stage cannot compute it from the batch alone
    requires_grad: bool
    storage: int  # tensors with the same storage are aliases
    given: bool = False  # a leaf of the batch


@dataclass(frozen=True)
class Call:
    """One torch call: where, what, with which tensors, and what it costs."""

    index: int
    position: Position
    module: str  # path of the module whose forward makes the call; "" for the loss function or the root model
    function: str  # "torch.nn.functional.linear", "torch.Tensor.add"
    arguments: (
        Any  # (args, kwargs) as nested tuples and dicts with Ref and Weight for tensors; None when not representable
    )
    inputs: tuple[int, ...]  # value ids
    outputs: tuple[int, ...]  # value ids made by this call
    writes: tuple[int, ...]  # value ids that it changes in place
    parameters: tuple[str, ...]  # trainable or frozen parameters that it uses, by first name
    buffers: tuple[str, ...]
    written_buffers: tuple[str, ...]  # buffers that it changes (batch norm statistics)
    derived: bool
    random: bool
    reads_value: bool  # returns a Python value that depends on a tensor's content
    flops: int  # forward
    bytes: int  # read plus written, forward
    output_bytes: int  # new memory that the outputs take
    saved: tuple[
        int, ...
    ]  # storages that autograd keeps for backward (parameters excluded), each listed at its first save
    where: str  # "models/net.py:41" of the user's code, from the working folder or the package


@dataclass(frozen=True)
class ModuleCall:
    """One call of one module: the events between `start` and the end of its frame."""

    position: Position
    path: str
    kind: str  # class name
    occurrence: int  # 0 for the first call of this module in the program
    first: int  # index of its first call
    last: int  # index after its last call
    results: tuple[int | None, ...]  # values among the leaves of what it returned
    guarded: (
        bool  # has values that leave by another way than its result, value reads or randomness: never passed over whole
    )


@dataclass(frozen=True)
class Cut:
    """A place where a stage may begin, and what crosses it."""

    name: str  # readable and unique: "blocks.3", "blocks.3.mlp#2"
    index: int  # the stage begins with this call
    position: Position
    boundary: tuple[int, ...]  # value ids made before and needed after
    bytes: int  # of the boundary, forward; gradients take as much again for differentiable values


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter or buffer of the model under its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool
    is_buffer: bool
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelGraph:
    """The whole program for one batch shape."""

    samples: int  # rows of the recorded batch
    calls: tuple[Call, ...]
    values: tuple[Value, ...]  # values[i].id == i
    storages: tuple[int, ...]  # bytes of each storage
    modules: tuple[ModuleCall, ...]
    parameters: tuple[ParameterInfo, ...]
    cuts: tuple[Cut, ...]  # the allowed ones, in program order
    refused_cuts: tuple[tuple[int, str], ...] = ()  # (call index, why) of places that are not allowed
    on_meta: bool = True  # recorded without computing
    notes: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()  # functions whose result's shape only the stage that computes them can tell
    host_draws: tuple[str, ...] = ()  # lines before which, or on which, Python's or numpy's random numbers are drawn
    branches: bool = False  # some value is read, be it of the batch alone: the program may go another way next time
    rows: Mapping[str, str] = field(default_factory=dict)  # whose numbers are drawn where (`graph.rows.find_rows`)
    host: tuple[str, ...] = ()  # the same for Python's and numpy's numbers (`graph.host.whose`)
    extra: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def parameter(self) -> dict[str, ParameterInfo]:
        """Parameters and buffers by every name they have."""
        table: dict[str, ParameterInfo] = {}
        for info in self.parameters:
            for name in (info.name, *info.aliases):
                table[name] = info
        return table

    @cached_property
    def cut(self) -> dict[str, Cut]:
        """Allowed cuts by name."""
        return {cut.name: cut for cut in self.cuts}

    @property
    def flops(self) -> int:
        """Forward FLOPs of one recorded batch."""
        return sum(call.flops for call in self.calls)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones once, buffers excluded."""
        return sum(p.bytes for p in self.parameters if not p.is_buffer)

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements, tied ones once."""
        return sum(info.elements for info in self.parameters if not info.is_buffer)

    @property
    def random(self) -> bool:
        """Whether any call draws random numbers."""
        return bool(self.host_draws) or any(call.random for call in self.calls)

    def __str__(self) -> str:
        """What was recorded, in a dozen or two lines."""
        from headway.graph.picture import draw  # the picture is of this class

        return draw(self)
