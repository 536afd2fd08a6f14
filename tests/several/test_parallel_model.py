"""ParallelModel on several processes against one: whatever a loop does between plan and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.collective.world import World
from headway.run.microbatch import Mean, Shared, cut
from headway.run.parallel import ParallelModel
from headway.schedule.catalogue import CATALOGUE
from tests.several.ranks import on_ranks, outcomes_on_ranks

LAYOUTS = ((2, 1), (1, 2), (2, 2))  # copies x stages


class Net(nn.Module):
    """What is hard to divide: skip connections to several consumers, a tied weight, integers and tensors that do not
    lie in one piece where stages meet, in-place calls, a frozen first layer, a branch that is never used, dropout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.table = nn.Embedding(3, 8)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Map [batch, (time,) 6] to logits [batch, (time,) 3]."""
        skip = hidden = self.first(x)
        for number, layer in enumerate(self.layers):
            hidden = self.drop(torch.tanh(layer(hidden))) * 1.5
            hidden += skip / 4
            if number == 0:
                best, turned = hidden.argmax(-1) % 3, hidden.transpose(0, -1)
        hidden = hidden + skip + self.table(best) + turned.transpose(0, -1)
        return {"logits": self.head(hidden if scale is None else hidden * scale), "hidden": hidden}


def loss(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean square error and two metrics."""
    logits = model(batch["x"], scale=batch.get("scale"))["logits"]
    error = (logits - batch["y"]) ** 2
    wrong = (logits.argmax(-1) != batch["y"].argmax(-1)).double()
    return error.mean(), {"wrong": wrong.mean(), "large": Mean(error.detach().sum(), float(error.numel()))}


def batch_of(samples: int, seed: int, time: tuple[int, ...] = (), scale: bool = False) -> dict[str, Any]:
    """Make a global batch."""
    torch.manual_seed(seed)
    batch: dict[str, Any] = {"x": torch.randn(samples, *time, 6).double(), "y": torch.randn(samples, *time, 3).double()}
    if scale:
        batch["scale"] = Shared(torch.randn(8).double())
    return batch


