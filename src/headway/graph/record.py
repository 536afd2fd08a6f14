"""record: runs loss(model, batch) once, without computing what can be left out, and notes every torch call."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headway.errors import SplitError
from headway.graph.absent import answer_fact, call_on_meta, meta_twin
from headway.graph.chance import argument, is_random
from headway.graph.flops import FlopCounter, attention_on_meta
from headway.graph.liveness import allowed_cuts, guarded_modules
from headway.graph.model import Call, ModelGraph, ModuleCall, Position, Ref, Value, Weight
from headway.graph.walk import Walk, function_name, is_read, is_shape_read, map_tensors, short_name, tensors_of
from headway.graph.weights import name_weights

Loss = Callable[[nn.Module, Any], Any]

_STATISTICS_FLAG = MappingProxyType({"batch_norm": "training", "instance_norm": "use_input_stats"})


class ValueNeeded(SplitError):
    """The program read the content of a tensor that was not computed."""


@dataclass(frozen=True)
class Recording:
    """A graph, and what the loss function returned (absent tensors when recorded on meta)."""

    graph: ModelGraph
    result: Any


def record(model: nn.Module, loss: Loss, batch: Any, *, samples: int | None = None) -> ModelGraph:
    """Record the program that loss(model, batch) runs. See `record_run`."""
    return record_run(model, loss, batch, samples=samples).graph


def record_run(model: nn.Module, loss: Loss, batch: Any, *, samples: int | None = None) -> Recording:
    """Record the program that loss(model, batch) runs, and its result.

    What depends on parameters is not computed: parameters stand as absent tensors, so a model larger than memory, or
    one on the meta device, can be recorded. When the program reads the content of such a value, a model that has
    values is recorded again with real numbers. `samples` is the number of rows of the batch, by default dim 0 of its
    first tensor. Buffers, and the state of all random generators, are as before afterwards.

    Raises SplitError when a value is read that a model on meta does not have.
    """
    if samples is None:
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        samples = leaves[0].shape[0] if leaves else 1
    has_values = not any(p.is_meta for p in model.parameters())
    try:
        return _record(model, loss, batch, samples, compute=False)
    except (
        Exception
    ):  # a value is read, a call has no shape rule for meta tensors, or the model has an error of its own
        if not has_values:
            raise
    return _record(model, loss, batch, samples, compute=True)


def _record(model: nn.Module, loss: Loss, batch: Any, samples: int, *, compute: bool) -> Recording:
    recorder = Recorder(model, batch, compute=compute)
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    contents = [(b, b.clone()) for b in model.buffers() if not b.is_meta]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.note_saved, lambda t: t))
            stack.enter_context(recorder.flop_counter)
            stack.enter_context(recorder)
            result = loss(model, batch)
    finally:
        for module, table in buffers:
            module._buffers.clear()
            module._buffers.update(table)
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
        random.setstate(python_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)
    return Recording(recorder.graph(samples, result), result)


@dataclass
class _OpenModule:
    position: Position
    path: str
    kind: str
    occurrence: int
    first: int
    last: int = 0
    outputs: frozenset[int] = field(default_factory=frozenset)


class Recorder(Walk):
    """Notes calls, tensors and modules while the program runs."""

    def __init__(self, model: nn.Module, batch: Any, *, compute: bool) -> None:
        super().__init__(model)
        self.compute = compute
        self.parameters, self.weights = name_weights(model)
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
        self.device = device or torch.device("cpu")
        self.flop_counter = FlopCounter()
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.modules: list[_OpenModule] = []
        self.occurrences: dict[str, int] = {}
        self.known: dict[int, tuple[torch.Tensor, int]] = {}  # id -> (kept alive, value id)
        self.twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.storages: dict[int, tuple[Any, int]] = {}
        self.derived_storages: set[int] = set()
        self.derived_values: set[int] = set()
        self.reshaped: dict[int, int] = {}  # value id -> call that changed its shape in place
        self.saved_now: list[int] = []
        self.saved_before: set[int] = set()
        self.weight_storages = {id(s): s for s in (_storage(t) for t, _, _ in self.weights.values()) if s is not None}
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self._value(leaf, producer=None, output=0, derived=False)

    # tables

    def _storage_id(self, tensor: torch.Tensor) -> int:
        storage = _storage(tensor)
        key = id(storage) if storage is not None else id(tensor)
        if key not in self.storages:
            self.storages[key] = (storage if storage is not None else tensor, len(self.storages))
        return self.storages[key][1]

    def _value(self, tensor: torch.Tensor, *, producer: int | None, output: int, derived: bool) -> int:
        number = len(self.values)
        self.known[id(tensor)] = (tensor, number)
        storage = self._storage_id(tensor)
        if derived:
            self.derived_values.add(number)
            self.derived_storages.add(storage)
        self.values.append(
            Value(
                id=number,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=tensor.numel() * tensor.element_size(),
                producer=producer,
                output=output,
                derived=derived,
                requires_grad=tensor.requires_grad,
                storage=storage,
            )
        )
        return number

    def _value_of(self, tensor: torch.Tensor) -> int:
        entry = self.known.get(id(tensor))
        if entry is not None:
            return entry[1]
        # made where no call was seen (a closure, a library outside torch): derived if it has no values
        return self._value(tensor, producer=None, output=0, derived=tensor.is_meta and not self.compute)

    def _is_derived(self, value: int) -> bool:
        return value in self.derived_values or self.values[value].storage in self.derived_storages

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        entry = self.twins.get(id(tensor))
        if entry is None:
            entry = (tensor, meta_twin(tensor))
            self.twins[id(tensor)] = entry
            storage = _storage(tensor)
            if storage is not None and id(storage) in self.weight_storages:
                twin_storage = _storage(entry[1])
                self.weight_storages[id(twin_storage)] = twin_storage
            elif id(tensor) in self.known:  # the twin takes the place of the value, for what autograd saves
                twin_storage = _storage(entry[1])
                self.storages[id(twin_storage)] = (twin_storage, self.values[self.known[id(tensor)][1]].storage)
        return entry[1]

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note what autograd keeps for backward (a hook of torch.autograd.graph.saved_tensors_hooks)."""
        storage = _storage(tensor)
        if storage is not None and id(storage) not in self.weight_storages:
            number = self._storage_id(tensor)
            if number not in self.saved_before:
                self.saved_before.add(number)
                self.saved_now.append(number)
        return tensor

    # events

    def fact(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer for absent tensors that they live on the model's device."""
        return answer_fact(func, name, args, kwargs, self.device)

    def on_module(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Note one module call."""
        path = self.paths.get(id(module), f"<{type(module).__name__}>")
        occurrence = self.occurrences.get(path, 0)
        self.occurrences[path] = occurrence + 1
        entry = _OpenModule(position, path, type(module).__name__, occurrence, len(self.calls))
        self.modules.append(entry)
        result = run()
        entry.last = len(self.calls)
        leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        entry.outputs = frozenset(self.known[id(t)][1] for t in leaves if id(t) in self.known)
        return result

    def on_call(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note one torch call, computing it on meta when it depends on parameters."""
        tensors = tensors_of((args, kwargs), [])
        parameters, buffers, inputs = self._classify(tensors)
        derived = bool(parameters) or any(self._is_derived(v) for v in inputs)
        derived = derived or any(t.is_meta for t in tensors)
        read = is_read(func, args, kwargs)
        shape_read = is_shape_read(func, args, kwargs)
        arguments = self._template(args, kwargs)
        on_meta = derived and not self.compute
        if on_meta and (read or shape_read):
            raise ValueNeeded(
                f"{short_name(func)} reads the content of a tensor that depends on parameters",
                place=f"{self.module_path or 'loss function'}, {_user_line()}",
                remedy="give the model values (it is on meta), or move the read out of the forward pass",
            )
        versions = [_version(t) for t in tensors]
        shapes = [t.shape for t in tensors]
        self.saved_now = []
        before = self.flop_counter.flops
        result = self._compute(func, args, kwargs) if on_meta else func(*args, **kwargs)
        flops = self.flop_counter.flops - before
        made = tensors_of(result, [])
        if not made and not read:
            return result
        self._note(
            position, func, tensors, inputs, result, made, arguments, flops,
            parameters, buffers, versions, shapes, _silently_written(func, args, kwargs), derived,
            read or shape_read, is_random(func, args, kwargs),
        )  # fmt: skip
        return result

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if short_name(func) == "scaled_dot_product_attention":
            return attention_on_meta(self.flop_counter, self._twin, func, args, kwargs)
        return call_on_meta(func, args, kwargs, self._twin)

    def _classify(self, tensors: list[torch.Tensor]) -> tuple[list[str], list[str], list[int]]:
        parameters, buffers, inputs = [], [], []
        for tensor in tensors:
            weight = self.weights.get(id(tensor))
            if weight is None:
                inputs.append(self._value_of(tensor))
            elif weight[2]:
                buffers.append(weight[1])
            else:
                parameters.append(weight[1])
        return parameters, buffers, inputs

    def _note(
        self, position: Position, func: Any, tensors: list[torch.Tensor], inputs: list[int], result: Any,
        made: list[torch.Tensor], arguments: Any, flops: int, parameters: list[str], buffers: list[str],
        versions: list[int], shapes: list[Any], silent: set[int], derived: bool, reads: bool, chance: bool,
    ) -> None:  # fmt: skip
        index = len(self.calls)
        writes, written_buffers = [], []
        # a call on meta changes the twin of a real tensor, so versions are compared on the twin there
        for tensor, version, shape in zip(tensors, versions, shapes, strict=True):
            twin = self.twins.get(id(tensor), (None, tensor))[1]
            seen = _version(tensor) != version or (twin is not tensor and _twin_written(twin, self.twins, tensor))
            if not seen and id(tensor) not in silent:
                continue
            weight = self.weights.get(id(tensor))
            if weight is not None:
                if weight[2]:
                    written_buffers.append(weight[1])
                continue
            value = self._value_of(tensor)
            writes.append(value)
            if derived:
                self.derived_storages.add(self.values[value].storage)
            if tensor.shape != shape:
                self.reshaped.setdefault(value, index)
        outputs, fresh, storages_in = [], 0, {self._storage_id(t) for t in tensors}
        touches_state = bool(written_buffers)
        for number, tensor in enumerate(made):
            if id(tensor) in self.known or id(tensor) in self.weights:
                continue
            value = self._value(tensor, producer=index, output=number, derived=derived or touches_state)
            outputs.append(value)
            if self.values[value].storage not in storages_in:
                fresh += self.values[value].bytes
        moved = fresh + sum(self.values[v].bytes for v in writes)
        if moved or not outputs:
            moved += sum(t.numel() * t.element_size() for t in tensors)
        self.calls.append(
            Call(
                index=index, position=position, module=self.module_path, function=function_name(func),
                arguments=arguments, inputs=tuple(dict.fromkeys(inputs)), outputs=tuple(outputs),
                writes=tuple(dict.fromkeys(writes)), parameters=tuple(dict.fromkeys(parameters)),
                buffers=tuple(dict.fromkeys(buffers)), written_buffers=tuple(dict.fromkeys(written_buffers)),
                derived=derived or touches_state, random=chance, reads_value=reads and derived, flops=flops,
                bytes=moved, output_bytes=fresh, saved=tuple(self.saved_now), where=_user_line(),
            )
        )  # fmt: skip

    def _template(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def stand_in(tensor: torch.Tensor) -> Any:
            weight = self.weights.get(id(tensor))
            return Weight(weight[1]) if weight else Ref(self._value_of(tensor))

        return map_tensors((args, kwargs), stand_in)

    def graph(self, samples: int, result: Any) -> ModelGraph:
        """Close the record: what crosses each cut, which cuts are allowed, which modules must not be passed over."""
        leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        results = [self.known[id(leaf)][1] for leaf in leaves if id(leaf) in self.known]
        sizes = [0] * (1 + max((n for _, n in self.storages.values()), default=-1))
        for storage, number in self.storages.values():
            size = storage.nbytes() if isinstance(storage, torch.UntypedStorage) else storage.nbytes
            sizes[number] = max(sizes[number], int(size))
        modules = [
            ModuleCall(m.position, m.path, m.kind, m.occurrence, m.first, m.last, guarded=False) for m in self.modules
        ]
        outputs = [m.outputs for m in self.modules]
        modules = guarded_modules(modules, outputs, self.calls, self.values)
        cuts, refused = allowed_cuts(self.calls, self.values, modules, results, self.reshaped)
        return ModelGraph(
            samples=samples, calls=tuple(self.calls), values=tuple(self.values), storages=tuple(sizes),
            modules=tuple(modules), parameters=tuple(self.parameters), cuts=cuts, refused_cuts=refused,
            on_meta=not self.compute, extra={"results": tuple(results)},
        )  # fmt: skip


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without one storage
        return None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _twin_written(
    twin: torch.Tensor, twins: dict[int, tuple[torch.Tensor, torch.Tensor]], tensor: torch.Tensor
) -> bool:
    """Say whether a call changed the twin of a real tensor, and forget it then (the next call compares anew)."""
    if _version(twin) == 0:
        return False
    fresh = meta_twin(tensor)
    twins[id(tensor)] = (tensor, fresh)
    return True


def _silently_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Name (by id) the tensors that a call changes without torch's version counter knowing: running statistics."""
    place = {"batch_norm": 5, "instance_norm": 5}.get(short_name(func))
    if place is None or not argument(args, kwargs, place, _STATISTICS_FLAG[short_name(func)], False):
        return set()
    if "torch.nn.functional" not in function_name(func):  # torch.batch_norm(input, weight, bias, mean, var, ...)
        statistics = args[3:5]
    else:
        statistics = (argument(args, kwargs, 1, "running_mean", None), argument(args, kwargs, 2, "running_var", None))
    return {id(tensor) for tensor in statistics if tensor is not None}


def _user_line() -> str:
    """Name file and line of the nearest caller outside torch and Headway."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "headway.")) and name != "torch":
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
