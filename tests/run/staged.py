"""Staged: runs the stages of a split one after another, each on its own copy of the model with only its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from headway.graph.model import ModelGraph
from headway.layout.split import Split, split
from headway.run.hold import drop_others
from headway.run.randomness import Chance, seeded
from headway.run.stage import Stage

Loss = Callable[[nn.Module, Any], Any]
Clone = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Trained:
    """Loss, gradients and buffers after one forward and backward."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def own(batch: Any) -> Any:
    """Copy a batch, as each process has its own."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def train_whole(
    model: nn.Module, loss: Loss, batch: Any, graph: ModelGraph, samples: int | None = None, *, clone: Clone = deepcopy
) -> Trained:
    """Train one step undivided: plainly, or with a stage that holds everything where random numbers are drawn."""
    model = clone(model)
    model.zero_grad()
    with seeded(0):
        if graph.random:
            stage = Stage.of(split(graph, ()), 0, model, loss, torch.device("cpu"))
            value = stage.run(own(batch), {}, {}, Chance(0, 0, 0, samples or graph.samples)).output
        else:
            value = loss(model, own(batch))
        value.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Trained(value.detach(), gradients, dict(model.named_buffers()))


def train_staged(
    model: nn.Module, loss: Loss, batch: Any, samples: int, parts: Split, steps: int = 1, *, clone: Clone = deepcopy,
    first: int = 0,
) -> Trained:  # fmt: skip
    """Train one step in stages; the split goes through its written form, as from a plan file.

    The batch is the micro-batch that begins with sample `first`.
    """
    parts = Split.from_dict(parts.to_dict())
    models = [clone(model) for _ in parts.stages]
    for part, own_model in zip(parts.stages, models, strict=True):
        own_model.zero_grad()
        drop_others(own_model, part.parameters)
    stages = [Stage.of(parts, i, m, loss, torch.device("cpu")) for i, m in enumerate(models)]
    for _ in range(steps - 1):
        _step(stages, batch, samples, first)
        for own_model in models:
            own_model.zero_grad()
    value = _step(stages, batch, samples, first)
    gradients: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for part, own_model in zip(parts.stages, models, strict=True):
        for name, parameter in own_model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
        table = dict(own_model.named_buffers())
        buffers.update({n: b for n, b in table.items() if part.index == 0 or n in part.owned_buffers})
    return Trained(value.detach(), gradients, buffers)


def _step(stages: Sequence[Stage], batch: Any, samples: int, first: int) -> torch.Tensor:
    parts = stages[0].split
    received: list[dict[Any, torch.Tensor]] = [{} for _ in stages]
    answers: dict[str, Any] = {}
    results = []
    chance = Chance(0, 0, first, samples) if parts.random else None
    for number, stage in enumerate(stages):
        with seeded(number):  # stages are other processes: nothing but Chance makes them draw alike
            result = stage.run(own(batch), received[number], answers, chance)
        answers = dict(result.answers)
        for crossing in parts.stages[number].sends:
            if crossing.key in result.sends:
                tensor = result.sends[crossing.key].detach().clone()
                received[crossing.target][crossing.key] = tensor.requires_grad_(crossing.differentiable)
        results.append(result)
    with seeded(0):
        if results[-1].output.requires_grad:
            results[-1].output.backward()
        for number in reversed(range(len(stages) - 1)):
            sums: dict[Any, torch.Tensor] = {}
            for crossing in parts.stages[number].sends:
                tensor = received[crossing.target].get(crossing.key)
                if tensor is not None and tensor.grad is not None:
                    key = crossing.key
                    sums[key] = sums[key] + tensor.grad if key in sums else tensor.grad
            pairs = [(results[number].sends[key], gradient) for key, gradient in sums.items()]
            pairs = [(made, gradient) for made, gradient in pairs if made.requires_grad]
            if pairs:
                torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
    return results[-1].output  # type: ignore[no-any-return]


def difference(want: Trained, got: Trained) -> float:
    """Give the largest difference of loss, gradients and buffers, relative to each tensor's largest element.

    Where that is zero but for rounding (the bias before a batch norm), it is relative to the others.
    """
    worst = float((want.loss - got.loss).abs()) / max(float(want.loss.abs()), 1e-3)
    for expected, actual in ((want.gradients, got.gradients), (want.buffers, got.buffers)):
        sizes = [float(t.double().abs().max()) for t in expected.values() if not t.is_sparse and t.numel()]
        floor = 1e-4 * max(sizes, default=0.0) + 1e-12
        for name in expected.keys() | actual.keys():
            a, b = expected.get(name), actual.get(name)
            if a is None or b is None:
                present = b if a is None else a
                assert present is not None
                far = float("inf") if present.any() else 0.0
            elif a.is_meta or b.is_meta or a.shape != b.shape:
                far = float("inf")
            elif a.is_sparse or b.is_sparse:
                far = float((a.to_dense() - b.to_dense()).abs().max())
            else:
                same = torch.equal(a, b) or (a.isnan() & b.isnan() | (a == b)).all()
                far = (
                    0.0 if same else float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(floor))
                )
            if not far <= worst:
                worst = far
    return worst


def check(
    model: nn.Module, loss: Loss, batch: Any, graph: ModelGraph, cuts: Sequence[str], *, samples: int | None = None
) -> float:
    """Compare one step in stages cut at `cuts` with the undivided model."""
    samples = samples or graph.samples
    want, parts = train_whole(model, loss, batch, graph, samples), split(graph, cuts)
    steps = 1 if parts.state else 2  # the second time, what was seen the first time is used
    return difference(want, train_staged(model, loss, batch, samples, parts, steps))
