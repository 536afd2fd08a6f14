"""One stage: runs the model's own Python, and computes only the part of the program that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from headway.errors import SplitError
from headway.graph.absent import answer_fact, call_on_meta, meta_twin
from headway.graph.chance import is_random
from headway.graph.model import Position, position_text
from headway.graph.walk import (
    Walk,
    function_name,
    is_read,
    is_shape_read,
    map_tensors,
    module_paths,
    short_name,
    tensors_of,
)
from headway.layout.split import Crossing, Split
from headway.run.outputs import Program
from headway.run.randomness import Chance

Key = tuple[Position, int]

_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)


class StageEnd(BaseException):
    """Unwinds the user's code when a stage has done its part; never seen outside this file."""


@dataclass(frozen=True)
class StageResult:
    """What one pass made: tensors for later stages by key, answers to value reads, and the loss on the last stage."""

    sends: Mapping[Key, torch.Tensor]
    answers: Mapping[str, Any]
    output: Any = None
    captured: Any = None  # what the model returned, with absent tensors for what other stages have


@dataclass(frozen=True)
class Stage:
    """A stage of a split, ready to run: the model, which weights it must not compute with, and what it passes over."""

    split: Split
    index: int
    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    device: torch.device
    weights: frozenset[int] = frozenset()  # ids of all parameters, and of buffers that the program changes
    keep: frozenset[Position] = frozenset()  # module calls that are followed call by call
    paths: Mapping[int, str] = field(default_factory=dict, compare=False)  # of modules, by id
    shapes: dict[Any, Any] = field(default_factory=dict, compare=False)  # results of what is passed over, as templates

    @staticmethod
    def of(
        split: Split, index: int, model: nn.Module, loss: Callable[[nn.Module, Any], Any], device: torch.device
    ) -> Stage:
        """Prepare stage `index` of `split`. Make it after the model's parameters are in their final place."""
        part = split.stages[index]
        state = set(split.state)
        weights = {id(p) for p in model.parameters()}
        weights |= {id(b) for name, b in model.named_buffers(remove_duplicate=False) if name in state}
        keep = set(split.guarded)
        for crossing in (*part.receives, *part.sends):
            keep.update(crossing.position[:depth] for depth in range(1, len(crossing.position)))
        return Stage(split, index, model, loss, device, frozenset(weights), frozenset(keep), module_paths(model))

    @property
    def whole(self) -> bool:
        """Whether this stage is the whole program and nothing in it needs watching."""
        return self.split.num_stages == 1 and not self.split.random

    def run(
        self,
        batch: Any,
        received: Mapping[Key, torch.Tensor],
        answers: Mapping[str, Any],
        chance: Chance | None = None,
        *,
        program: Program | None = None,
    ) -> StageResult:
        """Run this stage's part of loss(model, batch), or of `program` up to the return of model(...).

        `received` holds every tensor of `part.receives` that its source had. Raises SplitError when the program takes
        something that this stage does not have, naming module, call and value.
        """
        if self.whole and program is None:
            return StageResult({}, {}, self.loss(self.model, batch))
        walk = StageWalk(self, received, answers, chance, program)
        call = self.loss if program is None else program.call
        output = None
        try:
            with walk:
                output = call(self.model, batch)
        except StageEnd:
            pass
        part = self.split.stages[self.index]
        if part.end is None and program is None:
            for tensor in tensors_of(output, []):
                if tensor.is_meta:
                    raise self.error("the result of the loss function depends on a value that this stage does not have")
        for key, tensor in walk.made.items():
            if tensor.is_meta:
                raise self.error(f"the value made at {position_text(key[0])} was not computed")
        return StageResult(walk.made, {**answers, **walk.answers}, output, walk.captured)

    def error(self, fact: str, place: str | None = None) -> SplitError:
        """Say what went wrong in this stage."""
        where = f"stage {self.index} of {self.split.num_stages}" + (f", {place}" if place else "")
        return SplitError(
            fact,
            place=where,
            remedy='record with a batch that takes this way through the model, or fix other cuts (fixed={"cuts": ...})',
        )


