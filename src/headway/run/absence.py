"""Absence: what a stage does not have: which tensors have no content here, and what calls with them look like."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from headway.graph.absent import bare_twin, call_on_meta
from headway.graph.ledger import storage_of, version_of
from headway.graph.model import Position
from headway.graph.walk import function_name, map_tensors, short_name
from headway.run.templates import WANTS_GRADIENT, make, mark, signature, template

if TYPE_CHECKING:
    from headway.run.stage import Stage


class Absence:
    """The tensors of one pass that are not to be computed with before the stage's start.

    Those on meta, all parameters, buffers that the program changes, what was received, and what was written with any of
    them.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.parameters = stage.parameters
        self.opaque = {id(getattr(module, name)) for module, name, _ in stage.buffers}
        self.opaque_storages: set[int] = set()
        self.wrote: Callable[[torch.Tensor], None] = lambda tensor: None  # told of what is changed in place
        self.switched: dict[int, tuple[torch.Tensor, bool]] = {}  # parameters frozen or thawed, and as they were
        self.alive: list[Any] = []  # keeps those tensors and storages from being freed, so that ids stay theirs

    def hides(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor's content must not be used before the start."""
        if tensor.is_meta or id(tensor) in self.parameters or id(tensor) in self.opaque:
            return True
        return bool(self.opaque_storages) and id(storage_of(tensor)) in self.opaque_storages

    def hide(self, tensor: torch.Tensor) -> None:
        """Keep a tensor, and what shares its memory, from being used before the start."""
        self.opaque.add(id(tensor))
        storage = storage_of(tensor)
        if storage is not None:
            self.opaque_storages.add(id(storage))
        self.alive += (tensor, storage)

    def switches(self, func: Any, name: str, args: tuple[Any, ...], *, before: bool) -> bool:
        """Note that the program freezes or thaws a parameter; say whether it is done for something absent.

        What is received has the content of the cut, so `x.data = ...` before the start is done too.
        """
        if id(args[0]) in self.parameters:
            self.switched.setdefault(id(args[0]), (args[0], args[0].requires_grad))
        elif args[0].is_meta and name == "__set__" and func.__self__.__name__ == "requires_grad":
            if args[1]:
                mark(args[0])
            return True
        elif name == "__set__" and func.__self__.__name__ == "data":
            return before and self.hides(args[0])
        return False

    def result(
        self, position: Position, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], path: str,
        around: AbstractContextManager[Any] | None,
    ) -> Any:  # fmt: skip
        """Give a call's result without its content; what was found once for the same shapes is used again.

        `around` surrounds the call alone, not what is asked about tensors here.
        """
        wants = torch.is_grad_enabled() and any(t.requires_grad or hasattr(t, WANTS_GRADIENT) for t in tensors)
        if short_name(func) == "requires_grad_":
            return mark(args[0])
        inputs: list[Any] = []
        key = (position, func, signature((args, kwargs), inputs, self.hides), torch.is_grad_enabled())
        known = self.stage.shapes.get(key)
        if known is not None:
            return make(known, inputs)
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of twin -> (twin, the tensor it stands for)

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            for stand_in, original in twins.values():
                if original is tensor:
                    return stand_in
            stand_in = bare_twin(tensor)
            twins[id(stand_in)] = (stand_in, tensor)
            return stand_in

        versions, lengths = [version_of(t) for t in tensors], [t.shape for t in tensors]
        try:
            with torch.no_grad(), around or nullcontext():
                result = call_on_meta(func, args, kwargs, twin, self.hides)
        except Exception as error:
            return self._without_rule(func, args, error, path)
        written = [original for stand_in, original in twins.values() if version_of(stand_in)]
        for original in written:
            if not self.hides(original):
                self.hide(original)  # written with something absent: its content is not what the program has
        given = {id(t) for t in tensors}

        def settle(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in twins:
                return twins[id(tensor)][1]
            return mark(tensor) if wants and tensor.is_floating_point() and id(tensor) not in given else tensor

        result = map_tensors(result, settle)
        for tensor, version in zip(tensors, versions, strict=True):
            if version_of(tensor) != version or any(tensor is original for original in written):
                self.wrote(tensor)
        if not written and versions == [version_of(t) for t in tensors]:
            self.stage.shapes[key] = template(result, inputs)
        if lengths != [t.shape for t in tensors]:
            self.stage.shapes.clear()
            self.stage.known.clear()
        return result

    def _without_rule(self, func: Any, args: Any, error: Exception, path: str) -> Any:
        """Do without the result of a call that torch cannot do on meta: possible for in-place calls alone."""
        name = short_name(func)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if not in_place or not args or not isinstance(args[0], torch.Tensor):
            raise self.stage.error(
                f"{function_name(func)} takes a value of an earlier stage, and has no shape without it "
                f"({str(error).splitlines()[0]})",
                path or "loss function",
            ) from error
        if not self.hides(args[0]):
            self.hide(args[0])
        self.wrote(args[0])
        return None if name == "__setitem__" else args[0]
