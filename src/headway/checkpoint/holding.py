"""Holding: the tensors of a model by their names in its state, and which of them this rank can answer for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from headway.collective.world import World
from headway.errors import CheckpointError
from headway.launch.identity import identify
from headway.run.parallel import ParallelModel


@dataclass(frozen=True)
class Holding:
    """A model as a checkpoint sees it, on this rank.

    `tensors` are those of the whole model's state, by first name, on meta where this rank has no values. `names` maps
    every name of the state to a first name: tied tensors have several. `parameters` are the first names that are
    parameters. `offered` are the first names whose values are right on this rank. With `sliced` the tensors may be
    slices, of which all ranks together make the whole (shard="parameters").
    """

    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    parameters: tuple[str, ...]
    offered: tuple[str, ...]
    plan: str
    parallel: ParallelModel | None
    sliced: bool = False

    def name_of(self) -> dict[int, str]:
        """Map the id of each parameter that this rank holds to its first name."""
        return {id(self.tensors[name]): name for name in self.parameters if not self.tensors[name].is_meta}


def world_of(model: nn.Module) -> World:
    """Return a ParallelModel's world; for a plain module that of torch's default group, or this process alone."""
    if isinstance(model, ParallelModel):
        return model.world
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return World.start(identify())
    return World()


def undivided(parallel: ParallelModel) -> nn.Module:
    """Return the user's own model."""
    assert isinstance(parallel.module, nn.Module)
    return parallel.module


def hold(model: nn.Module) -> Holding:
    """Look at a ParallelModel or a plain module.

    Raises CheckpointError when its state holds something that is neither a parameter nor a buffer.
    """
    parallel = model if isinstance(model, ParallelModel) else None
    inner = model if parallel is None else undivided(parallel)
    parameters = {id(p): name for name, p in inner.named_parameters()}
    buffers = {id(b): name for name, b in inner.named_buffers()}
    first: dict[int, str] = {}
    tensors, names = {}, {}
    for name, value in inner.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or not (id(value) in parameters or id(value) in buffers):
            raise CheckpointError(
                f"the state of the model has {name}, which is neither a parameter nor a buffer",
                place=f"state_dict of {type(inner).__name__}",
                remedy="keep it yourself: pass it to headway.save by name, as a tensor or as plain values",
            )
        key = parameters.get(id(value)) or first.setdefault(id(value), name)
        tensors[key], names[name] = value, key
    mine = _right_here(parallel, inner, tensors) if parallel is not None else tuple(tensors)
    return Holding(
        tensors=tensors,
        names=names,
        parameters=tuple(name for name, value in tensors.items() if id(value) in parameters),
        offered=mine,
        plan="one process, without a plan" if parallel is None else _plan_text(parallel),
        parallel=parallel,
        sliced=parallel is not None and parallel.plan.shard == "parameters",
    )


def _right_here(parallel: ParallelModel, inner: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """List what has values here, but for buffers that other stages change, and parameters that other copies do."""
    table = dict(inner.named_buffers(remove_duplicate=False))
    changed = {id(table[n]) for part in parallel.split.stages for n in part.owned_buffers if n in table}
    own = {id(table[n]) for n in parallel.owned_buffers if n in table}
    own |= {id(parameter) for parameter in parallel.parameters()}
    changed |= {id(parameter) for parameter in inner.parameters()}
    return tuple(n for n, t in tensors.items() if not t.is_meta and (id(t) not in changed or id(t) in own))


def _plan_text(parallel: ParallelModel) -> str:
    plan = parallel.plan
    copies = f"{plan.data} cop{'y' if plan.data == 1 else 'ies'}"
    text = f"{copies} x {plan.pipeline} stage{'' if plan.pipeline == 1 else 's'}, {plan.schedule}"
    return text if plan.shard == "none" else f"{text}, {plan.shard} shared out"
