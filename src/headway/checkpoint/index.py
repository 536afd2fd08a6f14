"""Index: what a checkpoint holds and in which of its files; the one file that makes a directory a checkpoint.

    out/checkpoint.json                  this index, written last and put in place by one atomic rename
    out/parts-1f3a9c02/0.safetensors      tensors that rank 0 wrote: model/NAME, optimizer/NAME/KEY, reduction/RANK/N
    out/parts-1f3a9c02/2.safetensors      tensors that rank 2 wrote

The parts of the next save lie beside these until the index changes over.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import CheckpointError

INDEX = "checkpoint.json"
FORMAT = "headway checkpoint"
VERSION = 1

# safetensors itself writes under a passing name first.
_PART = re.compile(r"[0-9]+\.safetensors|\.tmp.*")

# What the keys of tensors begin with.
MODEL, OPTIMIZER, REDUCTION, RANDOM, EXTRA = "model/", "optimizer/", "reduction/", "random/", "extra/"


@dataclass(frozen=True)
class Entry:
    """One tensor: its dtype ("float32"), shape, part file, and the CRC-32 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    part: str
    crc: int


@dataclass(frozen=True)
class Group:
    """One parameter group of an optimizer: its options (lr, betas, ...) and the names of its parameters."""

    options: Mapping[str, Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerIndex:
    """What is known of an optimizer but its tensors; `numbers` is its state per parameter that is not a tensor."""

    kind: str
    groups: tuple[Group, ...]
    numbers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Index:
    """The whole of `checkpoint.json`.

    `parts` maps file names to bytes, `tensors` keys to entries. `names` maps each name of the model's state to the one
    that its tensor is written under (another for the second name of a tied parameter). `seed` and `steps` are a
    ParallelModel's; None when an undistributed model was saved. `reduction` has, by rank, what its reducer needs to go
    on. `reduction`, `random` and `extra` are values written as JSON.
    """

    save: str
    saved_at: str
    headway: str
    torch: str
    plan: str
    parts: Mapping[str, int]
    tensors: Mapping[str, Entry]
    names: Mapping[str, str]
    parameters: tuple[str, ...]
    optimizer: OptimizerIndex | None = None
    seed: int | None = None
    steps: int | None = None
    reduction: Mapping[str, Any] = field(default_factory=dict)
    random: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def keys(self, prefix: str) -> list[str]:
        """List the keys of tensors that begin with `prefix`, in order."""
        return [key for key in self.tensors if key.startswith(prefix)]

    def to_text(self) -> str:
        """Write as JSON, a line for each tensor. Floats are written so that they are read back exactly."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        tensors = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in values.pop("tensors").items())
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        return "{\n" + ",\n".join([*lines, f'"tensors": {{\n{tensors}\n}}']) + "\n}\n"

    @staticmethod
    def from_text(text: str) -> Index:
        """Read what `to_text` wrote. Raises ValueError, KeyError or TypeError when it is something else."""
        values = json.loads(text)
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        version = values.pop("version")
        if version != VERSION:
            raise CheckpointError(
                f"the checkpoint has format {version}, this Headway reads format {VERSION}",
                remedy=f"use the Headway that wrote it ({values.get('headway', 'unknown')}), or a newer one",
            )
        optimizer = values.pop("optimizer")
        if optimizer is not None:
            groups = tuple(Group(g["options"], tuple(g["parameters"])) for g in optimizer["groups"])
            optimizer = OptimizerIndex(optimizer["kind"], groups, optimizer["numbers"])
        tensors = {key: Entry(**{**e, "shape": tuple(e["shape"])}) for key, e in values.pop("tensors").items()}
        parameters = tuple(values.pop("parameters"))
        return Index(tensors=tensors, optimizer=optimizer, parameters=parameters, **values)


def read_index(directory: Path) -> Index:
    """Read the index of a checkpoint, and see that its parts are there whole.

    Raises CheckpointError when there is no such directory, no index in it, or when something is cut short.
    """
    if not directory.exists():
        raise CheckpointError("there is no such checkpoint", place=str(directory), remedy=_found_nearby(directory))
    path = directory / INDEX
    if not path.is_file():
        begun = save_folders(directory) if directory.is_dir() else []
        fact = "a save that was never completed" if begun else f"not a checkpoint: it has no {INDEX}"
        raise CheckpointError(f"this is {fact}", place=str(directory), remedy=_found_nearby(directory))
    try:
        index = Index.from_text(path.read_text(encoding="utf-8"))
    except CheckpointError as error:
        raise CheckpointError(error.fact, place=str(path), remedy=error.remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the index of the checkpoint cannot be read: {type(error).__name__}: {error}",
            place=str(path),
            remedy="take an earlier checkpoint, or copy this one again from where it came from",
        ) from None
    check_parts(directory, index.parts)
    return index


def check_parts(directory: Path, parts: Mapping[str, int]) -> None:
    """Raise CheckpointError when a part is missing or has another size than was written."""
    for name, size in parts.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            fact = "is missing" if found is None else f"has {found:,} bytes, {size:,} were written"
            raise CheckpointError(
                f"the checkpoint is damaged: one of its {len(parts)} parts {fact}",
                place=str(path),
                remedy="take an earlier checkpoint, or copy this one again with all its files",
            )


def write_index(directory: Path, index: Index) -> None:
    """Put the index in place, which completes the save, and remove the parts of earlier saves."""
    path, draft = directory / INDEX, directory / f"{INDEX}.{index.save}"
    with draft.open("w", encoding="utf-8") as file:
        file.write(index.to_text())
        file.flush()
        os.fsync(file.fileno())
    for folder in (directory / f"parts-{index.save}", directory):  # the parts' names, before the index that needs them
        sync_directory(folder)
    os.replace(draft, path)
    sync_directory(directory)
    for old in save_folders(directory):
        if old.name != f"parts-{index.save}":
            shutil.rmtree(old, ignore_errors=True)
    for left in directory.glob(f"{INDEX}.*"):
        left.unlink(missing_ok=True)


def part_name(save: str, rank: int) -> str:
    """Name the part that a rank writes in a save, from the checkpoint's directory."""
    return f"parts-{save}/{rank}.safetensors"


def save_folders(directory: Path) -> Sequence[Path]:
    """List the folders of saves, complete or not, in a directory: those that hold parts and nothing else."""
    return sorted(
        path
        for path in directory.glob("parts-????????")
        if path.is_dir() and all(_PART.fullmatch(inside.name) for inside in path.iterdir())
    )


def sync_directory(directory: Path) -> None:
    """Have the operating system write a directory's names to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _found_nearby(directory: Path) -> str:
    """Name checkpoints beside or inside the place where none was found."""
    places = [directory.parent, directory]
    found = sorted({path.parent for place in places if place.is_dir() for path in place.glob(f"*/{INDEX}")})
    if found:
        return f"a checkpoint is here: {', '.join(map(str, found[:3]))}"
    return "the path that was given to headway.save"
