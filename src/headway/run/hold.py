"""Hold: which parameters this rank keeps, and the whole model's state put together again from all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.collective.slices import fill, whole
from headway.collective.world import Group, World
from headway.errors import CheckpointError, PlanError
from headway.graph.keras import variables
from headway.graph.weights import name_weights
from headway.planner.fingerprint import digests
from headway.planner.plan import Plan


def check_parameters(model: nn.Module, plan: Plan) -> None:
    """Raise PlanError when the model has other parameters than the one that was planned."""
    assert plan.split is not None
    planned = set(plan.split.holders())
    names = {name for name, _ in model.named_parameters()}
    if planned != names:
        missing, new = sorted(planned - names), sorted(names - planned)
        parts = [f"it has no {', '.join(missing[:3])}"] if missing else []
        parts += [f"{', '.join(new[:3])} is not in the plan"] if new else []
        raise PlanError(
            f"the plan is for another model: {'; '.join(parts)}",
            place=f"{len(names)} parameter tensors here, {len(planned)} planned",
            remedy="plan again with headway.plan(model, loss, batch)",
        )
    total = sum(p.numel() for p in model.parameters())
    if plan.made_for is not None and plan.made_for.num_parameters != total:
        raise PlanError(
            f"the plan is for another model: it was made for {plan.made_for.num_parameters:,} parameters, "
            f"this one has {total:,}",
            place="shapes of the parameters",
            remedy="plan again with headway.plan(model, loss, batch)",
        )
    if plan.made_for is not None and plan.made_for.weights:
        met = digests(name_weights(model)[0])
        if met["weights"] != plan.made_for.weights:
            raise PlanError(
                "the plan is for another model: names and number of parameters are the same, shapes or dtypes are not",
                place=f"{total:,} parameters in {len(names)} tensors",
                remedy="plan again with headway.plan(model, loss, batch)",
            )
        if met["trained"] != plan.made_for.trained:
            raise PlanError(
                "other parameters require gradients than when this was planned",
                place=f"{sum(p.requires_grad for p in model.parameters())} of {len(names)} tensors do now",
                remedy="plan again; or plan with all that will ever be trained, and freeze after headway.parallelize",
            )
    absent = [name for name, p in model.named_parameters() if p.is_meta]
    if absent:
        raise PlanError(
            f"the model has no values: {absent[0]} is on the meta device",
            place=f"{len(absent)} of {len(names)} parameter tensors",
            remedy="build it on a real device before headway.parallelize (planning works on meta)",
        )


def same_everywhere(world: World, model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0 (scripts need not seed their initial weights)."""
    if world.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            for part in _plain_parts(tensor.detach()):
                content = part.to(world.device).contiguous()
                world.broadcast(content)
                part.copy_(content)


def _plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor is made of: a quantised one may hold numbers and scales."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, name))
    else:
        yield tensor


def drop_others(model: nn.Module, held: Iterable[str]) -> dict[str, nn.Parameter]:
    """Let go of the parameters that are not held, each replaced by an absent one under all its names.

    Returns the held ones by first name, in the model's order.
    """
    keep = set(held)
    kept: dict[str, nn.Parameter] = {}
    absent: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in keep:
            kept[name] = parameter
        else:
            meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            absent[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, own in list(module._parameters.items()):
            if own is not None and id(own) in absent:
                module._parameters[name] = absent[id(own)]
    for variable in variables(model):
        if id(variable._value) in absent:
            variable._value = absent[id(variable._value)]
    return kept


def full_state(
    world: World, group: Group, model: nn.Module, parameters: Collection[str], buffers: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Put the whole state_dict together from the ranks of one copy (`group`), on each of them, on the CPU.

    `parameters` and `buffers` are the names that this rank answers for.
    """
    own = model.state_dict(keep_vars=True)
    first = {id(p): name for name, p in model.named_parameters()}
    mine = {name: whole(p.detach()).cpu() for name, p in model.named_parameters() if name in parameters}
    mine |= {name: own[name].detach().cpu() for name in buffers if name in own}
    together: dict[str, Any] = {}
    for theirs in world.gather_objects(mine, group):
        together.update(theirs)
    state = {}
    for name, tensor in own.items():
        key = first.get(id(tensor), name) if isinstance(tensor, torch.Tensor) else name
        if key in together:
            state[name] = together[key]
        else:
            state[name] = tensor.detach().cpu().clone() if isinstance(tensor, torch.Tensor) else tensor
    return state


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy a full state_dict into what this rank holds. Raises CheckpointError naming what is missing or misshapen."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                continue
            given = state.get(name)
            if given is None:
                raise CheckpointError(f"the state has no {name}", remedy="load a state_dict of the whole model")
            if given.shape != tensor.shape:
                raise CheckpointError(f"{name} is {list(given.shape)} in the state, {list(tensor.shape)} in the model")
            if not tensor.is_meta:
                fill(tensor, given)
