"""What a codec still owes is in the checkpoint: the same plan goes on bit for bit, any other loads it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.checkpoint.inspect import inspect
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

SAMPLES = 12


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 3))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def put(world: World, data: int, stages: int, codec: str) -> tuple[ParallelModel, torch.optim.Optimizer]:
    model = build()
    fixed = {"data": data, "pipeline": stages, "codec": codec, "num_micro_batches": 1}
    batch = torch.zeros(SAMPLES, 40)
    plan = headway.plan(model, loss, batch, cluster=f"{data * stages}xcpu:1GiB", fixed=fixed, verify=False)
    assert plan.codec == codec
    parallel = ParallelModel(model, loss, plan, world)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-3)


def train(parallel: ParallelModel, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        batch = torch.randn(SAMPLES, 40, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses.append(float(parallel.forward_backward(parallel.share(batch))))
        parallel.clip_grad_norm(1.0)
        optimizer.step()
    return losses


def owed(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    """Return what all ranks together owe to each parameter."""
    state = parallel.reduction_state()
    mine = {} if state is None else state["residuals"]
    total: dict[str, torch.Tensor] = {}
    for residuals in parallel.world.gather_objects(mine):
        for name, residual in residuals.items():
            total[name] = total.get(name, 0.0) + residual.double()
    return total


def resumed(world: World, path: str, codec: str) -> Any:
    """Six steps in a row, and three after three that went through a checkpoint; and the same plan's other shapes."""
    parallel, optimizer = put(world, 2, 1, codec)
    train(parallel, optimizer, 0, 3)
    headway.save(path, parallel, optimizer, note=codec)
    before = owed(parallel)
    whole = train(parallel, optimizer, 3, 3), parallel.state_dict()
    parallel, optimizer = put(world, 2, 1, codec)
    assert headway.load(path, parallel, optimizer) == {"note": codec}
    after = owed(parallel)
    again = train(parallel, optimizer, 3, 3), parallel.state_dict()
    same = whole[0] == again[0] and all(torch.equal(whole[1][name], again[1][name]) for name in whole[1])
    return same, before, after


def elsewhere(world: World, path: str, plans: list[tuple[int, int, str]]) -> Any:
    """Load under several plans; return what is owed then, the losses of a step, and what is owed after it."""
    found = []
    for data, stages, codec in plans:
        parallel, optimizer = put(world, data, stages, codec)
        headway.load(path, parallel, optimizer)
        found.append((owed(parallel), train(parallel, optimizer, 3, 1), owed(parallel)))
    return found


@pytest.mark.several
@pytest.mark.parametrize("codec", ["powersgd:2", "int4"])
def test_what_is_owed_is_saved(codec: str, tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    (same, before, after), (other_same, *_) = on_ranks(2, resumed, path, codec)
    assert same and other_same
    assert before.keys() == dict(build().named_parameters()).keys()
    assert any(residual.abs().max() > 0 for residual in before.values())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "reduction  what a codec keeps, of 2 ranks" in inspect(Path(path))
    headway.load(path, build())  # one process leaves it out
    if codec != "int4":
        return
    # Two copies of two stages, or four copies: each holder of a parameter gets its part of the same sum. An exact
    # reduction pays it back at once; stages without copies leave it out.
    plans = [(2, 2, codec), (4, 1, "fp32"), (1, 4, "fp32")]
    stages, exact, alone = on_ranks(4, elsewhere, path, plans)[0]
    for found, losses, _ in (stages, exact):
        for name, residual in before.items():
            torch.testing.assert_close(found[name], residual, rtol=1e-5, atol=1e-9)
        assert 0 < losses[0] < 10
    assert stages[2].keys() == before.keys() and exact[2] == alone[0] == {}
