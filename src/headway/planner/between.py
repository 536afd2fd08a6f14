"""Between: the graph for a number of samples, worked out from others that differ in evenly growing numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from headway.graph.model import ModelGraph

GROWING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "calls": ("arguments", "flops", "bytes", "output_bytes"),
        "values": ("shape", "bytes"),
        "cuts": ("bytes",),
    }
)
"""Parts of a graph, and in which of their fields numbers may grow with the samples; all others are equal."""


class _Differs(Exception):
    """Graphs differ in more than numbers that grow evenly."""


@dataclass(frozen=True)
class Line:
    """A whole number that grows by `each` with every sample, from `at_none`."""

    at_none: int
    each: int


@dataclass(frozen=True)
class Between:
    """A graph, and the numbers in it that grow, as `Line`s; `least` to `most` samples were recorded."""

    least: int
    most: int
    pattern: ModelGraph
    storages: Any
    lines: Mapping[str, tuple[tuple[int, dict[str, Any]], ...]]
    """by part (index, field -> what it is at any number of samples), where something grows"""

    @classmethod
    def of(cls, graphs: Sequence[ModelGraph]) -> Between | None:
        """Compare graphs of one program for three or more numbers of samples; None where they differ otherwise."""
        rows = sorted(graphs, key=lambda graph: graph.samples)
        samples = [graph.samples for graph in rows]
        if len(set(samples)) < 3:
            return None
        try:
            for name in {item.name for item in fields(ModelGraph)} - {"samples", "storages", *GROWING}:
                _same([getattr(graph, name) for graph in rows])
            storages = _line([graph.storages for graph in rows], samples)
            lines = {
                part: tuple(_grown([getattr(graph, part) for graph in rows], samples, names))
                for part, names in GROWING.items()
            }
        except _Differs:
            return None
        return cls(samples[0], samples[-1], rows[0], storages, lines)

    def at(self, samples: int) -> ModelGraph:
        """Return the graph for a number of samples; raises ValueError for one outside of what was recorded."""
        if not self.least <= samples <= self.most:
            raise ValueError(f"{samples} samples are not among the {self.least} to {self.most} that were recorded")
        parts: dict[str, Any] = {}
        for part, lines in self.lines.items():
            items = list(getattr(self.pattern, part))
            for index, growing in lines:
                new = {name: _at(line, samples) for name, line in growing.items()}
                items[index] = type(items[index])(**{**vars(items[index]), **new})
            parts[part] = tuple(items)
        return replace(self.pattern, samples=samples, storages=_at(self.storages, samples), **parts)


def alike(graph: ModelGraph, other: ModelGraph) -> bool:
    """Tell whether two graphs are the same in everything."""
    try:
        for item in fields(ModelGraph):
            pair = getattr(graph, item.name), getattr(other, item.name)
            if item.name in GROWING:
                for entries in _rows(pair):
                    _same([vars(entry) for entry in entries])
            else:
                _same(pair)
    except _Differs:
        return False
    return True


def _grown(parts: Sequence[Sequence[Any]], samples: Sequence[int], names: tuple[str, ...]) -> list[Any]:
    """List what grows in each entry of one part of several graphs."""
    found = []
    for index, entries in enumerate(_rows(parts)):
        growing = {}
        for name, mine in vars(entries[0]).items():
            values = [mine, *(getattr(entry, name) for entry in entries[1:])]
            if name not in names:
                _same(values)
            elif not _equal(values):
                growing[name] = _line(values, samples)
        if growing:
            found.append((index, growing))
    return found


def _rows(parts: Sequence[Sequence[Any]]) -> Sequence[tuple[Any, ...]]:
    if len({len(part) for part in parts}) > 1:
        raise _Differs
    return list(zip(*parts, strict=True))


def _line(values: Sequence[Any], samples: Sequence[int]) -> Any:
    """Return what stands for these values of several graphs: the value itself, `Line`s where it grows."""
    first = values[0]
    if type(first) is int and all(type(value) is int for value in values):
        each, rest = divmod(values[-1] - first, samples[-1] - samples[0])
        line = Line(first - each * samples[0], each)
        if rest or any(_at(line, number) != value for number, value in zip(samples, values, strict=True)):
            raise _Differs
        return line if each else first
    if isinstance(first, tuple | list) and all(type(value) is type(first) for value in values):
        return _made(first, [_line(row, samples) for row in _rows(values)])
    if type(first) is dict and all(type(value) is dict and value.keys() == first.keys() for value in values):
        return {key: _line([value[key] for value in values], samples) for key in first}
    if type(first) is slice and all(type(value) is slice for value in values):
        return slice(*_line([(value.start, value.stop, value.step) for value in values], samples))
    _same(values)
    return first


def _at(line: Any, samples: int) -> Any:
    """Return the value at a number of samples."""
    if type(line) is Line:
        return line.at_none + line.each * samples
    if isinstance(line, tuple | list):
        return _made(line, [_at(item, samples) for item in line])
    if type(line) is dict:
        return {key: _at(item, samples) for key, item in line.items()}
    if type(line) is slice:
        return slice(_at(line.start, samples), _at(line.stop, samples), _at(line.step, samples))
    return line


def _made(like: Any, items: list[Any]) -> Any:
    """Make a sequence of the kind of another, a named tuple too."""
    make: Callable[[list[Any]], Any] = getattr(type(like), "_make", type(like))
    return make(items)


def _same(values: Sequence[Any]) -> None:
    if not _equal(values):
        raise _Differs


def _equal(values: Sequence[Any]) -> bool:
    """Tell whether values are equal; what cannot be told (tensors among them) is not."""
    first = values[0]
    try:
        return all(value is first or (type(value) is type(first) and (value == first) is True) for value in values[1:])
    except Exception:  # a class of the user's whose == raises
        return False
