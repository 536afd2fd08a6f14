"""Repeat: a checkpointed region, computed again in backward with the random numbers of the first time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import nn

from headway.graph.chance import is_random
from headway.graph.frame import Frame, Landmarks
from headway.graph.model import Position
from headway.graph.walk import Walk
from headway.run.randomness import Chance


class Repeat(Walk):
    """Sees a checkpointed region while backward computes it again, and draws the random numbers of the first time."""

    def __init__(
        self, paths: Mapping[int, str], landmarks: Landmarks, keep: Set[Position], chance: Chance, position: Position,
        path: str,
    ) -> None:  # fmt: skip
        super().__init__(paths, landmarks)
        self.frames[0] = Frame(position, path, landmarks.get(position))
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
            return self.chance.call(position, func, args, kwargs)
        return func(*args, **kwargs)
