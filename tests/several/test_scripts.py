"""Scripts as people write them, in two processes: the losses of one, to rounding."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2, "micro_batch": 2},
    {"pipeline": 2, "micro_batch": 2},
    {"pipeline": 2, "micro_batch": 2, "schedule": "zero_bubble"},
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(functional.gelu(self.inner(self.norm(x))))


class Reader(nn.Module):
    """Reads texts of ids, padded with 0; its blocks can be compiled."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(30, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 3)
        for block in self.blocks if compiled else ():
            block.compile(backend="aot_eager")

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * mask[..., None]
        for block in self.blocks:
            x = block(x)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def collated(seed: int) -> UserDict[str, torch.Tensor]:
    """Make a batch as collators of transformers do: a UserDict, as long as its longest text."""
    torch.manual_seed(seed)
    lengths = torch.randint(2, 6 + seed, (8, 1))
    ids = torch.randint(1, 30, (8, int(lengths.max())))
    mask = torch.arange(ids.shape[1]) < lengths
    return UserDict({"ids": ids * mask, "mask": mask, "labels": torch.randint(3, (8,))})


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"])


def made(*, compiled: bool) -> Reader:
    torch.manual_seed(0)
    return Reader(compiled=compiled).double()


BATCHES = [collated(seed) for seed in range(4)]


def train(world: World, compiled: bool) -> list[Any]:
    found = []
    for fixed in PLANS:
        model = made(compiled=compiled)
        plan = headway.plan(model, loss, BATCHES[0], fixed=fixed)
        assert plan.made_for is not None and len(plan.made_for.batch) == 3
        parallel = ParallelModel(model, loss, plan, world)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
        losses = []
        for batch in parallel.batches(BATCHES):
            optimizer.zero_grad()
            losses.append(float(parallel.forward_backward(batch)))
            optimizer.step()
        found.append((losses, parallel.predict(BATCHES[0])))
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_padded_batches_of_a_collator_and_compiled_blocks(compiled: bool) -> None:
    model = made(compiled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in BATCHES:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    for got, outputs in on_ranks(2, train, compiled, timeout=120, deadline=60)[0]:
        assert got == pytest.approx(losses, abs=1e-12)
        torch.testing.assert_close(outputs, model(BATCHES[0]["ids"], BATCHES[0]["mask"]).detach())


def refusals(world: World) -> None:
    """Look at what goes over all parameters, on a rank that has some of them."""
    plan = headway.plan(made(compiled=False), loss, BATCHES[0], fixed={"pipeline": 2})
    parallel = ParallelModel(made(compiled=False), loss, plan, world)
    together = torch.optim.LBFGS(parallel.parameters())
    with pytest.raises(headway.HeadwayError, match="LBFGS goes by all parameters"):
        together.step(lambda: parallel.forward_backward(BATCHES[0]))
    parallel.forward_backward(BATCHES[0])
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        with pytest.raises(headway.HeadwayError, match="norm of the gradients that this rank has") as refused:
            clip(parallel.parameters(), 1.0)
        assert "test_scripts.py" in str(refused.value.place)
    other = nn.Linear(3, 3)
    other(torch.ones(3)).sum().backward()
    assert clip_grad_norm_(other.parameters(), 1.0) > 0 and parallel.clip_grad_norm(1.0) > 0


def test_what_goes_over_all_parameters_is_refused_where_a_rank_has_some() -> None:
    on_ranks(2, refusals)
