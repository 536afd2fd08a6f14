"""Micro-batches: cuts a batch along its samples, weighs losses, and joins results; exact when it does not divide."""

from __future__ import annotations

import dataclasses
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr as path_text
from torch.utils._pytree import tree_map_with_path

from headway.errors import BatchError


@dataclass(frozen=True)
class Mean:
    """A mean that is not over samples: the global loss is the sum of totals over the sum of counts, exactly.

    `total` is a scalar tensor, `count` a number or a scalar tensor (the tokens that are not padding, say).
    """

    total: torch.Tensor
    count: torch.Tensor | float


@dataclass(frozen=True)
class Shared:
    """A tensor of a batch that all samples share, and that is not cut along dim 0 (an attention mask, say)."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise TypeError(f"Shared takes a tensor, not a {type(self.tensor).__name__}")


@dataclass(frozen=True)
class Share:
    """Which samples of a global batch a copy has: [start, stop) of `total`."""

    start: int
    stop: int
    total: int

    @property
    def samples(self) -> int:
        """How many samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class LossParts:
    """What one micro-batch adds to the global loss: loss = sum of totals / sum of counts; metrics likewise."""

    total: torch.Tensor
    count: float
    metrics: Mapping[str, tuple[float, float]]


def map_leaves(batch: Any, change: Callable[[str, Any], Any], path: str = "batch") -> Any:
    """Rebuild a batch with each leaf changed; `change` gets the leaf's place ("batch['x'][0]") and the leaf.

    Besides the containers that torch knows, mappings of other kinds (`transformers.BatchEncoding`) and dataclasses
    are gone into. A list of texts is one leaf: loaders make one of the texts of their samples.
    """

    def visit(key_path: Any, leaf: Any) -> Any:
        place = path + path_text(key_path)
        if isinstance(leaf, Shared | torch.Tensor):
            return change(place, leaf)
        if isinstance(leaf, UserDict):
            data = {key: map_leaves(item, change, f"{place}[{key!r}]") for key, item in leaf.items()}
            return type(leaf)(data)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [f.name for f in dataclasses.fields(leaf) if f.init]
            parts = {name: map_leaves(getattr(leaf, name), change, f"{place}.{name}") for name in fields}
            return dataclasses.replace(leaf, **parts)
        return change(place, leaf)

    return tree_map_with_path(visit, batch, is_leaf=_is_texts)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, str | bytes) for item in value)


def batch_leaves(batch: Any) -> dict[str, Any]:
    """List a batch's leaves by place."""
    found: dict[str, Any] = {}

    def note(place: str, leaf: Any) -> Any:
        found[place] = leaf
        return leaf

    map_leaves(batch, note)
    return found


def num_samples(batch: Any) -> int:
    """Count the samples of a batch: the length of dim 0 of its tensors.

    Raises BatchError naming the leaf whose dim 0 is another, or a batch without any tensor that is cut.
    """
    leaves = batch_leaves(batch)
    lengths = {
        place: leaf.shape[0] if leaf.dim() else None for place, leaf in leaves.items() if isinstance(leaf, torch.Tensor)
    }
    for place, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "shape") and len(leaf.shape):
            raise BatchError(
                f"{place} is a {type(leaf).__module__}.{type(leaf).__name__}, and only tensors are cut into shares",
                place=f"{place}: shape {list(leaf.shape)}",
                remedy=f"torch.as_tensor({place})",
            )
    sized = Counter(length for length in lengths.values() if length is not None)
    if not sized:
        raise BatchError(
            "the batch has no tensor with samples along dim 0",
            place=", ".join(lengths) or f"a batch of type {type(batch).__name__}",
            remedy="a batch is any nesting of tuples, lists and dicts with tensors of shape [samples, ...]",
        )
    samples = sized.most_common(1)[0][0]
    for place, length in lengths.items():
        if length != samples:
            what = "has no dim 0" if length is None else f"has {length} rows along dim 0"
            raise BatchError(
                f"{place} {what}, the batch has {samples} samples",
                place=", ".join(f"{p}: {'scalar' if n is None else n}" for p, n in lengths.items()),
                remedy=f"headway.Shared({place}) if all samples share it, else give it one row for each sample",
            )
    return int(samples)


