"""Stand in: what a stage sends in place of a value that this batch did not make, or made at another place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from headway.graph.model import Position, position_text
from headway.layout.split import Crossing

Key = tuple[Position, int]
Made = tuple[Position, int, str, torch.Tensor]
"""Place, number of the output, function, and the tensor."""


def moved(crossing: Crossing) -> str:
    """Name the answer that says what was sent instead: (place, output, function)."""
    return f"moved {position_text(crossing.position)}/{crossing.output}"


class StandIns:
    """The values made in frames with something to send, as far as they may stand in for others."""

    def __init__(self, sends: Iterable[Crossing]) -> None:
        self.sends = tuple(sends)
        self.frames = {crossing.position[:-2] for crossing in self.sends}
        self.latest: dict[Any, Made] = {}  # by frame, function and output
        self.origins: dict[Key, Made | None] = {key: None for crossing in self.sends for key in crossing.origin}

    def keep(self, frame: Position, made: Made) -> None:
        """Keep a value, made here or received."""
        position, number, function, _ = made
        self.latest[(frame, function, number)] = made
        if (position, number) in self.origins:
            self.origins[(position, number)] = made

    def settle(self, made: dict[Key, torch.Tensor], answers: dict[str, Any]) -> None:
        """Complete what is `made` to be sent, and say in `answers` what was sent instead.

        A loop that goes round more or fewer times leaves its value at another place, and a call that does not happen
        leaves what it would have changed: then that is sent, and received where the receiver's program makes it.
        """
        for crossing in self.sends:
            present = made.get(crossing.key)
            if present is not None and not fits(crossing, present):
                del made[crossing.key]  # the program went another way, and this is something else
                present = None
            other = self.latest.get((crossing.position[:-2], crossing.function, crossing.output))
            if present is not None:
                if not crossing.last or other is None or other[0] == crossing.position:
                    continue
                if not other[3].requires_grad or other[3].shape != present.shape:
                    continue
            else:
                other = next((o for o in map(self.origins.get, crossing.origin) if o is not None), other)
            if other is None or not fits(crossing, other[3]):
                continue
            answers[moved(crossing)], made[crossing.key] = other[:3], other[3]


def fits(crossing: Crossing, tensor: torch.Tensor) -> bool:
    """Say whether a tensor can take a crossing: one that needs a gradient only where gradients come back."""
    if crossing.differentiable:
        return tensor.is_floating_point() or tensor.is_complex()
    return not tensor.requires_grad
