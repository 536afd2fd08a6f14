"""Optimizer: its state and options by the names of parameters, so that any other division of them finds its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.checkpoint.holding import Holding
from headway.checkpoint.index import MODEL, OPTIMIZER, Group, Index, OptimizerIndex
from headway.checkpoint.part import Reader, check_writable, dtype_name
from headway.collective.slices import is_sliced, sliced_like
from headway.errors import CheckpointError

# How an optimizer computes on this machine, not what: these stay as they are when a checkpoint is loaded.
HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Described:
    """What one rank says of its optimizer; tensors of its state apart, by key."""

    kind: str
    groups: tuple[Group, ...]
    numbers: Mapping[str, Mapping[str, Any]]


def describe(optimizer: torch.optim.Optimizer, holding: Holding) -> tuple[Described, dict[str, torch.Tensor]]:
    """Read an optimizer by the names of its parameters.

    Raises CheckpointError for a parameter that is not the model's, and for state or options that are neither tensors
    nor plain values.
    """
    names = names_of(optimizer, holding)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        for key, value in state.items() if name is not None else ():
            what = f"the optimizer's {key} of {name}"
            if isinstance(value, torch.Tensor):
                if not (holding.sliced and is_sliced(value)):
                    check_writable(what, value)
                tensors[f"{OPTIMIZER}{name}/{key}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                numbers.setdefault(str(name), {})[key] = value
            else:
                raise _refused(value, what)
    groups = tuple(
        Group(
            {k: _plain(v, f"option {k} of group {i} of the optimizer") for k, v in group.items() if k not in HOW},
            tuple(names[id(p)] for p in group["params"] if id(p) in names),
        )
        for i, group in enumerate(optimizer.param_groups)
    )
    return Described(type(optimizer).__qualname__, groups, numbers), tensors


def names_of(optimizer: torch.optim.Optimizer, holding: Holding) -> dict[int, str]:
    """Map the ids of the optimizer's parameters to names; the empty one of a stage without parameters has none.

    Raises CheckpointError when one is not the model's.
    """
    names = holding.name_of()
    empty = {id(p) for p in holding.parallel.parameters()} - names.keys() if holding.parallel is not None else set()
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in names:
                found[id(parameter)] = names[id(parameter)]
            elif id(parameter) not in empty:
                raise CheckpointError(
                    "the optimizer has a parameter that is not the model's, "
                    f"{list(parameter.shape)} (number {place} of group {number})",
                    remedy="make the optimizer from model.parameters(), after headway.parallelize",
                )
    return found


def merge(ranks: Sequence[Described]) -> OptimizerIndex:
    """Make one description of what all ranks say.

    Groups of the same number and options are one; where ranks number them differently, groups of the same options are.
    Raises CheckpointError when ranks disagree about a parameter.
    """
    groups: list[Group] = []
    same_count = len({len(said.groups) for said in ranks}) == 1
    columns = list(zip(*(said.groups for said in ranks), strict=True)) if same_count else []
    if same_count and all(len({_key(group.options) for group in column}) == 1 for column in columns):
        groups = [Group(column[0].options, _union(column)) for column in columns]
    else:
        alike: dict[str, list[Group]] = {}
        for group in (group for said in ranks for group in said.groups if group.parameters):
            alike.setdefault(_key(group.options), []).append(group)
        groups = [Group(some[0].options, _union(some)) for some in alike.values()]
    owner: dict[str, Group] = {}
    for group in groups:
        for name in group.parameters:
            if owner.setdefault(name, group) is not group:
                raise CheckpointError(
                    f"ranks disagree about the options of {name}: {_difference(owner[name].options, group.options)}",
                    remedy="make and change the optimizer alike on every rank",
                )
    numbers: dict[str, Mapping[str, Any]] = {}
    for said in ranks:
        for name, state in said.numbers.items():
            numbers.setdefault(name, state)
    return OptimizerIndex(ranks[0].kind, tuple(groups), numbers)


def check(optimizer: torch.optim.Optimizer, holding: Holding, index: Index) -> tuple[str, ...]:
    """See that the saved optimizer is of the same class and can be given to this one; return this rank's names.

    Raises CheckpointError otherwise.
    """
    kind = type(optimizer).__qualname__
    if index.optimizer is None:
        raise CheckpointError(
            "the checkpoint was saved without an optimizer", remedy="headway.load(path, model) for the model alone"
        )
    if index.optimizer.kind != kind:
        raise CheckpointError(
            f"the checkpoint has the state of {index.optimizer.kind}, the optimizer here is {kind}",
            remedy=f"make a {index.optimizer.kind}, or headway.load(path, model) for the model alone",
        )
    names = names_of(optimizer, holding)
    _options(optimizer, names, index.optimizer)
    return tuple(names.values())


def check_names(here: set[str], saved: OptimizerIndex) -> None:
    """Raise CheckpointError when the optimizers of all ranks together lack a saved parameter."""
    there = [name for group in saved.groups for name in group.parameters]
    missing = [name for name in there if name not in here]
    if missing:
        raise CheckpointError(
            f"the saved optimizer also has {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
            place=f"{len(there)} parameters saved, {len(here)} in the optimizer here",
            remedy="make the optimizer over the same parameters as when it was saved",
        )


def restore(optimizer: torch.optim.Optimizer, holding: Holding, reader: Reader) -> None:
    """Give an optimizer the saved options and the state of its parameters, by torch's own load_state_dict."""
    saved = reader.index.optimizer
    assert saved is not None
    names = names_of(optimizer, holding)
    keys = keys_by_name(reader.index)
    state: dict[int, dict[str, Any]] = {}
    exact: list[tuple[torch.Tensor, dict[str, Any]]] = []
    document = optimizer.state_dict()
    groups = zip(optimizer.param_groups, document["param_groups"], _options(optimizer, names, saved), strict=True)
    for group, written, options in groups:
        written |= options
        for parameter, number in zip(group["params"], written["params"], strict=True):
            name = names.get(id(parameter), "")
            found: dict[str, Any] = dict(saved.numbers.get(name, {}))
            found |= {key.rpartition("/")[2]: sliced_like(parameter, reader.read(key)) for key in keys.get(name, ())}
            if not found:
                continue
            state[number] = found
            if reader.index.tensors[MODEL + reader.index.names[name]].dtype == dtype_name(parameter):
                exact.append((parameter, found))
    document["state"] = state
    optimizer.load_state_dict(document)
    for parameter, found in exact:
        _keep_dtypes(optimizer.state[parameter], found)


