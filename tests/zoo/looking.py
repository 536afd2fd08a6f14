"""Looking: one family recorded, cut and put back together, on the recorded batch and on others; step by step."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from headway.graph.model import ModelGraph
from headway.graph.record import record
from headway.layout.split import Split, split
from tests.run.staged import difference, train_staged, train_whole

LIMIT = 1e-6  # in float64; what insists on float32, or goes over to it on the way, may differ by 1e-3
COLUMNS = ("built", "recorded", "cut", "equal", "second", "fewer", "more", "shorter", "keys")
"""What is tried, in order: from `fewer` on where the model takes such a batch."""

Loss = Callable[[nn.Module, Any], Any]
Family = Callable[[], tuple[nn.Module, Loss, Any]]


@dataclass(frozen=True)
class Look:
    """What was seen of one family."""

    graph: ModelGraph | None = None
    crossing: int = 0  # tensors over the worst of the balanced cuts
    balance: float = 0.0  # FLOPs of the fullest of four stages over a quarter of all


def as_double(value: Any) -> Any:
    """Give floating tensors twice the digits."""
    return tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.dtype is torch.float32 else t, value)


def built(family: Family, seed: int, *, double: bool) -> tuple[nn.Module, Loss, Any]:
    """Build a family from a seed."""
    torch.manual_seed(seed)
    model, loss, batch = family()
    model.train()
    return (model.double(), loss, as_double(batch)) if double else (model, loss, batch)


def takes_double(family: Family) -> bool:
    """Say whether a family runs in float64; some have constants of their own in float32."""
    try:
        model, loss, batch = built(family, 0, double=True)
        loss(model, batch)
    except Exception:
        return False
    return True


def is_copied(model: nn.Module) -> bool:
    """Say whether a model can be copied: not one with a weight made of others, as torch's old weight_norm has it."""
    try:
        copy.deepcopy(model)
    except Exception:
        return False
    return True


def balanced(graph: ModelGraph, stages: int) -> list[str]:
    """Name the allowed cuts nearest to equal work."""
    sums, done = [], 0
    for call in graph.calls:
        sums.append(done)
        done += call.flops + call.bytes
    names = [min(graph.cuts, key=lambda c: abs(sums[c.index] - done * n / stages)).name for n in range(1, stages)]
    return list(dict.fromkeys(names))


def at_random(graph: ModelGraph, stages: int, draw: random.Random) -> list[str]:
    """Name any allowed cuts."""
    count = min(stages - 1, len(graph.cuts))
    return [graph.cuts[i].name for i in sorted(draw.sample(range(len(graph.cuts)), count))]


def by_samples(batch: Any) -> bool:
    """Say whether every tensor of a batch has its samples along dim 0."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and all(t.dim() and t.shape[0] == leaves[0].shape[0] for t in leaves)


def fewer(batch: Any, second: Any) -> Any:
    """Take the first sample alone."""
    return tree_map(lambda t: t[:1] if isinstance(t, torch.Tensor) else t, batch) if by_samples(batch) else None


def more(batch: Any, second: Any) -> Any:
    """Take one sample more."""
    if not by_samples(batch):
        return None
    try:
        return tree_map(lambda t, u: torch.cat([t, u[:1]]) if isinstance(t, torch.Tensor) else t, batch, second)
    except (RuntimeError, ValueError):
        return None


def shorter(batch: Any, second: Any) -> Any:
    """Take sequences of three quarters of the length, or smaller images."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    images = [leaf for leaf in leaves if leaf.dim() > 3]
    if not leaves:
        return None
    size = images[0].shape[-1] if images else Counter(t.shape[1] for t in leaves).most_common(1)[0][0]
    length = (size - 32 if size >= 64 else size // 2) if images else size * 3 // 4
    if length < 4:
        return None

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for dim in range(1, value.dim() if images else min(value.dim(), 2)):
            value = value.narrow(dim, 0, length) if value.shape[dim] == size else value
        return value

    return tree_map(cut, batch)


def other_keys(batch: Any, second: Any) -> Any:
    """Leave the mask out, or put one in that hides the end of the last sequence."""
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), torch.Tensor):
        return None
    if "attention_mask" in batch:
        return {key: value for key, value in batch.items() if key != "attention_mask"}
    mask = torch.ones(batch["input_ids"].shape, dtype=torch.int64)
    mask[..., -1, -max(mask.shape[-1] // 3, 1) :] = 0
    return batch | {"attention_mask": mask}


def _balance(graph: ModelGraph, parts: Split) -> float:
    begins = [part.start for part in parts.stages]
    work = [0] * len(begins)
    for call in graph.calls:
        work[sum(start <= call.position for start in begins) - 1] += call.flops + call.bytes
    return max(work) * 4 / max(sum(work), 1)


def look_at(family: Family, name: str) -> Iterator[tuple[str, Look]]:
    """Try one family; gives each column that went well, and raises at the first thing that did not."""
    double = takes_double(family)
    model, loss, batch = built(family, 0, double=double)
    if not double:
        loss(model, batch)
        model, loss, batch = built(family, 0, double=False)
    yield "built", Look()
    second = built(family, 5, double=double)[2]
    # Keras gives each copy other names, and some modules cannot be copied: then each copy is built like the first
    again = "keras" in name or not is_copied(model)
    options: dict[str, Any] = {"clone": lambda _: built(family, 0, double=double)[0]} if again else {}
    graph = record(model, loss, batch)
    yield "recorded", Look(graph)
    draw = random.Random(name)
    splits = [balanced(graph, 2), balanced(graph, 4), at_random(graph, 2, draw), at_random(graph, 4, draw)]
    crossing = max((len(graph.cut[cut].boundary) for cuts in splits[:2] for cut in cuts), default=0)
    look = Look(graph, crossing, _balance(graph, split(graph, splits[1])))
    if graph.cuts:
        yield "cut", look
    low = not double or any(value.derived and value.dtype == "float32" for value in graph.values)
    shapes = {"fewer": fewer, "more": more, "shorter": shorter, "keys": other_keys}
    batches = {"equal": batch, "second": second} | {key: make(batch, second) for key, make in shapes.items()}
    for column, data in batches.items():
        if data is None:
            continue
        try:
            want = train_whole(model, loss, data, graph, **options)
        except Exception:
            if column == "equal":
                raise
            continue  # the model itself does not take it
        for cuts in splits if column == "equal" else splits[1:4:2]:
            got = train_staged(model, loss, data, graph.samples, split(graph, cuts), **options)
            far = difference(want, got)
            assert far < (1e-3 if low else LIMIT), f"{column}: {far:.1e} at {cuts}"
        yield column, look