def num_tokens(batch: Any, total: int) -> int | None:
    """Count the tokens of a global batch of `total` samples, given a share: its first leaf is integers [samples, n].

    None when the batch is of another kind (images, features).
    """
    first = next((leaf for leaf in batch_leaves(batch).values() if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.dim() != 2 or first.is_floating_point() or first.dtype is torch.bool:
        return None
    return total * first.shape[1]


def cut(batch: Any, start: int, stop: int, *, keep_shared: bool = False) -> Any:
    """Take samples [start, stop) of a batch as views; `Shared` leaves give their tensor, or stay as they are.

    A list of as many texts as there are samples is cut too; what else is no tensor goes to all.
    """

    def part(place: str, leaf: Any) -> Any:
        if isinstance(leaf, Shared):
            return leaf if keep_shared else leaf.tensor
        if _is_texts(leaf) and len(leaf) == num_samples(batch):
            return leaf[start:stop]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # `.data`: a program that writes its micro-batch does not seem to write the others, which are kept for backward
        return leaf[start:stop] if leaf.requires_grad else leaf[start:stop].data

    return map_leaves(batch, part)


def copied(batch: Any) -> Any:
    """Copy the tensors of a batch, for a program that may write what it is given (`x.sub_(mean)`)."""
    return map_leaves(batch, lambda place, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch's tensors to a device, without waiting where memory is pinned."""

    def move(place: str, leaf: Any) -> Any:
        if isinstance(leaf, Shared):
            return Shared(leaf.tensor.to(device, non_blocking=True))
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(batch, move)


def offsets(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Turn sizes into (start, stop) pairs."""
    pairs, start = [], 0
    for size in sizes:
        pairs.append((start, start + size))
        start += size
    return pairs


def read_loss(result: Any, samples: int, whole: int | None = None) -> LossParts:
    """Read what a loss function returned for `samples` samples: a scalar mean, `Mean`, or (either, metrics).

    With `whole` samples in the global batch it is a sum: losses of its micro-batches are added up, not averaged.
    Raises TypeError when it is none of these.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, metrics = result
    total, count = _total_and_count(result, samples, "the loss function")
    if not isinstance(total, torch.Tensor):
        raise TypeError(f"the loss function returned {_kind(result)}, not a scalar tensor")
    if whole is not None:  # sum of (loss x whole) / sum of samples = sum of losses
        total, count = total * (whole / count), float(samples)
    values = {}
    for name, value in metrics.items():
        part, weight = _total_and_count(value, samples, f"metric {name!r}")
        values[name] = (float(part.detach()) if isinstance(part, torch.Tensor) else float(part), weight)
    return LossParts(total, count, values)


def _total_and_count(value: Any, samples: int, what: str) -> tuple[Any, float]:
    if isinstance(value, Mean):
        total = value.total
        if isinstance(total, torch.Tensor) and total.dim():
            raise TypeError(f"{what} returned a Mean whose total has shape {list(total.shape)}, not a scalar")
        return total, float(value.count)
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise TypeError(f"{what} returned a complex number\n  Try: its .abs() or .real")
        if value.dim():  # [1] too: for one sample a loss that is not reduced at all looks like that
            raise TypeError(
                f"{what} returned a tensor of shape {list(value.shape)}, not a scalar\n"
                "  Try: return its mean over the samples (shape []), or headway.Mean(total, count)"
            )
        return value * samples, float(samples)
    if isinstance(value, int | float):
        return value * samples, float(samples)
    raise TypeError(
        f"{what} returned {_kind(value)}\n  Try: return a scalar tensor, headway.Mean(total, count), or (loss, metrics)"
    )


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def leaves_of(output: Any) -> list[Any]:
    """List what an output is made of, in order; fields of dataclasses, too."""
    found: list[Any] = []
    map_leaves(output, lambda place, leaf: found.append(leaf))
    return found


def with_leaves(output: Any, leaves: Iterable[Any]) -> Any:
    """Rebuild an output with others in place of `leaves_of` it."""
    following = iter(leaves)
    return map_leaves(output, lambda place, leaf: next(following))


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of micro-batches: tensors with one row a sample are concatenated, the rest is the first's."""
    leaves = []
    for column in zip(*map(leaves_of, parts), strict=True):
        rows = all(
            isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
            for leaf, size in zip(column, sizes, strict=True)
        )
        leaves.append(torch.cat(list(column)) if rows else column[0])
    return with_leaves(parts[0], leaves)
