"""Verify: a division into stages against the undivided model, on a few samples, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import psutil
import torch
from torch import nn

from headway.errors import SplitError
from headway.graph.model import ModelGraph
from headway.graph.weights import state_of
from headway.journal import Verified
from headway.layout.split import Split, split
from headway.run.microbatch import copied, cut, num_samples, read_loss
from headway.run.randomness import Chance, seeded
from headway.run.stage import Key, Stage

SAMPLES = 2
"""Samples to try with: batch norm needs more than one value, and more would only cost time and memory."""

TOLERANCES = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2})


def verify_split(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any, parts: Split,
    graph_at: Callable[[int], ModelGraph], *, memory: int | None = None,
) -> Verified:  # fmt: skip
    """Compare loss and gradients of the stages, run one after another here, with the undivided model's.

    `memory` is the budget in bytes, parameters included; by default what is free on the model's device now. Where it
    does not hold all gradients twice, those of one stage after the other are compared; where it does not hold what
    autograd keeps either, the loss alone; what was compared is said. Skipped when the model is on meta. Parameters,
    gradients, buffers and random generators are as before afterwards.
    Raises SplitError naming the parameter with the largest difference when they do not agree.
    """
    parameters = dict(model.named_parameters())
    if any(p.is_meta for p in parameters.values()):
        return Verified("not verified: the model has no values", None, True)
    samples = min(SAMPLES, num_samples(batch))
    graph = graph_at(samples)
    groups = _groups(model, parts, graph, _budget(model) if memory is None else memory)
    if groups is None:
        return Verified("not verified beforehand: one forward pass does not fit into the budget", None, True)
    few = cut(batch, 0, samples)
    chance = Chance(0, 0, 0, samples) if parts.random else None
    whole, worst = split(graph, ()), 0.0
    buffers = [(b, b.clone()) for b in state_of(model).values()]
    kept = {name: (p.grad, p.requires_grad) for name, p in parameters.items()}
    try:
        for names in groups or [frozenset()]:
            for name, p in parameters.items():
                p.grad = None
                p.requires_grad_(kept[name][1] and name in names)
            want = _run(whole, model, loss, few, samples, chance, train=bool(groups))
            _restore(buffers)
            got = _run(parts, model, loss, few, samples, chance, train=bool(groups))
            _restore(buffers)
            worst = max(worst, _compare(*want, *got))
    finally:
        _restore(buffers)
        for name, p in parameters.items():
            p.requires_grad_(kept[name][1])
            p.grad = kept[name][0]
    against = f"{parts.num_stages} stages against the undivided model, {samples} samples"
    if len(groups) > 1:
        against += ", gradients of one stage after the other: all at once do not fit"
    elif not groups:
        against += ", the loss alone: gradients do not fit"
    return Verified(against, worst, True)


def _groups(model: nn.Module, parts: Split, graph: ModelGraph, memory: int) -> list[frozenset[str]] | None:
    """Say of which parameters gradients are compared at once: of all, of a stage's, of none; None: nothing fits."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    trained = {name: sizes[name] for name, p in model.named_parameters() if p.requires_grad}
    held, saved = sum(sizes.values()), sum(graph.storages[s] for call in graph.calls for s in call.saved)
    stages = [frozenset(part.parameters) & trained.keys() for part in parts.stages]
    for groups in ([frozenset(trained)], [names for names in stages if names]):
        gradients = max((sum(trained[name] for name in names) for names in groups), default=0)
        if held + 2 * gradients + 2 * saved <= memory:
            return groups
    # without gradients a call's result goes when it has been used: a few are there at once
    largest = max((call.output_bytes for call in graph.calls), default=0)
    return [] if held + 8 * largest <= memory else None


def _budget(model: nn.Module) -> int:
    """Count the bytes that the model has and those that are free beside it."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free) + sum(p.numel() * p.element_size() for p in model.parameters())


def _restore(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, content in buffers:
            buffer.copy_(content)


def _run(
    split: Split, model: nn.Module, loss: Any, batch: Any, samples: int, chance: Chance | None, *, train: bool
) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Run all stages of a split in this process, forward and, to `train`, backward; takes the gradients away."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    received: list[dict[Key, torch.Tensor]] = []
    sent: list[dict[Key, torch.Tensor]] = []
    answers: dict[str, Any] = {}
    output = None
    with torch.set_grad_enabled(train), seeded(0):
        for part in split.stages:
            inputs = {}
            for crossing in part.receives:
                made = sent[crossing.source].get(crossing.key)
                if made is not None:
                    tensor = made.detach().clone()
                    inputs[crossing.key] = tensor.requires_grad_(train and crossing.differentiable)
            result = Stage.of(split, part.index, model, loss, device).run(copied(batch), inputs, answers, chance)
            answers, output = dict(result.answers), result.output
            received.append(inputs)
            sent.append(dict(result.sends))
        parts = read_loss(output, samples)
        roots, gradients = [parts.total], [torch.full_like(parts.total, 1.0 / max(parts.count, 1e-30))]
        for part in reversed(split.stages) if train else ():
            if part.end is not None:
                roots, gradients = _gradients_of(split, part.index, sent, received)
            if roots and any(r.requires_grad for r in roots):
                torch.autograd.backward(roots, gradients)
    gradients_now = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    return float(parts.total.detach()) / max(parts.count, 1e-30), gradients_now


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
