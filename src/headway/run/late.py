"""Late: what a stage computes after all because it needs it, from what it received, when a batch takes another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from headway.graph.ledger import storage_of, version_of
from headway.graph.model import Position
from headway.graph.walk import is_in_place, is_read, is_shape_read, map_tensors, short_name, tensors_of

if TYPE_CHECKING:
    from headway.run.absence import Absence


FAR = 50
"""How many views are followed back."""

FRESH = frozenset(
    "add sub mul div neg exp log sqrt rsqrt pow sin cos tanh sigmoid relu gelu silu softmax log_softmax matmul "
    "softplus bmm einsum linear conv1d conv2d conv3d layer_norm group_norm rms_norm embedding dropout cat stack sum "
    "mean cumsum masked_fill where zeros_like ones_like full_like empty_like clone pad roll clamp "
    "scaled_dot_product_attention "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __matmul__ __neg__".split()
)
"""Functions whose result shares no memory with their arguments; any other may be a view."""


class _Missing(Exception):
    """A value needs something that this stage does not have."""


def is_pure(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call does nothing but make its result: it reads no value, and changes nothing in place."""
    return not (is_in_place(func, kwargs) or is_read(func, args, kwargs) or is_shape_read(func, args, kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """A call that was left out, with all that is needed to compute it after all."""

    position: Position
    turn: Position
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]  # among its arguments
    versions: list[int]
    results: list[torch.Tensor]
    changes: int  # how many changes in place had been left out before
    gradient: bool
    autocast: tuple[bool, torch.dtype]


class Late:
    """The calls before the start that were left out in this pass.

    A batch may need, after a border, a value that the recorded one did not: keys that are repeated for a mask, say.
    Where it follows by torch calls from values that were received, this stage computes it; the stage before may have
    done so too, for itself. Not where an argument was changed in place since: what was received has its last content.
    """

    def __init__(self, absence: Absence, compute: Callable[..., Any], received: Mapping[Any, torch.Tensor]) -> None:
        self.absence, self.compute = absence, compute
        self.device = absence.stage.device.type
        self.received = {id(tensor) for tensor in received.values()}
        self.left: dict[int, _Left] = {}  # by the id of an absent result, which the record keeps alive
        self.made: dict[int, torch.Tensor] = {}
        self.under_way: set[int] = set()
        self.changed: list[torch.Tensor] = []
        absence.wrote = self.changed.append

    def note(
        self, position: Position, turn: Position, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor],
        result: Any,
    ) -> Any:  # fmt: skip
        """Remember a call that is left out, with the `tensors` among its arguments; gives its `result`."""
        results = [result] if isinstance(result, torch.Tensor) else tensors_of(result, [])
        autocast = (torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
        versions, changes = [version_of(tensor) for tensor in tensors], len(self.changed)
        entry = _Left(
            position, turn, func, args, kwargs, tensors, versions, results, changes, torch.is_grad_enabled(), autocast,
        )  # fmt: skip
        for tensor in results:
            if tensor.is_meta and not any(tensor is given for given in tensors):
                self.left[id(tensor)] = entry
        return result

    def present(self, value: Any) -> Any:
        """Replace the absent tensors in nested arguments by real ones, where they can be computed.

        Lists and dicts stay the objects that they are: the program may hold them too, and what is called may write
        them (append a value, count layers).
        """
        if isinstance(value, torch.Tensor):
            if not value.is_meta or id(value) not in self.left:
                return value
            try:
                return self._value(value)
            except _Missing:
                return value
        if isinstance(value, list | dict):
            for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
                real = self.present(item)
                if real is not item:
                    value[key] = real
            return value
        if isinstance(value, tuple):
            items = [self.present(item) for item in value]
            if all(map(is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.made:
            return self.made[id(tensor)]
        entry = self.left.get(id(tensor))
        if entry is None or id(tensor) in self.under_way or self._is_changed(entry):
            raise _Missing
        self.under_way.add(id(tensor))  # whatever comes of it, it is tried once
        args, kwargs = map_tensors((entry.args, entry.kwargs), self._given)
        enabled, dtype = entry.autocast
        with torch.set_grad_enabled(entry.gradient), torch.autocast(self.device, dtype=dtype, enabled=enabled):
            made = tensors_of(self.compute(entry.position, entry.func, args, kwargs, entry.turn), [])
        for absent, real in zip(entry.results, made, strict=True):
            self.made[id(absent)] = real
        return self.made[id(tensor)]

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return self._value(tensor)
        if self.absence.hides(tensor) and id(tensor) not in self.received:
            if id(tensor) not in self.absence.stage.parameters:
                raise _Missing  # a buffer that the program changes, or what was written with something absent
        return tensor

    def _is_changed(self, entry: _Left) -> bool:
        """Say whether an argument was changed in place after the call."""
        for tensor, version in zip(entry.tensors, entry.versions, strict=True):
            if not tensor.is_meta and version_of(tensor) != version:
                return True
        later = {self._memory(tensor) for tensor in self.changed[entry.changes :]}
        mine = {self._memory(tensor) for tensor in entry.tensors}
        return bool(later) and (None in later or None in mine or not later.isdisjoint(mine))

    def _memory(self, tensor: torch.Tensor) -> int | None:
        """Tell by a number whose memory a tensor has; None for the result of a module, which may be a view of any."""
        if not tensor.is_meta:
            return id(storage_of(tensor))
        for _ in range(FAR):
            entry = self.left.get(id(tensor))
            if entry is None:
                break
            if not entry.tensors or short_name(entry.func) in FRESH:
                return id(tensor)
            tensor = entry.tensors[0]
            if not tensor.is_meta:
                return id(storage_of(tensor))
        return None
