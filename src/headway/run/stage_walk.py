"""Stage walk: computes the calls of one stage's range, receives what crosses, and leaves out what other stages do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from headway.graph.absent import Inside, answer_fact, bare_twin, call_on_meta
from headway.graph.chance import is_random
from headway.graph.model import Position, position_text
from headway.graph.walk import Walk, function_name, is_read, is_shape_read, map_tensors, short_name, tensors_of
from headway.layout.split import Crossing
from headway.run.absence import Absence
from headway.run.alive import Alive
from headway.run.hooks import GRADIENT_HOOKS, is_torn, leave_out, no_hook
from headway.run.late import Late, is_pure
from headway.run.outputs import Program
from headway.run.passing import frames_around, pass_over, run_whole
from headway.run.randomness import Chance
from headway.run.repeat import Repeat
from headway.run.stand_in import Key, StandIns, fits, moved
from headway.run.templates import WANTS_GRADIENT, Known, absent_of, shapes_of

if TYPE_CHECKING:
    from headway.run.stage import Stage


class StageEnd(BaseException):
    """Unwinds the user's code when a stage has done its part; never seen outside run/."""


class StageWalk(Walk):
    """Computes the calls in [start, end); before, only what depends on the batch alone; after, nothing."""

    def __init__(
        self, stage: Stage, received: Mapping[Key, torch.Tensor], answers: Mapping[str, Any], chance: Chance | None,
        program: Program | None,
    ) -> None:  # fmt: skip
        super().__init__(stage.paths, stage.landmarks, stage.calls, stage.parameters, stage.model)
        self.order: list[int] | None = None  # of the sequences that an LSTM takes packed by their length
        self.capture, self.captured = program is not None, None
        part = stage.split.stages[stage.index]
        self.stage, self.part, self.chance = stage, part, chance
        self.start, self.end = part.start, part.end
        self.given_answers = answers
        self.answers: dict[str, Any] = {}
        self.incoming: dict[Position, dict[int, Crossing]] = {}
        self.functions: dict[Position, str] = {}  # that make what comes in
        self.strayed: set[Position] = set()  # module calls that did not make what crosses, where they did once
        self.alive = Alive(part.sends, part.receives, answers)
        for crossing in part.receives:
            place, output, function = answers.get(moved(crossing), (*crossing.key, crossing.function))
            if function:  # else it comes in as the result of a module
                self.incoming.setdefault(place, {})[output] = crossing
                self.functions[place] = function
            if place != crossing.position:
                self.strayed.update((*frames_around(crossing.position), *self.alive.follow))
        self.received, self.known = received, stage.known
        self.outgoing: dict[Position, dict[int, Crossing]] = {}
        for crossing in part.sends:
            self.outgoing.setdefault(crossing.position, {})[crossing.output] = crossing
        self.made: dict[Key, torch.Tensor] = {}
        self.stand_ins = StandIns(part.sends)
        self.absence = Absence(stage, self.known)
        self.taken: dict[Key, torch.Tensor] = {}  # what was received, as the program has it
        self.late = Late(self.absence, self._real, received)

    def _before(self, position: Position) -> bool:
        return position < self.start

    def _after(self, position: Position) -> bool:
        return self.end is not None and position >= self.end

    def fact(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer for absent tensors that they live on this stage's device, and need gradients where they do."""
        if name == "requires_grad" and args[0].is_meta and not isinstance(args[0], nn.Parameter):
            return hasattr(args[0], WANTS_GRADIENT)
        if name in ("requires_grad_", "__set__"):
            if self.absence.switches(func, name, args, before=self._before(self.frames[-1].next_event())):
                return None
        if name in GRADIENT_HOOKS and self._before(self.frames[-1].next_event()) and self.absence.hides(args[0]):
            return no_hook()
        return answer_fact(func, name, args, kwargs, self.stage.device)

    def backward_hook(self, original: Any, hook: BackwardHook, args: Any) -> Any:
        """Leave out the full backward hooks of what lies before the start."""
        if self._before(self.frames[-1].next_event()):
            return leave_out(hook, args)
        if is_torn(hook):
            what = "a full backward hook takes gradients of a module's inputs and results, which are on two stages"
            raise self.stage.error(what, self.module_path)
        return original(hook, args)

    def on_region(self, position: Position) -> None:
        """End at a checkpointed region after the range."""
        if self._after(position):
            self._finish_here(())

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
        stage, chance, path, begun = self.stage, self.chance, self.module_path, self.frames[-1].begun

        def once_more(*args: Any, **kwargs: Any) -> Any:
            with Repeat(stage, chance, position, path, begun):
                return run(*args, **kwargs)

        return once_more

    def on_module(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Pass over a module that lies before the start; run one that lies in the range at full speed."""
        if self._after(position):
            self._finish_here((args, kwargs))
        if self.capture and module is self.stage.model and len(self.frames) == 1:
            self.captured = run()
            raise StageEnd
        depth = len(position)
        if (
            position in self.stage.borders
            and position not in self.strayed | self.alive.follow
            and id(module) not in self.stage.followed
        ):
            over = pass_over if position < self.start else run_whole
            return over(self, position, module, run, args, kwargs)
        if (
            position in self.stage.keep
            or position in self.alive.follow
            or id(module) in self.stage.followed
            or position == self.start[:depth]
            and len(self.start) > depth
        ):
            return run()
        if position < self.start:
            return pass_over(self, position, module, run, args, kwargs)
        if self.end is not None and position == self.end[:depth]:
            return run()
        return self.at_full_speed(module, run)

    def _finish_here(self, given: Any) -> None:
        with self.pause():
            self.alive.capture(given, self.frames, self.made, self.answers)
        raise StageEnd

    def at_full_speed(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Run a module that is computed whole, unseen; not one that lacks weights: linear() takes those for zeros."""
        if id(module) in self.stage.lacking:
            return run()
        try:
            with self.pause():
                return run()
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            path = self.paths.get(id(module), type(module).__name__)
            what = f"{type(module).__name__} takes a tensor or a parameter which this stage does not have"
            raise self.stage.error(what, path) from error

    def on_call(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, receive or leave out one call, by its place."""
        if self._after(position):
            self._finish_here((args, kwargs))
        if self._before(position):
            return self._call_before(position, func, args, kwargs)
        for tensor in tensors_of((args, kwargs), []):
            if tensor.is_meta:
                args, kwargs = self.late.present((args, kwargs))
                break
        tensors = tensors_of((args, kwargs), [])
        for tensor in tensors:
            if tensor.is_meta:
                if self.frames[-1].strayed and self.end is not None and is_pure(func, args, kwargs):
                    return self._leave_out(position, func, args, kwargs, tensors)
                return self._absent_in_range(func, args, kwargs, tensor)
        result = self._real(position, func, args, kwargs)
        if self.stage.split.reads:
            if is_read(func, args, kwargs):
                self.answers[position_text(position)] = deepcopy(result)  # the program may change a list that it got
            elif is_shape_read(func, args, kwargs) or function_name(func) in self.stage.split.asked:
                self.answers[position_text(position)] = shapes_of(result)
        return result

    def _leave_out(self, position: Position, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Leave a call of a batch that strayed to the stage that has all it takes; that may be a later one."""
        result = self.absence.result(position, func, args, kwargs, tensors, self.module_path, None)
        return self.late.note(position, self.frames[-1].turn, func, args, kwargs, tensors, result)

    def _real(
        self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], turn: Position | None = None
    ) -> Any:
        if self.chance is not None and self.opaque:
            result = self.chance.inside(self.frames[-1].turn, func, args, kwargs)
        elif self.chance is not None and is_random(func, args, kwargs):
            rows = None if turn else self.stage.rows(self.module_path, self.frames[-1].turn, func)
            result = self.chance.call(turn or self.frames[-1].turn, func, args, kwargs, rows, self.order)
        else:
            result = func(*args, **kwargs)
        if self.alive.spares:
            self.alive.note(position, function_name(func), tensors_of(result, []), (args, kwargs), self.absence)
        frame = self.frames[-1].position
        if frame in self.stand_ins.frames:
            name, wanted = function_name(func), self.outgoing.get(position, {})
            for number, tensor in enumerate(tensors_of(result, [])):
                self.stand_ins.keep(frame, (position, number, name, tensor))
                crossing = wanted.get(number)
                if crossing is not None and crossing.function == name and fits(crossing, tensor):
                    self.made[crossing.key] = tensor
        return result

    def finish(self) -> None:
        """Find what takes the place of values that were to be sent and were not made, or made anew."""
        self.stand_ins.settle(self.made, self.answers)

    def _absent_in_range(self, func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
        if not is_read(func, args, kwargs):
            try:
                with torch.no_grad():
                    result = call_on_meta(func, args, kwargs, bare_twin)
            except Exception:  # it is an error below, whatever it would be here
                result = tensor
            if not tensors_of(result, []) and short_name(func) != "__setitem__":
                return result  # a question about shapes
        name = next((n for n, p in self.stage.model.named_parameters() if p is tensor), None)
        what = f"parameter {name}" if name else f"a tensor of shape {list(tensor.shape)}"
        raise self.stage.error(
            f"{function_name(func)} takes {what}, which this stage does not have", self.module_path or "loss function"
        )

    def on_opaque(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, receive or leave out a call that may use weights which are not among its arguments."""
        if not self._before(position):
            with Inside(self._refuse_absent, lambda t: False, bare_twin, self.stage.device):
                return self.on_call(position, func, args, kwargs)
        if any(map(self.absence.hides, tensors_of((args, kwargs), []))):
            around = Inside(lambda tensor: None, self.absence.hides, bare_twin, self.stage.device)
            return self._call_before(position, func, args, kwargs, around)
        found: list[torch.Tensor] = []

        def absent(tensor: torch.Tensor) -> bool:
            if self.absence.hides(tensor):
                found.append(tensor)
            return bool(found) and found[-1] is tensor

        with Inside(lambda tensor: None, absent, bare_twin, self.stage.device):
            result = self._call_before(position, func, args, kwargs)
        return map_tensors(result, bare_twin) if found and position not in self.incoming else result

    def _refuse_absent(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            raise self.stage.error(
                f"a call takes a tensor of shape {list(tensor.shape)}, which this stage does not have",
                f"inside a function in {self.module_path or 'the loss function'}",
            )

    def _call_before(
        self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        around: AbstractContextManager[Any] | None = None,
    ) -> Any:  # fmt: skip
        tensors = tensors_of((args, kwargs), [])
        incoming = self.incoming.get(position)
        if incoming and self.functions[position] != function_name(func):
            incoming = None  # the program went another way; what was sent is found elsewhere
        if not incoming and not any(map(self.absence.hides, tensors)):
            return self._real(position, func, args, kwargs)
        if is_read(func, args, kwargs):
            return self._answer(position, func)
        told = position_text(position) in self.given_answers and function_name(func) in self.stage.split.asked
        if told or is_shape_read(func, args, kwargs):
            result = absent_of(self._answer(position, func))
        else:
            result = self.absence.result(position, func, args, kwargs, tensors, self.module_path, around)
        if not incoming:
            return self.late.note(position, self.frames[-1].turn, func, args, kwargs, tensors, result)
        numbers = iter(range(1 << 30))

        def settle(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            if number not in incoming:
                return tensor
            return self.receive(incoming[number], tensor, (position, number, function_name(func)))

        return map_tensors(result, settle)

    def receive(
        self, crossing: Crossing, shape: torch.Tensor, place: tuple[Position, int, str] | None = None
    ) -> torch.Tensor:
        """Give a tensor that crosses to this stage; what looks like it if its source did not make it on this batch.

        `place` says where in the open frame it is received: place, output and function.
        """
        tensor = self.received.get(crossing.key)
        if tensor is None:
            return shape
        if crossing.written and tensor.requires_grad:
            with torch.enable_grad():
                tensor = tensor.clone()  # in-place calls are not allowed on a leaf
                self.late.received.add(id(tensor))
        self.taken[crossing.key] = tensor
        self.absence.hide(tensor)
        if crossing.output in self.outgoing.get(crossing.position, {}):
            self.made[crossing.key] = tensor
        self.alive.received(place or (*crossing.key, crossing.function), tensor)
        frame = crossing.position[:-2] if place is None else self.frames[-1].position
        if frame in self.stand_ins.frames:  # a stage whose part does not run passes on what it received
            self.stand_ins.keep(frame, (*(place or (*crossing.key, crossing.function)), tensor))
        return tensor

    def _answer(self, position: Position, func: Any) -> Any:
        text = position_text(position)
        if text in self.given_answers:
            return deepcopy(self.given_answers[text])
        what = f"{short_name(func)} reads the content of a tensor that an earlier stage computes, and had no answer"
        raise self.stage.error(what, self.module_path or "loss function")

    def module_call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give a result that is known at once."""
        frame = self.frames[-1]
        before = frame.answered
        if before is not None and not kwargs and not self.alive.arrived:
            ahead = before.next
            if isinstance(ahead, Known) and ahead.fits(module, args):
                frame.answered = ahead
                return ahead.result
        path = self.paths.get(id(module))
        if path is None or isinstance(module, torch.jit.ScriptModule):
            return super().module_call(original, module, args, kwargs)
        position = frame.next_module(path)
        known = self.known.get(position)
        if known is not None and not kwargs and not self.alive.arrived and known.fits(module, args):
            frame.answer(known, before)
            return known.result
        return self.module_at(position, path, original, module, args, kwargs)

    def module_at(self, position: Position, path: str, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Carry out a module call, in the range with what can be had of its arguments."""
        left: Mapping[int, Any] = {} if self._before(position) or self._after(position) else self.late.left
        if left and any(id(tensor) in left for tensor in tensors_of((args, kwargs), [])):
            with self.pause():
                args, kwargs = self.late.present((args, kwargs))
        result = super().module_at(position, path, original, module, args, kwargs)
        watched = self.stand_ins.watches(position)
        if watched or self.alive.spares or self.alive.results:
            with self.pause():
                if watched and not self._before(position):
                    self.stand_ins.take(position, result, self.made, self.answers)
                result = self.alive.result(position, result, self.receive)
        return result
