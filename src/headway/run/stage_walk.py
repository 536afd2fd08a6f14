"""Stage walk: computes the calls of one stage's range, receives what crosses, and leaves out what other stages do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.graph.absent import Inside, answer_fact, call_on_meta, meta_twin
from headway.graph.chance import is_random
from headway.graph.ledger import storage_of
from headway.graph.model import Position, position_text
from headway.graph.walk import (
    Walk,
    function_name,
    is_read,
    is_shape_read,
    map_tensors,
    short_name,
    tensors_of,
)
from headway.layout.split import Crossing
from headway.run.outputs import Program
from headway.run.randomness import Chance
from headway.run.repeat import Repeat
from headway.run.templates import WANTS_GRADIENT, absent_of, make, mark, shapes_of, signature, template

if TYPE_CHECKING:
    from headway.run.stage import Stage

Key = tuple[Position, int]


class StageEnd(BaseException):
    """Unwinds the user's code when a stage has done its part; never seen outside run/."""


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
        super().__init__(stage.paths, stage.landmarks)
        self.capture, self.captured = program is not None, None
        part = stage.split.stages[stage.index]
        self.stage, self.part, self.chance = stage, part, chance
        self.start, self.end = part.start, part.end
        self.given_answers = answers
        self.answers: dict[str, Any] = {}
        self.incoming: dict[Position, dict[int, Crossing]] = {}
        for crossing in part.receives:
            place = answers.get(_moved(crossing), crossing.position)
            self.incoming.setdefault(place, {})[crossing.output] = crossing
        self.received = received
        self.outgoing: dict[Position, dict[int, Crossing]] = {}
        for crossing in part.sends:
            self.outgoing.setdefault(crossing.position, {})[crossing.output] = crossing
        self.made: dict[Key, torch.Tensor] = {}
        self.frames_out = {position[:-2] for position in self.outgoing}
        self.latest: dict[Any, tuple[Position, torch.Tensor]] = {}  # what may stand in for a value that is not made
        # ids of tensors that are not to be computed with before the start, and of their storages
        self.opaque = set(stage.parameters)
        self.opaque.update(id(getattr(module, name)) for module, name, _ in stage.buffers)
        self.opaque_storages: set[int] = set()
        self.alive: list[Any] = []  # keeps those tensors and storages from being freed, so that ids stay theirs

    # where in the program

    def _before(self, position: Position) -> bool:
        return position < self.start

    def _after(self, position: Position) -> bool:
        return self.end is not None and position >= self.end

    # events

    def fact(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer for absent tensors that they live on this stage's device, and need gradients where they do."""
        if name == "requires_grad" and args[0].is_meta and not isinstance(args[0], nn.Parameter):
            return hasattr(args[0], WANTS_GRADIENT)
        return answer_fact(func, name, args, kwargs, self.stage.device)

    def on_region(self, position: Position) -> None:
        """End at a checkpointed region after the range."""
        if self._after(position):
            raise StageEnd

    def on_reentrant(self, position: Position, apply: Callable[..., Any], run: Any, preserve: Any, args: Any) -> Any:
        """Checkpoint a region only where it is computed."""
        if self._before(position):
            return run(*args)
        first, later = iter((run,)), self.again(position, run)
        return apply(lambda *given: next(first, later)(*given), preserve, *args)

    def again(self, position: Position, run: Callable[..., Any]) -> Callable[..., Any]:
        """Compute a checkpointed region again with the same random numbers."""
        if self.chance is None or not self.stage.split.random or self._before(position):
            return run
        stage, chance, path = self.stage, self.chance, self.module_path

        def once_more(*args: Any, **kwargs: Any) -> Any:
            with Repeat(stage.paths, stage.landmarks, stage.keep, chance, position, path):
                return run(*args, **kwargs)

        return once_more

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
        try:
            with self.pause():
                return run()
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            path = self.paths.get(id(module), type(module).__name__)
            raise self.stage.error(
                f"{type(module).__name__} takes a tensor or a parameter which this stage does not have", path
            ) from error

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
            if is_read(func, args, kwargs):
                self.answers[position_text(position)] = result
            elif is_shape_read(func, args, kwargs) or function_name(func) in self.stage.split.asked:
                self.answers[position_text(position)] = shapes_of(result)
        return result

    def _real(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.chance is not None and is_random(func, args, kwargs):
            result = self.chance.call(position, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if position[:-2] in self.frames_out:
            name, wanted = function_name(func), self.outgoing.get(position, {})
            for number, tensor in enumerate(tensors_of(result, [])):
                crossing = wanted.get(number)
                if crossing is not None and crossing.function == name:
                    self.made[crossing.key] = tensor
                else:
                    self.latest[(position[:-2], name, number)] = (position, tensor)
        return result

    def finish(self) -> None:
        """Find what takes the place of values that were to be sent and were not made.

        A loop that went round more or fewer times makes its last value at another place: then the last that the same
        function made in the same frame is sent, with its place, where the receiver makes it too.
        """
        for crossing in self.part.sends:
            other = self.latest.get((crossing.position[:-2], crossing.function, crossing.output))
            if crossing.key not in self.made and other is not None:
                self.answers[_moved(crossing)], self.made[crossing.key] = other

    def _absent_in_range(self, func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
        if not is_read(func, args, kwargs):
            try:
                with torch.no_grad():
                    result = call_on_meta(func, args, kwargs, _bare_twin)
            except Exception:  # it is an error below, whatever it would be here
                result = tensor
            if not tensors_of(result, []) and short_name(func) != "__setitem__":
                return result  # a question about shapes
        name = next((n for n, p in self.stage.model.named_parameters() if p is tensor), None)
        what = f"parameter {name}" if name else f"a tensor of shape {list(tensor.shape)}"
        raise self.stage.error(
            f"{function_name(func)} takes {what}, which this stage does not have", self.module_path or "loss function"
        )

    # before the start

    def on_opaque(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, receive or leave out a call that may use weights which are not among its arguments."""
        if not self._before(position):
            return self.on_call(position, func, args, kwargs)
        if any(map(self._is_hidden, tensors_of((args, kwargs), []))):
            with Inside(_ignore, self._is_hidden, _bare_twin, self.stage.device):
                return self._call_before(position, func, args, kwargs)
        found: list[torch.Tensor] = []

        def absent(tensor: torch.Tensor) -> bool:
            if self._is_hidden(tensor):
                found.append(tensor)
            return bool(found) and found[-1] is tensor

        with Inside(_ignore, absent, _bare_twin, self.stage.device):
            result = self._call_before(position, func, args, kwargs)
        return map_tensors(result, _bare_twin) if found and position not in self.incoming else result

    def _call_before(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of((args, kwargs), [])
        incoming = self.incoming.get(position)
        if incoming and next(iter(incoming.values())).function != function_name(func):
            incoming = None  # the program went another way; what was sent is found elsewhere
        if not incoming and not any(map(self._is_hidden, tensors)):
            return self._real(position, func, args, kwargs)
        if is_read(func, args, kwargs):
            return self._answer(position, func)
        result = self._absent(position, func, args, kwargs, tensors)
        if not incoming:
            return result
        numbers = iter(range(1 << 30))

        def settle(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            return self._receive(incoming[number], tensor) if number in incoming else tensor

        return map_tensors(result, settle)

    def _absent(self, position: Position, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Give a call's result without its content; what was found once for the same shapes is used again."""
        if is_shape_read(func, args, kwargs) or function_name(func) in self.stage.split.asked:
            return absent_of(self._answer(position, func))
        wants = torch.is_grad_enabled() and any(t.requires_grad or hasattr(t, WANTS_GRADIENT) for t in tensors)
        if short_name(func) == "requires_grad_":
            return mark(args[0])
        inputs: list[Any] = []
        key = (position, func, signature((args, kwargs), inputs, self._is_hidden), torch.is_grad_enabled())
        known = self.stage.shapes.get(key)
        if known is not None:
            return make(known, inputs)
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of twin -> (twin, the tensor it stands for)

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            for stand_in, original in twins.values():
                if original is tensor:
                    return stand_in
            stand_in = _bare_twin(tensor)
            twins[id(stand_in)] = (stand_in, tensor)
            return stand_in

        versions = [t._version for t in tensors]
        try:
            with torch.no_grad():
                result = call_on_meta(func, args, kwargs, twin, self._is_hidden)
        except Exception as error:
            return self._without_rule(func, args, error)
        written = [original for stand_in, original in twins.values() if stand_in._version]
        for original in written:
            if not self._is_hidden(original):
                self._hide(original)  # written with something absent: its content is not what the program has
        given = {id(t) for t in tensors}

        def settle(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in twins:
                return twins[id(tensor)][1]
            return mark(tensor) if wants and tensor.is_floating_point() and id(tensor) not in given else tensor

        result = map_tensors(result, settle)
        if not written and versions == [t._version for t in tensors]:
            self.stage.shapes[key] = template(result, inputs)
        return result

    def _without_rule(self, func: Any, args: Any, error: Exception) -> Any:
        """Do without the result of a call that torch cannot do on meta: possible for in-place calls alone."""
        name = short_name(func)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if not in_place or not args or not isinstance(args[0], torch.Tensor):
            raise self.stage.error(
                f"{function_name(func)} takes a value of an earlier stage, and has no shape without it "
                f"({str(error).splitlines()[0]})",
                self.module_path or "loss function",
            ) from error
        if not self._is_hidden(args[0]):
            self._hide(args[0])
        return None if name == "__setitem__" else args[0]

    def _receive(self, crossing: Crossing, shape: torch.Tensor) -> torch.Tensor:
        tensor = self.received.get(crossing.key)
        if tensor is None:
            return shape  # its source did not make it on this batch
        if crossing.written and tensor.requires_grad:
            with torch.enable_grad():
                tensor = tensor.clone()  # in-place calls are not allowed on a leaf
        self._hide(tensor)
        if crossing.output in self.outgoing.get(crossing.position, {}):
            self.made[crossing.key] = tensor
        return tensor

    def _is_hidden(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta or id(tensor) in self.opaque:
            return True
        return bool(self.opaque_storages) and id(storage_of(tensor)) in self.opaque_storages

    def _hide(self, tensor: torch.Tensor) -> None:
        self.opaque.add(id(tensor))
        storage = storage_of(tensor)
        if storage is not None:
            self.opaque_storages.add(id(storage))
        self.alive += (tensor, storage)

    def _answer(self, position: Position, func: Any) -> Any:
        text = position_text(position)
        if text not in self.given_answers:
            raise self.stage.error(
                f"{short_name(func)} reads the content of a tensor that an earlier stage computes, and had no answer",
                self.module_path or "loss function",
            )
        return self.given_answers[text]

    # modules passed over

    def _pass_over(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Give a module's result without running it: absent tensors in the shape of the first time it was run.

        Not possible when the result holds something computed from the batch alone, or an object that is not known.
        """
        inputs: list[Any] = []
        shapes = self.stage.shapes
        with self.pause():  # under the walk an absent tensor says that it is on this stage's device
            key = (position, id(module), module.training, signature((args, kwargs), inputs, self._is_hidden))
            known = shapes.get(key)
            if known is not None:
                return make(known, inputs)
        result = run()
        if key not in shapes:
            with self.pause():
                shapes[key] = template(result, inputs)
        return result


def _moved(crossing: Crossing) -> str:
    return f"moved {position_text(crossing.position)}/{crossing.output}"


def _ignore(tensor: torch.Tensor) -> None:
    pass


def _bare_twin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else meta_twin(tensor).detach()
