"""Outputs: what a model returns is put together whatever it is wrapped in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.run.microbatch import join
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks


@dataclass
class Made:
    """What a model returns, in a class of its own."""

    hidden: torch.Tensor
    rest: dict[str, torch.Tensor | None]


class Net(nn.Module):
    """Gives what two stages make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Made:
        hidden = self.first(x)
        return Made(hidden, {"logits": self.second(hidden), "none": None})


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).rest["logits"].square().mean()


def predicted(world: World) -> list[float]:
    """Compare with one process, in 2 stages and in 2 copies."""
    torch.manual_seed(0)
    x, apart = torch.randn(7, 4), []
    for fixed in ({"pipeline": 2, "cuts": ["second"], "num_micro_batches": 3}, {"data": 2, "num_micro_batches": 2}):
        net = Net()
        want = net(x)
        plan = headway.plan(net, loss, x, cluster="2xcpu:4GiB", fixed=fixed)
        got = ParallelModel(net, loss, plan, world).predict(x)
        assert isinstance(got, Made) and got.rest["none"] is None
        for a, b in ((got.hidden, want.hidden), (got.rest["logits"], want.rest["logits"])):
            assert a is not None and b is not None and a.shape == b.shape
            apart.append(float((a - b).abs().max()))
    return apart


@pytest.mark.several
def test_predictions_in_a_dataclass() -> None:
    assert max(apart for ranks in on_ranks(2, predicted) for apart in ranks) < 1e-6


def test_parts_in_a_dataclass_are_joined() -> None:
    parts = [Made(torch.full((rows, 2), float(rows)), {"none": None}) for rows in (2, 1)]
    assert join(parts, [2, 1]).hidden.tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
