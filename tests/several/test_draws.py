"""Random numbers on real processes: copies and stages train, evaluate and predict as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.run.test_draws_by_plan import build, data, loss
from tests.several.ranks import on_ranks

NAMES = ("lstm", "windows", "layer drop", "noise")
PLANS = (
    {"data": 2, "num_micro_batches": 1},
    {"data": 2, "num_micro_batches": 3},
    {"pipeline": 2, "num_micro_batches": 3},
)


def under(world: World, name: str, fixed: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two steps and evaluate twice between them; gives what came out, and this rank's parameters."""
    torch.manual_seed(world.rank)  # rank 0's weights and seed are everybody's
    net = build(name)
    torch.manual_seed(7 + world.rank)
    fixed = {"data": 1, "pipeline": 1, **fixed}
    plan = headway.plan(net, loss, data(), cluster=f"{world.size}xcpu:4GiB", fixed=fixed, verify=False)
    model = ParallelModel(net, loss, plan, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for _ in range(2):
        optimizer.zero_grad()
        told.append(float(model.forward_backward(model.share(data()))))
        optimizer.step()
        told += [float(model.evaluate(model.share(data()))) for _ in range(2)]
        if name != "noise":
            told.append(float(model.predict(data()).square().sum()))
    return told, {key: value.detach().clone() for key, value in model.named_parameters()}


def compare(world: World) -> list[str]:
    """Compare each plan with one process and one micro-batch; say which differ."""
    wrong = []
    for name in NAMES:
        torch.manual_seed(0)
        want, parameters = under(World(), name, {"num_micro_batches": 1})
        for fixed in PLANS:
            got, mine = under(world, name, fixed)
            far = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(want, got, strict=True))
            far = max([far, *(float((parameters[key] - value).abs().max()) for key, value in mine.items())])
            if not far < 1e-9:
                wrong.append(f"{name} {fixed}: {far:.1e}")
        if name == "noise":
            assert want[1] != want[2], "each evaluation draws its own"
    return wrong


@pytest.mark.several
def test_the_same_numbers_on_copies_and_stages() -> None:
    assert on_ranks(2, compare, timeout=100.0) == [[], []]
