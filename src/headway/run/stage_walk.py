"""Stage walk: computes the calls of one stage's range, receives what crosses, and leaves out what other stages do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from headway.graph.absent import Inside, answer_fact, bare_twin, call_on_meta
from headway.graph.chance import is_random
from headway.graph.model import Position, position_text
from headway.graph.walk import Walk, function_name, is_read, is_shape_read, map_tensors, short_name, tensors_of
from headway.run.absence import Absence
from headway.run.alive import Alive
from headway.run.before import call_before, receive
from headway.run.hooks import GRADIENT_HOOKS, is_torn, leave_out, no_hook
from headway.run.late import Late, is_pure
from headway.run.outputs import Program
from headway.run.passing import pass_over, run_whole
from headway.run.randomness import Chance
from headway.run.repeat import Repeat
from headway.run.routes import Key
from headway.run.stand_in import StandIns, fits
from headway.run.templates import WANTS_GRADIENT, Known, shapes_of

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
        routes = stage.routes.told(answers)
        self.routes, self.incoming, self.functions = routes, routes.incoming, routes.functions
        self.outgoing = routes.outgoing
        self.alive, self.stand_ins = Alive(routes), StandIns(routes)
        self.received, self.known = received, stage.known
        self.made: dict[Key, torch.Tensor] = {}
        self.absence = Absence(stage)
        self.taken: dict[Key, torch.Tensor] = {}  # what was received, as the program has it
        self.late = Late(self.absence, self.real, received)
        split = stage.split
        self.settled = (  # whether, once the start is behind, nothing can happen that must be known by its place
            self.end is None and not (split.reads or split.asked or split.random or self.capture)
            and not (routes.spares or routes.arrived)
        )  # fmt: skip
        self.free = False  # whether that is so now

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
        if name in GRADIENT_HOOKS and self.absence.hides(args[0]) and not isinstance(args[0], nn.Parameter):
            if self.frames[-1].next_event() <= self.start:  # it is registered by the stage before
                return no_hook()
            what = f"{name} is called for the gradient of a value that an earlier stage makes, of which this is a part"
            raise self.stage.error(what, self.module_path or "loss function")
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
            and position not in self.routes.unsure
            and id(module) not in self.stage.followed
        ):
            over = pass_over if position < self.start else run_whole
            return over(self, position, module, run, args, kwargs)
        if (
            position in self.stage.keep
            or position in self.routes.follow
            or id(module) in self.stage.followed
            or position == self.start[:depth]
            and len(self.start) > depth
        ):
            return run()
        if position < self.start:
            return pass_over(self, position, module, run, args, kwargs)
        if self.end is not None and position == self.end[:depth]:
            return run()
        self.free = self.settled
        if id(module) not in self.stage.lacking and not (self.routes.spares or self.stand_ins.watches(position)):
            self.known[position] = module
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
            return call_before(self, position, func, args, kwargs)
        self.free = self.settled
        if _absent(args, kwargs) is not None:
            args, kwargs = self.late.present((args, kwargs))
            tensor = _absent(args, kwargs)
            if tensor is not None:
                if self.frames[-1].strayed and self.end is not None and is_pure(func, args, kwargs):
                    return self._leave_out(position, func, args, kwargs, tensors_of((args, kwargs), []))
                return self._absent_in_range(func, args, kwargs, tensor)
        result = self.real(position, func, args, kwargs)
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

    def real(
        self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], turn: Position | None = None
    ) -> Any:
        """Compute a call, with the random numbers that belong to it, and keep what is to be sent."""
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
            return call_before(self, position, func, args, kwargs, around)
        found: list[torch.Tensor] = []

        def absent(tensor: torch.Tensor) -> bool:
            if self.absence.hides(tensor):
                found.append(tensor)
            return bool(found) and found[-1] is tensor

        with Inside(lambda tensor: None, absent, bare_twin, self.stage.device):
            result = call_before(self, position, func, args, kwargs)
        return map_tensors(result, bare_twin) if found and position not in self.incoming else result

    def _refuse_absent(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            raise self.stage.error(
                f"a call takes a tensor of shape {list(tensor.shape)}, which this stage does not have",
                f"inside a function in {self.module_path or 'the loss function'}",
            )

    def _event(self, handle: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call at once where its place is of no interest and nothing that it takes is absent."""
        if self.free and not self.opaque and _absent(args, kwargs) is None:
            return func(*args, **kwargs)
        return super()._event(handle, func, args, kwargs)

    def module_call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give a result that is known at once; compute one at once whose place is of no interest."""
        if self.free and id(module) not in self.stage.lacking:
            with self.pause():
                complete = _absent(args, kwargs) is None
            if complete:
                return self.at_full_speed(module, lambda: original(module, *args, **kwargs))
        frame = self.frames[-1]
        before = frame.answered
        if before is not None and not kwargs and not self.routes.arrived:
            ahead = before.next
            if isinstance(ahead, Known) and ahead.fits(module, args):
                frame.answered = ahead
                return ahead.result
        path = self.paths.get(id(module))
        if path is None or isinstance(module, torch.jit.ScriptModule):
            return super().module_call(original, module, args, kwargs)
        position = frame.next_module(path)
        known = self.known.get(position)
        if known is not None and not self.routes.arrived:
            if known is module and not self._was_left(args, kwargs):
                return self.at_full_speed(module, lambda: original(module, *args, **kwargs))
            if isinstance(known, Known) and not kwargs and known.fits(module, args):
                frame.answer(known, before)
                return known.result
        return self.module_at(position, path, original, module, args, kwargs)

    def _was_left(self, args: Any, kwargs: Any) -> bool:
        """Say whether a call takes a tensor that was left out."""
        left = self.late.left
        return bool(left) and any(id(tensor) in left for tensor in tensors_of((args, kwargs), []))

    def module_at(self, position: Position, path: str, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Carry out a module call, in the range with what can be had of its arguments."""
        if not (self._before(position) or self._after(position)) and self._was_left(args, kwargs):
            with self.pause():
                args, kwargs = self.late.present((args, kwargs))
        result = super().module_at(position, path, original, module, args, kwargs)
        watched = self.stand_ins.watches(position)
        if watched or self.alive.spares or self.routes.results:
            with self.pause():
                if watched and not self._before(position):
                    self.stand_ins.take(position, result, self.made, self.answers)
                result = self.alive.result(position, result, partial(receive, self))
        return result


def _absent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Find a tensor without content among the arguments of a call."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                return value
        elif isinstance(value, tuple | list | dict | slice):
            for tensor in tensors_of(value, []):
                if tensor.is_meta:
                    return tensor
    return _absent(tuple(kwargs.values()), {}) if kwargs else None
