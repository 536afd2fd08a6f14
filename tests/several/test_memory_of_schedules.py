"""What a step takes depends on the number of micro-batches only where the schedule says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.run.memory import Meter
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

MEBIBYTE = 1 << 20
SAVED = 4 * MEBIBYTE  # bytes that each layer saves of a micro-batch


class Deep(nn.Module):
    """Layers with few weights that save much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.expand(-1, SAVED // 16, -1)  # a batch is small, so that its size does not matter
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def peaks(world: World, schedule: str, counts: tuple[int, ...]) -> list[float]:
    """Give the peak of a step in MiB for each number of micro-batches of one size."""
    found = []
    for count in counts:
        torch.manual_seed(0)
        batch = torch.randn(count, 1, 4)
        fixed: dict[str, Any] = {"pipeline": world.size, "num_micro_batches": count, "schedule": schedule}
        plan = headway.plan(Deep(), loss, batch, cluster=f"{world.size}xcpu:8GiB", fixed=fixed, verify=False)
        model = ParallelModel(Deep(), loss, plan, world)
        model.forward_backward(batch)
        meter = Meter.start(world.device, already=0)
        for _ in range(2):
            model.forward_backward(batch)
        found.append((meter.peak() or 0) / MEBIBYTE)
    return found


@pytest.mark.several
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble", "gpipe"])
def test_memory_of_many_micro_batches(schedule: str) -> None:
    """A stage's four layers save 16 MiB of a micro-batch; the system's own allocator rounds and keeps some."""
    few, many = 6, 18
    for by_count in on_ranks(2, peaks, schedule, (few, many)):
        more = (by_count[1] - by_count[0]) / (many - few)
        assert more > 14 if schedule == "gpipe" else more < 9, by_count
