"""Models that change between steps: frozen and thawed layers train as in one process, other changes stop all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks, outcomes_on_ranks

STEPS = 6


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))).double()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


def batch_of(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randn(8, 5, dtype=torch.float64)


def change(model: Any, module: nn.Sequential, step: int) -> None:
    """Train all layers, then the last, one more with each step, all again; and put another activation in."""
    frozen = {1: 3, 2: 2, 3: 1}.get(step, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name[0]) >= frozen)
    if step == 3:
        module[1][1] = nn.Sequential(nn.ReLU(), nn.Identity())
        module[2][1] = nn.GELU()


def train(world: World, data: int, stages: int) -> float:
    """Train beside one process, and give the largest difference of gradients and weights."""
    fixed = {"data": data, "pipeline": stages, "num_micro_batches": 2}
    model = build()
    plan = headway.plan(model, loss, batch_of(0), cluster=f"{world.size}xcpu:4GiB", fixed=fixed)
    parallel = ParallelModel(model, loss, plan, world)
    plain = build()
    ours = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    far = 0.0
    for step in range(STEPS):
        change(parallel, model, step)
        change(plain, plain, step)
        ours.zero_grad()
        theirs.zero_grad()
        parallel.forward_backward(parallel.share(batch_of(step)))
        loss(plain, batch_of(step)).backward()
        want = dict(plain.named_parameters())
        for name, parameter in parallel.named_parameters():
            expected = want[name].grad
            assert (parameter.grad is None) == (expected is None), (step, name)
            if expected is not None and parameter.grad is not None:
                far = max(far, float((parameter.grad - expected).abs().max()))
        ours.step()
        theirs.step()
        far = max(far, *(float((p - want[name]).abs().max()) for name, p in parallel.named_parameters()))
    return far


@pytest.mark.several
@pytest.mark.parametrize(("data", "stages"), [(1, 2), (2, 1)])
def test_freezing_and_thawing(data: int, stages: int) -> None:
    assert max(on_ranks(2, train, data, stages)) < 1e-10


def thaw(world: World) -> None:
    """Thaw a layer of the first stage that was frozen when the model was planned."""
    model = build()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    fixed = {"data": 1, "pipeline": 2, "cuts": ("2",), "num_micro_batches": 2}
    plan = headway.plan(model, loss, batch_of(0), cluster="2xcpu:4GiB", fixed=fixed)
    parallel = ParallelModel(model, loss, plan, world)
    parallel.forward_backward(batch_of(0))
    for _, parameter in parallel.named_parameters():
        parameter.requires_grad_(True)
    parallel.forward_backward(batch_of(1))


@pytest.mark.several
def test_thawing_what_was_planned_frozen_stops_all_ranks() -> None:
    first, second = outcomes_on_ranks(2, thaw, deadline=10.0)
    assert "0.0.weight requires gradients now" in str(first.error) and "freeze it afterwards" in str(first.error)
    assert second.error is not None and second.seconds < 30
