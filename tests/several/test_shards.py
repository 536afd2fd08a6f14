"""Copies that share out states, gradients or parameters train as one process does, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import headway
from headway.collective.slices import local
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from tests.several.ranks import on_ranks

STEPS = 5
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


class Block(nn.Module):
    """Two layers around a nonlinearity, added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between tied embeddings; a frozen layer, one that is never used, and one that some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(13, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.word(tokens))
        for block in self.blocks:
            x = block(x)
        return (x + self.scale * self.sometimes(x)) @ self.word.weight.T


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy, with the weight of the embedding once more outside of the model."""
    tokens, targets = batch
    assert isinstance(model, Net)
    return nn.functional.cross_entropy(model(tokens), targets) + 0.01 * model.word.weight.square().mean()


def batch_of(step: int, samples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(13, (2, samples), generator=torch.Generator().manual_seed(step))
    return made[0], made[1]


def build() -> Net:
    torch.manual_seed(1)
    return Net().double()


def train(model: Any, parallel: ParallelModel | None, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train with clipping; in one step two batches add up, the second of another size; look at the loss between."""
    values = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for batch in (batch_of(step), batch_of(100, 7))[: 2 if step == 2 else 1]:
            if parallel is None:
                value = loss(model, batch)
                value.backward()
            else:
                value = parallel.forward_backward(parallel.share(batch))
            values.append(float(value.detach()))
        if parallel is None:
            values.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        else:
            values.append(float(parallel.clip_grad_norm(0.3)))
        optimizer.step()
        if step == 1:
            look = batch_of(200, 9)
            values.append(float(loss(model, look).detach()) if parallel is None else float(parallel.evaluate(look)))
    return values


