"""Verify: a division into stages against the undivided model, on a few samples, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from headway.errors import SplitError
from headway.graph.model import ModelGraph
from headway.journal import Verified
from headway.layout.split import Split, split
from headway.planner.plan import Plan
from headway.run.microbatch import cut, num_samples, read_loss
from headway.run.randomness import Chance, seeded
from headway.run.stage import Key, Stage

SAMPLES = 2
"""Samples to try with: batch norm needs more than one value, and more would only cost time and memory."""

TOLERANCES = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2})


def verify_split(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any, plan: Plan,
    graph_at: Callable[[int], ModelGraph], *, memory: int | None = None,
) -> Verified:  # fmt: skip
    """Compare loss and gradients of the stages, run one after another here, with the undivided model's.

    Skipped when the model is on meta, or when a budget of `memory` bytes would not hold gradients twice beside the
    parameters. Parameters, gradients, buffers and random generators are as before afterwards.
    Raises SplitError naming the parameter with the largest difference when they do not agree.
    """
    assert plan.split is not None
    parameters = dict(model.named_parameters())
    if any(p.is_meta for p in parameters.values()):
        return Verified("not verified: the model has no values", None, True)
    samples = min(SAMPLES, num_samples(batch))
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    graph = graph_at(samples)
    working = 2 * sum(graph.storages[s] for call in graph.calls for s in call.saved)
    if memory is not None and 3 * size + working > memory:
        return Verified("not verified beforehand: the undivided model does not fit into the budget", None, True)
    few = cut(batch, 0, samples)
    chance = Chance(0, 0, 0, samples) if plan.split.random else None
    buffers = [(b, b.clone()) for b in model.buffers()]
    kept = {name: p.grad for name, p in parameters.items()}
    try:
        want_loss, want = _run(split(graph, ()), model, loss, few, samples, chance)
        _restore(buffers)
        got_loss, got = _run(plan.split, model, loss, few, samples, chance)
    finally:
        _restore(buffers)
        for name, p in parameters.items():
            p.grad = kept[name]
    worst = _compare(want_loss, want, got_loss, got)
    return Verified(f"{plan.split.num_stages} stages against the undivided model, {samples} samples", worst, True)


def _restore(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, content in buffers:
            buffer.copy_(content)


def _run(
    split: Split, model: nn.Module, loss: Any, batch: Any, samples: int, chance: Chance | None
) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Run all stages of a split in this process, forward and backward."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for p in model.parameters():
        p.grad = None
    received: list[dict[Key, torch.Tensor]] = []
    sent: list[dict[Key, torch.Tensor]] = []
    answers: dict[str, Any] = {}
    output = None
    with torch.enable_grad(), seeded(0):
        for part in split.stages:
            inputs = {}
            for crossing in part.receives:
                made = sent[crossing.source].get(crossing.key)
                if made is not None:
                    tensor = made.detach().clone()
                    inputs[crossing.key] = tensor.requires_grad_() if crossing.differentiable else tensor
            result = Stage.of(split, part.index, model, loss, device).run(batch, inputs, answers, chance)
            answers, output = dict(result.answers), result.output
            received.append(inputs)
            sent.append(dict(result.sends))
        parts = read_loss(output, samples)
        roots, gradients = [parts.total], [torch.full_like(parts.total, 1.0 / max(parts.count, 1e-30))]
        for part in reversed(split.stages):
            if part.end is not None:
                roots, gradients = _gradients_of(split, part.index, sent, received)
            if roots and any(r.requires_grad for r in roots):
                torch.autograd.backward(roots, gradients)
    value = float(parts.total.detach()) / max(parts.count, 1e-30)
    return value, {name: p.grad for name, p in model.named_parameters()}


def _gradients_of(
    split: Split, stage: int, sent: list[dict[Key, torch.Tensor]], received: list[dict[Key, torch.Tensor]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sums: dict[Key, torch.Tensor] = {}
    for target in split.stages:
        for crossing in target.receives:
            tensor = received[target.index].get(crossing.key) if crossing.source == stage else None
            if tensor is not None and tensor.grad is not None:
                key = crossing.key
                sums[key] = sums[key] + tensor.grad if key in sums else tensor.grad
    keys = [key for key in sums if sent[stage][key].requires_grad]
    return [sent[stage][key] for key in keys], [sums[key] for key in keys]


def _compare(want_loss: float, want: dict[str, Any], got_loss: float, got: dict[str, Any]) -> float:
    """Give the largest relative difference of loss and gradients; raise SplitError when it is too large."""
    worst, where, limit = abs(want_loss - got_loss) / max(abs(want_loss), 1.0), "the loss", 1e-4
    for name, expected in want.items():
        actual = got[name]
        if expected is None and actual is None:
            continue
        if expected is None or actual is None:
            present = actual if expected is None else expected
            difference = 0.0 if not present.any() else float("inf")
        else:
            scale = max(float(expected.abs().max()), 1e-6)
            difference = float((expected - actual).abs().max()) / scale
        if not difference <= worst:
            worst, where = difference, f"the gradient of {name}"
    dtypes = {g.dtype for g in want.values() if g is not None}
    limit = max((TOLERANCES.get(dtype, 1e-4) for dtype in dtypes), default=1e-4)
    if not worst <= limit:
        raise SplitError(
            f"the stages do not reproduce the model: {where} differs by {worst:.1e} (relative)",
            remedy='other cuts (fixed={"cuts": [...]}), or fixed={"pipeline": 1}; '
            "verify=False if the model is random on purpose",
        )
    return worst
