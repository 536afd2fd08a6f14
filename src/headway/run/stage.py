"""One stage: runs the model's own Python, and computes only the part of the program that it holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headway.errors import SplitError
from headway.graph.frame import Calls, Landmarks, number_modules
from headway.graph.interception import INTERCEPTION
from headway.graph.model import Position, position_text
from headway.graph.rows import Rows, rows_at
from headway.graph.walk import module_paths, short_name, tensors_of
from headway.layout.split import Split
from headway.run.drawing import DrawingWalk
from headway.run.outputs import Program
from headway.run.passing import borders, frames_around, unlearn
from headway.run.randomness import Chance
from headway.run.routes import Key, Routes
from headway.run.stage_walk import StageEnd, StageWalk
from headway.run.templates import Known

__all__ = ["Key", "Stage", "StageResult"]


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
    routes: Routes
    parameters: Mapping[int, str] = field(default_factory=dict, compare=False)  # names of all parameters, by id
    buffers: tuple[tuple[nn.Module, str, bool], ...] = ()  # those that the program changes; whether this stage does
    keep: frozenset[Position] = frozenset()  # module calls that are followed call by call
    borders: frozenset[Position] = frozenset()  # those of them that need not be, once it is seen what crosses there
    landmarks: Landmarks = field(default_factory=dict, compare=False)
    calls: Calls = field(default_factory=dict, compare=False)
    followed: frozenset[int] = frozenset()  # ids of modules with one in them that may read a value, or draw numbers
    lacking: frozenset[int] = frozenset()  # ids of modules with weights in them that this stage does not have
    paths: dict[int, str] = field(default_factory=dict, compare=False)  # of modules, by id
    shapes: dict[Any, Any] = field(default_factory=dict, compare=False)  # results of what is passed over, as templates
    # by the place of a module's call: its result of the last time; or the module itself, where it just runs
    known: dict[Position, Known | nn.Module] = field(default_factory=dict, compare=False)
    drawn: dict[Any, Rows | None] = field(default_factory=dict, compare=False)  # whose numbers random calls draw

    @staticmethod
    def of(
        split: Split, index: int, model: nn.Module, loss: Callable[[nn.Module, Any], Any], device: torch.device
    ) -> Stage:
        """Prepare stage `index` of `split`. Make it after the model's parameters are in their final place."""
        part = split.stages[index]
        state, owned = set(split.state), set(part.owned_buffers)
        names = {id(b): n for n, b in model.named_buffers()}  # first names
        buffers = tuple(
            (module, name, names[id(buffer)] in owned)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if names[id(buffer)] in state
        )
        keep = set(split.guarded)
        for crossing in (*part.receives, *part.sends):
            keep.update(frames_around(crossing.position))
        landmarks = {position: number_modules(paths) for position, paths in split.landmarks}
        calls = {position: tuple(tuple(row.split(" ")) for row in rows) for position, rows in split.calls}
        parameters = {id(p): name for name, p in model.named_parameters()}
        kinds = {*split.reading, *split.drawing}
        followed = frozenset(
            id(module)
            for module in model.modules()
            if kinds and any(type(m).__name__ in kinds for m in module.modules())
        )
        lacking = frozenset(id(m) for m in model.modules() if any(p.is_meta for p in m.parameters()))
        paths = module_paths(model)
        stage = Stage(
            split, index, model, loss, device, Routes.of(part), parameters, buffers, frozenset(keep),
            borders(split, index), landmarks, calls, followed, lacking, paths,
        )  # fmt: skip
        INTERCEPTION.hold()
        weakref.finalize(stage, INTERCEPTION.release)
        return stage

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
        around: AbstractContextManager[Any] | None = None,
    ) -> StageResult:
        """Run this stage's part of loss(model, batch), or of `program` up to the return of model(...).

        `received` holds every tensor of `part.receives` that its source had; `around` is entered before anything runs.
        Raises SplitError when the program takes something that this stage does not have, naming module, call and value.
        """
        around = around or nullcontext()
        if self.whole and program is None:
            with around, INTERCEPTION.loss_of(self.model):
                return StageResult({}, {}, self.loss(self.model, batch))
        walk = (DrawingWalk if self.split.random else StageWalk)(self, received, answers, chance, program)
        call = self.loss if program is None else program.call
        output = None
        before = [(module, name, module._buffers.get(name)) for module, name, mine in self.buffers if not mine]
        try:
            with around, walk:
                output = call(self.model, batch)
        except StageEnd:
            for parameter, flag in walk.absence.switched.values():  # the rest of the program would have done so
                parameter.requires_grad_(flag)
        finally:
            for module, name, buffer in before:  # what another stage changes is not changed here
                module._buffers[name] = buffer
        walk.finish()
        part = self.split.stages[self.index]
        if part.end is None and program is None:
            output = walk.late.present(output)  # the program may have ended before this stage's start
            for tensor in tensors_of(output, []):
                if tensor.is_meta:
                    raise self.error("the result of the loss function depends on a value that this stage does not have")
        for key, tensor in walk.made.items():
            if tensor.is_meta:
                raise self.error(f"the value made at {position_text(key[0])} was not computed")
        unlearn(walk)
        result = StageResult(walk.made, {**answers, **walk.answers}, output, walk.captured)
        vars(walk).clear()  # its parts know each other, and would keep what crosses until Python looks for such circles
        return result

    def rows(self, path: str, turn: Position, func: Any) -> Rows | None:
        """Say whose numbers a random call draws, as far as that was seen when the program was recorded."""
        key = (path, turn, func)
        if key not in self.drawn:
            self.drawn[key] = rows_at(self.split.rows, path, turn, short_name(func))
        return self.drawn[key]

    def error(self, fact: str, place: str | None = None) -> SplitError:
        """Say what went wrong in this stage."""
        where = f"stage {self.index} of {self.split.num_stages}" + (f", {place}" if place else "")
        return SplitError(
            fact,
            place=where,
            remedy='record with a batch that takes this way through the model, or fix other cuts (fixed={"cuts": ...})',
        )
