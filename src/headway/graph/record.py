"""record: runs loss(model, batch) once, without computing what can be left out, and notes every torch call."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headway.graph.host import Gaps, seed_host
from headway.graph.model import ModelGraph
from headway.graph.recorder import Recorder
from headway.graph.twin import twin_of
from headway.graph.walk import all_tensors
from headway.graph.weights import state_of

Loss = Callable[[nn.Module, Any], Any]


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
    one on the meta device, can be recorded. When the program reads the content of such a value, it is recorded again
    with real numbers: the model's own, or for one on meta those of a twin with random ones, which the graph's notes
    say. `samples` is the number of rows of the batch, by default dim 0 of its first tensor. Buffers, and the state of
    all random generators, are as before afterwards.

    Raises SplitError when a value is read, the model is on meta, and a twin is too large or fails.
    """
    if samples is None:
        leaves = [leaf for leaf in all_tensors(batch) if leaf.dim()]
        samples = leaves[0].shape[0] if leaves else 1
    has_values = not any(p.is_meta for p in model.parameters())
    try:
        return _settled(model, loss, batch, samples, compute=False)
    except Exception as error:  # a value is read, a call has no shape rule on meta, or the error is the model's own
        if not has_values:
            return _with_twin(model, loss, batch, samples, error)
    return _settled(model, loss, batch, samples, compute=True)


def _with_twin(model: nn.Module, loss: Loss, batch: Any, samples: int, refusal: Exception) -> Recording:
    """Record a twin of a model on meta, and note which values were taken from it; else raise the refusal."""
    twin = twin_of(model)
    if twin is None:
        raise refusal
    try:
        run = _settled(twin, loss, batch, samples, compute=True)
    except Exception:  # random values are not what this program is made for; what it asked for is told
        raise refusal from None
    reads: dict[str, str] = {}
    for call in run.graph.calls:
        if call.reads_value and call.function not in run.graph.asked:
            reads.setdefault(call.where, call.function.rsplit(".", 1)[-1].strip("_"))
    notes = tuple(
        f"{where}: {function} reads a value: taken as with random weights (the model is on meta); a run goes by its own"
        for where, function in reads.items()
    )
    return Recording(replace(run.graph, notes=(*run.graph.notes, *notes)), run.result)


def _settled(model: nn.Module, loss: Loss, batch: Any, samples: int, *, compute: bool) -> Recording:
    """Record, and once more when something is computed from buffers that turn out to change from run to run."""
    run = _record(model, loss, batch, samples, frozenset(), compute=compute)
    state = frozenset(name for call in run.graph.calls for name in call.written_buffers)
    if any(not call.derived and not state.isdisjoint(call.buffers) for call in run.graph.calls):
        run = _record(model, loss, batch, samples, state, compute=compute)
    return run


def _record(
    model: nn.Module, loss: Loss, batch: Any, samples: int, state: frozenset[str], *, compute: bool
) -> Recording:
    recorder = Recorder(model, batch, compute=compute, state=state)
    with ExitStack() as stack:
        replaced = stack.enter_context(_as_before(model))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.enable_grad())
        recorder.gaps = Gaps(seed_host)  # what is drawn is the same in each record
        stack.callback(recorder.ledger.put_back)
        with ExitStack() as watching:
            watching.enter_context(recorder.saved_hooks)
            watching.enter_context(recorder.flop_counter)
            watching.enter_context(recorder)
            result = loss(model, batch)
        graph = recorder.graph(samples, result, replaced())
    recorder.ledger.let_go()
    return Recording(graph, result)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Put buffers, attributes and generators of random numbers back; tells which buffers were replaced by others."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    own = vars(nn.Module()).keys()
    boxes = [
        (box, box.copy())
        for _, table in attributes
        for name, box in table.items()
        if type(box) in (dict, list) and name not in own
    ]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    buffers = [(name, module, dict(module._buffers)) for name, module in model.named_modules() if module._buffers]
    contents = [(b, b.clone()) for b in state_of(model).values() if not b.is_meta]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None

    def replaced() -> dict[str, torch.Tensor]:
        return {
            f"{path}.{name}".lstrip("."): module._buffers[name]
            for path, module, table in buffers
            for name in table
            if isinstance(module._buffers.get(name), torch.Tensor) and module._buffers[name] is not table[name]
        }

    try:
        yield replaced
    finally:
        for _, module, table in buffers:
            module._buffers.clear()
            module._buffers.update(table)
        for parameter, flag in trained:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        for module, before in attributes:  # what a module kept of this run would be of no use to it
            now = vars(module)
            for name in [n for n, value in now.items() if before.get(n, now) is not value and _holds_made(value)]:
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]
        for box, content in boxes:
            if _holds_made(box):
                _fill(box, content)
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
        random.setstate(python_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def _fill(box: Any, content: Any) -> None:
    box.clear()
    box.update(content) if isinstance(box, dict) else box.extend(content)


def _holds_made(value: Any) -> bool:
    """Say whether there is a tensor in it that is absent, or part of a graph: no copy could be made of that."""
    return any(isinstance(leaf, torch.Tensor) and (leaf.is_meta or not leaf.is_leaf) for leaf in tree_leaves(value))
