"""Passing: module calls that are passed over, or run whole, as they were seen to be the first time.

Where a tensor crosses inside a module's call and is (part of) its result, the call need not be followed: a stage that
computes it takes what it sends from the result, and one that passes over it puts there what it received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headway.graph.model import Position
from headway.layout.split import Crossing, Split
from headway.run.before import receive
from headway.run.templates import CONSTANTS, Known, make, signature, template

if TYPE_CHECKING:
    from headway.run.stage_walk import StageWalk


Picks = tuple[tuple[int, Crossing], ...]
"""Which leaves of a module's result are tensors that cross."""


def borders(split: Split, index: int) -> frozenset[Position]:
    """List the module calls of stage `index` that have crossings inside, and could be run or passed over whole.

    Not where values are read: then it is not sure that the same calls make the same tensors. A call with values that
    leave by another way than its result, or with the border itself inside, is followed.
    """
    if split.reads or split.asked:
        return frozenset()
    part = split.stages[index]
    places = {part.start, part.end or ()}
    return frozenset(
        position
        for crossing in (*part.receives, *part.sends)
        for position in frames_around(crossing.position)
        if position not in split.guarded and not any(place[: len(position)] == position != place for place in places)
    )


def frames_around(position: Position) -> Iterable[Position]:
    """Give the module calls that an event lies in, the outermost first."""
    return (position[:depth] for depth in range(2, len(position), 2))


def within(crossings: Iterable[Crossing], position: Position) -> list[Crossing]:
    """List the crossings that are made inside a module call."""
    return [c for c in crossings if c.position[: len(position)] == position]


def picks(result: Any, inside: Iterable[Crossing], made: Mapping[Any, torch.Tensor]) -> Picks | None:
    """Find the tensors that cross among the leaves of a result; None unless each of them is there."""
    leaves = tree_leaves(result)
    found = []
    for crossing in inside:
        tensor = made.get(crossing.key)
        place = next((i for i, leaf in enumerate(leaves) if leaf is tensor), None) if tensor is not None else None
        if place is None:
            return None
        found.append((place, crossing))
    return tuple(found)


def run_whole(
    walk: StageWalk, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any
) -> Any:
    """Run a module in the range at full speed, and send what crosses from its result, if it was seen to be there."""
    key, _ = _look(walk, position, module, args, kwargs)
    known = walk.stage.shapes.get(key)
    if known:
        result = walk.at_full_speed(module, run)
        leaves = tree_leaves(result)
        walk.made.update((crossing.key, leaves[place]) for place, crossing in known)
        return result
    result = run()
    if known is None:
        walk.stage.shapes[key] = picks(result, within(walk.part.sends, position), walk.made) or ()
    return result


def pass_over(
    walk: StageWalk, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any
) -> Any:
    """Give the result of a module before the start without running it: absent, in the shape of the first time.

    Not possible when the result holds something computed from the batch alone, or an object that is not known, or not
    all that is received inside.
    """
    shapes = walk.stage.shapes
    key, inputs = _look(walk, position, module, args, kwargs)
    known = shapes.get(key)
    if known is not None:
        with walk.pause():
            result = make(known, inputs, partial(receive, walk))
            if isinstance(result, torch.Tensor) and result.is_meta and all(map(_is_lasting, args)):
                path = walk.paths[id(module)]
                occurrence = walk.frames[-1].seen[path] - 1
                walk.known[position] = Known(position, path, occurrence, module, args, result)
        return result
    before = _contents(module, (args, kwargs)) if key not in shapes else []
    result = run()
    if key not in shapes and any(map(_is_written, before)):
        shapes[key] = None  # it does more than give a result
    if key not in shapes:
        with walk.pause():
            inside = within(walk.part.receives, position) if position in walk.stage.borders else []
            received = picks(result, inside, walk.taken)
            shapes[key] = None if received is None else template(result, inputs, dict(received))
    return result


def _contents(module: nn.Module, given: Any) -> list[tuple[Any, list[Any]]]:
    """List what a module may write: lists and dicts that it is given or has, and its attributes, with their content."""
    usual = vars(nn.Module()).keys() - {"training"}
    found: dict[int, tuple[Any, list[Any]]] = {}

    def look(value: Any) -> None:
        if isinstance(value, list | dict) and id(value) not in found:
            items = list(value.values() if isinstance(value, dict) else value)
            found[id(value)] = (value, items)
        elif isinstance(value, tuple):
            items = list(value)
        else:
            return
        for item in items:
            look(item)

    look(given)
    for part in module.modules():
        found[id(vars(part))] = (vars(part), list(vars(part).values()))
        for name, value in vars(part).items():
            if name not in usual:
                look(value)
    return list(found.values())


def _is_written(entry: tuple[Any, list[Any]]) -> bool:
    container, before = entry
    now = container.values() if isinstance(container, dict) else container
    return len(now) != len(before) or not all(map(is_, now, before))


def unlearn(walk: StageWalk) -> None:
    """Follow from now on the calls of whose inside this pass computed something after all: a template has none."""
    frames = {frame for number in walk.late.made for frame in frames_around(walk.late.left[number].position)}
    for key in [key for key in walk.stage.shapes if key[0] in frames] if frames else ():
        walk.stage.shapes[key] = None
    for frame in frames:
        walk.known.pop(frame, None)


def _look(walk: StageWalk, position: Position, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """Say what a call looks like, and list what it takes that is not told by that."""
    inputs: list[Any] = []
    with walk.pause():  # under the walk an absent tensor says that it is on this stage's device
        looks = signature((args, kwargs), inputs, walk.absence.hides)
    return (position, id(module), module.training, looks), inputs


def _is_lasting(item: Any) -> bool:
    return item is None or isinstance(item, CONSTANTS) or (isinstance(item, torch.Tensor) and item.is_meta)
