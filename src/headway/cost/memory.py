"""Memory model: the bytes that a stage (a range of calls) holds, from the lifetimes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from headway.cost.cluster import Device
from headway.graph.model import Call, ModelGraph

RUNTIME_BYTES_CPU = 32 << 20
"""Thread stacks, workspaces of matrix products, message buffers and the allocator's slack of a process."""

RUNTIME_BYTES_GPU = 1 << 30
"""CUDA context, workspaces of cuBLAS (32 MiB on Hopper) and NCCL's channels, about 1 GiB together."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage: what it holds for the step, for a micro-batch, for an action, and once at the start.

    `static` = parameters, buffers, gradients, optimizer states, batch and runtime; `activation` from F to B of each
    micro-batch; `temporary` within an action; `update` within the optimizer's step; `build` while the whole model
    exists.
    """

    parameters: int
    static: int
    activation: int
    temporary: int
    update: int
    build: int


def runtime_bytes(device: Device) -> int:
    """Return the constant for what the runtime itself takes on a device."""
    return RUNTIME_BYTES_CPU if device.is_cpu else RUNTIME_BYTES_GPU


def batch_bytes(graph: ModelGraph, samples: int) -> int:
    """Return the bytes of a batch of `samples`: leaves that have the recorded samples in dim 0 grow with it."""
    sizes: dict[int, int] = {}
    for value in graph.values:
        if value.producer is None and not value.derived:
            grows = bool(value.shape) and value.shape[0] == graph.samples
            size = value.bytes * samples // graph.samples if grows else value.bytes
            sizes[value.storage] = max(size, sizes.get(value.storage, 0))
    return sum(sizes.values())


def calls_of(graph: ModelGraph, first: int, last: int) -> Iterator[Call]:
    """Yield the calls that a stage computes: those in its range, and all that depend on the batch alone."""
    return (call for call in graph.calls if not call.derived or first <= call.index < last)


def names_of(graph: ModelGraph, first: int, last: int) -> tuple[str, ...]:
    """Return the first names of the parameters and buffers that a stage's calls use, each once (tied ones too)."""
    used: dict[str, None] = {}
    for call in calls_of(graph, first, last):
        for name in (*call.parameters, *call.buffers, *call.written_buffers):
            if name in graph.parameter:
                used[graph.parameter[name].name] = None
    return tuple(used)


def parameter_bytes(graph: ModelGraph, names: Iterable[str], *, trainable: bool = False) -> int:
    """Return the bytes of parameters and buffers, or of the trainable parameters alone; a tied one counts once."""
    infos = {graph.parameter[name].name: graph.parameter[name] for name in names}.values()
    return sum(info.bytes for info in infos if not trainable or (info.trainable and not info.is_buffer))


def static_bytes(graph: ModelGraph, names: Iterable[str], optimizer_states: int) -> int:
    """Return parameters + buffers + gradients + states: bytes + trainable bytes * (1 + states).

    Gradients are views into the reduction's buckets, so buckets add nothing.
    """
    held = tuple(names)
    return parameter_bytes(graph, held) + (1 + optimizer_states) * parameter_bytes(graph, held, trainable=True)


@dataclass(frozen=True)
class Storages:
    """Who makes, uses and saves each storage of a graph: read off once, for the ranges of many stages.

    Leaves of the batch are left out; they are there anyway.
    """

    leaves: frozenset[int]
    kept: tuple[tuple[int, ...], ...]
    """[calls] storages that a call saves for backward, or takes where some call saves them"""
    taken: tuple[tuple[tuple[int, int], ...], ...]
    """[calls] storages that a call takes of earlier calls, and which call made the value"""
    made: tuple[tuple[tuple[int, int], ...], ...]
    """[calls] storages that a call makes for later calls, and which call uses the value last"""
    weights: int
    """bytes of all parameters and buffers"""

    @classmethod
    def of(cls, graph: ModelGraph) -> Storages:
        """Read a graph."""
        values = graph.values
        leaves = frozenset(value.storage for value in values if value.producer is None and not value.derived)
        ever = {storage for call in graph.calls for storage in call.saved}
        last: dict[int, int] = {}
        for call in graph.calls:
            last.update(dict.fromkeys((v for v in call.inputs if call.derived and values[v].derived), call.index))
        kept, taken = [], []
        made: list[list[tuple[int, int]]] = [[] for _ in graph.calls]
        for call in graph.calls:
            own = {*call.saved, *(s for s in (values[v].storage for v in call.inputs) if s in ever)} - leaves
            kept.append(tuple(own))
            used = (v for v in call.inputs if call.derived and values[v].derived and values[v].storage not in leaves)
            taken.append(tuple((values[v].storage, _producer(graph, v)) for v in used))
        for value, user in last.items():
            producer = values[value].producer
            if producer is not None and values[value].storage not in leaves:
                made[producer].append((values[value].storage, user))
        weights = sum(info.bytes for info in graph.parameters)
        return cls(leaves, tuple(kept), tuple(taken), tuple(map(tuple, made)), weights)

    def received(self, first: int, last: int) -> set[int]:
        """Return the storages of derived values made before a stage that its calls use."""
        return {storage for call in self.taken[first:last] for storage, maker in call if maker < first}

    def sent(self, first: int, last: int) -> set[int]:
        """Return the storages of derived values made in a stage that calls after it use."""
        return {storage for call in self.made[first:last] for storage, user in call if user >= last}

    def held(self, first: int, last: int) -> set[int]:
        """Return the storages that a stage keeps for a micro-batch from its F to its B.

        What its calls save for backward (each storage once, whichever call saved it first), what it received, and what
        it sent (the roots of its backward).
        """
        return self.received(first, last).union(self.sent(first, last), *self.kept[first:last])


