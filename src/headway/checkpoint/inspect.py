"""Inspect: a checkpoint as text, from its index alone; without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway.checkpoint.index import MODEL, OPTIMIZER, REDUCTION, Entry, Index, OptimizerIndex, read_index
from headway.units import format_bytes

TABLE_LINES = 24
"""Lines of the table of tensors before it is cut short."""


def inspect(directory: Path, *, whole: bool = False) -> str:
    """Describe the checkpoint in `directory`; `whole` lists all of its tensors. Raises CheckpointError."""
    index = read_index(directory)
    model = {key.removeprefix(MODEL): entry for key, entry in index.tensors.items() if key.startswith(MODEL)}
    weights = [entry for name, entry in model.items() if name in set(index.parameters)]
    buffers = len(model) - len(weights)
    lines = [
        f"checkpoint {directory}",
        f"saved      {index.saved_at}, by Headway {index.headway} and torch {index.torch}, from {index.plan}",
        f"model      {_count(weights):,} parameters in {len(weights)} tensors"
        + (f", {buffers} buffers" if buffers else "")
        + f": {format_bytes(_bytes(model.values()))}",
    ]
    tied = [f"{name} is {first}" for name, first in index.names.items() if name != first]
    if tied:
        lines.append(f"tied       {_some(tied)}")
    if index.optimizer is not None:
        lines += _optimizer_lines(index, index.optimizer)
    if index.seed is not None:
        lines.append(f"random     seed {index.seed}, {index.steps} steps done")
    owed = [entry for key, entry in index.tensors.items() if key.startswith(REDUCTION)]
    if owed:
        lines.append(f"reduction  what a codec keeps, of {len(index.reduction)} ranks: {format_bytes(_bytes(owed))}")
    lines += [f"extra      {name} = {_short(value)}" for name, value in index.extra.items()]
    lines.append(f"files      {_some([f'{name} ({format_bytes(size)})' for name, size in index.parts.items()])}")
    shown = list(model.items()) if whole else list(model.items())[:TABLE_LINES]
    width = max((len(name) for name, _ in shown), default=0)
    lines.append("")
    lines += [f"{name:{width}}  {entry.dtype} {list(entry.shape)}" for name, entry in shown]
    if len(shown) < len(model):
        lines.append(f"... {len(model) - len(shown)} more (--all)")
    return "\n".join(lines)


def _optimizer_lines(index: Index, optimizer: OptimizerIndex) -> list[str]:
    state = {key: entry for key, entry in index.tensors.items() if key.startswith(OPTIMIZER)}
    kinds = list(dict.fromkeys(key.rpartition("/")[2] for key in state))
    held = f"{', '.join(kinds)}: {format_bytes(_bytes(state.values()))}" if state else "no state yet"
    lines = [f"optimizer  {optimizer.kind}; {held}"]
    for number, group in enumerate(optimizer.groups):
        options = {key: value for key, value in group.options.items() if value is not None and value is not False}
        said = ", ".join(f"{key} {_short(value)}" for key, value in options.items())
        lines.append(f"  group {number}  {len(group.parameters)} parameters: {said}")
    return lines


def _count(entries: Iterable[Entry]) -> int:
    return sum(math.prod(entry.shape) for entry in entries)


def _bytes(entries: Iterable[Entry]) -> int:
    return sum(math.prod(entry.shape) * _item_bytes(entry.dtype) for entry in entries)


def _item_bytes(dtype: str) -> int:
    """Read the bytes of an element from a dtype's name: "float64" is 8, "float8_e5m2" 1, "bool" 1."""
    bits = "".join(c if c.isdigit() else " " for c in dtype).split()
    return int(bits[0]) // 8 if bits else 1


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _short(value: Any) -> str:
    """Write a value as it was given, in at most sixty characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