def _keep_dtypes(here: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give state the dtype it was saved in: torch casts it to its parameter's, which rounds NAdam's mu_product."""
    for key, value in saved.items():
        if isinstance(value, torch.Tensor) and here[key].dtype != value.dtype:
            here[key] = value.to(here[key].device)


def keys_by_name(index: Index) -> dict[str, list[str]]:
    """Group the keys of the optimizer's tensors by their parameter's name."""
    table: dict[str, list[str]] = {}
    for key in index.keys(OPTIMIZER):
        table.setdefault(key.removeprefix(OPTIMIZER).rpartition("/")[0], []).append(key)
    return table


def _options(optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: OptimizerIndex) -> list[dict[str, Any]]:
    """Find for each group here the saved options of its parameters; a group without any goes by its number."""
    owner = {name: group for group in saved.groups for name in group.parameters}
    result = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [names[id(p)] for p in group["params"] if id(p) in names]
        unknown = [name for name in mine if name not in owner]
        if unknown:
            raise CheckpointError(
                f"the saved optimizer does not have {', '.join(unknown[:3])}",
                place=f"group {number} of the optimizer here",
                remedy="make the optimizer over the same parameters as when it was saved",
            )
        for name in mine[1:]:
            if _key(owner[name].options) != _key(owner[mine[0]].options):
                difference = _difference(owner[mine[0]].options, owner[name].options)
                raise CheckpointError(
                    f"{mine[0]} and {name} are in one group here, and were saved with other options: {difference}",
                    place=f"group {number} of the optimizer here",
                    remedy="make the parameter groups as when it was saved",
                )
        if mine:
            options = owner[mine[0]].options
        else:
            options = saved.groups[number].options if len(saved.groups) == len(optimizer.param_groups) else {}
        result.append({key: _as_here(value, group.get(key)) for key, value in options.items()})
    return result


def _as_here(value: Any, here: Any) -> Any:
    """Give an option the type it has here: tensors (a learning rate) and tuples (betas) are written as JSON."""
    if isinstance(here, torch.Tensor):
        return torch.full_like(here, value)
    return _tupled(value)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any, what: str) -> Any:
    """Return an option or a state as JSON has it. Raises CheckpointError when it is no plain value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item, what) for item in value]
    raise _refused(value, what)


def _refused(value: Any, what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint does not hold",
        remedy="save the model without the optimizer: headway.save(path, model)",
    )


def _union(groups: Sequence[Group]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group.parameters))


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    parts = [f"{k} {one.get(k)} and {other.get(k)}" for k in {**one, **other} if one.get(k) != other.get(k)]
    return ", ".join(parts[:3])
