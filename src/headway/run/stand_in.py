"""Stand in: what a stage sends in place of a value that this batch did not make, or made at another place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from headway.graph.model import Position
from headway.layout.split import Crossing
from headway.run.routes import Key, Routes, moved

Made = tuple[Position, int, str, torch.Tensor]
"""Place, number of the output, function, and the tensor."""


class StandIns:
    """The values made in frames with something to send, as far as they may stand in for others."""

    def __init__(self, routes: Routes) -> None:
        self.routes, self.frames = routes, routes.frames
        self.latest: dict[Any, Made] = {}  # by frame, function and output
        self.origins: dict[Key, Made | None] = dict.fromkeys(routes.origins)
        self.others: dict[
            Position, tuple[Position, list[Any]]
        ] = {}  # by frame: what a module gave that was not recorded
        self.given: set[Key] = set()

    def watches(self, position: Position) -> bool:
        """Say whether to `take` what the module call at this place gives."""
        return position in self.routes.given or (position[-1] != 0 and position[:-2] in self.routes.homes)

    def keep(self, frame: Position, made: Made) -> None:
        """Keep a value, made here or received."""
        position, number, function, _ = made
        self.latest[(frame, function, number)] = made
        if (position, number) in self.origins:
            self.origins[(position, number)] = made

    def take(self, position: Position, result: Any, made: dict[Key, torch.Tensor], answers: dict[str, Any]) -> None:
        """Send what a module gives, where it was made in another way than when the module was recorded to give it."""
        leaves = tree_leaves(result)
        if position not in self.routes.given:
            self.others[position[:-2]] = (position, leaves)
        for crossing in self.routes.given.get(position, ()):
            self._give(crossing, position, leaves, made, answers)

    def _give(
        self, crossing: Crossing, place: Position, leaves: list[Any], made: dict[Key, torch.Tensor],
        answers: dict[str, Any],
    ) -> None:  # fmt: skip
        leaf = crossing.result[1] if crossing.result else 0
        tensor = leaves[leaf] if leaf < len(leaves) else None
        if not isinstance(tensor, torch.Tensor) or tensor is made.get(crossing.key) or tensor.is_meta:
            return
        if fits(crossing, tensor):
            made[crossing.key], answers[moved(crossing)] = tensor, (place, leaf, "")
            self.given.add(crossing.key)

    def settle(self, made: dict[Key, torch.Tensor], answers: dict[str, Any]) -> None:
        """Complete what is `made` to be sent, and say in `answers` what was sent instead.

        A loop that goes round more or fewer times leaves its value at another place, and a call that does not happen
        leaves what it would have changed: then that is sent, and received where the receiver's program makes it.
        """
        for crossing in self.routes.sends:
            if crossing.key in self.given:
                continue
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
                if present is None and crossing.result is not None and crossing.result[0][:-2] in self.others:
                    self._give(crossing, *self.others[crossing.result[0][:-2]], made, answers)
                continue
            answers[moved(crossing)], made[crossing.key] = other[:3], other[3]


def fits(crossing: Crossing, tensor: torch.Tensor) -> bool:
    """Say whether a tensor can take a crossing: one that needs a gradient only where gradients come back."""
    if crossing.differentiable:
        return tensor.is_floating_point() or tensor.is_complex()
    return not tensor.requires_grad
