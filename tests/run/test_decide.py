"""plan and advise as a person calls them, without other processes."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.graph.record import record
from headway.layout.split import split
from headway.run.decide import optimizer_states
from headway.run.parallel import ParallelModel
from headway.run.verify import verify_split
from tests.run.staged import difference, train_staged, train_whole


def net(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


BATCH = (torch.zeros(12, 8), torch.zeros(12, 1))


def test_planning_needs_no_device_and_changes_nothing() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    plan = headway.plan(model, loss, BATCH, cluster="2x8xH100")
    assert plan.data * plan.pipeline <= 16 and plan.seconds is not None and plan.seconds > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_program_that_writes_its_batch_is_recorded_and_verified_on_copies() -> None:
    def centred(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch.sub_(0.5)).square() + batch[:, :1]).mean()

    batch = torch.ones(12, 8)
    plan = headway.plan(net(), centred, batch, cluster="2xcpu:4GiB", fixed={"pipeline": 2})
    assert plan.split is not None
    graph = record(net(), centred, torch.ones(2, 8))
    assert verify_split(net(), centred, batch, split(graph, [graph.cuts[2].name]), lambda samples: graph).passed
    assert torch.equal(batch, torch.ones(12, 8))


def test_a_model_on_meta_gets_the_plan_of_the_same_model_with_values() -> None:
    with torch.device("meta"):
        ghost = net()
    cluster = headway.Cluster("4xcpu:64MiB")
    fixed = {"pipeline": 2}
    plans = [headway.plan(model, loss, BATCH, cluster=cluster, fixed=fixed) for model in (net(), ghost)]
    assert plans[0] == plans[1]


class Gated(nn.Module):
    """Experts of which each sample takes one; those that no sample takes are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).tanh()
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return self.head(x + out)


def test_a_model_on_meta_that_reads_values_is_planned_and_its_plan_says_so() -> None:
    """The plan was made with random weights; the real ones go their own way, and train as in one process."""
    with torch.device("meta"):
        ghost = Gated().double()
    torch.manual_seed(0)
    batch = (torch.randn(12, 8).double(), torch.randn(12, 1).double())
    plan = headway.plan(ghost, loss, batch, cluster="2xcpu:64MiB", fixed={"pipeline": 2, "data": 1})
    assert "reads a value: taken as with random weights" in plan.explain() and plan.split is not None
    model = Gated().double()
    want = train_whole(model, loss, batch, record(model, loss, batch))
    assert difference(want, train_staged(model, loss, batch, 12, plan.split)) < 1e-12


def test_one_process_trains_the_whole_model_and_verifies_nothing() -> None:
    plan = headway.plan(net(), loss, BATCH)
    assert (plan.data, plan.pipeline, plan.global_batch) == (1, 1, 12)
    model = headway.parallelize(net(), loss, plan)
    assert torch.isfinite(model.forward_backward(BATCH))


def test_a_plan_survives_its_file(tmp_path: object) -> None:
    plan = headway.plan(net(), loss, BATCH, cluster="4xcpu:64MiB", fixed={"pipeline": 2, "schedule": "gpipe"})
    path = f"{tmp_path}/plan.toml"
    plan.save(path)
    assert headway.Plan.load(path) == plan


def test_a_plan_for_more_processes_is_refused_before_anything_is_lost() -> None:
    plan = headway.plan(net(), loss, BATCH, cluster="2xcpu:64MiB")
    model = net()
    with pytest.raises(headway.PlanError, match="the plan is for 2 processes") as refused:
        headway.parallelize(model, loss, plan)
    assert "headway run -n 2" in str(refused.value)
    assert not any(p.is_meta for p in model.parameters())


def test_advice_has_reason_price_and_remedy() -> None:
    plan = headway.plan(net(512), loss, BATCH, cluster="8xcpu:64MiB", fixed={"data": 1, "pipeline": 2})
    found = headway.advise(net(512), loss, BATCH, plan)
    assert found and all(advice.id and advice.reason and advice.price and advice.remedy for advice in found)
    assert "idle-ranks" in {advice.id for advice in found}


@pytest.mark.parametrize(("kind", "states"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 1), (torch.optim.Adafactor, 0)])
def test_states_of_an_optimizer(kind: type[torch.optim.Optimizer], states: int) -> None:
    assert optimizer_states(kind) == states


class Rotated(nn.Module):
    """A model that takes tensors from elsewhere: of numpy, and one that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.scale = nn.Linear(3, 1), torch.full((3,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x * torch.from_numpy(numpy.arange(3, dtype=numpy.float32)) * self.scale)


def test_a_plan_knows_the_leaves_of_the_batch_from_other_tensors() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    model, batch = Rotated(), {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}
    plan = headway.plan(model, loss, batch)
    assert plan.made_for is not None and plan.made_for.batch == ("float32 [*, 3]", "float32 [*, 1]")
    parallel = ParallelModel(model, loss, plan, World())
    torch.testing.assert_close(parallel.predict(batch), model(batch["x"]).detach())
    torch.testing.assert_close(parallel.predict(batch["x"]), model(batch["x"]).detach())


def test_advice_is_not_given_about_a_plan_for_something_else() -> None:
    def other(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) * 2

    plan = headway.plan(net(8), loss, BATCH)
    for model, program, words in ((net(16), loss, "another model"), (net(8), other, "another program")):
        with pytest.raises(headway.PlanError, match=words):
            headway.advise(model, program, BATCH, plan)
