"""Outputs: what the model returns, put together from stages, micro-batches and copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.collective.world import Group, World
from headway.errors import RankError
from headway.planner.fingerprint import leaf_text
from headway.planner.plan import Plan
from headway.run.microbatch import Shared, batch_leaves, join, leaves_of, num_samples, with_leaves


@dataclass(frozen=True)
class Program:
    """How to get at the model's outputs: a function that calls the model."""

    call: Callable[[nn.Module, Any], Any]


def program_for(batch: Any, plan: Plan, loss: Callable[[nn.Module, Any], Any]) -> Program:
    """Choose how to call the model on `batch`.

    A batch with the leaves that were planned goes to the loss function, which calls the model; any other holds the
    model's own inputs.
    """
    samples = num_samples(batch)
    tensors = [leaf.tensor if isinstance(leaf, Shared) else leaf for leaf in batch_leaves(batch).values()]
    texts = [
        leaf_text(str(leaf.dtype).removeprefix("torch."), leaf.shape, samples)
        for leaf in tensors
        if isinstance(leaf, torch.Tensor)
    ]
    planned = plan.made_for.batch if plan.made_for else ()
    return Program(loss if [_kind(t) for t in texts] == [_kind(t) for t in planned] else _call_directly)


def _kind(leaf: str) -> tuple[str, int]:
    """Give dtype and number of dims of a leaf written as "int64 [*, 128]"."""
    dtype, _, shape = leaf.partition(" ")
    return dtype, 0 if shape == "[]" else shape.count(",") + 1


def _call_directly(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def gather_outputs(world: World, stages: Group, copies: Group, outputs: Mapping[int, Any], sizes: Sequence[int]) -> Any:
    """Join outputs along dim 0 over micro-batches, then over copies, on every rank; tensors come on the CPU if sent.

    A stage has absent tensors where another stage has the values.
    """
    joined = None
    if outputs:
        joined = join([_whole(world, stages, outputs[micro]) for micro in sorted(outputs)], sizes)
    elif stages.size > 1 and sizes:
        joined = join([_whole(world, stages, None) for _ in sizes], sizes)
    if copies.size == 1:
        return joined
    parts = world.gather_objects((joined, sum(sizes)), copies)
    filled = [(part, count) for part, count in parts if count]
    return join([part for part, _ in filled], [count for _, count in filled])


def merged(before: Any, now: Any) -> Any:
    """Fill what is absent in a stage's output of the model with what an earlier stage of this rank has of it."""
    known, leaves = leaves_of(before), leaves_of(now)
    if len(known) != len(leaves):
        return now
    return with_leaves(now, [old if is_absent(leaf) else leaf for old, leaf in zip(known, leaves, strict=True)])


def is_absent(leaf: Any) -> bool:
    """Say whether a leaf of an output is a tensor without values."""
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _whole(world: World, stages: Group, output: Any) -> Any:
    """Put one output together: each leaf from a stage that has its values."""
    if stages.size == 1:
        return output
    leaves = leaves_of(output) if output is not None else []
    values = {i: leaf for i, leaf in enumerate(leaves) if not is_absent(leaf)}
    # the structure travels as the output itself with numbers for leaves: a TreeSpec is not made to be pickled
    shape = None if output is None else with_leaves(output, range(len(leaves)))
    together: dict[int, Any] = {}
    for theirs, their_shape in world.gather_objects((values, shape), stages):
        together.update(theirs)
        shape = their_shape if shape is None else shape
    if shape is None or len(together) != len(leaves_of(shape)):
        raise RankError("no stage has what the model returns", remedy="model.predict takes what loss(model, ...) takes")
    return with_leaves(shape, [together[place] for place in leaves_of(shape)])
