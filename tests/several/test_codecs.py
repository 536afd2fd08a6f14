"""A plan with a codec, saved, loaded and trained on two processes: near the exact training, the same on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

STEPS, SAMPLES = 4, 6


class Tied(nn.Module):
    """An embedding that is also the output layer, a parameter that nothing uses, and some layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.token = nn.Embedding(32, 24)
        self.hidden = nn.Sequential(nn.Linear(24, 700), nn.Tanh(), nn.Linear(700, 24), nn.LayerNorm(24))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.hidden(self.token(tokens)) @ self.token.weight.T


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(32, (2, SAMPLES, 5), generator=generator)) for _ in range(STEPS)]  # type: ignore[misc]


def train(model: nn.Module, world: World | None, plan: headway.Plan | None) -> tuple[list[float], dict]:
    parallel = model if world is None else ParallelModel(model, loss, plan, world)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        if isinstance(parallel, ParallelModel):
            losses.append(float(parallel.forward_backward(parallel.share(batch))))
        else:
            value = loss(parallel, batch)
            value.backward()
            losses.append(value.item())
        optimizer.step()
    return losses, dict(parallel.state_dict())


def trained(world: World, paths: list[str]) -> list[tuple[list[float], dict]]:
    return [train(Tied(), world, headway.Plan.load(path)) for path in paths]


@pytest.mark.several
def test_training_with_a_codec(tmp_path: Path) -> None:
    tolerances = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2, "int4": 0.1, "powersgd:2": 0.5}
    paths = []
    for codec in tolerances:
        fixed = {"data": 2, "codec": codec}
        plan = headway.plan(Tied(), loss, batches()[0], cluster="2xcpu:1GiB", fixed=fixed)
        assert plan.codec == codec
        paths.append(str(tmp_path / f"{codec}.toml"))
        plan.save(paths[-1])
    first, second = on_ranks(2, trained, paths)
    losses, state = train(Tied(), None, None)
    distances = []
    for (codec, tolerance), one, other in zip(tolerances.items(), first, second, strict=True):
        assert one[0] == other[0], codec
        assert all(torch.equal(one[1][name], other[1][name]) for name in state), codec
        assert one[0] == pytest.approx(losses, rel=tolerance), codec
        change = {name: (one[1][name] - value).abs().max().item() for name, value in state.items()}
        assert change["unused.weight"] == 0
        distances.append(max(change.values()))
        assert distances[-1] < tolerance, codec
    # Each codec was at work: what it rounds more shows more.
    exact, half, brain, eight, four, low = distances
    assert exact < half < brain and half < eight < four < low
