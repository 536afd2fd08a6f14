"""Rows: which of the numbers that a call draws belong to which sample, seen from two numbers of samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.graph.chance import DRAWING, sample_dim
from headway.graph.host import whose
from headway.graph.model import Call, ModelGraph, Position, Ref, Weight, position_text

REORDERS = frozenset(
    "reshape reshape_as view view_as flatten unflatten cat concat concatenate stack vstack repeat tile "
    "repeat_interleave __getitem__ index_select narrow select chunk split tensor_split unbind roll flip squeeze "
    "unsqueeze".split()
)
"""Functions that merge, divide, lengthen or reorder the dim that the samples lie along; others leave it as it is."""


@dataclass(frozen=True)
class Rows:
    """Where the samples lie in a tensor that is drawn: along `dim`, which is [outer, samples, inner] in one.

    One of `outer` and `inner` is None: it follows from the size. `whose` is "sample"; or "all": no dim grows with the
    samples, so they share the numbers; or "batch": what is whose is not known.
    """

    whose: str
    dim: int = 0
    outer: int | None = 1
    inner: int | None = None

    def parts(self, shape: Sequence[int], samples: int) -> tuple[int, int] | None:
        """Give `outer` and `inner` for a tensor of this shape; None where it cannot be divided so."""
        if self.whose != "sample" or self.dim >= len(shape):
            return None
        times, rest = divmod(shape[self.dim], samples)
        fixed = self.outer or self.inner or 1
        if rest or not times or times % fixed:
            return None
        return (fixed, times // fixed) if self.outer else (times // fixed, fixed)

    def __str__(self) -> str:
        if self.whose != "sample":
            return self.whose
        return str(self.dim) if self.outer == 1 else f"{self.dim}:{self.outer or ''}:{self.inner or ''}"

    @staticmethod
    def parse(text: str) -> Rows:
        """Read what `str` wrote."""
        if not text[0].isdigit():
            return Rows(text)
        dim, *sizes = text.split(":")
        outer, inner = (int(size) if size else None for size in sizes or ("1", ""))
        return Rows("sample", int(dim), outer, inner)


SHARED, MIXED = Rows("all"), Rows("batch")


def guess(shape: Sequence[int], samples: int) -> Rows:
    """Say where the samples lie as far as one shape tells; a single number is for all of them."""
    if not shape:
        return SHARED
    dim = sample_dim(shape, samples)
    return MIXED if dim is None else Rows("sample", dim)


def place_of(path: str, turn: Position | None, function: str) -> str:
    """Name a random call's place in its module, the same in all layers of a kind: "layers.*.attn 1.2 dropout".

    That is the second such call after the first module call in that frame: `turn` numbers them as they come. Without a
    turn all of that module's are meant.
    """
    place = position_text(turn[-2:]) if turn else "*"
    return f"{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', path)} {place} {function}"


def find_rows(graph: ModelGraph, other: ModelGraph) -> dict[str, str]:
    """Say for each random call whose numbers it draws, from records of one program for two numbers of samples.

    A dim is the samples' when it grows with their number, k for each. Where k is above 1, it is followed from call to
    call in which order they lie ([samples, windows], [length, samples], two views one after the other). Keys are
    `place_of` the calls: of all of a function in a kind of module where they are alike, else of each, else its turn
    ("@1.0.2") where layers differ. Values are `Rows` as text.
    """
    small, large = sorted((graph, other), key=lambda g: g.samples)
    if small.samples == large.samples:
        return {}
    seen = _Lying(large, small) if small.samples == 1 else _Lying(small, large)
    draws = []
    found: dict[str, set[str]] = {}
    for call, turn in turns(seen.graph):
        rows = seen.rows(call)
        if rows is not None:
            name = call.function.rpartition(".")[2]
            keys = [place_of(call.module, None, name), place_of(call.module, turn, name), f"@{position_text(turn)}"]
            keys = keys[:1] if seen.repeats(call) else keys
            draws.append((keys, str(rows)))
            for key in keys:
                found.setdefault(key, set()).add(str(rows))
    table = {}
    for keys, text in draws:
        table[next((key for key in keys if len(found[key]) == 1), keys[-1])] = text
    return table


def turns(graph: ModelGraph) -> Iterator[tuple[Call, Position]]:
    """Yield the random calls with their turns, as `Frame.turn` numbers them; not those that draw inside."""
    counts: Counter[Position] = Counter()
    for call in graph.calls:
        if call.random and call.function.rpartition(".")[2] in DRAWING:
            counts[call.position[:-1]] += 1
            yield call, (*call.position[:-1], counts[call.position[:-1]])


def with_owners(graph: ModelGraph, other: ModelGraph | None) -> ModelGraph:
    """Complete a graph by whose the random numbers are, seen beside a record with another number of samples."""
    if other is None or graph.samples == other.samples:
        return graph
    host = whose(graph.extra.get("host", ()), other.extra.get("host", ()), (graph.samples, other.samples))
    return replace(graph, rows=find_rows(graph, other), host=host)


def rows_at(table: Mapping[str, str], path: str, turn: Position, function: str) -> Rows | None:
    """Look a random call up in what `find_rows` found; None for one that it did not see."""
    keys = (f"@{position_text(turn)}", place_of(path, turn, function), place_of(path, None, function))
    text = next((table[key] for key in keys if key in table), None)
    return Rows.parse(text) if text else None


def drawn(graph: ModelGraph) -> Iterator[tuple[Call, Rows]]:
    """Yield the random calls of a graph, and whose numbers each draws."""
    for call, turn in turns(graph):
        known = rows_at(graph.rows, call.module, turn, call.function.rpartition(".")[2])
        yield call, known or guess(_shape(graph, _first(call)), graph.samples)


def _first(call: Call) -> Ref | Weight | None:
    """Give the first tensor that a call takes, else the first that it makes: that whose numbers are drawn."""
    given = next(_leaves(call.arguments), None)
    return given or (Ref(call.outputs[0]) if call.outputs else None)


def _leaves(value: Any) -> Iterator[Ref | Weight]:
    if isinstance(value, Ref | Weight):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)


def _shape(graph: ModelGraph, leaf: Ref | Weight | None) -> tuple[int, ...]:
    if leaf is None:
        return ()
    return graph.values[leaf.value].shape if isinstance(leaf, Ref) else graph.parameter[leaf.name].shape


class _Lying:
    """Where the samples lie in each value of a graph, as (dim, outer, inner)."""

    def __init__(self, graph: ModelGraph, other: ModelGraph) -> None:
        self.graph, self.other = graph, other
        self.twins = {call.position: call for call in other.calls}
        self.counts = [Counter((c.module, c.function, c.where) for c in g.calls if c.random) for g in (graph, other)]
        self.scales: dict[int, tuple[tuple[int, int], ...]] = {}  # the dims of a value that grow, and k of each
        self.lying: dict[int, tuple[int, int, int]] = {}
        self.users: dict[int, list[int]] = {}
        leaves = [[v for v in g.values if v.producer is None] for g in (graph, other)]
        if len(leaves[0]) == len(leaves[1]):
            for mine, theirs in zip(*leaves, strict=True):
                self._compare(mine.id, theirs.id)
        for call in graph.calls:
            for value in call.inputs:
                self.users.setdefault(value, []).append(call.index)
            twin = self._twin(call)
            for mine_id, theirs_id in zip(call.outputs, twin.outputs if twin else (), strict=False):
                self._compare(mine_id, theirs_id)
            for number, value in enumerate(call.outputs):
                self._follow(call, number, value)

    def rows(self, call: Call) -> Rows | None:
        """Say whose numbers a random call draws; None for one that only one of the records has."""
        first = _first(call)
        if self.repeats(call):
            return MIXED
        if self._twin(call) is None or first is None:
            return None
        grown = [self._scale(Ref(value)) for value in call.outputs]
        scale = self._scale(first)
        if scale == () and not any(grown):
            return SHARED
        lies = self.lying.get(first.value) if isinstance(first, Ref) else None
        if lies is None and isinstance(first, Ref) and scale and not call.inputs:
            lies = self._from_users(first.value, scale[0])
        if lies is None:
            return MIXED
        dim, outer, inner = lies
        if outer == 1 or inner == 1:
            return Rows("sample", dim) if outer == 1 else Rows("sample", dim, None, 1)
        return Rows("sample", dim, outer)

    def repeats(self, call: Call) -> bool:
        """Say whether a call is made more often with more samples: drawn for one of them, and not known for which."""
        kind = (call.module, call.function, call.where)
        return self.counts[0][kind] != self.counts[1][kind]

    def _twin(self, call: Call) -> Call | None:
        twin = self.twins.get(call.position)
        return twin if twin is not None and twin.function == call.function else None

    def _scale(self, leaf: Ref | Weight) -> tuple[tuple[int, int], ...] | None:
        return () if isinstance(leaf, Weight) else self.scales.get(leaf.value)

    def _compare(self, mine: int, theirs: int) -> None:
        """Note which dims of a value grow with the samples, unless one grows in another way."""
        here, there = self.graph.values[mine].shape, self.other.values[theirs].shape
        n, m = self.graph.samples, self.other.samples
        if len(here) != len(there) or any(
            a != b and (a % n or a * m != b * n) for a, b in zip(here, there, strict=True)
        ):
            return
        self.scales[mine] = tuple((dim, a // n) for dim, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
        if len(self.scales[mine]) == 1 and self.scales[mine][0][1] == 1:
            self.lying[mine] = (self.scales[mine][0][0], 1, 1)

    def _follow(self, call: Call, number: int, value: int) -> None:
        """Find the order along a dim that has several rows a sample from what the call takes."""
        scale = self.scales.get(value, ())
        if value in self.lying or len(scale) != 1:
            return
        (dim, k), n = scale[0], self.graph.samples
        if call.function.rpartition(".")[2] in REORDERS:
            found = self._tried(call, number, dim)
            if found is not None:
                self.lying[value] = (dim, *found)
            return
        for given in call.inputs:
            lies = self.lying.get(given)
            if lies is not None and lies[1] * lies[2] == k and self.graph.values[given].shape[lies[0]] == k * n:
                self.lying[value] = (dim, *lies[1:])
                return

    def _tried(self, call: Call, number: int, dim: int) -> tuple[int, int] | None:
        """Make a call that reorders on tensors that hold each element's sample; gives outer and inner."""
        name = call.function.rpartition(".")[2].replace("view", "reshape")  # a view of what does not lie as it did
        function: Callable[..., Any] | None = getattr(torch.Tensor, name, None) or getattr(torch, name, None)
        try:
            args, kwargs = _with_tensors(call.arguments, self._numbered)
            made = function(*args, **kwargs) if function else None
        except Exception:  # one that depends on more than shapes: the order stays unknown
            return None
        result = made if isinstance(made, torch.Tensor) else (made or ())[number]
        return _order(result, dim, self.graph.samples)

    def _numbered(self, leaf: Ref | Weight) -> torch.Tensor:
        """Make a tensor that holds the number of the sample of each element, from 1; 0 where that is not known."""
        shape = _shape(self.graph, leaf)
        lies = self.lying.get(leaf.value) if isinstance(leaf, Ref) else None
        if lies is None:
            return torch.zeros((), dtype=torch.int16).expand(shape)
        dim, outer, inner = lies
        numbers = torch.arange(1, self.graph.samples + 1, dtype=torch.int16)
        row = numbers[None, :, None].expand(outer, -1, inner).reshape(-1)
        return row.view(-1, *(1,) * (len(shape) - dim - 1)).expand(shape)

    def _from_users(self, value: int, scale: tuple[int, int]) -> tuple[int, int, int] | None:
        """Find the order of numbers that are drawn out of nothing from what they are used with, or how divided."""
        dim, k = scale
        same = {value}
        for call in self.graph.calls[min(self.users.get(value, [len(self.graph.calls)])) :]:
            if same.isdisjoint(call.inputs):
                continue
            if call.function.rpartition(".")[2] in REORDERS:
                return self._fitting(call, value, dim, k) if value in call.inputs else None
            for given in call.inputs:
                lies = self.lying.get(given) if given not in same else None
                if lies is not None and lies[1] * lies[2] == k:
                    return (dim, *lies[1:])
            same.update(made for made in call.outputs if [s[1] for s in self.scales.get(made, ())] == [k])
        return None

    def _fitting(self, call: Call, value: int, dim: int, k: int) -> tuple[int, int, int] | None:
        """Try in which orders a call that divides the dim gives one that has the samples alone."""
        for outer in (o for o in range(1, k + 1) if k % o == 0):
            self.lying[value] = (dim, outer, k // outer)
            for number, made in enumerate(call.outputs):
                known = self.lying.get(made)
                if known is not None and self._tried(call, number, known[0]) == known[1:]:
                    return self.lying[value]
            del self.lying[value]
        return None


def _with_tensors(value: Any, change: Callable[[Ref | Weight], torch.Tensor]) -> Any:
    if isinstance(value, Ref | Weight):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_with_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, change) for key, item in value.items()}
    return value


def _order(numbers: torch.Tensor, dim: int, samples: int) -> tuple[int, int] | None:
    """Read outer and inner off a tensor of samples' numbers; None where they lie in no such order along `dim`."""
    flat = numbers.movedim(dim, 0).reshape(numbers.shape[dim], -1)
    row = flat.amax(1)
    if not bool(((flat == row[:, None]) | (flat == 0)).all()):
        return None
    inner = int((row != row[0]).to(torch.int8).argmax()) or len(row)
    outer, rest = divmod(len(row), samples * inner)
    want = torch.arange(1, samples + 1, dtype=row.dtype)[None, :, None].expand(max(outer, 1), -1, inner).reshape(-1)
    return (outer, inner) if not rest and torch.equal(row, want) else None
