"""Repeat: a checkpointed region, computed again in backward with the random numbers of the first time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import nn

from headway.graph.chance import is_random
from headway.graph.frame import Calls, Landmarks
from headway.graph.model import Position
from headway.graph.walk import Walk
from headway.run.randomness import Chance


class Repeat(Walk):
    """Sees a checkpointed region while backward computes it again, and draws the random numbers of the first time."""

    def __init__(
        self, paths: dict[int, str], landmarks: Landmarks, calls: Calls, weights: Mapping[int, str],
        keep: Set[Position], chance: Chance, position: Position, path: str,
        begun: Position,
    ) -> None:  # fmt: skip
        super().__init__(paths, landmarks, calls, weights)
        self.frames[0] = self.frame(position, path, begun)
        self.keep, self.chance = keep, chance

    def on_module(self, position: Position, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Follow only the modules that were followed the first time."""
        if position in self.keep:
            return run()
        with self.pause():
            return run()

    def on_call(self, position: Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one call."""
        if is_random(func, args, kwargs):
            return self.chance.call(self.frames[-1].turn, func, args, kwargs)
        return func(*args, **kwargs)
