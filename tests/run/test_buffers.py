"""Buffers of several copies against one process that runs all micro-batches in order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from headway.collective.world import World
from headway.run.buffers import Before, agree
from tests.several.ranks import on_ranks

NAMES = ("0.running_mean", "0.running_var", "0.num_batches_tracked")


def model_of(momentum: float | None) -> nn.Module:
    """Make a batch norm that has already seen something."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum)).double()
    for _ in range(2):
        model(torch.randn(4, 3, dtype=torch.float64))
    return model


def batches(counts: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Make micro-batches for each copy."""
    torch.manual_seed(2)
    return [[torch.randn(5, 3, dtype=torch.float64) for _ in range(count)] for count in counts]


def one_copy(world: World, momentum: float | None, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    model = model_of(momentum)
    before = Before.of(model, NAMES)
    for x in batches(counts)[world.rank]:
        model(x)
    agree(world, world.everyone, model, before)
    return copy.deepcopy(model.state_dict())


@pytest.mark.several
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 2, 2), (2, 0, 1)])
def test_copies_agree_with_one_process(momentum: float | None, counts: tuple[int, ...]) -> None:
    want = model_of(momentum)
    for each in batches(counts):
        for x in each:
            want(x)
    for got in on_ranks(3, one_copy, momentum, counts):
        for name, value in want.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)
