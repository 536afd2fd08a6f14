"""Alive: what the program still holds where a stage ends, when a batch has strayed from the recorded way.

Which tensors later stages need is known from the recorded run. Where a batch goes another way (layers left out by
chance, a loop that ends by its values), a stage sends, over spare crossings, what the program's own variables hold at
the border; the next stage receives it where its program makes it, and sends on what is still held at its own end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from headway.graph.frame import Frame
from headway.graph.ledger import storage_of
from headway.graph.model import Position
from headway.layout.split import Crossing
from headway.run.routes import Key, Routes, moved

if TYPE_CHECKING:
    from headway.run.absence import Absence

DEEP = 3
"""How deep tensors are looked for in what a variable holds."""


class Alive:
    """What was made in the frames that are open, and which of it is held where the stage ends."""

    def __init__(self, routes: Routes) -> None:
        self.routes, self.spares = routes, routes.spares
        self.places: dict[int, tuple[Position, int, str, torch.Tensor]] = {}  # by id of a tensor, kept alive here

    def note(
        self, place: Position, function: str, tensors: Sequence[torch.Tensor], inputs: Any, absence: Absence
    ) -> None:
        """Note where tensors are made that depend on parameters."""
        derived = None
        for number, tensor in enumerate(tensors):
            if tensor.is_meta:
                continue
            if derived is None:
                leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
                derived = any(
                    id(leaf) in self.places or isinstance(leaf, nn.Parameter) or absence.hides(leaf) for leaf in leaves
                )
            if derived or tensor.requires_grad:
                self.places[id(tensor)] = (place, number, function, tensor)

    def received(self, place: tuple[Position, int, str], tensor: torch.Tensor) -> None:
        """Note where a tensor comes in."""
        if self.spares:
            self.places[id(tensor)] = (*place, tensor)

    def result(self, position: Position, result: Any, receive: Any) -> Any:
        """Put what comes in into a module's result, and note what it makes."""
        inside = self.routes.results.get(position, {})
        if inside:
            numbers = iter(range(1 << 30))

            def change(leaf: Any) -> Any:
                number = next(numbers)
                return receive(inside[number], leaf, (position, number, "")) if number in inside else leaf

            result = tree_map(change, result)
        if self.spares:
            for number, leaf in enumerate(tree_leaves(result)):
                if isinstance(leaf, torch.Tensor) and not leaf.is_meta and _may_need_gradient(leaf):
                    self.places[id(leaf)] = (position, number, "", leaf)
        return result

    def capture(
        self, given: Any, frames: Sequence[Frame], made: dict[Key, torch.Tensor], answers: dict[str, Any]
    ) -> None:
        """Send over the spare crossings what is held now, if the program has strayed; call it where a stage ends.

        `given` are the arguments of the call at which it ends, which no variable need hold.
        """
        missing = any(key not in made for key in self.routes.expected)
        if not (self.spares and (self.routes.arrived or missing or any(frame.strayed for frame in frames))):
            return
        held: dict[int, torch.Tensor] = {}
        _collect(given, held, DEEP)
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(("headway.", "torch.")) or name.startswith("torch.nn.modules"):
                for value in frame.f_locals.values():
                    _collect(value, held, DEEP)
            frame = frame.f_back  # type: ignore[assignment]
        sent = {id(tensor) for tensor in made.values()}
        memory = {id(storage_of(tensor)) for tensor in made.values()}
        found = [self.places[key] for key in held if key in self.places and key not in sent]
        spares: dict[bool, list[Crossing]] = {True: [], False: []}
        for crossing in self.spares:
            spares[crossing.differentiable].append(crossing)
        for position, output, function, tensor in sorted(found, key=lambda entry: entry[:2], reverse=True):
            free, own = spares[_may_need_gradient(tensor)], id(storage_of(tensor))
            if free and own not in memory:  # two views of one memory would be two on the other side
                memory.add(own)
                crossing = free.pop(0)
                made[crossing.key], answers[moved(crossing)] = tensor, (position, output, function)


def _may_need_gradient(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a gradient, or would have one where gradients are computed."""
    return tensor.requires_grad or (not torch.is_grad_enabled() and tensor.is_floating_point())


def _collect(value: Any, found: dict[int, torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
    elif depth and isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _collect(item, found, depth - 1)