def activation_bytes(graph: ModelGraph, first: int, last: int, storages: Storages | None = None) -> int:
    """Return the bytes that a stage keeps for one micro-batch from F to B."""
    return sum(graph.storages[storage] for storage in (storages or Storages.of(graph)).held(first, last))


def temporary_bytes(graph: ModelGraph, first: int, last: int, storages: Storages | None = None) -> int:
    """Return the most bytes above the activations that one F or B of the stage needs at any moment.

    Forward, at call i: storages that are live and not kept, less the kept ones that do not exist yet. Backward, at call
    i: gradients of live differentiable storages (two of one written in place), and of the call's weights before they
    are added up, less the kept storages that only later calls saved (freed by then).
    """
    size = last - first
    if size <= 0:
        return 0
    storages = storages or Storages.of(graph)
    held, outputs = storages.held(first, last), storages.sent(first, last)
    born, died, saved = _lifetimes(graph, first, last, storages.leaves)
    differentiable = {
        graph.values[v].storage
        for call in graph.calls[first:last]
        for v in (*call.inputs, *call.outputs)
        if graph.values[v].requires_grad and (graph.values[v].derived)
    }
    forward, backward = [0] * (size + 1), [0] * (size + 1)
    for storage in born.keys() | saved.keys():
        number = graph.storages[storage]
        begin = born.get(storage, saved.get(storage, 0))
        end = size - 1 if storage in outputs else died.get(storage, begin)
        if storage in held:
            forward[0] -= number  # counted from the start of F, exists from `begin`
            forward[begin] += number
            if storage in saved and storage not in outputs:
                backward[0] -= number  # freed once its first saver's backward is done: absent for calls before it
                backward[saved[storage]] += number
        else:
            forward[begin] += number
            forward[end + 1] -= number
        if storage in differentiable:
            backward[begin] += number
            backward[end + 1] -= number
    during = [live + _own(graph, first + place) for place, live in enumerate(accumulate(backward[:size]))]
    return max(0, *accumulate(forward[:size]), *during)


def _own(graph: ModelGraph, index: int) -> int:
    """Return what a call's backward makes beside gradients of storages: those of weights, and a second one in place."""
    call = graph.calls[index]
    written = {graph.values[v].storage for v in call.writes if graph.values[v].requires_grad}
    return parameter_bytes(graph, call.parameters, trainable=True) + sum(graph.storages[s] for s in written)


def stage_memory(
    graph: ModelGraph,
    first: int,
    last: int,
    device: Device,
    *,
    names: Iterable[str] | None = None,
    optimizer_states: int,
    global_batch: int,
    storages: Storages | None = None,
    batch: int | None = None,
) -> StageMemory:
    """Return the bytes of the stage that computes calls `first` to `last`, for micro-batches as recorded.

    `names` are the parameters and buffers that it holds, by default those that its calls use. Each rank reads the whole
    global batch, of which micro-batches are views. An optimizer's step works on a parameter at a time on a CPU (two
    temporaries), on all at once elsewhere.
    """
    held = tuple(names) if names is not None else names_of(graph, first, last)
    storages = storages or Storages.of(graph)
    constant = runtime_bytes(device) + (batch_bytes(graph, global_batch) if batch is None else batch)
    trainable = parameter_bytes(graph, held, trainable=True)
    largest = max((parameter_bytes(graph, [name], trainable=True) for name in held), default=0)
    return StageMemory(
        parameters=parameter_bytes(graph, held),
        static=static_bytes(graph, held, optimizer_states) + constant,
        activation=activation_bytes(graph, first, last, storages),
        temporary=temporary_bytes(graph, first, last, storages),
        update=2 * largest if device.is_cpu else trainable,
        build=storages.weights + constant,
    )


def _producer(graph: ModelGraph, value: int) -> int:
    producer = graph.values[value].producer
    return -1 if producer is None else producer


def _lifetimes(
    graph: ModelGraph, first: int, last: int, leaves: frozenset[int]
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return for each storage of a stage the call (from `first`) that makes it, uses it last, saves it first."""
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    saved: dict[int, int] = {}
    for place, call in enumerate(graph.calls[first:last]):
        for value in (*call.inputs, *call.outputs, *call.writes):
            storage = graph.values[value].storage
            if storage not in leaves:
                received_here = _producer(graph, value) < first
                born.setdefault(storage, 0 if received_here else place)
                died[storage] = place
        for storage in call.saved:
            if storage not in leaves:
                saved.setdefault(storage, place)
    return born, died, saved