def plainly(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()
    values = train(model, None, OPTIMIZERS[kind](model.parameters()))
    return values, {name: value.detach().clone() for name, value in model.state_dict().items()}


Case = tuple[int, int, str, int]


def kinds_of(case: Case) -> list[str]:
    """Name the optimizers to try: groups of copies are tried with two, as what an optimizer sees is the same there."""
    data, stages, shard, ranks = case
    every = ["sgd", "adamw"] if ranks < data else list(OPTIMIZERS)
    return [kind for kind in every if (shard, kind) != ("parameters", "adafactor")]


def under_plans(world: World, cases: list[Case]) -> list[Any]:
    """Train under each (copies, stages, shard, copies in a group) with each optimizer; rank 0's values and states."""
    found = []
    for case in cases:
        data, stages, shard, ranks = case
        fixed = {
            "data": data, "pipeline": stages, "shard": shard, "shard_ranks": ranks,
            "num_micro_batches": 3 if ranks < data else 2,
        }  # fmt: skip
        plan = headway.plan(build(), loss, batch_of(0), cluster=f"{world.size}xcpu:4GiB", fixed=fixed)
        assert plan.shard == shard and (shard != "parameters" or plan.blocks == tuple(f"blocks.{i}" for i in range(4)))
        assert plan.shard_ranks == (ranks if ranks < data else None)
        for kind in kinds_of(case):
            parallel = ParallelModel(build(), loss, plan, world)
            optimizer = OPTIMIZERS[kind](parallel.parameters())
            values = train(None, parallel, optimizer)
            found.append((values, parallel.state_dict(), kept(parallel, optimizer)))
    return found


def kept(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Count the bytes of parameters, gradients and whole states (not step counts) that this rank really has."""
    trained = [p for p in parallel.module.parameters() if p.requires_grad and not p.is_meta]  # type: ignore[operator]
    held = [local(p) for p in trained]
    gradients = [local(p.grad) for p in trained if p.grad is not None]
    states = [local(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return bytes_of(held), bytes_of(gradients), bytes_of(states)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.several
@pytest.mark.parametrize(
    "cases",
    [
        [(2, 1, "optimizer", 2), (2, 1, "gradients", 2), (2, 1, "parameters", 2)],
        [(2, 2, "optimizer", 2), (2, 2, "gradients", 2), (4, 1, "gradients", 4), (4, 1, "parameters", 4)],
        [(4, 1, "optimizer", 2), (4, 1, "gradients", 2), (4, 1, "parameters", 2)],
    ],
    ids=["2 ranks", "4 ranks", "2 groups of 2"],
)
def test_training_equals_one_process(cases: list[Case]) -> None:
    size = cases[0][0] * cases[0][1]
    ranks = on_ranks(size, under_plans, cases, timeout=110)
    want = {kind: plainly(kind) for kind in OPTIMIZERS}
    todo = [(case, kind) for case in cases for kind in kinds_of(case)]
    for results in ranks:
        for (case, kind), (values, state, _) in zip(todo, results, strict=True):
            assert values == pytest.approx(want[kind][0], rel=1e-9, abs=1e-12), (case, kind)
            assert state.keys() == want[kind][1].keys()
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, want[kind][1][name], rtol=1e-9, atol=1e-11, msg=f"{case} {name}")
    # what one process has of each, the copies have once, and each about the same
    whole = bytes_of([p.detach() for name, p in build().named_parameters() if p.requires_grad])
    used = whole - bytes_of([p.detach() for p in build().never.parameters()])
    tied = bytes_of([build().word.weight.detach()])
    for number, (case, kind) in enumerate(todo):
        data, stages, shard, each = case
        have = [results[number][2] for results in ranks]
        again = tied if stages > 1 else 0  # on both stages
        groups = data // each
        assert sum(g for _, g, _ in have) == groups * (used + again), case
        if kind == "adamw":
            assert sum(s for _, _, s in have) == groups * 2 * (used + again), case
            assert stages > 1 or max(s for _, _, s in have) <= 1.4 * 2 * used / each, case
        assert sum(p for p, _, _ in have) == (groups * whole if shard == "parameters" else data * (whole + again)), case


def resumed(world: World, folder: str) -> None:
    """Save under one way of sharing out in groups, load under the next: training goes on as it would have."""
    chain = [("optimizer", 2), ("parameters", 2), ("gradients", 2), ("parameters", 4), ("none", 1)]
    plans = []
    for shard, ranks in chain:
        fixed: dict[str, object] = {"data": 4, "shard": shard, "num_micro_batches": 1}
        fixed |= {} if shard == "none" else {"shard_ranks": ranks}
        plans.append(headway.plan(build(), loss, batch_of(0), cluster="4xcpu:4GiB", fixed=fixed))
    parallel = ParallelModel(build(), loss, plans[0], world)
    optimizer = OPTIMIZERS["adamw"](parallel.parameters())
    for number, plan in enumerate(plans[1:]):
        steps(parallel, optimizer, number)
        path = f"{folder}/{number}"
        headway.save(path, parallel, optimizer)
        want = steps(parallel, optimizer, 10), parallel.state_dict()
        torch.manual_seed(world.rank)
        parallel = ParallelModel(Net().double(), loss, plan, world)
        optimizer = OPTIMIZERS["adamw"](parallel.parameters())
        headway.load(path, parallel, optimizer)
        assert steps(parallel, optimizer, 10) == pytest.approx(want[0], rel=1e-11)
        for name, tensor in parallel.state_dict().items():
            torch.testing.assert_close(tensor, want[1][name], rtol=1e-11, atol=1e-12, msg=f"{plan.shard} {name}")


def steps(parallel: ParallelModel, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Train two steps."""
    values = []
    for step in (first, first + 1):
        optimizer.zero_grad()
        values.append(float(parallel.forward_backward(parallel.share(batch_of(step)))))
        optimizer.step()
    return values


@pytest.mark.several
def test_a_checkpoint_of_groups_is_loaded_by_any(tmp_path: Path) -> None:
    on_ranks(4, resumed, str(tmp_path), timeout=110)


def rounded(world: World) -> None:
    """A codec rounds each rank's gradients once; what is refused is refused by name."""
    exact: dict[str, torch.Tensor] = {}
    for codec in ("fp32", "fp16", "int8"):
        for shard in ("optimizer", "gradients", "parameters"):
            torch.manual_seed(1)
            fixed = {"data": 2, "shard": shard, "codec": codec}
            plan = headway.plan(Net(), loss, batch_of(0), cluster="2xcpu:4GiB", fixed=fixed)
            parallel = ParallelModel(Net(), loss, plan, world)
            parallel.load_state_dict({name: value.float() for name, value in build().state_dict().items()})
            parallel.forward_backward(batch_of(0))
            norm = parallel.clip_grad_norm(1e9)
            exact.setdefault("norm", norm)
            assert float(norm) == pytest.approx(float(exact["norm"]), rel=1e-6 if codec == "fp32" else 0.02)
    with pytest.raises(headway.HeadwayError, match="share parameters out"):
        parallel(batch_of(0)[0])
    for shard in ("none", "optimizer", "gradients", "parameters"):
        model = build()
        early = torch.optim.SGD(model.parameters(), lr=0.1)  # a script's order in which one process trains
        plan = headway.plan(model, loss, batch_of(0), cluster="2xcpu:4GiB", fixed={"data": 2, "shard": shard})
        made = ParallelModel(model, loss, plan, world)
        made.forward_backward(batch_of(0))
        if shard == "parameters":
            with pytest.raises(headway.HeadwayError, match="before headway.parallelize"):
                early.step()
        else:
            early.step()
        made.forward_backward(batch_of(0))
        if shard in ("optimizer", "gradients"):
            with pytest.raises(headway.HeadwayError, match="norm of the gradients that this rank has"):
                nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        else:
            norm = nn.utils.clip_grad_norm_(made.parameters(), 1e9)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            assert float(norm) == pytest.approx(float(made.clip_grad_norm(1e9)))
    for refused, why in ((torch.ones(()), "scale is a scalar"), (torch.ones(6, dtype=torch.float64), "of one dtype")):
        odd = Net()
        odd.scale = nn.Parameter(refused)
        plan = headway.plan(odd, loss, batch_of(0), cluster="2xcpu:4GiB", fixed={"data": 2, "shard": "parameters"})
        with pytest.raises(headway.PlanError, match=why):
            ParallelModel(odd, loss, plan, world)
    with pytest.raises(headway.PlanError, match="has none of this optimizer"):
        headway.plan(
            Net(), loss, batch_of(0), cluster="2xcpu", optimizer=torch.optim.Adafactor, fixed={"shard": "parameters"}
        )


@pytest.mark.several
def test_codecs_and_refusals() -> None:
    on_ranks(2, rounded)