def build(p: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(p).double()


def parallel(
    world: World, data: int, stages: int, batch: Any, p: float = 0.0, count: int = 3, schedule: str = "one_f_one_b"
) -> ParallelModel:
    """Plan by the face and put the model under the plan."""
    model = build(p)
    fixed = {"data": data, "pipeline": stages, "num_micro_batches": count, "schedule": schedule}
    plan = headway.plan(model, loss, batch, cluster=f"{world.size}xcpu:4GiB", fixed=fixed)
    return ParallelModel(model, loss, plan, world)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def plainly(todo: Callable[[Net], None]) -> dict[str, torch.Tensor | None]:
    model = build()
    todo(model)
    return gradients(model)


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Check this rank's gradients against one process's; what is unused has none."""
    for name, gradient in got.items():
        if want[name] is None:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, want[name], rtol=1e-10, atol=1e-12, msg=name)


def whole(batch: dict[str, Any]) -> dict[str, Any]:
    return cut(batch, 0, len(batch["x"]))


def check_other_batches(world: World, data: int, stages: int, schedule: str) -> None:
    """Batches that differ from the planned one: ragged, longer, shorter than copies, other shapes, optional keys."""
    model = parallel(world, data, stages, batch_of(12, 0), schedule=schedule)
    others = [(12, (), False), (7, (), False), (17, (), False), (12, (5,), False), (12, (3,), False), (1, (), False)]
    others += [(12, (), True), (9, (2,), True)]
    for number, (samples, time, scale) in enumerate(others):
        batch = batch_of(samples, number, time, scale)
        model.zero_grad()
        value = model.forward_backward(model.share(batch))

        def todo(plain: Net, batch: Any = batch, value: torch.Tensor = value) -> None:
            result, metrics = loss(plain, whole(batch))
            result.backward()
            assert float(value) == pytest.approx(float(result.detach()), abs=1e-12)
            assert model.metrics["wrong"] == pytest.approx(float(metrics["wrong"]), abs=1e-12)
            assert model.metrics["large"] == pytest.approx(float(result.detach()), abs=1e-12)

        same(gradients(model), plainly(todo))


def check_accumulation(world: World, data: int, stages: int, schedule: str) -> None:
    """Two calls before a step add up; zero_grad of both kinds starts anew; the norm is that of the sum."""
    batches = [batch_of(12, 1), batch_of(10, 2)]
    model = parallel(world, data, stages, batches[0], schedule=schedule)
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        for batch in batches:
            model.forward_backward(model.share(batch))

        def todo(plain: Net) -> None:
            for batch in batches:
                loss(plain, whole(batch))[0].backward()

        want = plainly(todo)
        same(gradients(model), want)
        norm = model.clip_grad_norm(0.01)
        total = torch.sqrt(sum((g**2).sum() for g in want.values() if g is not None))
        assert float(norm) == pytest.approx(float(total), rel=1e-12)


def check_evaluation(world: World, data: int, stages: int, schedule: str) -> None:
    """evaluate and predict give what one process gives, on every rank, and leave modes and gradients alone."""
    model = parallel(world, data, stages, batch_of(12, 0), p=0.5, count=4, schedule=schedule)
    plain = build(0.5).eval()
    batch = batch_of(30, 3)
    want = plain(batch["x"])
    for given in (batch, model.share(batch), batch["x"], model.share({"x": batch["x"]})["x"], {"x": batch["x"]}):
        got = model.predict(given)
        assert got["logits"].shape == (30, 3)
        torch.testing.assert_close(got["logits"], want["logits"])
        torch.testing.assert_close(got["hidden"], want["hidden"])
    for given in (batch, model.share(batch)):
        assert float(model.evaluate(given)) == pytest.approx(float(loss(plain, batch)[0].detach()), abs=1e-12)
    assert model.training and model.module.training and all(p.grad is None for p in model.parameters())
    few = model.predict(batch["x"][:1])
    torch.testing.assert_close(few["logits"], want["logits"][:1])
    state, reference = model.state_dict(), build().state_dict()
    assert list(state) == list(reference) and all(torch.equal(state[k], reference[k]) for k in reference)


def masks(world: World, data: int, stages: int, count: int, schedule: str) -> tuple[float, dict[str, Any]]:
    """Train two steps with dropout; the loss of the second and the gradients on this rank."""
    torch.manual_seed(0)
    batch = batch_of(12, 4)
    model = parallel(world, data, stages, batch, p=0.4, count=count, schedule=schedule)
    value = 0.0
    for _ in range(2):
        model.zero_grad()
        value = float(model.forward_backward(model.share(batch)))
    return value, gradients(model)


def check_all(world: World, data: int, stages: int) -> None:
    some = ("one_f_one_b", "zero_bubble", "zero_bubble_v", "interleaved", "searched")
    for schedule in ["one_f_one_b"] if stages == 1 else (*CATALOGUE, "searched") if data == 1 else some:
        try:
            check_other_batches(world, data, stages, schedule)
            check_accumulation(world, data, stages, schedule)
            check_evaluation(world, data, stages, schedule)
        except Exception as error:
            error.add_note(f"under {schedule}")
            raise


@pytest.mark.several
@pytest.mark.parametrize(("data", "stages"), LAYOUTS)
def test_everything_a_loop_does_equals_one_process(data: int, stages: int) -> None:
    on_ranks(data * stages, check_all, data, stages, timeout=110)


@pytest.mark.several
def test_dropout_masks_do_not_depend_on_the_plan() -> None:
    seen = []
    for data, stages, count, schedule in (
        (1, 1, 1, "gpipe"), (2, 1, 3, "gpipe"), (1, 2, 4, "one_f_one_b"), (2, 2, 2, "interleaved"),
        (1, 2, 3, "zero_bubble_v"), (1, 2, 4, "zero_bubble"),
    ):  # fmt: skip
        results = on_ranks(data * stages, masks, data, stages, count, schedule)
        seen.append((results[0][0], {k: v for _, part in results for k, v in part.items()}))
    (value, want), *others = seen
    for other, part in others:
        assert other == pytest.approx(value, abs=1e-12)
        same(part, want)


def different_batches(world: World) -> str:
    model = parallel(world, world.size, 1, batch_of(12, 0))
    try:
        model.share(batch_of(12, world.rank))
    except headway.BatchError as error:
        return str(error)
    return "not noticed"


@pytest.mark.several
def test_a_loader_that_differs_between_ranks_is_noticed() -> None:
    for text in on_ranks(2, different_batches):
        assert "ranks 0 and 1 see different batches" in text and "seed" in text


def shuffled(world: World) -> list[list[int]]:
    """Iterate twice over a loader that shuffles without a seed, on ranks whose generators differ."""
    torch.manual_seed(world.rank)
    data = [{"x": torch.full((6,), i).double(), "y": torch.zeros(3).double()} for i in range(8)]
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    model = parallel(world, 1, world.size, next(iter(torch.utils.data.DataLoader(data, 4))))
    return [batch["x"][:, 0].tolist() for _ in range(2) for batch in model.batches(loader)]


@pytest.mark.several
def test_a_loader_that_shuffles_gives_all_ranks_the_same_order() -> None:
    first, second = on_ranks(2, shuffled)
    assert first == second
    assert sorted(first[0] + first[1]) == list(range(8)) and first[:2] != first[2:]


def failing(world: World) -> None:
    class Bad(Net):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
            out = super().forward(x, scale)
            if self.training and world.rank == 1 and x.shape[0] == 3:
                raise ValueError("a sample that is not liked")
            return out

    torch.manual_seed(0)
    model = Bad().double()
    batch = batch_of(12, 0)
    fixed = {"pipeline": 2, "micro_batch": 4}
    plan = headway.plan(model, loss, batch, cluster="2xcpu:4GiB", fixed=fixed)
    made = ParallelModel(model, loss, plan, world)
    made.forward_backward(batch)
    made.forward_backward(batch_of(11, 0))


@pytest.mark.several
def test_an_error_in_the_users_code_says_where_it_happened() -> None:
    outcomes = outcomes_on_ranks(2, failing)
    assert "a sample that is not liked" in outcomes[1].trace
    assert "stage 1 of 2" in outcomes[1].trace and "micro-batch 2" in outcomes[1].trace
    assert isinstance(outcomes[0].error, headway.RankError) and outcomes[0].seconds < 20


class Bare(nn.Module):
    """Two layers with a good deal between them that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 3)
        self.between = nn.Sequential(nn.Tanh(), nn.Softplus(), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.between(self.before(x)))


