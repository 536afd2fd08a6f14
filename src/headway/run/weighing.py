"""Weighing: how losses of parts make the loss of a batch: their mean, their sum, or neither; tried on a few samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from headway.graph.weights import state_of
from headway.run.microbatch import Mean, copied, cut, map_leaves, num_samples
from headway.run.randomness import seeded

HALF = 2
"""Samples in each of the two parts: a model may take a single one for no batch at all."""

_ROUNDING = MappingProxyType({torch.float64: (1e-9, 1e-9), torch.float32: (3e-5, 1e-3)})
"""Relative differences that are rounding: the least, and the most where a part taken twice differs by so much."""


@dataclass(frozen=True)
class Weighing:
    """`reduction` is "mean" or "sum"; `note` says why it is not the usual mean, or that it is neither."""

    reduction: str = "mean"
    note: str | None = None
    exact: bool = True


def weigh(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Weighing:
    """Compare the loss of a few samples with the losses of their halves, in eval mode, without gradients.

    A scalar counts as a mean over samples, `Mean` as what it says. Where neither holds and the loss is the sum of its
    halves' (of a scalar, or of `Mean`s whose count does not grow), it is a sum. A model on meta, one sample alone,
    random losses and those that cannot be had this way count as means. The model is as before afterwards.
    """
    half = min(HALF, num_samples(batch) // 2)
    if not half or any(p.is_meta for p in model.parameters()):
        return Weighing()
    whole, twice_it = (cut(batch, 0, 2 * half), 2 * half), (_twice(batch, half), 2 * half)
    parts = [whole, (cut(batch, 0, half), half), (cut(batch, half, 2 * half), half), twice_it]
    modes = [(module, module.training) for module in model.modules()]
    state = [(tensor, tensor.clone()) for tensor in state_of(model).values()]
    model.eval()
    try:
        with torch.no_grad():
            found = [_loss(model, loss, *part, 0) for part in parts] + [_loss(model, loss, *whole, 1)]
    except Exception:  # whatever a model does not like about this, training is not refused for it
        return Weighing()
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for tensor, content in state:
                tensor.copy_(content)
    (value, _, dtype), (first, first_count, _), (second, second_count, _), (twice, _, _), (again, _, _) = found
    size = max(abs(value), abs(first), abs(second))
    # Under autocast a loss in float32 is as rough as what it is made of, as the first half twice shows.
    rough = 10 * min(abs(twice - first), abs(twice - 2 * first))
    least, most = (part * size for part in _ROUNDING.get(dtype, (5e-2, 5e-2)))
    near = min(max(rough, least), most)
    count = first_count + second_count
    if value != again or not count or not near:  # random, nothing counted, or all zero: nothing can be told
        return Weighing()
    if not abs(value) < float("inf") or not near < float("inf"):
        return Weighing()
    mean = (first * first_count + second * second_count) / count
    if abs(value - mean) <= near:
        return Weighing()
    halves = f"the loss of {2 * half} samples is {value:.4g}, of their halves {first:.4g} and {second:.4g}"
    if abs(value - first - second) <= near:
        return Weighing("sum", f"{halves}: a sum, so losses of micro-batches and copies are added up")
    return Weighing(
        note=f"{halves}, {mean:.4g} on average: cut into micro-batches and copies it is another loss. "
        "headway.Mean(total, count) says how samples weigh (by tokens that are not padding, say)",
        exact=False,
    )


def _twice(batch: Any, half: int) -> Any:
    """Make a batch of the first samples and the same again."""

    def doubled(place: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.cat([leaf, leaf])
        return leaf * 2 if isinstance(leaf, list | tuple) and len(leaf) == half else leaf

    return cut(map_leaves(cut(batch, 0, half, keep_shared=True), doubled), 0, 2 * half)


def _loss(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], part: Any, samples: int, seed: int
) -> tuple[float, float, Any]:
    """Compute the loss of so many samples: its value, what it counts for, and its dtype."""
    with seeded(seed):
        result = loss(model, copied(part))
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result = result[0]
    if isinstance(result, Mean):
        count = float(result.count)
        return float(result.total) / count, count, result.total.dtype
    return float(result), float(samples), result.dtype
