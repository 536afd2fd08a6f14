"""Drawing: the stage walk of a program that draws random numbers, some of them where no torch call shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from headway.graph.chance import is_random
from headway.graph.host import Gaps
from headway.graph.model import Position
from headway.run.draws import packed_order
from headway.run.stage_walk import StageWalk


class DrawingWalk(StageWalk):
    """Looks at each event whether Python's or numpy's numbers were drawn before it, and at what is packed by length."""

    gaps: Gaps | None = None

    def __enter__(self) -> DrawingWalk:
        """Begin to see calls, with the generators seeded."""
        if self.chance is not None:
            chance, whose = self.chance, self.stage.split.host
            chance.begin()
            gaps = Gaps(lambda number: chance.host(number, whose))
            self.gaps = gaps if whose else None
        super().__enter__()
        return self

    def _event(self, handle: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.gaps is not None:
            self.gaps.look()
        if is_random(func, args, kwargs):
            self.frames[-1].draw()
        return super()._event(handle, func, args, kwargs)

    def module_call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Carry out a call of nn.Module.__call__."""
        if self.gaps is not None:
            self.gaps.look()
        return super().module_call(original, module, args, kwargs)

    def module_at(self, position: Position, path: str, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Carry out a module call at its place."""
        if isinstance(module, nn.RNNBase):
            with self.pause():
                self.order = packed_order(module, args)
        return super().module_at(position, path, original, module, args, kwargs)