def bare_loss(model: nn.Module, x: torch.Tensor) -> Mean:
    """A sum over samples that counts as one, however many samples there are."""
    return Mean(model(x).square().sum(), 1.0)


def without_parameters(world: World) -> list[list[float]]:
    """Train where rank 1 holds stages without parameters; losses and norms of each schedule."""
    found = []
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()
    for schedule, cuts in (
        ("zero_bubble_v", ("between.0", "between.1", "after")),
        ("interleaved", ("between", "between.1", "after")),
        ("zero_bubble", ("between.1",)),
    ):
        torch.manual_seed(0)
        net = Bare().double()
        fixed = {"pipeline": 2, "schedule": schedule, "cuts": cuts, "num_micro_batches": 3}
        plan = headway.plan(net, bare_loss, x, cluster="2xcpu:4GiB", fixed=fixed)
        model = ParallelModel(net, bare_loss, plan, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        numbers = []
        for _ in range(3):
            optimizer.zero_grad()
            numbers += [float(model.forward_backward(x)), float(model.clip_grad_norm(0.5))]
            optimizer.step()
        found.append(numbers)
    return found


@pytest.mark.several
def test_stages_without_parameters_and_a_loss_that_is_a_sum() -> None:
    torch.manual_seed(0)
    net = Bare().double()
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()
    optimizer, want = torch.optim.AdamW(net.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        value = net(x).square().sum()
        value.backward()
        want += [float(value.detach()), float(nn.utils.clip_grad_norm_(net.parameters(), 0.5))]
        optimizer.step()
    for by_schedule in on_ranks(2, without_parameters):
        for numbers in by_schedule:
            assert numbers == pytest.approx(want, rel=1e-9)
