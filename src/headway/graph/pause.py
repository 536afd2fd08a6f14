"""Pause: a block in which a walk sees nothing, and torch runs at full speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from headway.graph.walk import Walk


class Pause:
    """Surrounds what a walk does not see."""

    __slots__ = ("before", "walk")

    def __init__(self, walk: Walk) -> None:
        self.walk, self.before = walk, walk.paused

    def __enter__(self) -> None:
        """Take the walk away."""
        self.before = self.walk.paused
        if not self.before:
            TorchFunctionMode.__exit__(self.walk, None, None, None)
            self.walk.paused = True

    def __exit__(self, *exception: Any) -> None:
        """Put it back, if this took it away."""
        if not self.before:
            self.walk.paused = False
            TorchFunctionMode.__enter__(self.walk)
