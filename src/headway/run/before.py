"""Before: the calls of the program before a stage's start: received, answered, left out, or done by every stage."""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from headway.graph.model import Position, position_text
from headway.graph.walk import function_name, is_read, is_shape_read, map_tensors, short_name, tensors_of
from headway.layout.split import Crossing
from headway.run.templates import absent_of

if TYPE_CHECKING:
    from headway.run.stage_walk import StageWalk


def call_before(
    walk: StageWalk, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    around: AbstractContextManager[Any] | None = None,
) -> Any:  # fmt: skip
    """Give the result of a call that lies before the start; computed if it depends on the batch alone."""
    tensors = tensors_of((args, kwargs), [])
    incoming = walk.incoming.get(position)
    if incoming and walk.functions[position] != function_name(func):
        incoming = None  # the program went another way; what was sent is found elsewhere
    if not incoming and not any(map(walk.absence.hides, tensors)):
        return walk.real(position, func, args, kwargs)
    if is_read(func, args, kwargs):
        return _answer(walk, position, func)
    told = position_text(position) in walk.given_answers and function_name(func) in walk.stage.split.asked
    if told or is_shape_read(func, args, kwargs):
        result = absent_of(_answer(walk, position, func))
    else:
        result = walk.absence.result(position, func, args, kwargs, tensors, walk.module_path, around)
    if not incoming:
        return walk.late.note(position, walk.frames[-1].turn, func, args, kwargs, tensors, result)
    numbers = iter(range(1 << 30))

    def settle(tensor: torch.Tensor) -> torch.Tensor:
        number = next(numbers)
        if number not in incoming:
            return tensor
        return receive(walk, incoming[number], tensor, (position, number, function_name(func)))

    return map_tensors(result, settle)


def receive(
    walk: StageWalk, crossing: Crossing, shape: torch.Tensor, place: tuple[Position, int, str] | None = None
) -> torch.Tensor:
    """Give a tensor that crosses to this stage; what looks like it if its source did not make it on this batch.

    `place` says where in the open frame it is received: place, output and function.
    """
    tensor = walk.received.get(crossing.key)
    if tensor is None:
        return shape
    if crossing.written and tensor.requires_grad:
        with torch.enable_grad():
            tensor = tensor.clone()  # in-place calls are not allowed on a leaf
            walk.late.received.add(id(tensor))
    walk.taken[crossing.key] = tensor
    walk.absence.hide(tensor)
    if crossing.output in walk.outgoing.get(crossing.position, {}):
        walk.made[crossing.key] = tensor
    walk.alive.received(place or (*crossing.key, crossing.function), tensor)
    frame = crossing.position[:-2] if place is None else walk.frames[-1].position
    if frame in walk.stand_ins.frames:  # a stage whose part does not run passes on what it received
        walk.stand_ins.keep(frame, (*(place or (*crossing.key, crossing.function)), tensor))
    return tensor


def _answer(walk: StageWalk, position: Position, func: Any) -> Any:
    text = position_text(position)
    if text in walk.given_answers:
        return deepcopy(walk.given_answers[text])
    what = f"{short_name(func)} reads the content of a tensor that an earlier stage computes, and had no answer"
    raise walk.stage.error(what, walk.module_path or "loss function")
