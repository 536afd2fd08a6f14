"""Load: every rank reads what it holds under its own plan, by name, after all ranks have found that it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.checkpoint.generators import set_states
from headway.checkpoint.holding import Holding, hold
from headway.checkpoint.index import MODEL, Index, check_parts, read_index
from headway.checkpoint.optimizer import check, check_names, keys_by_name, restore
from headway.checkpoint.part import Reader, dtype_name
from headway.checkpoint.reduction import Compared, compare_reduction, restore_reduction
from headway.checkpoint.together import together
from headway.checkpoint.values import join_values
from headway.collective.slices import fill
from headway.collective.world import World
from headway.errors import CheckpointError
from headway.run.parallel import ParallelModel


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Load a checkpoint into model, optimizer and random generators, and return what was saved as `extra`.

    Every rank of a ParallelModel calls it, with the same path. The plan may be another than when it was saved, or none
    at all. Each rank reads what it holds. Nothing is changed before all ranks have found that names, shapes and
    optimizer fit; when a file turns out to be damaged later, while it is read, the model has been loaded in part.
    Raises CheckpointError on every rank when one of them cannot load.
    """
    directory = Path(path)
    world = model.world if isinstance(model, ParallelModel) else World()  # a plain module concerns nobody else
    index = together(world, lambda: read_index(directory) if world.rank == 0 else None)[0]
    assert index is not None
    loading = _Loading(directory, model, optimizer, index)
    names = together(world, loading.check)
    if index.optimizer is not None and optimizer is not None:
        check_names({name for mine in names for name in mine}, index.optimizer)
    found = together(world, lambda: compare_reduction(loading.holding.parallel, index))
    together(world, lambda: loading.apply(found))
    return loading.extra()


class _Loading:
    """What one rank knows while it loads; each method is its share of a step that all ranks take together."""

    def __init__(
        self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, index: Index
    ) -> None:
        self.directory, self.model, self.optimizer, self.index = directory, model, optimizer, index
        self.reader = Reader(directory, index)

    def check(self) -> tuple[str, ...]:
        """See that everything fits, and that the files are there whole; return the names that the optimizer has."""
        check_parts(self.directory, self.index.parts)
        self.holding = hold(self.model)
        check_model(self.holding, self.index)
        keys = [MODEL + self.index.names[name] for name in self.holding.tensors]
        names: tuple[str, ...] = ()
        if self.optimizer is not None:
            names = check(self.optimizer, self.holding, self.index)
            table = keys_by_name(self.index)
            keys += [key for name in names for key in table.get(name, ())]
        self.reader.check(keys)
        return names

    def apply(self, found: Sequence[Compared]) -> None:
        """Read into the model, the optimizer, the reduction and the generators."""
        with torch.no_grad():
            for name, tensor in self.holding.tensors.items():
                if not tensor.is_meta:
                    fill(tensor, self.reader.read(MODEL + self.index.names[name]))
        if self.optimizer is not None:
            restore(self.optimizer, self.holding, self.reader)
        restore_reduction(self.holding.parallel, found, self.reader)
        set_states(join_values(self.index.random, self.reader.read))
        parallel = self.holding.parallel
        if parallel is not None and self.index.seed is not None and self.index.steps is not None:
            parallel.seed, parallel.steps_done = self.index.seed, self.index.steps
        self.given = {name: join_values(value, self.reader.read) for name, value in self.index.extra.items()}

    def extra(self) -> dict[str, Any]:
        """Return what was saved beside model and optimizer."""
        return self.given


def check_model(holding: Holding, index: Index) -> None:
    """Raise CheckpointError that names the first differences between the model and the one that was saved."""
    here, there = holding.names, index.names
    differences = [f"{name} is not in the checkpoint" for name in here if name not in there]
    differences += [f"{name} is not in the model" for name in there if name not in here]
    for name in (name for name in here if name in there):
        saved, own = index.tensors[MODEL + there[name]], holding.tensors[here[name]]
        if saved.shape != tuple(own.shape):
            differences.append(f"{name} is {list(saved.shape)} in the checkpoint, {list(own.shape)} in the model")
        elif own.is_floating_point() != ("float" in saved.dtype):
            differences.append(f"{name} is {saved.dtype} in the checkpoint, {dtype_name(own)} in the model")
    if differences:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(differences[:3])}"
            + (f"; {len(differences) - 3} more differences" if len(differences) > 3 else ""),
            place=f"{len(there)} tensors saved, {len(here)} in the model",
            remedy="build the model as when it was saved; `headway checkpoint inspect` lists what the checkpoint holds",
        )
    apart = _untied(here, there)
    if apart:
        raise CheckpointError(
            f"{apart[0]} and {apart[1]} are one tensor in the model, and were two when it was saved",
            remedy="build the model as when it was saved",
        )


def _untied(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[str, str] | None:
    """Find two names of one tensor of the model that were saved as two."""
    for name, first in here.items():
        if there[name] != there.get(first, there[name]):
            return first, name
    return None
