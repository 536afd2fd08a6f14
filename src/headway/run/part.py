"""Part: refuses what would take the part of a model that this rank has for the whole, and train another model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headway.errors import HeadwayError
from headway.graph.interception import INTERCEPTION
from headway.graph.where import user_line
from headway.planner.plan import Plan
from headway.run.surface import Surface


def guard(model: Surface, before: Iterable[nn.Parameter], plan: Plan) -> None:
    """Have refused, for as long as `model` lives, what looks at more than one parameter on a rank that has some.

    Steps of optimizers that hold one of the parameters of `before` in whose place there are slices by now, or that
    go by all parameters together (LBFGS); and torch's norm of all gradients.
    """
    kept = {id(p) for p in model.module.parameters()}
    old = {id(p): weakref.ref(p) for p in before if id(p) not in kept}
    owned = plan.data > 1 and plan.shard in ("optimizer", "gradients")
    partial = plan.pipeline > 1 or owned
    here = weakref.ref(model)

    def look_at_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in old and old[id(p)]() is p for p in parameters):
            raise HeadwayError(
                "the optimizer was made before headway.parallelize, which put slices in place of its parameters",
                place=user_line(),
                remedy="make it of model.parameters() after headway.parallelize",
            )
        if isinstance(optimizer, torch.optim.LBFGS) and _has(here(), parameters):
            raise HeadwayError(
                "LBFGS goes by all parameters together, and this rank has some of them",
                place=user_line(),
                remedy='fixed={"pipeline": 1, "shard": "none"}, or an optimizer that goes by each parameter',
            )

    def look_at_norm(gradients: Sequence[torch.Tensor]) -> None:
        found = here()
        mine = set() if found is None else {id(p.grad) for p in found.parameters() if p.grad is not None}
        if any(id(gradient) in mine for gradient in gradients):
            raise HeadwayError(
                "torch.nn.utils.clip_grad_norm_ takes the norm of the gradients that this rank has, which are not all",
                place=user_line(),
                remedy="model.clip_grad_norm(max_norm), which goes over the whole model",
            )

    if partial or old:
        weakref.finalize(model, register_optimizer_step_pre_hook(look_at_step).remove)
    if partial:
        INTERCEPTION.norms.append(look_at_norm)
        weakref.finalize(model, INTERCEPTION.norms.remove, look_at_norm)


def _has(model: Surface | None, parameters: Iterable[nn.Parameter]) -> bool:
    mine = set() if model is None else {id(p) for p in model.parameters()}
    return any(id(p) in mine for p in parameters)
