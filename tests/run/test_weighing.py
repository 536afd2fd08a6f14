"""What a loss is: the mean of its parts' losses, their sum, or neither; seen on a few samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import headway
from headway.collective.world import World
from headway.run.parallel import ParallelModel
from headway.run.weighing import weigh
from tests.several.ranks import on_ranks

Loss = Callable[[nn.Module, Any], Any]


def model_and_batch(samples: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
    targets = torch.tensor([0, 3, -100, -100, 1, 2, -100, 3])
    return model, (torch.randn(8, 3, dtype=torch.float64)[:samples], targets[:samples])


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().sum()


def total_and_metrics(model: nn.Module, batch: Any) -> Any:
    return total(model, batch), {"rows": len(batch[0])}


def by_a_constant(model: nn.Module, batch: Any) -> headway.Mean:
    return headway.Mean(total(model, batch), 20)


def by_samples(model: nn.Module, batch: Any) -> headway.Mean:
    return headway.Mean(total(model, batch), len(batch[0]))


def padded(model: nn.Module, batch: Any) -> headway.Mean:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return headway.Mean(losses, (batch[1] != -100).sum())


def padded_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), torch.where(torch.arange(len(batch[1])) % 4 == 1, -100, batch[1]))


def hardly_padded(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
    weights = 1 + 0.01 * (batch[1] == 3)
    return (losses.float() * weights).sum() / weights.sum()


def rough(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0]).float()  # as under autocast: other kernels round otherwise for other numbers of samples
    return (out.square().mean() * (1 + 2e-5 * len(out))).float()


def in_pairs(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) + torch.randn(len(batch[0]), 4, dtype=torch.float64)).square().sum()


@pytest.mark.parametrize(
    ("loss", "reduction", "exact"),
    [
        (mean, "mean", True), (by_samples, "mean", True), (padded, "mean", True), (total, "sum", True),
        (total_and_metrics, "sum", True), (by_a_constant, "sum", True), (in_pairs, "mean", False),
        (padded_mean, "mean", False), (hardly_padded, "mean", False), (rough, "mean", True), (noisy, "mean", True),
    ],
)  # fmt: skip
def test_means_sums_and_neither(loss: Loss, reduction: str, exact: bool) -> None:
    model, batch = model_and_batch()
    found = weigh(model, loss, batch)
    assert (found.reduction, found.exact) == (reduction, exact)
    assert (found.note is None) == (reduction == "mean" and exact)
    assert model.training and all(module.training for module in model.modules())


def test_nothing_is_told_by_one_sample_or_on_meta_or_by_a_model_that_cannot_be_evaluated() -> None:
    model, batch = model_and_batch()
    assert weigh(model, total, (batch[0][:1], batch[1][:1])).reduction == "mean"
    assert weigh(model.to("meta"), total, batch).reduction == "mean"

    def only_in_training(model: nn.Module, batch: Any) -> torch.Tensor:
        assert model.training
        return total(model, batch)

    assert weigh(model_and_batch()[0], only_in_training, batch).reduction == "mean"


def test_what_a_model_counts_in_its_buffers_is_as_before() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting().double()
    assert weigh(model, total, model_and_batch()[1]).reduction == "sum"
    assert model.calls == 0


def test_a_sum_is_seen_beside_what_all_samples_share() -> None:
    model, batch = model_and_batch()

    def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) * batch[2]).square().sum()

    assert weigh(model, scaled, (*batch, headway.Shared(torch.ones(4).double()))).reduction == "sum"


def test_a_program_that_writes_its_batch_is_given_copies() -> None:
    model, batch = model_and_batch()
    before = batch[0].clone()

    def centred(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0].sub_(0.5)).square().sum()

    assert weigh(model, centred, batch).reduction == "sum"
    assert torch.equal(batch[0], before)


def trained_by(world: World, loss: Loss, fixed: dict[str, object]) -> list[Any]:
    """Give losses, norms and gradients of two batches, the second a smaller one."""
    model, batch = model_and_batch()
    model = model.eval()  # no dropout: torch alone draws other masks
    plan = headway.plan(model, loss, batch, fixed=fixed)
    parallel = ParallelModel(model, loss, plan, world)
    seen: list[Any] = []
    for few in parallel.batches([batch, model_and_batch(5)[1]]):
        parallel.zero_grad()
        value = float(parallel.forward_backward(few))
        seen.append((value, {name: p.grad.clone() for name, p in parallel.named_parameters() if p.grad is not None}))
        assert float(parallel.evaluate(few)) == pytest.approx(value, rel=1e-12)
    return seen


@pytest.mark.several
@pytest.mark.parametrize("loss", [total, by_a_constant])
@pytest.mark.parametrize("fixed", [{"data": 2, "num_micro_batches": 3}, {"pipeline": 2, "num_micro_batches": 3}])
def test_a_sum_is_one_under_every_plan(loss: Loss, fixed: dict[str, object]) -> None:
    ranks = on_ranks(2, trained_by, loss, fixed)
    for number, samples in enumerate((8, 5)):
        model, batch = model_and_batch(samples)
        result = loss(model.eval(), batch)
        want = result.total / result.count if isinstance(result, headway.Mean) else result
        want.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for seen in ranks:
            value, found = seen[number]
            assert value == pytest.approx(float(want.detach()), rel=1e-12)
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)


def test_who_says_so_is_believed() -> None:
    model, batch = model_and_batch()
    assert headway.plan(model, mean, batch, fixed={"reduction": "sum"}).reduction == "sum"
    assert headway.plan(model, total, batch, fixed={"reduction": "mean"}).reduction == "mean"
    assert headway.plan(model, total, batch).reduction == "sum"
    with pytest.raises(headway.PlanError, match="reduction"):
        headway.plan(model, total, batch, fixed={"reduction": "largest"})


def test_another_loss_when_cut_is_said_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = model_and_batch()
    cut = headway.plan(model, in_pairs, batch, fixed={"num_micro_batches": 2})
    assert "Mean(total, count)" in capsys.readouterr().out and "Mean(total, count)" in str(cut)
    whole = headway.plan(model, in_pairs, batch, fixed={"num_micro_batches": 1})
    assert "Mean(total, count)" not in capsys.readouterr().out + str(whole)
