"""Program: the graph for micro-batches of some size with its times, and what its stages hold, worked out once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from headway.cost.cluster import Link
from headway.cost.memory import StageMemory, Storages, batch_bytes, parameter_bytes, runtime_bytes, stage_memory
from headway.cost.model import Times, weight_part
from headway.graph.model import ModelGraph
from headway.layout.split import Split, StagePart, split
from headway.planner.choice import Setting
from headway.planner.shard import gathered
from headway.planner.wire import bytes_by_kind, float32_shapes

Cuts = tuple[str, ...]


@dataclass(frozen=True)
class Weights:
    """The parameters that count for one stage: bytes that are trained, those of float32 and of other dtypes."""

    names: tuple[str, ...]
    trainable: int
    coded: int
    other: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shape:
    """What programs have in common whose graphs differ in sizes alone; `graph` is any of them."""

    graph: ModelGraph
    splits: dict[Cuts, Split] = field(default_factory=dict, compare=False, repr=False)
    weighed: dict[tuple[Cuts, tuple[int, ...]], tuple[Weights, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def storages(self) -> Storages:
        """Who makes, uses and saves each storage."""
        return Storages.of(self.graph)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The modules that are gathered one at a time where copies share out parameters."""
        return gathered(self.graph)

    @cached_property
    def parameters(self) -> int:
        """Bytes of all parameters, buffers aside."""
        return parameter_bytes(self.graph, (info.name for info in self.graph.parameters if not info.is_buffer))

    @cached_property
    def trainable(self) -> int:
        """Bytes of the parameters that are trained."""
        return parameter_bytes(self.graph, (info.name for info in self.graph.parameters), trainable=True)

    def split(self, cuts: Cuts) -> Split:
        """Divide the graph into the stages between these cuts."""
        if cuts not in self.splits:
            self.splits[cuts] = split(self.graph, cuts)
        return self.splits[cuts]

    def weights(self, cuts: Cuts, placement: tuple[int, ...]) -> tuple[Weights, ...]:
        """Return the parameters that count for each stage: those of several stages of a rank for the first of them."""
        key = (cuts, placement)
        if key not in self.weighed:
            counted: list[set[str]] = [set() for _ in placement]
            found = []
            for part in self.split(cuts).stages:
                already = counted[placement[part.index]]
                names = tuple(name for name in part.parameters if name not in already)
                already.update(names)
                trainable = parameter_bytes(self.graph, names, trainable=True)
                found.append(
                    Weights(names, trainable, *bytes_by_kind(self.graph, names), float32_shapes(self.graph, names))
                )
            self.weighed[key] = tuple(found)
        return self.weighed[key]


@dataclass(frozen=True)
class Held:
    """One stage of a cut program: its calls first..last-1, the weights that count for it, and its bytes."""

    part: StagePart
    first: int
    last: int
    weights: Weights
    memory: StageMemory


