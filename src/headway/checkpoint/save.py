"""Save: every rank writes what only it answers for; the directory is a checkpoint once its index is in place.

all ranks   say what they hold -> who writes what (the lowest rank that holds it: copy 0 of the first such stage)
each        writes its part, down to the disk
rank 0      puts the index in place, removes the parts of the save before
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.checkpoint.generators import states
from headway.checkpoint.holding import hold, world_of
from headway.checkpoint.index import EXTRA, FORMAT, INDEX, MODEL, RANDOM, Entry, Index, part_name, write_index
from headway.checkpoint.optimizer import Described, describe, merge
from headway.checkpoint.part import check_writable, write_part
from headway.checkpoint.reduction import offer_reduction
from headway.checkpoint.together import together
from headway.checkpoint.values import split_values
from headway.collective.slices import is_sliced, whole
from headway.errors import CheckpointError
from headway.layout.ownership import share_out


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others before anything is written; `save`, `random` and `extra` count from rank 0."""

    save: str
    keys: tuple[str, ...]
    optimizer: Described | None
    reduction: Any
    random: Any
    extra: Any


@dataclass(frozen=True)
class Written:
    """What a rank has written: an entry for each tensor, and the size of its part in bytes."""

    entries: Mapping[str, Entry]
    parts: Mapping[str, int]


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any) -> None:
    """Save model, optimizer, random generators and `extra` as the directory `path`, which any plan can load.

    Every rank calls it. An earlier checkpoint at `path` is replaced once the new one is complete on disk; a save that
    is interrupted leaves the earlier one as it was. `extra` (rank 0's) holds plain values and tensors: the step,
    `schedule.state_dict()`. `model` is a ParallelModel or, in an undistributed script, any module.
    Raises CheckpointError on every rank when one of them cannot save.
    """
    world = world_of(model)
    saving = _Saving(Path(path), model, optimizer, extra, world.rank, world.size)
    offers = together(world, saving.offer)
    try:
        written = together(world, lambda: saving.write(offers))
    except Exception:
        saving.discard(offers)
        raise
    together(world, lambda: saving.complete(offers, written))


class _Saving:
    """What one rank knows while it saves; each method is its share of a step that all ranks take together."""

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        rank: int,
        ranks: int,
    ) -> None:
        self.directory, self.model, self.optimizer, self.extra = directory, model, optimizer, extra
        self.rank, self.ranks = rank, ranks
        self.tensors: dict[str, torch.Tensor] = {}
        self.slices: dict[str, torch.Tensor] = {}  # of what all ranks have a part of
        self.writers: dict[str, int] = {}  # who writes the whole of it

    def offer(self) -> Offer:
        """Collect what this rank can write."""
        self.holding = hold(self.model)
        for name in self.holding.offered:
            tensor = self.holding.tensors[name]
            if not (self.holding.sliced and is_sliced(tensor)):
                check_writable(name, tensor)
            self.tensors[MODEL + name] = tensor
        described = None
        if self.optimizer is not None:
            described, state = describe(self.optimizer, self.holding)
            self.tensors |= state
        self._set_slices_apart()
        reduction, owed = offer_reduction(self.holding.parallel)
        self.tensors |= owed
        random, extra = None, {}
        if self.rank == 0:
            _check_place(self.directory)
            apart: dict[str, torch.Tensor] = {}
            random = split_values(states(), "random", apart, RANDOM)
            extra = {name: split_values(value, name, apart, EXTRA) for name, value in self.extra.items()}
            self.tensors |= apart
        return Offer(secrets.token_hex(4), tuple(self.tensors), described, reduction, random, extra)

    def _set_slices_apart(self) -> None:
        """Choose for each sliced tensor the rank that writes it: each about the same, so that none holds all."""
        self.slices = {key: self.tensors[key] for key in sorted(self.tensors) if is_sliced(self.tensors[key])}
        sizes = {key: slices.numel() * slices.element_size() for key, slices in self.slices.items()}
        self.writers = share_out(sizes, dict.fromkeys(sizes, (0,)), self.ranks)
        self.tensors = {key: t for key, t in self.tensors.items() if self.writers.get(key, self.rank) == self.rank}

    def write(self, offers: Sequence[Offer]) -> Written:
        """Write what no rank before this one offers."""
        for key, slices in self.slices.items():
            together_again = whole(slices.detach())  # every rank takes part, and the writer keeps it
            if self.writers[key] == self.rank:
                self.tensors[key] = together_again
        described = [offer.optimizer for offer in offers if offer.optimizer is not None]
        self.merged = merge(described) if described else None
        before = {key for offer in offers[: self.rank] for key in offer.keys}
        mine = {key: tensor for key, tensor in self.tensors.items() if key not in before}
        if not mine:
            return Written({}, {})
        part = part_name(offers[0].save, self.rank)
        entries = write_part(self.directory, part, mine)
        return Written(entries, {part: (self.directory / part).stat().st_size})

    def discard(self, offers: Sequence[Offer]) -> None:
        """Remove what has been written of a save that some rank could not do."""
        shutil.rmtree((self.directory / part_name(offers[0].save, self.rank)).parent, ignore_errors=True)

    def complete(self, offers: Sequence[Offer], written: Sequence[Written]) -> None:
        """On rank 0: put the index in place."""
        if self.rank != 0:
            return
        entries = {key: entry for part in written for key, entry in part.entries.items()}
        order = {MODEL + name: number for number, name in enumerate(self.holding.tensors)}
        parallel = self.holding.parallel
        missing = [name for name in self.holding.tensors if MODEL + name not in entries]
        if missing:
            raise CheckpointError(f"no rank has the values of {missing[0]}", remedy="save the model after training it")
        index = Index(
            save=offers[0].save,
            saved_at=datetime.now().isoformat(sep=" ", timespec="seconds"),
            headway=_version(),
            torch=str(torch.__version__),
            plan=self.holding.plan,
            parts={name: size for part in written for name, size in part.parts.items()},
            tensors=dict(sorted(entries.items(), key=lambda item: order.get(item[0], len(order)))),
            names=self.holding.names,
            parameters=self.holding.parameters,
            optimizer=self.merged,
            seed=None if parallel is None else parallel.seed,
            steps=None if parallel is None else parallel.steps_done,
            reduction={str(rank): offer.reduction for rank, offer in enumerate(offers) if offer.reduction is not None},
            random=offers[0].random,
            extra=offers[0].extra,
        )
        write_index(self.directory, index)


def _check_place(directory: Path) -> None:
    """Raise CheckpointError when something else is in the way."""
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(
            "a checkpoint is a directory, and this is a file", place=str(directory), remedy="save under another name"
        )
    index = directory / INDEX
    if index.exists() and FORMAT not in index.read_text(encoding="utf-8", errors="replace"):
        raise CheckpointError(
            f"there is a {INDEX} that is not a checkpoint's", place=str(index), remedy="save under another name"
        )


def _version() -> str:
    try:
        return version("headway")
    except PackageNotFoundError:
        return "unknown"
