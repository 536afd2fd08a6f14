"""Reduction: what a plan's reducer keeps between steps, in a checkpoint: every rank's own, or shared out anew by name.

A codec with error feedback owes to each parameter the sum over all ranks of what their messages lost. Under the plan
that wrote the checkpoint each rank gets back its own, and goes on bit for bit; under another each holder of a parameter
gets an equal part of the sum. A model without copies has nothing to pay it with: it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.checkpoint.index import REDUCTION, Index
from headway.checkpoint.part import Reader
from headway.checkpoint.values import TENSOR, join_values, split_values
from headway.run.parallel import ParallelModel

COMMON = ("bases", "momenta")
"""What is the same on all copies."""


@dataclass(frozen=True)
class Compared:
    """What a rank found: the names of the parameters that it reduces, and whether what it wrote itself fits it."""

    names: tuple[str, ...]
    fits: bool


def offer_reduction(parallel: ParallelModel | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what this rank's reducer keeps, as JSON can hold it, and its tensors by key."""
    tensors: dict[str, torch.Tensor] = {}
    state = None if parallel is None else parallel.reduction_state()
    if parallel is None or state is None:
        return None, tensors
    return split_values(state, "the reducer's state", tensors, f"{REDUCTION}{parallel.world.rank}/"), tensors


def compare_reduction(parallel: ParallelModel | None, index: Index) -> Compared:
    """Look at what was saved; its tensors are not read."""
    state = None if parallel is None else parallel.reduction_state()
    if parallel is None or state is None:
        return Compared((), not index.reduction)
    saved = index.reduction.get(str(parallel.world.rank))
    alike = saved is not None and all(saved[key] == state[key] for key in ("asked", "copies", "names"))
    return Compared(tuple(state["names"]), alike and len(index.reduction) == parallel.world.size)


def restore_reduction(parallel: ParallelModel | None, found: Sequence[Compared], reader: Reader) -> None:
    """Give this rank's reducer its state back, or its part of what all that wrote the checkpoint kept."""
    saved = reader.index.reduction
    if parallel is None or not saved or not found[parallel.world.rank].names:
        return
    if all(compared.fits for compared in found):
        state = join_values(saved[str(parallel.world.rank)], reader.read)
    else:
        state = _shared_out(saved, found, found[parallel.world.rank].names, reader)
    parallel.load_reduction_state(state)


def _shared_out(
    saved: Mapping[str, Any], found: Sequence[Compared], names: Sequence[str], reader: Reader
) -> dict[str, Any]:
    """Add up what is owed to each of `names`, one tensor at a time, and divide it by those who hold it now."""
    residuals: dict[str, torch.Tensor] = {}
    common: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in COMMON}
    for name in names:
        owed = [state["residuals"][name] for state in saved.values() if name in state["residuals"]]
        if owed:
            total = reader.read(owed[0][TENSOR])
            for other in owed[1:]:
                total += reader.read(other[TENSOR])
            residuals[name] = total / sum(name in compared.names for compared in found)
        for kind, found_there in common.items():
            known = [state[kind][name] for state in saved.values() if name in state.get(kind, {})]
            if known:
                found_there[name] = reader.read(known[0][TENSOR])
    first = next(iter(saved.values()))
    return {
        "asked": first["asked"],
        "codec": first["codec"],
        "steps": first["steps"],
        "order": [],
        "residuals": residuals,
        **common,
    }
