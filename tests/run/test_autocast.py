"""Autocast within the loss function, and around the step: the training of one process with the same micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

SAMPLES, STEPS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(self.norm(x)).chunk(3, -1)
        return x + self.outer(functional.scaled_dot_product_attention(q, k, v))


def made() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), Block(), Block(), nn.Linear(8, 20))
    return model, [tuple(torch.randint(20, (2, SAMPLES, 4))) for _ in range(STEPS)]  # type: ignore[misc]


def low() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def cost(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def cost_in_autocast(model: nn.Module, batch: Any) -> torch.Tensor:
    with low():
        return cost(model, batch)


def train_plainly(micro_batch: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, batches = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        parts = [cost_in_autocast(model, part) for part in zip(*(t.split(micro_batch) for t in batch), strict=True)]
        mean = torch.stack(parts).mean()
        mean.backward()
        losses.append(mean.item())
        optimizer.step()
    return losses, model.state_dict()


def train(world: World, around: bool, fixed: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, batches = made()
    loss = cost if around else cost_in_autocast
    plan = headway.plan(model, loss, batches[0], fixed=fixed)
    parallel = ParallelModel(model, loss, plan, world)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with low() if around else nullcontext():
            parallel.evaluate(batch)  # casts without gradients
            losses.append(float(parallel.forward_backward(batch)))
        optimizer.step()
    return losses, parallel.state_dict()


def train_all(world: World, plans: list[dict[str, Any]]) -> list[Any]:
    return [train(world, around, fixed) for fixed in plans for around in (False, True)]


@pytest.mark.parametrize(
    "size, plans",
    [
        (1, [{"micro_batch": 2}]),
        (
            2,
            [
                {"pipeline": 2, "schedule": "one_f_one_b", "micro_batch": 2},
                {"pipeline": 2, "schedule": "zero_bubble", "micro_batch": 2},
                {"data": 2, "micro_batch": 2},
                {"data": 2, "shard": "parameters", "micro_batch": 2},
            ],
        ),
    ],
)
def test_lower_precision_is_that_of_one_process(size: int, plans: list[dict[str, Any]]) -> None:
    losses, state = train_plainly(2)
    for trained in on_ranks(size, train_all, plans, timeout=120)[0]:
        assert trained[0] == pytest.approx(losses, abs=1e-6)
        torch.testing.assert_close(trained[1], state, rtol=0, atol=1e-6)  # one bfloat16 more would be 1e-3
