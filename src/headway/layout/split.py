"""Split: what each stage holds, receives and sends, as one frozen value that a plan file can carry."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import SplitError
from headway.graph.liveness import derived_since, last_uses, storage_writes
from headway.graph.model import BETWEEN, Call, ModelGraph, ModuleCall, Position, parse_position, position_text
from headway.layout.places import Unseen, find_unseen, list_calls, list_modules

SPARE = "spare"
"""Function of a crossing that is not for a recorded value, but for what a batch holds that goes another way."""

SPARES = ((True, 6), (False, 2))
"""How many of them lead to the next stage: for values with gradients and without."""

ORIGINS = 8
"""How far a value is followed back for what may stand in for it."""


@dataclass(frozen=True, order=True)
class Crossing:
    """One tensor that goes from the stage that has it last to a stage that needs it.

    It is named by the place where the program makes the tensor: there the receiving stage gets it, with the content
    that it has at the cut.
    """

    position: Position
    output: int  # which tensor of that call's result
    source: int
    target: int
    differentiable: bool
    written: bool  # the target (or a later stage) changes it in place, so it must not be a leaf there
    function: str = ""  # that makes it
    last: bool = False  # no later call of this function in this frame before the cut: what a loop leaves
    origin: tuple[tuple[Position, int], ...] = ()  # from what it was made, in this frame: stands in where it is not
    result: tuple[Position, int] | None = None  # the outermost module call that gave it, as which leaf of its result

    @property
    def key(self) -> tuple[Position, int]:
        """Name of the tensor, the same on every stage."""
        return (self.position, self.output)


@dataclass(frozen=True)
class StagePart:
    """One contiguous range of the program: [start, end) by position, end None for the last."""

    index: int
    start: Position
    end: Position | None
    parameters: tuple[str, ...]  # held, by first name
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    owned_buffers: tuple[str, ...]  # buffers that this stage changes


@dataclass(frozen=True)
class Split:
    """The stages of a program, in order, and what all of them must know."""

    stages: tuple[StagePart, ...]
    state: tuple[str, ...] = ()  # buffers that the program changes
    guarded: tuple[Position, ...] = ()  # module calls that are followed call by call
    random: bool = False  # some call draws random numbers
    reads: bool = False  # some call reads a value that depends on parameters
    asked: tuple[str, ...] = ()  # functions whose result's shape only the stage that computes them can tell
    landmarks: tuple[tuple[Position, tuple[str, ...]], ...] = ()  # for frames that matter: the paths called, in order
    calls: tuple[tuple[Position, tuple[str, ...]], ...] = ()  # for those with a border: the torch calls in order
    reading: tuple[str, ...] = ()  # kinds of modules that read values: where one does, others may on another batch
    drawing: tuple[str, ...] = ()  # kinds of modules that draw random numbers: others of a kind may, on another batch
    rows: Mapping[str, str] = field(default_factory=dict)  # whose numbers random calls draw (`ModelGraph.rows`)
    host: tuple[str, ...] = ()  # the same for Python's and numpy's numbers (`ModelGraph.host`)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (source stage, target stage) between which tensors go; neighbours also when values are read."""
        pairs = {(c.source, c.target) for part in self.stages for c in part.sends}
        if self.reads:
            pairs |= {(s, s + 1) for s in range(len(self.stages) - 1)}
        return tuple(sorted(pairs))

    def crossings(self, source: int, target: int) -> tuple[Crossing, ...]:
        """Tensors that go from one stage to another, in a fixed order."""
        return tuple(sorted(c for c in self.stages[source].sends if c.target == target))

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Give for each parameter the stages that hold it; more than one for a tied parameter."""
        table: dict[str, list[int]] = {}
        for part in self.stages:
            for name in part.parameters:
                table.setdefault(name, []).append(part.index)
        return {name: tuple(stages) for name, stages in table.items()}

    def to_dict(self) -> dict[str, Any]:
        """Write as plain tables for a TOML file."""
        return {
            "state": list(self.state),
            "guarded": [position_text(p) for p in self.guarded],
            "random": self.random,
            "reads": self.reads,
            "asked": list(self.asked),
            "reading": list(self.reading),
            "landmarks": [{"frame": position_text(p), "calls": list(paths)} for p, paths in self.landmarks],
            "calls": [{"frame": position_text(p), "rows": list(rows)} for p, rows in self.calls],
            "drawing": list(self.drawing),
            "rows": dict(self.rows),
            "host": list(self.host),
            "stages": [
                {
                    "start": position_text(part.start),
                    **({} if part.end is None else {"end": position_text(part.end)}),
                    "parameters": list(part.parameters),
                    "owned_buffers": list(part.owned_buffers),
                    "sends": [
                        {
                            "position": position_text(c.position),
                            "output": c.output,
                            "target": c.target,
                            "differentiable": c.differentiable,
                            "written": c.written,
                            "function": c.function,
                            "last": c.last,
                            "origin": [[position_text(p), output] for p, output in c.origin],
                            **({"result": [position_text(c.result[0]), c.result[1]]} if c.result else {}),
                        }
                        for c in part.sends
                    ],
                }
                for part in self.stages
            ],
        }

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> Split:
        """Read what `to_dict` wrote."""
        rows = table["stages"]
        sends = [
            tuple(
                Crossing(
                    parse_position(c["position"]),
                    c["output"],
                    s,
                    c["target"],
                    c["differentiable"],
                    c["written"],
                    c.get("function", ""),
                    c.get("last", False),
                    tuple((parse_position(p), output) for p, output in c.get("origin", ())),
                    (parse_position(c["result"][0]), c["result"][1]) if "result" in c else None,
                )
                for c in row["sends"]
            )
            for s, row in enumerate(rows)
        ]
        parts = tuple(
            StagePart(
                index=s,
                start=parse_position(row["start"]),
                end=parse_position(row["end"]) if "end" in row else None,
                parameters=tuple(row["parameters"]),
                receives=tuple(sorted(c for out in sends for c in out if c.target == s)),
                sends=sends[s],
                owned_buffers=tuple(row["owned_buffers"]),
            )
            for s, row in enumerate(rows)
        )
        guarded = tuple(parse_position(p) for p in table["guarded"])
        landmarks = tuple((parse_position(row["frame"]), tuple(row["calls"])) for row in table.get("landmarks", ()))
        calls = tuple((parse_position(row["frame"]), tuple(row["rows"])) for row in table.get("calls", ()))
        return Split(
            parts, tuple(table["state"]), guarded, table["random"], table["reads"],
            tuple(table.get("asked", ())), landmarks, calls, tuple(table.get("reading", ())),
            tuple(table.get("drawing", ())), dict(table.get("rows", {})), tuple(table.get("host", ())),
        )  # fmt: skip


def split(graph: ModelGraph, cuts: Sequence[str]) -> Split:
    """Divide a program at cuts given by name (`Cut.name`), in program order.

    Raises SplitError for a name that is no allowed cut of this model, or names out of order.
    """
    for name in cuts:
        if name not in graph.cut:
            near = [c.name for c in graph.cuts if c.name.split("#")[0] == name.split("#")[0].split("@")[0]][:5]
            raise SplitError(
                f"there is no cut named {name!r} in this model",
                remedy=f"one of {', '.join(near or [c.name for c in graph.cuts[:5]])}",
            )
    starts = [graph.cut[name].index for name in cuts]
    if starts != sorted(set(starts)):
        raise SplitError(f"cuts are not in program order: {', '.join(cuts)}")
    bounds = [0, *starts, len(graph.calls)]
    sends = _crossings(graph, bounds)
    reads = any(call.reads_value for call in graph.calls) or (
        graph.random and (graph.branches or bool(graph.host_draws))
    )
    if reads:
        for source, out in enumerate(sends[:-1]):
            out += _spare(source)
    positions: list[Position | None] = [(), *(graph.cut[name].position for name in cuts), None]
    unseen = find_unseen(graph)
    parameters, buffers = _weights(graph, bounds, [p for p in positions[1:] if p is not None], unseen)
    parts = tuple(
        StagePart(
            index=s,
            start=positions[s] or (),
            end=positions[s + 1],
            parameters=parameters[s],
            receives=tuple(sorted(c for out in sends for c in out if c.target == s)),
            sends=tuple(sorted(sends[s])),
            owned_buffers=buffers[s],
        )
        for s in range(len(cuts) + 1)
    )
    reading = {call.position[:-2] for call in graph.calls if call.reads_value}
    drawing = {call.position[:-2] for call in graph.calls if call.random}
    places = [*(part.start for part in parts), *(c.position for out in sends for c in out if c.function != SPARE)]
    guarded = tuple(m.position for m in graph.modules if m.guarded)
    return Split(
        stages=parts,
        state=tuple(sorted({b for call in graph.calls for b in call.written_buffers})),
        guarded=guarded,
        random=graph.random,
        reads=reads,
        asked=graph.asked,
        landmarks=list_modules(graph, [*guarded, *places], unseen),
        calls=list_calls(graph, places),
        reading=tuple(sorted({m.kind for m in graph.modules if m.position in reading})),
        drawing=tuple(sorted({m.kind for m in graph.modules if m.position in drawing})),
        rows=graph.rows,
        host=graph.host,
    )


def _crossings(graph: ModelGraph, bounds: Sequence[int]) -> list[list[Crossing]]:
    """Find, for each stage, the tensors that it needs and that an earlier stage wrote last."""
    calls, values = graph.calls, graph.values
    since, writes = derived_since(calls, values), storage_writes(calls, values)
    last = last_uses(calls, values, graph.extra.get("results", ()))
    num_stages = len(bounds) - 1

    def stage_of(index: int) -> int:
        return min(bisect_right(bounds, index) - 1, num_stages - 1)

    by_function: dict[tuple[Position, str], list[int]] = {}
    for call in calls:
        by_function.setdefault((call.position[:-2], call.function), []).append(call.index)
    returned = _returned(graph)
    needed: list[dict[int, None]] = [{} for _ in range(num_stages)]
    for call in calls:
        for number in call.inputs:
            needed[stage_of(call.index)].setdefault(number)
    for number in graph.extra.get("results", ()):
        needed[-1].setdefault(number)
    sends: list[list[Crossing]] = [[] for _ in range(num_stages)]
    for target in range(1, num_stages):
        begin = bounds[target]
        for number in needed[target]:
            value, start = values[number], since[number]
            if start is None or start >= begin or value.producer is None or value.producer >= begin:
                continue
            storage_written = writes.get(value.storage, [])
            content = max([value.producer, *(w for w in storage_written if w < begin)])
            source = stage_of(content)
            later = any(w >= begin for w in storage_written) and last[number] >= begin
            floating = value.dtype.startswith(("float", "bfloat", "complex"))
            maker = calls[value.producer]
            differentiable = floating and (value.requires_grad or bool(storage_written))
            place = (maker.position, value.output, source, target)
            same = by_function[(maker.position[:-2], maker.function)]
            latest = maker.index == max(i for i in same if i < bounds[source + 1])
            origin = _origin(graph, maker)
            result = next((r for m, r in returned.get(number, ()) if m.last <= bounds[source + 1]), None)
            sends[source].append(Crossing(*place, differentiable, later, maker.function, latest, origin, result))
    return sends


def _returned(graph: ModelGraph) -> dict[int, list[tuple[ModuleCall, tuple[Position, int]]]]:
    """Give for each value the module calls that made and returned it, the outermost first, and as which leaf."""
    table: dict[int, list[tuple[ModuleCall, tuple[Position, int]]]] = {}
    for module in graph.modules:
        for leaf, number in enumerate(module.results):
            producer = None if number is None else graph.values[number].producer
            if producer is not None and module.first <= producer < module.last:
                table.setdefault(number, []).append((module, (module.position, leaf)))  # type: ignore[arg-type]
    return table


def _spare(source: int) -> list[Crossing]:
    """Make the crossings to the next stage for what is held where a batch goes another way."""
    kinds = [differentiable for differentiable, count in SPARES for _ in range(count)]
    return [
        Crossing((BETWEEN * (source + 1) + number,), number, source, source + 1, kind, True, SPARE)
        for number, kind in enumerate(kinds)
    ]


def _origin(graph: ModelGraph, maker: Call) -> tuple[tuple[Position, int], ...]:
    """Follow a value back over the first inputs of its makers, as far as they lie in one frame."""
    frame = maker.position[:-2]
    found: list[tuple[Position, int]] = []
    while maker.inputs and len(found) < ORIGINS:
        value = graph.values[maker.inputs[0]]
        if value.producer is None or graph.calls[value.producer].position[:-2] != frame:
            break
        maker = graph.calls[value.producer]
        found.append((maker.position, value.output))
    return tuple(found)


def _weights(
    graph: ModelGraph, bounds: Sequence[int], starts: Sequence[Position], unseen: Sequence[Unseen]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """List what each stage holds.

    A parameter that no call used (an expert without tokens) goes where its module would be called, so that it is there
    when another batch uses it.
    """
    num_stages = len(bounds) - 1
    used: list[dict[str, None]] = [{} for _ in range(num_stages)]
    written: list[dict[str, None]] = [{} for _ in range(num_stages)]
    for stage in range(num_stages):
        for call in graph.calls[bounds[stage] : bounds[stage + 1]]:
            used[stage].update(dict.fromkeys(call.parameters))
            written[stage].update(dict.fromkeys(call.written_buffers))
    names = [info.name for info in graph.parameters if not info.is_buffer]
    order = {name: i for i, name in enumerate(names)}
    for module in unseen:
        used[sum(start <= module.place for start in starts)].update(dict.fromkeys(module.parameters))
    held = [tuple(sorted(table, key=order.__getitem__)) for table in used]
    return held, [tuple(table) for table in written]
