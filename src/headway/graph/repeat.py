"""Repeat: the repeated blocks of a model: modules, one after the other, that make the same calls on the same shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.graph.model import Call, ModelGraph, ModuleCall, Position, Ref, Weight

LONGEST_PIECE = 8
"""Most modules of one repeated piece: (attention, feed forward) are two, (convolution, norm, ReLU) three."""


@dataclass(frozen=True)
class Block:
    """A piece of the program that comes several times in a row: equal calls, equal shapes, parameters of its own."""

    kind: str  # class of the module; "Attention, FeedForward" when each piece is several modules
    paths: tuple[str, ...]  # of each piece; "layer*2" is the third call of a module that is called again
    spans: tuple[tuple[int, int], ...]  # calls of each piece, first and after the last
    calls: int  # in each
    parameters: int  # elements used in each

    @property
    def count(self) -> int:
        """How many pieces."""
        return len(self.spans)

    @property
    def name(self) -> str:
        """From the first to the last: "blocks.0 ... blocks.11"."""
        return f"{self.paths[0]} {'...' if self.count > 2 else 'and'} {self.paths[-1]}"


def repeated_blocks(graph: ModelGraph) -> tuple[Block, ...]:
    """Find the runs of equal pieces, in program order; of runs within runs the outermost.

    Two module calls are equal when their class is the same and so are all torch calls in them: function, arguments
    but for floats (a rate of dropout costs nothing), shapes and dtypes of tensors and of parameters. A piece may be
    several modules, with the same torch calls between them. Pieces without parameters are not counted.
    """
    finder = _Finder(graph)
    return tuple(block for frame in finder.outermost() for block in finder.runs(frame))


class _Finder:
    """The tree of module calls, and what each call looks like as a number: equal numbers, equal calls."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        numbers: dict[Any, int] = {}
        self.looks = [numbers.setdefault(look(graph, call), len(numbers)) for call in graph.calls]
        self.children: Mapping[Position, list[ModuleCall]] = defaultdict(list)
        for module in sorted(graph.modules, key=lambda m: m.position):
            self.children[module.position[:-2]].append(module)

    def outermost(self) -> Iterator[list[ModuleCall]]:
        """Yield the module calls that no other encloses."""
        known = {module.position for module in self.graph.modules}
        for parent in list(self.children):
            if parent not in known:
                yield self._listed(parent)

    def runs(self, modules: Sequence[ModuleCall]) -> Iterator[Block]:
        """Yield the runs among these neighbours, and those inside of what is not repeated."""
        start = 0
        while start < len(modules):
            size, count = self._longest(modules, start)
            if count > 1:
                yield self._block([modules[start + i * size : start + (i + 1) * size] for i in range(count)])
                start += size * count
            else:
                yield from self.runs(self._listed(modules[start].position))
                start += 1

    def _listed(self, parent: Position) -> list[ModuleCall]:
        """List the modules called in a frame; a checkpointed region is as if it were not there."""
        found: list[ModuleCall] = []
        for module in self.children.get(parent, ()):
            if module.kind == "checkpoint":
                found += self._listed(module.position)
            elif module.last > module.first:
                found.append(module)
        return found

    def _longest(self, modules: Sequence[ModuleCall], start: int) -> tuple[int, int]:
        """Return modules in a piece, and pieces, of the run from `start` that takes in most; of equals the smaller."""
        best = (1, 1)
        for size in range(1, min(LONGEST_PIECE, (len(modules) - start) // 2) + 1):
            first = modules[start : start + size]
            looks, count = self._piece(first), 1
            while looks == self._piece(modules[start + count * size : start + (count + 1) * size]):
                count += 1
            if count > 1 and count * size > best[0] * best[1] and self._names(first):
                best = (size, count)
        return best

    def _piece(self, modules: Sequence[ModuleCall]) -> Any:
        if not modules:
            return None
        return [m.kind for m in modules], self.looks[modules[0].first : modules[-1].last]

    def _names(self, modules: Sequence[ModuleCall]) -> set[str]:
        calls = self.graph.calls[modules[0].first : modules[-1].last]
        return {name for call in calls for name in call.parameters}

    def _block(self, pieces: Sequence[Sequence[ModuleCall]]) -> Block:
        first = pieces[0]
        held = {self.graph.parameter[name].name: self.graph.parameter[name] for name in self._names(first)}
        spans = tuple((piece[0].first, piece[-1].last) for piece in pieces)
        return Block(
            ", ".join(module.kind for module in first), _paths(pieces), spans, spans[0][1] - spans[0][0],
            sum(info.elements for info in held.values() if not info.is_buffer),
        )  # fmt: skip


def _paths(pieces: Sequence[Sequence[ModuleCall]]) -> tuple[str, ...]:
    """Name each piece by what the paths of its modules have in common, when that tells the pieces apart."""
    shared = []
    for piece in pieces:
        parts = [module.path.split(".") for module in piece]
        same = 0
        while same < min(map(len, parts)) and len({p[same] for p in parts}) == 1:
            same += 1
        shared.append(".".join(parts[0][:same]))
    if len(pieces[0]) > 1 and len(set(shared)) == len(pieces) and all(shared):
        return tuple(shared)
    return tuple(name_of(piece[0]) for piece in pieces)


def name_of(module: ModuleCall) -> str:
    """Name a module call as cuts do: "layer*2" is the third call of `layer`."""
    return (module.path or "model") + (f"*{module.occurrence}" if module.occurrence else "")


def look(graph: ModelGraph, call: Call) -> tuple[Any, ...]:
    """Describe a call without saying where it stands: what two calls have in common that cost the same."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, tuple | list):
            return tuple(of(item) for item in leaf)
        if isinstance(leaf, dict):
            return tuple((str(key), of(item)) for key, item in leaf.items())
        if isinstance(leaf, Ref):
            return _tensor(graph, leaf.value)
        if isinstance(leaf, Weight):
            info = graph.parameter.get(leaf.name)
            return None if info is None else (info.shape, info.dtype, info.trainable)
        if leaf is None or isinstance(leaf, bool | int | str):
            return leaf
        # other objects (functions, generators) would tell every call apart by their address
        return str(leaf) if type(leaf).__module__ == "torch" else type(leaf).__name__

    weights = tuple((graph.parameter[n].shape, graph.parameter[n].dtype) for n in (*call.parameters, *call.buffers))
    tensors = tuple(_tensor(graph, value) for value in (*call.inputs, *call.outputs))
    # which element is taken (the layer's own, say) costs nothing
    arguments = None if call.function.endswith("__getitem__") else of(call.arguments)
    return call.function, arguments, weights, tensors, call.random, call.flops


def _tensor(graph: ModelGraph, value: int) -> tuple[Any, ...]:
    seen = graph.values[value]
    return seen.shape, seen.dtype
