"""Recorder: the walk that notes calls, tensors and modules while the program runs once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import BackwardHook

from headway.errors import SplitError
from headway.graph.absent import Inside, answer_fact, bare_twin, call_on_meta
from headway.graph.backward import names_of, refuse_backward
from headway.graph.chance import host_state, is_random, seed_torch
from headway.graph.flops import FlopCounter, attention_on_meta
from headway.graph.host import Gaps
from headway.graph.interception import CHECKPOINT
from headway.graph.ledger import Ledger, version_of
from headway.graph.liveness import allowed_cuts, guarded_modules
from headway.graph.model import Call, ModelGraph, ModuleCall, Position, Ref, Weight
from headway.graph.walk import (
    Walk,
    all_tensors,
    function_name,
    is_in_place,
    is_read,
    is_shape_read,
    map_tensors,
    module_paths,
    short_name,
    tensors_of,
)
from headway.graph.weights import running_statistics
from headway.graph.where import user_line


class ValueNeeded(SplitError):
    """The program read the content of a tensor that was not computed."""


@dataclass
class _OpenModule:
    position: Position
    path: str
    kind: str
    occurrence: int
    first: int
    last: int = 0
    draws: bool = False
    results: tuple[int | None, ...] = ()  # values among the leaves of what it returned


class Recorder(Walk):
    """Notes calls, tensors and modules. With `compute` on real numbers; else what is derived is computed on meta."""

    def __init__(self, model: nn.Module, batch: Any, *, compute: bool, state: frozenset[str] = frozenset()) -> None:
        super().__init__(module_paths(model), model=model)
        self.compute = compute
        self.ledger = Ledger(model, state, compute=compute)
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
        self.device = device or torch.device("cpu")
        self.flop_counter = FlopCounter()
        self.saved_hooks = torch.autograd.graph.saved_tensors_hooks(self.ledger.note_saved, lambda t: t)
        self.calls: list[Call] = []
        self.modules: list[_OpenModule] = []
        self.occurrences: dict[str, int] = {}
        self.reshaped: dict[int, int] = {}  # value id -> call that changed its shape in place
        self.unsendable: set[int] = set()  # sparse and other values that no message can carry
        self.locked: dict[int, str] = {}  # call index -> why no stage may begin there
        self.hooked: dict[Position, int] = {}  # open modules with full backward hooks -> their first call
        self.without_rule: dict[Any, bool] = {}  # calls whose shape cannot be had on meta, by what they took
        self.asked: set[str] = set()  # names of those functions
        self.branches = self.went_back = False
        self.gaps: Gaps | None = None  # between calls, in which Python's or numpy's numbers are drawn
        self.host_draws: dict[str, None] = {}  # lines of calls before which Python's or numpy's numbers were drawn
        for leaf in all_tensors(batch):
            self.ledger.add(leaf, producer=None, output=0, derived=False, given=True)

    # events

    def goes_back(self, roots: Any, inputs: Any) -> None:
        """Refuse a backward that reaches parameters, or what stands for them; note one that follows from them."""
        refuse_backward(roots, inputs, self.ledger.with_twins(names_of(self.model)))
        self.went_back = self.went_back or any(
            root.is_meta or self.ledger.is_derived(self.ledger.value_of(root)) for root in tensors_of(roots, [])
        )

    def fact(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer for absent tensors that they live on the model's device."""
        result = answer_fact(func, name, args, kwargs, self.device)
        if name == "__set__":
            self.ledger.look_again(args[0])
        return result

    def on_module(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Note one module call."""
        entry = self._open(position, self.path_of(module), type(module).__name__)
        self._look_for_draws()
        before = host_state()
        result = run()
        entry.draws = host_state() != before
        entry.last = len(self.calls)
        known = self.ledger.known
        leaves = (leaf if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(result))
        entry.results = tuple(known[id(t)][1] if id(t) in known else None for t in leaves)
        return result

    def _open(self, position: Position, path: str, kind: str) -> _OpenModule:
        occurrence = self.occurrences.get(path, 0)
        self.occurrences[path] = occurrence + 1
        entry = _OpenModule(position, path, kind, occurrence, len(self.calls))
        self.modules.append(entry)
        return entry

    def on_region(self, position: Position) -> None:
        """Note where a checkpointed region begins; it ends where the calls with other positions go on."""
        self._open(position, CHECKPOINT, "checkpoint")

    def on_reentrant(self, position: Position, apply: Callable[..., Any], run: Any, preserve: Any, args: Any) -> Any:
        """Follow a checkpointed region as if it were not one: what it computes is the same."""
        return run(*args)

    def backward_hook(self, original: Any, hook: BackwardHook, args: Any) -> Any:
        """Keep a module with a full backward hook whole: it takes gradients of the inputs and of the results."""
        first = len(self.calls)
        result = original(hook, args)
        if hook.user_hooks and hook.output_tensors_index is None and len(self.calls) > first:
            self.hooked[self.frames[-1].position] = first
        elif hook.output_tensors_index is not None and self.frames[-1].position in self.hooked:
            inside = range(self.hooked.pop(self.frames[-1].position) + 1, len(self.calls))
            self.locked.update(dict.fromkeys(inside, "a module with a full backward hook stays whole"))
        return result

    def on_opaque(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note one call with an inside of its own, and the weights that it finds by itself."""
        try:
            return self.on_call(position, func, args, kwargs, opaque=True)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
        self.saved_hooks.__exit__(None, None, None)  # derivatives of torch.func do not allow them
        try:
            return self.on_call(position, func, args, kwargs, opaque=True)
        finally:
            self.saved_hooks.__enter__()

    def on_call(
        self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, opaque: bool = False
    ) -> Any:
        """Note one torch call, computing it on meta when it depends on parameters."""
        ledger = self.ledger
        self._look_for_draws()
        tensors = tensors_of((args, kwargs), [])
        parameters, buffers, inputs = ledger.classify(tensors)
        derived = bool(parameters) or any(ledger.is_derived(v) for v in inputs) or any(t.is_meta for t in tensors)
        derived = derived or not ledger.state.isdisjoint(buffers)
        read, shape_read = is_read(func, args, kwargs), is_shape_read(func, args, kwargs)
        self.branches = self.branches or read or shape_read
        arguments = map_tensors((args, kwargs), self._stand_in)
        on_meta = derived and not self.compute
        if on_meta and (read or shape_read):
            raise ValueNeeded(
                f"{short_name(func)} reads the content of a tensor that depends on parameters",
                place=f"{self.module_path or 'loss function'}, {user_line()}",
                remedy="give the model values (it is on meta), or move the read out of the forward pass",
            )
        asked = derived and self.compute and not read and not shape_read and not self._has_rule(func, args, kwargs)
        if self.compute and is_in_place(func, kwargs):
            ledger.keep(tensors)
        versions, shapes = [version_of(t) for t in tensors], [t.shape for t in tensors]
        statistics = {id(t) for t in running_statistics(func, args, kwargs)}
        ledger.saved_now = []
        before, chance = self.flop_counter.flops, is_random(func, args, kwargs)
        if chance and not on_meta:
            seed_torch(crc32(repr(position).encode()))
        inside: dict[int, torch.Tensor] = {}
        with self._inside(inside) if opaque else nullcontext() as within:
            result = self._compute(func, args, kwargs) if on_meta else func(*args, **kwargs)
        flops = self.flop_counter.flops - before
        made = tensors_of(result, [])
        if not made and not read and result is not None:
            return result
        if inside:
            found, held, taken = ledger.classify(list(inside.values()))
            parameters, buffers, inputs = parameters + found, buffers + held, inputs + taken
            derived = derived or bool(found) or any(ledger.is_derived(v) for v in taken)
        chance = chance or (within is not None and within.random)
        if short_name(func) == "requires_grad_":
            ledger.look_again(args[0])
        self.asked.update((function_name(func),) if asked else ())
        self._note(
            position, func, tensors, inputs, made, arguments, flops, parameters, buffers,
            versions, shapes, derived, read or shape_read or asked, chance, statistics,
        )  # fmt: skip
        return result

    def _look_for_draws(self) -> tuple[str, ...]:
        """Note whether Python's or numpy's generator was drawn from since the last call, which no mode sees."""
        if self.gaps is not None and self.gaps.look():
            self.host_draws.setdefault(user_line())
        return tuple(self.host_draws)

    def _inside(self, found: dict[int, torch.Tensor]) -> Inside:
        """Watch a call whose inside is not followed for the weights and the values that it uses."""
        weights, known = self.ledger.weights, self.ledger.known

        def seen(tensor: torch.Tensor) -> None:
            if id(tensor) in weights or id(tensor) in known:
                found[id(tensor)] = tensor

        def absent(tensor: torch.Tensor) -> bool:
            return not self.compute and id(tensor) in weights and not weights[id(tensor)][2]

        return Inside(seen, absent, self.ledger.twin, self.device)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if short_name(func) == "scaled_dot_product_attention":
            return attention_on_meta(self.flop_counter, self.ledger.twin, func, args, kwargs)
        result = call_on_meta(func, args, kwargs, self.ledger.twin, self.ledger.is_hidden)
        if func is torch.autograd.grad and None in result:
            raise ValueNeeded("torch.autograd.grad has gone back over calls that were computed, and found nothing")
        # a call may give one of its arguments back: x.float() where x is float already, x.add_(1)
        given = {
            id(self.ledger.twins[id(t)][1]): t for t in tensors_of((args, kwargs), []) if id(t) in self.ledger.twins
        }
        return map_tensors(result, lambda t: given.get(id(t), t)) if given else result

    def _has_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether a stage that does not compute this call can have its shape on meta."""
        looks = map_tensors((args, kwargs), lambda t: (t.shape, t.dtype, t.dim() or self.ledger.is_hidden(t)))
        key = (func, str(looks))
        if key not in self.without_rule:
            flops = self.flop_counter.flops
            try:
                with torch.no_grad(), self._as_absent():
                    call_on_meta(func, args, kwargs, bare_twin, self.ledger.is_hidden)
                # what a stage has of a sparse tensor is a shape alone
                self.without_rule[key] = any(t.layout is not torch.strided for t in tensors_of((args, kwargs), []))
            except Exception:  # whatever it is, a stage would meet it too
                self.without_rule[key] = True
            self.flop_counter.flops = flops
        return not self.without_rule[key]

    def _as_absent(self) -> Inside:
        return Inside(lambda t: None, lambda t: id(t) in self.ledger.weights, bare_twin, self.device)

    def _stand_in(self, tensor: torch.Tensor) -> Any:
        weight = self.ledger.weights.get(id(tensor))
        return Weight(weight[1]) if weight else Ref(self.ledger.value_of(tensor))

    def _note(
        self, position: Position, func: Any, tensors: list[torch.Tensor], inputs: list[int],
        made: list[torch.Tensor], arguments: Any, flops: int, parameters: list[str], buffers: list[str],
        versions: list[int], shapes: list[Any], derived: bool, reads: bool, chance: bool, statistics: set[int],
    ) -> None:  # fmt: skip
        index, ledger = len(self.calls), self.ledger
        writes, written_buffers = [], []
        for tensor, version, shape in zip(tensors, versions, shapes, strict=True):
            if not ledger.was_written(tensor, version) and id(tensor) not in statistics:
                continue
            weight = ledger.weight_of(tensor)
            if weight is not None:
                written_buffers.append(weight)  # Keras keeps its moving averages in frozen parameters
            if id(tensor) in ledger.weights:
                continue
            value = ledger.value_of(tensor)
            writes.append(value)
            if derived:
                ledger.derived_storages.add(ledger.values[value].storage)
            if tensor.shape != shape:
                self.reshaped.setdefault(value, index)
        if not (made or reads or writes or written_buffers):
            return
        outputs, fresh, storages_in = [], 0, {ledger.storage_id(t) for t in tensors}
        derived = derived or bool(written_buffers)
        for number, tensor in enumerate(made):
            if id(tensor) in ledger.known or id(tensor) in ledger.weights:
                continue
            value = ledger.add(tensor, producer=index, output=number, derived=derived)
            outputs.append(value)
            if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
                self.unsendable.add(value)
            if ledger.values[value].storage not in storages_in:
                fresh += ledger.values[value].bytes
        moved = fresh + sum(ledger.values[v].bytes for v in writes)
        if moved or not outputs:
            moved += sum(t.numel() * t.element_size() for t in tensors)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.locked[index] = "tensors inside a transform of torch.func do not leave it"
        self.calls.append(
            Call(
                index=index, position=position, module=self.module_path, function=function_name(func),
                arguments=arguments, inputs=tuple(dict.fromkeys(inputs)), outputs=tuple(outputs),
                writes=tuple(dict.fromkeys(writes)), parameters=tuple(dict.fromkeys(parameters)),
                buffers=tuple(dict.fromkeys(buffers)), written_buffers=tuple(dict.fromkeys(written_buffers)),
                derived=derived, random=chance, reads_value=reads and derived, flops=flops,
                bytes=moved, output_bytes=fresh, saved=tuple(ledger.saved_now), where=user_line(),
            )
        )  # fmt: skip

    # the end

    def graph(self, samples: int, result: Any, replaced: dict[str, torch.Tensor]) -> ModelGraph:
        """Close the record: what crosses each cut, which cuts are allowed, which modules must not be passed over.

        `replaced` are the buffers for which the program put other tensors, with those.
        """
        known, values = self.ledger.known, self.ledger.values
        results = [known[id(leaf)][1] for leaf in all_tensors(result) if id(leaf) in known]
        self._note_replaced(replaced)
        modules = [self._closed(m) for m in self.modules]
        draws = [m.draws for m in self.modules]
        modules = guarded_modules(modules, draws, self.calls, values)
        if self.went_back:  # it leaves gradients in tensors, where no call is seen to make them
            self.locked = dict.fromkeys(
                range(len(self.calls)), "backward is called, where torch.autograd.grad would do"
            )
        cuts, refused = allowed_cuts(self.calls, values, modules, results, self.reshaped, self.locked, self.unsendable)
        return ModelGraph(
            samples=samples, calls=tuple(self.calls), values=tuple(values),
            storages=tuple(self.ledger.storage_sizes()), modules=tuple(modules),
            parameters=tuple(self.ledger.parameters), cuts=cuts, refused_cuts=refused, on_meta=not self.compute,
            asked=tuple(sorted(self.asked)), host_draws=self._look_for_draws(),
            branches=self.branches, host=("? ?",) * len(self.gaps.ends if self.gaps else ()),
            extra={"results": tuple(results), "host": tuple(self.gaps.ends if self.gaps else ())},
        )  # fmt: skip

    def _closed(self, module: _OpenModule) -> ModuleCall:
        last = module.last
        if module.kind == "checkpoint":
            depth = len(module.position)
            last = module.first
            while last < len(self.calls) and self.calls[last].position[:depth] == module.position:
                last += 1
        return ModuleCall(
            module.position, module.path, module.kind, module.occurrence, module.first, last, module.results, False
        )

    def _note_replaced(self, replaced: dict[str, torch.Tensor]) -> None:
        """Count a buffer for which the program put another tensor as written by the call that made that tensor.

        One that follows from the batch alone is made on every stage, and is no state.
        """
        for name, tensor in replaced.items():
            entry = self.ledger.known.get(id(tensor))
            producer = self.ledger.values[entry[1]].producer if entry else None
            if producer is not None and self.calls[producer].derived:
                call = self.calls[producer]
                written = tuple(dict.fromkeys((*call.written_buffers, name)))
                self.calls[producer] = Call(**{**vars(call), "written_buffers": written})
