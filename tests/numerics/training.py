"""Trains the example models in float64, plainly in one process and under a plan, and says how far apart they are."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.planner.plan import micro_batches, shares
from headway.run.microbatch import Mean, offsets
from headway.run.parallel import ParallelModel

GLOBAL_BATCH, STEPS, MAX_NORM = 12, 5, 0.5


@dataclass(frozen=True)
class Case:
    """One way to train: the model, the optimizer, the plan's decisions, and whether targets are padded."""

    model: str
    optimizer: str
    fixed: tuple[tuple[str, Any], ...]
    padded: bool = False
    seed: int = 0

    def __str__(self) -> str:
        plan = " ".join(f"{name}={value}" for name, value in self.fixed)
        return f"{self.model} {self.optimizer}{' padded' if self.padded else ''} {plan} seed={self.seed}"


@dataclass(frozen=True)
class Trained:
    """What training came to: losses and gradient norms of each step, and the final state_dict."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


def example(name: str) -> Any:
    """Import examples/NAME.py."""
    module_name = f"example_{name}"
    if module_name not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def padded_loss(model: nn.Module, batch: Any) -> Mean:
    """Cross entropy over the targets that are not padding (-1): a mean that is not over samples."""
    tokens, targets = batch
    total = nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )
    return Mean(total, (targets >= 0).sum())


def setting(case: Case) -> tuple[nn.Module, Callable[[nn.Module, Any], Any], list[Any]]:
    """Make model, loss and global batches; the same in every process."""
    module = example(case.model)
    torch.manual_seed(case.seed)
    if case.model == "gpt":
        model = module.GPT(3, 16, 2, 8).double()
        batches = [tuple(torch.randint(256, (2, GLOBAL_BATCH, 8))) for _ in range(STEPS)]
        if case.padded:
            lengths = torch.arange(GLOBAL_BATCH) % 8 + 1
            keep = torch.arange(8)[None, :] < lengths[:, None]
            batches = [(tokens, targets.masked_fill(~keep, -1)) for tokens, targets in batches]
    else:
        model = module.build_model(argparse.Namespace(seed=case.seed, width=4, depth=1)).double()
        batches = [
            (torch.randn(GLOBAL_BATCH, 1, 8, 8, dtype=torch.float64), torch.randint(10, (GLOBAL_BATCH,)))
            for _ in range(STEPS)
        ]
    return model, (padded_loss if case.padded else module.loss), batches


def optimizer_of(case: Case, parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of a case."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=3e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plainly(case: Case, sizes: Sequence[int]) -> Trained:
    """Train in one process with torch alone, each global batch cut into micro-batches of these sizes, in order.

    Without batch norm the sizes make no difference but for rounding; then pass the whole batch.
    """
    model, loss, batches = setting(case)
    optimizer = optimizer_of(case, model.parameters())
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        count = float((batch[1] >= 0).sum()) if case.padded else float(GLOBAL_BATCH)
        value = 0.0
        for start, stop in offsets(sizes):
            part = loss(model, tuple(leaf[start:stop] for leaf in batch))
            total = part.total if isinstance(part, Mean) else part * (stop - start)
            (total / count).backward()
            value += float(total.detach()) / count
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(value)
    return Trained(losses, norms, {k: v.detach().clone() for k, v in model.state_dict().items()})


def plan_of(size: int, case: Case, known: dict[tuple[object, ...], headway.Plan]) -> headway.Plan:
    """Plan a case for `size` processes; optimizers and seeds share a plan."""
    key = (case.model, case.padded, case.fixed)
    if key not in known:
        model, loss, batches = setting(case)
        known[key] = headway.plan(model, loss, batches[0], cluster=f"{size}xcpu:4GiB", fixed=dict(case.fixed))
    return known[key]


def under_plan(world: World, case: Case, known: dict[Any, headway.Plan]) -> tuple[Trained, tuple[int, ...]]:
    """Train under a plan; also give the sizes of all micro-batches of a step, in the order of the samples."""
    model, loss, batches = setting(case)
    plan = plan_of(world.size, case, known)
    parallel = ParallelModel(model, loss, plan, world)
    optimizer = optimizer_of(case, parallel.parameters())
    losses, norms = [], []
    for batch in parallel.batches(batches):
        optimizer.zero_grad()
        losses.append(float(parallel.forward_backward(batch)))
        norms.append(float(parallel.clip_grad_norm(MAX_NORM)))
        optimizer.step()
    sizes = [
        size
        for samples in shares(GLOBAL_BATCH, plan.data)
        for size in micro_batches(samples, plan.num_micro_batches, plan.micro_batch)
    ]
    return Trained(losses, norms, parallel.state_dict()), tuple(sizes)


def difference(want: Trained, got: Trained) -> tuple[float, str]:
    """Give the largest relative difference, and of what."""
    worst, what = 0.0, "nothing"
    pairs = [("loss", torch.tensor(want.losses), torch.tensor(got.losses))]
    pairs += [("norm", torch.tensor(want.norms), torch.tensor(got.norms))]
    assert want.state.keys() == got.state.keys()
    pairs += [(name, want.state[name], got.state[name]) for name in want.state]
    for name, a, b in pairs:
        apart = float(((a.double() - b.double()).abs() / a.double().abs().clamp(min=1.0)).max())
        if not apart <= worst:
            worst, what = apart, name
    return worst, what