class StageWalk(Walk):
    """Computes the calls in [start, end); before, only what depends on the batch alone; after, nothing."""

    def __init__(
        self,
        stage: Stage,
        received: Mapping[Key, torch.Tensor],
        answers: Mapping[str, Any],
        chance: Chance | None,
        program: Program | None,
    ) -> None:
        super().__init__(stage.model, stage.paths)
        self.capture, self.captured = program is not None, None
        self.frames[0].count = 0 if program is None else program.events
        part = stage.split.stages[stage.index]
        self.stage, self.part, self.chance = stage, part, chance
        self.start, self.end = part.start, part.end
        self.given_answers = answers
        self.answers: dict[str, Any] = {}
        self.incoming: dict[Position, dict[int, Crossing]] = {}
        for crossing in part.receives:
            self.incoming.setdefault(crossing.position, {})[crossing.output] = crossing
        self.received = received
        self.outgoing: dict[Position, set[int]] = {}
        for crossing in part.sends:
            self.outgoing.setdefault(crossing.position, set()).add(crossing.output)
        self.made: dict[Key, torch.Tensor] = {}
        self.opaque = set(stage.weights)  # ids of tensors that are not to be computed with before the start
        self.alive: list[torch.Tensor] = []  # keeps the tensors of `opaque` from being freed, so that ids stay theirs

    # where in the program

    def _before(self, position: Position) -> bool:
        return position < self.start

    def _after(self, position: Position) -> bool:
        return self.end is not None and position >= self.end

    # events

    def fact(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer for absent tensors that they live on this stage's device."""
        return answer_fact(func, name, args, kwargs, self.stage.device)

    def on_module(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Pass over a module that lies before the start; run one that lies in the range at full speed."""
        if self._after(position):
            raise StageEnd
        if self.capture and module is self.stage.model and len(self.frames) == 1:
            self.captured = run()
            raise StageEnd
        depth = len(position)
        if position in self.stage.keep or position == self.start[:depth] and len(self.start) > depth:
            return run()
        if position < self.start:
            return self._pass_over(position, module, run, args, kwargs)
        if self.end is not None and position == self.end[:depth]:
            return run()
        with self.pause():
            return run()

    def on_call(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, receive or leave out one call, by its place."""
        if self._after(position):
            raise StageEnd
        if self._before(position):
            return self._call_before(position, func, args, kwargs)
        for tensor in tensors_of((args, kwargs), []):
            if tensor.is_meta:
                return self._absent_in_range(func, args, kwargs, tensor)
        result = self._real(position, func, args, kwargs)
        if self.stage.split.reads:
            self._note_answer(position, func, args, kwargs, result)
        return result

    def _real(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.chance is not None and is_random(func, args, kwargs):
            result = self.chance.call(position, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        wanted = self.outgoing.get(position)
        if wanted:
            for number, tensor in enumerate(tensors_of(result, [])):
                if number in wanted:
                    self.made[(position, number)] = tensor
        return result

    def _absent_in_range(self, func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
        result = call_on_meta(func, args, kwargs, meta_twin)
        if not is_read(func, args, kwargs) and not tensors_of(result, []):
            return result  # a question about shapes
        name = next((n for n, p in self.stage.model.named_parameters() if p is tensor), None)
        what = f"parameter {name}" if name else f"a tensor of shape {list(tensor.shape)}"
        raise self.stage.error(
            f"{function_name(func)} takes {what}, which this stage does not have", self.module_path or "loss function"
        )

    # before the start

    def _call_before(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of((args, kwargs), [])
        hidden = any(t.is_meta or id(t) in self.opaque for t in tensors)
        if not hidden and position not in self.incoming:
            return self._real(position, func, args, kwargs)
        if is_read(func, args, kwargs):
            return self._answer(position, func)
        result = self._absent(position, func, args, kwargs, tensors)
        incoming = self.incoming.get(position)
        if incoming:
            numbers = iter(range(1 << 30))

            def settle(tensor: torch.Tensor) -> torch.Tensor:
                number = next(numbers)
                return self._receive(incoming[number], tensor) if number in incoming else tensor

            result = map_tensors(result, settle)
        return result

    def _absent(self, position: Position, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Give a call's result without its content; what was found once for the same shapes is used again."""
        inputs: list[Any] = []
        key = (position, func, _signature((args, kwargs), inputs, self.opaque), torch.is_grad_enabled())
        template = self.stage.shapes.get(key)
        if template is not None:
            leaves, spec = template
            return tree_unflatten([make(inputs) for make in leaves], spec)
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of twin -> (twin, the tensor it stands for)

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            for stand_in, original in twins.values():
                if original is tensor:
                    return stand_in
            stand_in = meta_twin(tensor).detach()
            twins[id(stand_in)] = (stand_in, tensor)
            return stand_in

        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        versions = [t._version for t in tensors]
        with torch.no_grad():
            if is_shape_read(func, args, kwargs):
                return self._shaped(position, func)
            result = call_on_meta(func, args, kwargs, twin)
        written = [original for stand_in, original in twins.values() if stand_in._version]
        for original in written:
            if id(original) not in self.opaque:
                self._hide(original)  # written with something absent: its content is not what the program has

        def settle(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in twins:
                return twins[id(tensor)][1]
            if grad and tensor.is_floating_point() and tensor.is_leaf and not any(tensor is t for t in tensors):
                tensor.requires_grad_()
            return tensor

        result = map_tensors(result, settle)
        if not written and versions == [t._version for t in tensors]:
            self.stage.shapes[key] = _template(result, inputs)
        return result

    def _receive(self, crossing: Crossing, shape: torch.Tensor) -> torch.Tensor:
        tensor = self.received.get(crossing.key)
        if tensor is None:
            return shape  # its source did not make it on this batch
        if crossing.written and tensor.requires_grad:
            with torch.enable_grad():
                tensor = tensor.clone()  # in-place calls are not allowed on a leaf
        self._hide(tensor)
        if crossing.position in self.outgoing and crossing.output in self.outgoing[crossing.position]:
            self.made[crossing.key] = tensor
        return tensor

    def _hide(self, tensor: torch.Tensor) -> None:
        self.opaque.add(id(tensor))
        self.alive.append(tensor)

    # values that the program reads

    def _note_answer(self, position: Position, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if is_read(func, args, kwargs):
            self.answers[position_text(position)] = result
        elif is_shape_read(func, args, kwargs):
            shapes = map_tensors(result, lambda t: (tuple(t.shape), t.dtype))
            self.answers[position_text(position)] = shapes

    def _answer(self, position: Position, func: Any) -> Any:
        text = position_text(position)
        if text not in self.given_answers:
            raise self.stage.error(
                f"{short_name(func)} reads the content of a tensor that an earlier stage computes, and had no answer",
                self.module_path or "loss function",
            )
        return self.given_answers[text]

    def _shaped(self, position: Position, func: Any) -> Any:
        def is_leaf(item: Any) -> bool:
            return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.dtype)

        def make(item: Any) -> Any:
            if is_leaf(item):
                return torch.empty(item[0], dtype=item[1], device="meta")
            return type(item)(make(part) for part in item) if isinstance(item, tuple | list) else item

        return make(self._answer(position, func))

    # modules passed over

    def _pass_over(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Give a module's result without running it: absent tensors in the shape of the first time it was run.

        Not possible when the result holds something computed from the batch alone, or an object that is not known.
        """
        inputs: list[Any] = []
        shapes = self.stage.shapes
        with self.pause():  # under the walk an absent tensor says that it is on this stage's device
            signature = (position, id(module), module.training, _signature((args, kwargs), inputs, self.opaque))
            template = shapes.get(signature)
            if template is not None:
                leaves, spec = template
                return tree_unflatten([make(inputs) for make in leaves], spec)
        result = run()
        if signature not in shapes:
            with self.pause():
                shapes[signature] = _template(result, inputs)
        return result


def _signature(value: Any, inputs: list[Any], opaque: set[int]) -> Any:
    """Describe the arguments of a module call for as far as its result's shape can depend on them."""
    if isinstance(value, torch.Tensor):
        inputs.append(value)
        hidden = value.is_meta or id(value) in opaque
        return (value.shape, value.dtype, value.requires_grad, hidden)
    if isinstance(value, tuple | list):
        return (type(value), *(_signature(item, inputs, opaque) for item in value))
    if isinstance(value, dict):
        return (type(value), *((key, _signature(item, inputs, opaque)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, *(_signature(part, inputs, opaque) for part in (value.start, value.stop, value.step)))
    if value is None or value is Ellipsis or isinstance(value, _CONSTANTS):
        return (type(value), value)
    inputs.append(value)
    return type(value)


def _template(result: Any, inputs: list[Any]) -> Any:
    """Make, for each leaf of a module's result, a function that makes it again; None when that is not possible."""
    leaves, spec = tree_flatten(result)
    makers: list[Callable[[list[Any]], Any]] = []
    for leaf in leaves:
        place = next((i for i, item in enumerate(inputs) if item is leaf), None)
        if place is not None:
            makers.append(lambda items, i=place: items[i])  # type: ignore[misc]
        elif isinstance(leaf, torch.Tensor):
            if not leaf.is_meta:
                return None
            makers.append(lambda items, like=leaf.detach(), grad=leaf.requires_grad: _absent_like(like, grad))  # type: ignore[misc]
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            makers.append(lambda items, constant=leaf: constant)  # type: ignore[misc]
        else:
            return None
    return makers, spec


def _absent_like(like: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    tensor = like.detach()  # shares nothing but a shape: there is no content on meta
    return tensor.requires_grad_() if requires_grad else tensor
