"""sync_every: copies train on their own and meet now and then, as worked out in one process; also after a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.collective.outer import MOMENTUM, RATE
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

EVERY, STEPS, SAMPLES, COPIES = 3, 7, 8, 2


class Tied(nn.Module):
    """An embedding that is also the output, so that two stages hold it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.token = nn.Embedding(9, 6)
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(self.token(tokens))) @ self.token.weight.T


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(9, (2, SAMPLES), generator=torch.Generator().manual_seed(step))
    return tokens[0], tokens[1]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def by_hand(looks: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two copies in one process; return the mean loss of each step and the parameters after a last round."""
    models = [Tied() for _ in range(COPIES)]
    optimizers = [optimizer_of(model) for model in models]
    start = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    momenta = {name: torch.zeros_like(p) for name, p in start.items()}
    losses, since = [], 0

    @torch.no_grad()
    def meet() -> None:
        for name, first in start.items():
            mean = sum(first - model.get_parameter(name) for model in models) / COPIES
            momenta[name] = MOMENTUM * momenta[name] + mean
            start[name] = first - RATE * (mean + MOMENTUM * momenta[name])
            for model in models:
                model.get_parameter(name).copy_(start[name])

    for step in range(STEPS):
        if since == EVERY or (step in looks and since):
            meet()
            since = 0
        values = []
        for copy, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(copy * SAMPLES // COPIES, (copy + 1) * SAMPLES // COPIES)
            optimizer.zero_grad()
            value = loss(model, tuple(part[mine] for part in batch_of(step)))
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            values.append(value.item())
        losses.append(sum(values) / COPIES)
        since += 1
    meet()
    return losses, start


def put(world: World, stages: int) -> ParallelModel:
    model = Tied()
    fixed = {"data": COPIES, "pipeline": stages}
    machine = f"{COPIES * stages}xcpu:1GiB"
    plan = headway.plan(model, loss, batch_of(0), cluster=machine, fixed=fixed, verify=False)
    return ParallelModel(model, loss, replace(plan, sync_every=EVERY), world)


def trained(world: World, stages: int, looks: tuple[int, ...], path: str | None) -> Any:
    """Train; `looks` are steps before which the model is evaluated, or, with a path, saved and loaded anew."""
    parallel = put(world, stages)
    optimizer = optimizer_of(parallel)
    losses = []
    for step in range(STEPS):
        if step in looks and path is not None:
            headway.save(path, parallel, optimizer)
            parallel = put(world, stages)
            optimizer = optimizer_of(parallel)
            headway.load(path, parallel, optimizer)
        elif step in looks:
            assert float(parallel.evaluate(parallel.share(batch_of(100)))) > 0
        optimizer.zero_grad()
        losses.append(float(parallel.forward_backward(parallel.share(batch_of(step)))))
        parallel.clip_grad_norm(0.5)
        optimizer.step()
    return losses, parallel.state_dict()


@pytest.mark.several
@pytest.mark.parametrize(("stages", "looks", "saved"), [(1, (4,), True), (2, (5,), False)])
def test_copies_meet_as_worked_out_in_one_process(
    stages: int, looks: tuple[int, ...], saved: bool, tmp_path: Path
) -> None:
    answers = on_ranks(COPIES * stages, trained, stages, looks, str(tmp_path / "out") if saved else None)
    losses, parameters = by_hand(looks)
    for found, state in answers:
        assert found == pytest.approx(losses, abs=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)
            assert torch.equal(state[name], answers[0][1][name])
