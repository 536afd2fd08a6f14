"""Repeat: a checkpointed region, computed again in backward with the random numbers of the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from headway.graph.chance import is_random
from headway.graph.model import Position
from headway.graph.walk import Walk
from headway.run.draws import packed_order
from headway.run.randomness import Chance

if TYPE_CHECKING:
    from headway.run.stage import Stage


class Repeat(Walk):
    """Sees a checkpointed region while backward computes it again, and draws the random numbers of the first time."""

    def __init__(self, stage: Stage, chance: Chance, position: Position, path: str, begun: Position) -> None:
        super().__init__(stage.paths, stage.landmarks, stage.calls, stage.parameters)
        self.frames[0] = self.frame(position, path, begun)
        self.stage, self.chance = stage, chance
        self.order: list[int] | None = None

    def on_module(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Follow only the modules that were followed the first time."""
        if position in self.stage.keep:
            with self.pause():
                self.order = packed_order(module, args)
            return run()
        with self.pause():
            return run()

    def _event(self, handle: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_random(func, args, kwargs):
            self.frames[-1].draw()
        return super()._event(handle, func, args, kwargs)

    def on_call(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one call."""
        if is_random(func, args, kwargs):
            turn = self.frames[-1].turn
            return self.chance.call(turn, func, args, kwargs, self.stage.rows(self.module_path, turn, func), self.order)
        return func(*args, **kwargs)
