"""Values: turns nested plain values into what JSON can hold and back, tensors kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headway.checkpoint.part import check_writable
from headway.errors import CheckpointError

TENSOR, TUPLE, ITEMS = "$tensor", "$tuple", "$items"


def split_values(value: Any, place: str, tensors: dict[str, torch.Tensor], prefix: str) -> Any:
    """Return `value` with JSON's types alone; tensors go into `tensors`, under prefix + number.

    Tuples, and dicts whose keys are numbers, are marked, so that `join_values` gives back what was given. Raises
    CheckpointError, naming `place` down to the item, for anything else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, torch.Tensor):
        check_writable(place, value)
        key = f"{prefix}{len(tensors)}"
        tensors[key] = value
        return {TENSOR: key}
    if isinstance(value, list | tuple):
        items = [split_values(item, f"{place}[{i}]", tensors, prefix) for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and all(isinstance(key, str | int | float) for key in value):
        inside = {k: split_values(item, f"{place}[{k!r}]", tensors, prefix) for k, item in value.items()}
        plain = all(isinstance(key, str) for key in value) and not any(key in value for key in (TENSOR, TUPLE, ITEMS))
        return inside if plain else {ITEMS: [[key, item] for key, item in inside.items()]}
    kind = "a dict whose keys are not text or numbers" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"{place} is {kind}, which a checkpoint does not hold",
        place="headway.save(...)",
        remedy="pass tensors, numbers, text, and lists, tuples or dicts of them",
    )


def join_values(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Return what `split_values` was given; `read` fetches a tensor by its key."""
    if isinstance(value, list):
        return [join_values(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return read(value[TENSOR])
    if TUPLE in value:
        return tuple(join_values(item, read) for item in value[TUPLE])
    if ITEMS in value:
        return {key: join_values(item, read) for key, item in value[ITEMS]}
    return {key: join_values(item, read) for key, item in value.items()}
