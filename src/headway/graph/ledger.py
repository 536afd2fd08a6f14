"""Ledger: which tensor objects of a run are which values, on which storages, and what depends on parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headway.graph.absent import meta_twin
from headway.graph.model import Value
from headway.graph.weights import name_weights


def storage_of(tensor: torch.Tensor) -> Any:
    """Give a tensor's storage object; None for sparse and other tensors without one."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def version_of(tensor: torch.Tensor) -> int:
    """Count the in-place changes of a tensor."""
    return 0 if tensor.is_inference() else tensor._version


class Ledger:
    """The tables of one recording. Every tensor that it knows is kept alive, so that ids stay theirs.

    `state` names buffers that the program is known to change: what is read from them depends on earlier runs, so it
    counts as derived.
    """

    def __init__(self, model: nn.Module, state: frozenset[str], *, compute: bool) -> None:
        self.compute = compute
        self.state = state
        self.parameters, self.weights = name_weights(model)
        self.values: list[Value] = []
        self.known: dict[int, tuple[torch.Tensor, int]] = {}  # id -> (kept alive, value id)
        self.twins: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # id -> tensor, twin, version of the twin
        self.storages: dict[int, tuple[Any, int]] = {}
        self.derived_storages: set[int] = set()
        self.graph_storages: set[int] = set()  # written in place, on meta, with something that needs a gradient
        self.derived_values: set[int] = set()
        stored = ((storage_of(tensor), name) for tensor, name, _ in self.weights.values())
        self.weight_storages = {id(s): (s, name) for s, name in stored if s is not None}
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # weights that were changed, with what they held
        self.saved_now: list[int] = []
        self.saved_before: set[int] = set()

    def storage_id(self, tensor: torch.Tensor) -> int:
        """Number a tensor's storage."""
        storage = storage_of(tensor)
        key = id(storage) if storage is not None else id(tensor)
        if key not in self.storages:
            self.storages[key] = (storage if storage is not None else tensor, len(self.storages))
        return self.storages[key][1]

    def add(
        self, tensor: torch.Tensor, *, producer: int | None, output: int, derived: bool, given: bool = False
    ) -> int:
        """Enter a new value."""
        number = len(self.values)
        self.known[id(tensor)] = (tensor, number)
        storage = self.storage_id(tensor)
        if derived:
            self.derived_values.add(number)
            self.derived_storages.add(storage)
        self.values.append(
            Value(
                id=number,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=tensor.numel() * tensor.element_size(),
                producer=producer,
                output=output,
                derived=derived,
                requires_grad=tensor.requires_grad,
                storage=storage,
                given=given,
            )
        )
        return number

    def value_of(self, tensor: torch.Tensor) -> int:
        """Find a tensor's value, entering one that was made where no call was seen."""
        entry = self.known.get(id(tensor))
        if entry is not None:
            return entry[1]
        # made by a library outside torch, say: derived if it has no values, or shares memory with what is
        derived = (tensor.is_meta and not self.compute) or self.storage_id(tensor) in self.derived_storages
        return self.add(tensor, producer=None, output=0, derived=derived)

    def is_derived(self, value: int) -> bool:
        """Say whether a value depends on a parameter by now."""
        return value in self.derived_values or self.values[value].storage in self.derived_storages

    def is_hidden(self, tensor: torch.Tensor) -> bool:
        """Say whether a recording on meta must not look into a tensor that has values."""
        weight = self.weights.get(id(tensor))
        if weight is not None:
            return not weight[2] or weight[1] in self.state
        return self.is_derived(self.value_of(tensor))

    def classify(self, tensors: list[torch.Tensor]) -> tuple[list[str], list[str], list[int]]:
        """Tell parameters, buffers (by name) and values (by id) apart."""
        parameters, buffers, inputs = [], [], []
        for tensor in tensors:
            weight = self.weights.get(id(tensor))
            if weight is None:
                inputs.append(self.value_of(tensor))
            elif weight[2]:
                buffers.append(weight[1])
            else:
                parameters.append(weight[1])
        return parameters, buffers, inputs

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the absent tensor that stands for one with values."""
        entry = self.twins.get(id(tensor))
        written = bool(self.graph_storages) and self.storage_id(tensor) in self.graph_storages
        wants = (tensor.requires_grad or written) and (tensor.is_floating_point() or tensor.is_complex())
        if entry is None or entry[1].requires_grad != wants:
            twin = meta_twin(tensor)
            if wants and not twin.requires_grad:
                with torch.enable_grad():
                    twin = twin.requires_grad_().clone()  # no leaf, so that it can be written again
            entry = (tensor, twin, version_of(twin))
            self.twins[id(tensor)] = entry
            storage, twin_storage = storage_of(tensor), storage_of(entry[1])
            if storage is not None and id(storage) in self.weight_storages:
                self.weight_storages[id(twin_storage)] = (twin_storage, self.weight_storages[id(storage)][1])
            elif id(tensor) in self.known:  # the twin takes the place of the value, for what autograd saves
                self.storages[id(twin_storage)] = (twin_storage, self.values[self.known[id(tensor)][1]].storage)
        return entry[1]

    def with_twins(self, names: Mapping[int, str]) -> dict[int, str]:
        """Add to the names of tensors, by id, those of their twins."""
        return {**names, **{id(twin): names[number] for number, (_, twin, _) in self.twins.items() if number in names}}

    def look_again(self, tensor: torch.Tensor) -> None:
        """Note that a known value requires gradients by now: somebody has said so."""
        entry = self.known.get(id(tensor))
        if entry is not None and tensor.requires_grad:
            self.values[entry[1]] = replace(self.values[entry[1]], requires_grad=True)

    def weight_of(self, tensor: torch.Tensor) -> str | None:
        """Name the weight that a tensor is, or is a view of: `weight.data`, a row of a buffer."""
        weight = self.weights.get(id(tensor))
        if weight is not None:
            return weight[1]
        storage = storage_of(tensor)
        return None if storage is None else self.weight_storages.get(id(storage), (None, None))[1]

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Keep the content of parameters that may be changed now, for `put_back`."""
        names = {self.weight_of(tensor) for tensor in tensors} - {None} - self.kept.keys()
        for tensor, name, _ in self.weights.values() if names else ():
            if name in names:
                self.kept[name] = (tensor, tensor.detach().clone())

    def put_back(self) -> None:
        """Undo what the recorded run changed of parameters."""
        with torch.no_grad():
            for tensor, content in self.kept.values():
                tensor.copy_(content)

    def was_written(self, tensor: torch.Tensor, version: int) -> bool:
        """Say whether a call changed a tensor in place; a call on meta changes the twin of a tensor with values."""
        if version_of(tensor) != version:
            return True
        entry = self.twins.get(id(tensor))
        if entry is None or version_of(entry[1]) == entry[2]:
            return False
        twin = entry[1]
        self.twins[id(tensor)] = (tensor, twin, version_of(twin))  # the next call compares anew
        if twin.requires_grad:
            self.graph_storages.add(self.storage_id(tensor))
        return True

    def let_go(self) -> None:
        """Forget all tensors: autograd holds this ledger by a hook, and they hold autograd, unseen by the collector."""
        for table in (self.weights, self.known, self.twins, self.storages, self.weight_storages, self.kept):
            table.clear()

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note what autograd keeps for backward (a hook of torch.autograd.graph.saved_tensors_hooks)."""
        storage = storage_of(tensor)
        if storage is not None and id(storage) not in self.weight_storages:
            number = self.storage_id(tensor)
            if number not in self.saved_before:
                self.saved_before.add(number)
                self.saved_now.append(number)
        return tensor

    def storage_sizes(self) -> list[int]:
        """Give the bytes of each storage."""
        sizes = [0] * (1 + max((n for _, n in self.storages.values()), default=-1))
        for storage, number in self.storages.values():
            if isinstance(storage, torch.UntypedStorage):
                size = storage.nbytes()
            else:  # a tensor without one: sparse ones keep only what is not zero
                size = storage.coalesce().values().nbytes if storage.is_sparse else storage.numel() * storage.itemsize
            sizes[number] = max(sizes[number], int(size))
        return sizes
