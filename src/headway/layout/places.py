"""Places: by what the events around a border are found again in a run that does more or less than the recorded one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from headway.graph.frame import NOT_NOTED, call_key
from headway.graph.model import BETWEEN, Call, ModelGraph, Position, Ref, Weight


def _frames(places: Sequence[Position]) -> set[Position]:
    return {place[:depth] for place in places for depth in range(0, len(place), 2)} | {()}


def list_calls(graph: ModelGraph, places: Sequence[Position]) -> tuple[tuple[Position, tuple[str, ...]], ...]:
    """List the torch calls of each frame around one of `places`: one line of `call_key`s for each landmark."""
    frames = _frames(places)
    tables: dict[Position, dict[int, dict[int, str]]] = {}
    for call in graph.calls:
        frame, (landmark, count) = call.position[:-2], call.position[-2:]
        if frame in frames:
            tables.setdefault(frame, {}).setdefault(landmark, {})[count] = _key(graph, call)
    result = []
    for frame, table in sorted(tables.items()):
        rows = [table.get(landmark, {}) for landmark in range(max(table) + 1)]
        lines = (" ".join(row.get(i, NOT_NOTED) for i in range(1, max(row, default=0) + 1)) for row in rows)
        result.append((frame, tuple(lines)))
    return tuple(result)


def _key(graph: ModelGraph, call: Call) -> str:
    given = _tensors(call.arguments, [])
    dims = -1
    if given:
        first = given[0]
        shape = graph.values[first.value].shape if isinstance(first, Ref) else graph.parameter[first.name].shape
        dims = len(shape)
    names = (leaf.name for leaf in given if isinstance(leaf, Weight) and not graph.parameter[leaf.name].is_buffer)
    return call_key(call.function, dims, next(names, ""))


def _tensors(value: Any, found: list[Ref | Weight]) -> list[Ref | Weight]:
    """Collect what stands for tensors, in the order of `headway.graph.walk.tensors_of`."""
    if isinstance(value, Ref | Weight):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _tensors(item, found)
    elif isinstance(value, slice):
        _tensors((value.start, value.stop, value.step), found)
    return found


def list_modules(
    graph: ModelGraph, places: Sequence[Position], unseen: Sequence[Unseen]
) -> tuple[tuple[Position, tuple[str, ...]], ...]:
    """List the module calls of each frame around one of `places`, which must be found again."""
    frames = _frames(places)
    tables: dict[Position, list[str]] = {}
    for module in graph.modules:
        if module.position[:-2] in frames:
            tables.setdefault(module.position[:-2], []).append(module.path)
    for new in reversed(unseen):  # from the back, so that numbers before stay
        table = tables.get(new.place[:-2])
        if table is not None and f"+{new.path}" not in table:
            table.insert(new.place[-2], f"+{new.path}")
    return tuple(sorted((position, tuple(paths)) for position, paths in tables.items()))


@dataclass(frozen=True)
class Unseen:
    """A module that was not called when the program was recorded, and where its call would stand."""

    path: str
    place: Position
    parameters: tuple[str, ...]


def _inside(graph: ModelGraph, frame: Position, path: str) -> Position:
    """Place a module in the call of one that was called, after the call there whose name is most like its own."""
    calls = [module for module in graph.modules if module.position[:-2] == frame]
    like = max(calls, key=lambda module: len(commonprefix((module.path, path))), default=None)
    return (*frame, 0 if like is None else like.position[-2], 0)


def find_unseen(graph: ModelGraph) -> list[Unseen]:
    """Place the modules of parameters that no call used (an expert without tokens, a layer that was left out).

    A module would be called after the nearest relative before it in the model, else before the one after it.
    """
    used = {name for call in graph.calls for name in call.parameters}
    names = [info.name for info in graph.parameters if not info.is_buffer]
    places: dict[str, list[Position]] = {}
    for module in graph.modules:
        places.setdefault(module.path, []).append(module.position)
    last = {name: call.position for call in graph.calls for name in call.parameters}
    within: dict[str, list[int]] = {}  # for each path, the places in `names` of used parameters in it
    for i, name in enumerate(names):
        path = name if name in used else ""
        while path:
            path = path.rpartition(".")[0]
            within.setdefault(path, []).append(i)
    found: dict[str, Unseen] = {}
    for i, name in enumerate(names):
        if name in used:
            continue
        path = name.rpartition(".")[0]
        new = name
        while path and path not in within and path not in places:
            path, new = path.rpartition(".")[0], path
        near = within.get(path, [])
        before = [j for j in near if j < i]
        if not near:
            place: Position = _inside(graph, places[path][-1], new) if path in places else ()
        else:
            prefix = f"{path}." if path else ""
            relative = names[before[-1] if before else near[0]]
            called = places.get(prefix + relative.removeprefix(prefix).split(".")[0])
            if called is None:
                place = last[relative]
            else:
                place = (*called[-1][:-2], called[-1][-2], 0) if before else (*called[0][:-2], called[0][-2] - 1, 0)
        count = sum(u.place[:-1] == place[:-1] and u.path != new for u in found.values())
        entry = found.get(new, Unseen(new, (*place[:-1], (count + 1) * BETWEEN) if place else (), ()))
        found[new] = replace(entry, parameters=(*entry.parameters, name))
    return list(found.values())
