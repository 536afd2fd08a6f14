"""Spread: new values of parameters on their way from their owners; each is awaited when the program first uses it.

    owner 0    [embed] [0.attn.qkv]           [1.mlp.up] ...      as the last forward used them
    owner 1            [0.mlp.up]  [0.norm ...]          ...
    here       embed waits for its own values, computes with them while those of block 0 come, and so on

A parameter that has not come is, for that while, of a class whose every use in a torch function waits first; so it does
not matter by which name, from which module or through which list the program reaches it. Afterwards nothing remains.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from headway.collective.bucket import Slot, flat
from headway.collective.courier import Courier, Delivery

DIRECT_BYTES = 1 << 16
"""A parameter of so many bytes is sent as it lies; smaller ones of one owner are copied together."""

TOGETHER_BYTES = 1 << 18
"""Bytes of small parameters that are sent at once, at most."""

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "is_leaf", "grad", "grad_fn", "is_cuda",
    "is_sparse", "is_quantized", "is_nested",
)  # fmt: skip
_METHODS = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size")
LOOKS = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES] + [getattr(torch.Tensor, name) for name in _METHODS]
)
"""What a program may ask of a parameter without waiting for its values."""


@dataclass(eq=False)
class Load:
    """What one owner sends at once, one parameter as it lies or several small ones, and what is under way of it."""

    owner: int  # index in the group
    slots: list[Slot]
    awaited: str
    delivery: Delivery | None = None


class Spread:
    """Gives all ranks of a group the values of `slots` from their owners, by name an index in the group; `me` is here.

    `used` are the numbers of the slots that were used since the last `start`, in that order.
    """

    def __init__(self, courier: Courier, slots: Sequence[Slot], owners: Mapping[str, int], me: int) -> None:
        self._courier, self._slots, self._owners, self._me = courier, list(slots), owners, me
        self._coming = _coming(self)
        self._load_of: dict[int, Load] = {}
        self.used: list[int] = []
        self.order(())

    def order(self, numbers: Iterable[int]) -> None:
        """Send parameters in this order, of the slots' numbers, from now on; those left out come last, as they stand.

        All ranks call it alike.
        """
        first = {number: place for place, number in enumerate(numbers)}
        self._loads: list[Load] = []
        filling: dict[tuple[int, torch.dtype, torch.device], Load] = {}
        for slot in sorted(self._slots, key=lambda slot: first.get(slot.number, len(first))):
            owner, parameter = self._owners[slot.name], slot.parameter
            load = Load(owner, [slot], f"new values of {slot.name}")
            if slot.bytes < DIRECT_BYTES or not _dense(slot):
                key = (owner, parameter.dtype, parameter.device)
                open_one = filling.get(key)
                if open_one is not None and sum(s.bytes for s in open_one.slots) + slot.bytes <= TOGETHER_BYTES:
                    open_one.slots.append(slot)
                    open_one.awaited = f"new values of {open_one.slots[0].name}, ..."
                    continue
                filling[key] = load
            self._loads.append(load)

    def start(self, at_once: Container[str] = ()) -> None:
        """Send all values on their way; wait for those of the parameters `at_once` alone. Every rank calls it.

        An owner's own are waited for until they are sent: a program that changes them would change what is sent.
        """
        self.settle()
        self.used = []
        with self._courier.together():
            for load in self._loads:
                load.delivery = self._send(load)
        for load in self._loads:
            for slot in load.slots:
                self._load_of[id(slot.parameter)] = load
                if type(slot.parameter) is Parameter and slot.name not in at_once:
                    slot.parameter.__class__ = self._coming
        self.use([slot.parameter for slot in self._slots if type(slot.parameter) is not self._coming])

    def settle(self) -> None:
        """Wait for all that is on its way. Raises PeerError when a rank is lost or late."""
        for load in self._loads:
            self._wait(load)

    def use(self, parameters: Iterable[Any]) -> None:
        """Wait for these parameters."""
        for load in [self._load_of[id(p)] for p in parameters if id(p) in self._load_of]:
            if load.delivery is not None:
                self.used += [slot.number for slot in load.slots]
            self._wait(load)

    def _send(self, load: Load) -> Delivery:
        with torch.no_grad():
            first, mine = load.slots[0].parameter, load.owner == self._me
            if len(load.slots) == 1 and _dense(load.slots[0]):
                return self._courier.spread(flat(first), load.owner, load.awaited)
            if mine:
                values = torch.cat([slot.parameter.detach().reshape(-1) for slot in load.slots])
            else:
                size = sum(slot.parameter.numel() for slot in load.slots)
                values = torch.empty(size, dtype=first.dtype, device=first.device)
            then = None if mine else partial(_lay, values, [slot.parameter.detach() for slot in load.slots])
            return self._courier.spread(values, load.owner, load.awaited, then)

    def _wait(self, load: Load) -> None:
        if load.delivery is None:
            return
        load.delivery.wait()
        load.delivery = None
        for slot in load.slots:
            self._load_of.pop(id(slot.parameter), None)
            if type(slot.parameter) is self._coming:
                slot.parameter.__class__ = Parameter


def _coming(spread: Spread) -> type[Parameter]:
    """Make the class of parameters that have not come."""

    class Coming(Parameter):
        """A parameter whose values are on their way: what uses it waits for them first."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            found = [leaf for leaf in tree_leaves((args, dict(kwargs))) if type(leaf) is cls]
            if not found:  # it is in something that is not looked into
                spread.settle()
            if func not in LOOKS:
                spread.use(found)
                return func(*args, **kwargs)
            for parameter in found:
                parameter.__class__ = Parameter  # type: ignore[assignment]
            try:
                return func(*args, **kwargs)
            finally:
                for parameter in found:
                    parameter.__class__ = cls

    return Coming


def _lay(values: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy what came together into the parameters."""
    for target, part in zip(targets, values.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view(target.shape))


def _dense(slot: Slot) -> bool:
    """Tell whether a parameter fills its memory without gaps, in its own order."""
    return slot.parameter.stride() == slot.stride and slot.parameter.numel() > 0