@dataclass(frozen=True)
class Program:
    """A recorded graph for micro-batches of some size with its times; sums over ranges of calls in O(1)."""

    graph: ModelGraph
    times: Times
    shape: Shape
    helds: dict[tuple[Cuts, tuple[int, ...], Setting], tuple[Held, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    cuts: dict[tuple[tuple[int, ...], Link], Cuts] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, graph: ModelGraph, times: Times) -> Program:
        """Make the program of a graph that shares its shape with no other."""
        return cls(graph, times, Shape(graph))

    @property
    def num_calls(self) -> int:
        """Number of calls in the program."""
        return len(self.graph.calls)

    @cached_property
    def _forward(self) -> list[float]:
        return list(accumulate((self.times.forward[c.index] * c.derived for c in self.graph.calls), initial=0.0))

    @cached_property
    def _backward(self) -> list[float]:
        return list(accumulate((self.times.backward[c.index] for c in self.graph.calls), initial=0.0))

    @cached_property
    def batch_only(self) -> float:
        """Seconds of the calls that depend on the batch alone, which every stage computes."""
        return sum(self.times.forward[call.index] for call in self.graph.calls if not call.derived)

    def forward(self, first: int, last: int) -> float:
        """Seconds of a stage's forward."""
        return self._forward[last] - self._forward[first] + self.batch_only

    def backward(self, first: int, last: int) -> float:
        """Seconds of a stage's backward."""
        return self._backward[last] - self._backward[first]

    @cached_property
    def _weight(self) -> list[float]:
        calls = self.graph.calls
        return list(accumulate((self.times.backward[c.index] * weight_part(self.graph, c) for c in calls), initial=0.0))

    def weight(self, first: int, last: int) -> float:
        """Seconds of a stage's backward that make weight gradients which can wait."""
        return self._weight[last] - self._weight[first]

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Seconds of each call, forward and backward, that the stage with it alone computes."""
        pairs = zip(self.graph.calls, self.times.forward, self.times.backward, strict=True)
        return tuple(forward * call.derived + backward for call, forward, backward in pairs)

    @cached_property
    def work(self) -> float:
        """Seconds of all calls but those of the batch alone, forward and backward."""
        return sum(self.weights)

    @cached_property
    def largest(self) -> float:
        """Seconds of the longest run of calls without a cut, forward and backward: some stage takes as long."""
        sums = list(accumulate(self.weights, initial=0.0))
        bounds = [0, *(cut.index for cut in self.graph.cuts), self.num_calls]
        return max((sums[last] - sums[first] for first, last in zip(bounds, bounds[1:], strict=False)), default=0.0)

    @cached_property
    def forward_part(self) -> float:
        """The least that the forward of any call is of its forward and backward; 0 to 1."""
        pairs = zip(self.graph.calls, self.times.forward, self.weights, strict=True)
        return min((forward * call.derived / both for call, forward, both in pairs if both > 0), default=0.0)

    def batch_bytes(self, samples: int) -> int:
        """Bytes of a batch of so many samples."""
        if samples not in self._batches:
            self._batches[samples] = batch_bytes(self.graph, samples)
        return self._batches[samples]

    @cached_property
    def _batches(self) -> dict[int, int]:
        return {}

    @cached_property
    def activations(self) -> int:
        """Bytes of everything that autograd keeps of one micro-batch, the batch itself aside."""
        kept = {storage for call in self.graph.calls for storage in call.saved} - self.shape.storages.leaves
        return sum(self.graph.storages[storage] for storage in kept)

    @cached_property
    def values(self) -> Mapping[tuple[tuple[int, ...], int], int]:
        """Bytes of each value by the position of its call and its place in the result."""
        calls = self.graph.calls
        return {(calls[v.producer].position, v.output): v.bytes for v in self.graph.values if v.producer is not None}

    def split(self, cuts: Cuts) -> Split:
        """Divide the graph into the stages between these cuts."""
        return self.shape.split(cuts)

    def stages(self, cuts: Cuts, placement: tuple[int, ...], setting: Setting) -> tuple[Held, ...]:
        """Return each stage with its parameters and its memory.

        What a rank holds for several of its stages (tied parameters, buffers, the batch, the runtime) counts for the
        first.
        """
        key = (cuts, placement, setting)
        if key not in self.helds:
            self.helds[key] = tuple(self._held(cuts, placement, setting))
        return self.helds[key]

    def _held(self, cuts: Cuts, placement: tuple[int, ...], setting: Setting) -> Iterator[Held]:
        graph = self.graph
        bounds = [0, *(graph.cut[name].index for name in cuts), self.num_calls]
        buffers = tuple(info.name for info in graph.parameters if info.is_buffer)
        constant = runtime_bytes(setting.cluster.device) + self.batch_bytes(setting.global_batch)
        weights = self.shape.weights(cuts, placement)
        seen: set[int] = set()
        for part, own, first, last in zip(self.split(cuts).stages, weights, bounds, bounds[1:], strict=False):
            rank = placement[part.index]
            memory = stage_memory(
                graph,
                first,
                last,
                setting.cluster.device,
                names=own.names if rank in seen else own.names + buffers,
                optimizer_states=setting.optimizer_states,
                global_batch=setting.global_batch,
                storages=self.shape.storages,
                batch=self.batch_bytes(setting.global_batch),
            )
            if rank in seen:
                memory = replace(memory, static=memory.static - constant)
            seen.add(rank)
            yield Held(part, first, last, own, memory)
