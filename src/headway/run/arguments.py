"""Arguments: what the calls of the face are given, looked at before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headway.cost.cluster import Cluster
from headway.errors import PlanError
from headway.planner.plan import Plan
from headway.run.surface import Surface


def check_planned(model: Any, loss: Any, *, cluster: Any = None, optimizer: Any = None, fixed: Any = None) -> None:
    """Raise TypeError for what `headway.plan` cannot take, PlanError for a model without shapes of its own."""
    _check_model(model, "headway.plan(model, loss, batch)")
    _check_loss(loss)
    if not (cluster is None or isinstance(cluster, Cluster | str)):
        raise TypeError(f'cluster={cluster!r}: it is a headway.Cluster or its text, as "2x8xH100"')
    if isinstance(optimizer, str) or not (callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)):
        raise TypeError(f"optimizer={optimizer!r}: it is a class, as torch.optim.AdamW; only its kind is looked at")
    if not (fixed is None or isinstance(fixed, Mapping)):
        raise TypeError(f'fixed={fixed!r}: it is a dict of fields of a plan, as {{"pipeline": 2}}')
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise PlanError(
            f"the model is not built yet: {lazy} has no shape before the first call",
            place=_module_of(model, lazy),
            remedy="call the model once on a few samples before headway.plan",
        )


def check_parallelized(model: Any, loss: Any, plan: Any) -> None:
    """Raise TypeError for what `headway.parallelize` cannot take, PlanError for a plan that was written by hand."""
    _check_model(model, "headway.parallelize(model, loss, plan)")
    _check_loss(loss)
    check_plan(plan)
    if plan.split is None:
        raise PlanError(
            "the plan does not say which calls each stage makes: it was written by hand",
            place=str(plan).partition("\n")[0],
            remedy='headway.plan(model, loss, batch, fixed={"pipeline": 2, ...}) makes one that does',
        )


def check_plan(plan: Any) -> None:
    """Raise TypeError for what is no plan."""
    if not isinstance(plan, Plan):
        what = "nothing" if plan is None else f"a {type(plan).__name__}"
        raise TypeError(f"the plan is {what}; it is what headway.plan(...) or headway.Plan.load(path) returns")


def _check_model(model: Any, call: str) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"the model is {what}, not an nn.Module: {call}")
    if isinstance(model, Surface):
        raise TypeError("this model is parallel already; model.module is the one that it was made of")


def _check_loss(loss: Any) -> None:
    if not callable(loss) or type(loss).__module__.startswith("torch.nn"):
        what = "nothing" if loss is None else f"a {type(loss).__name__}"
        raise TypeError(
            f"the loss is {what}, not a function of model and batch\n"
            "  Try: def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])"
        )


def _module_of(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    return f"{path or 'the model'} ({type(model.get_submodule(path)).__name__})"
