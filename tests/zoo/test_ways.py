"""Ways that families were seen to go: each recorded on one batch, cut in two at each place, and run on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from headway.errors import SplitError
from headway.graph.record import record
from headway.layout.split import split
from headway.run.stage import Stage
from tests.run.staged import difference, train_staged, train_whole
from tests.zoo.plain import r, square


def check(model: nn.Module, loss: Any, recorded: Any, *others: Any, whole: str = "-") -> None:
    """Record one batch, and train with it and others, cut in two at each place, but not in the module `whole`."""
    model.double()
    graph = record(model, loss, recorded)
    assert len(graph.cuts) > 2
    for batch in (recorded, *others):
        want = train_whole(model, loss, batch, graph)
        for cut in (cut for cut in graph.cuts if not cut.name.startswith(whole)):
            got = train_staged(model, loss, batch, graph.samples, split(graph, [cut.name]))
            assert difference(want, got) < 1e-10, cut.name


class Places(nn.Module):
    """Embeds pieces of a picture; places that were learned for another size are stretched, by other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.piece, self.places, self.first = nn.Linear(3, 4), nn.Parameter(r(1, 7, 4)), nn.Parameter(r(1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.first.expand(len(x), -1, -1), self.piece(x)], 1)
        places = self.places
        if h.shape[1] != places.shape[1]:
            rest = F.interpolate(places[:, 1:].mT, x.shape[1], mode="linear").mT
            places = torch.cat([places[:, :1], rest], 1)
        h = h + places
        return torch.cat([h[:, :1], self.first.expand(len(x), -1, -1), h[:, 1:]], 1)


def test_a_module_gives_its_result_by_other_calls() -> None:
    model = nn.Sequential(Places(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    check(model, square, r(2, 6, 3), r(2, 4, 3), r(2, 9, 3), whole="0")


class Steps(nn.Module):
    """A loop of modules, as long as the batch, whose results are put together after it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outs = x.new_zeros(len(x), 4), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outs.append(self.out(state))
        return torch.stack(outs, 1)


def test_a_loop_of_modules_may_be_shorter() -> None:
    check(Steps(), square, r(2, 5, 3), r(2, 3, 3))


class Replacing(nn.Module):
    """Puts another module in the place of its first one when it is called for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)
        self.fresh = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fresh:
            self.body, self.fresh = nn.Sequential(*self.body, nn.Tanh()), False
        return self.head(self.body(x))


def test_a_module_may_be_put_in_anothers_place() -> None:
    check(Replacing(), square, r(2, 3), r(3, 3))


class Moved(nn.Module):
    """Moves a teacher's weights towards a student's, through `data`, before it asks the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.teacher = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said = self.student(x)
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
            goal = self.teacher(x)
        assert bool(goal.isfinite().all())
        return said - goal


def test_weights_are_written_once_and_seen_by_all_who_use_them() -> None:
    model = Moved().double()
    before = [p.clone() for p in model.parameters()]
    check(model, square, r(2, 3), r(3, 3))
    assert all(map(torch.equal, before, model.parameters())), "recording has moved the teacher"


class Chosen(nn.Module):
    """Runs one of two blocks, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = (
            nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)),
            nn.Linear(3, 2),
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(self.blocks[int(batch["block"])](batch["x"]))


def test_weights_that_a_stage_does_not_have_are_no_zeros() -> None:
    """torch.nn.functional.linear takes a weight on meta beside real numbers, and gives some (torch 2.13)."""
    model, x = Chosen().double(), r(2, 3)
    graph = record(model, square, {"x": x, "block": torch.tensor(0)})
    parts = split(graph, ["head"])
    held = {name for part in parts.stages[:1] for name in part.parameters}
    other = {"x": x, "block": torch.tensor(1)}
    want = train_whole(model, square, other, graph)
    try:
        got = train_staged(model, square, other, graph.samples, parts)
    except SplitError:
        assert "blocks.1.0.weight" not in held
    else:
        assert difference(want, got) < 1e-10


@pytest.mark.parametrize("frozen", [False, True])
def test_absent_weights_are_refused_in_a_module_that_runs_unseen(frozen: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 2), nn.Linear(2, 2)).requires_grad_(not frozen)
    graph = record(model, square, torch.randn(2, 3))
    parts = split(graph, [graph.cuts[-1].name])
    model[0][0].weight = nn.Parameter(model[0][0].weight.to("meta"))
    with pytest.raises(SplitError, match=r"0\.0\.weight"):
        Stage.of(parts, 0, model, square, torch.device("cpu")).run(torch.randn(2, 3), {}, {})


class Queue(nn.Module):
    """Takes places from a list of best ones, by which it then goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.body = nn.Linear(3, 1), nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order, total = self.score(x).squeeze(-1).argsort().tolist(), x.new_zeros(())
        for layer in self.body:
            total = total + layer(x[order.pop(0)]).tanh().sum()
        return total + self.score(x[order]).sum()


def test_a_list_that_was_read_is_the_programs_own() -> None:
    check(Queue(), lambda m, b: m(b), r(5, 3), r(5, 3))


class _Half(torch.autograd.Function):
    """Gives half of the gradient that its own calls would have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).tanh()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope / 2


half = _Half.apply


@torch.jit.script
def _bent(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.tanh(x * 0.8 * (1 + 0.04 * x * x)))


class Noisy(torch.autograd.Function):
    """Draws random numbers where no walk looks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope


def test_a_function_under_another_name_is_one_call() -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    check(body, lambda m, x: m[2](half(m[1](half(m[0](x))))).square().mean(), r(2, 3), r(3, 3))


def test_what_a_function_draws_is_the_same_on_any_stage() -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    check(body, lambda m, x: m[2](Noisy.apply(m[1](Noisy.apply(m[0](x))))).square().mean(), r(2, 3), r(2, 3))


def test_gradients_with_respect_to_the_batch_are_found_where_it_is_not_computed() -> None:
    """torch.autograd.functional takes gradients of copies of copies of its inputs, and zeros where it finds none."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hessian = torch.autograd.functional.hessian(lambda point: model(point).sum(), x, create_graph=True)
        return model(x).square().mean() + hessian.square().sum()

    check(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), loss, r(2, 2))


def test_a_scripted_function_is_one_call() -> None:
    """What it does inside is seen of some runs, and not of those that torch has compiled for."""
    body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    batch = r(2, 3)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model[2](_bent(model[1](_bent(model[0](x))))).square().mean()  # type: ignore[index]

    for _ in range(3):
        loss(body, batch).backward()
    check(body, loss, batch, r(2, 3))


def test_data_that_is_put_in_place_of_other() -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = model[2](model[1](model[0](x)))  # type: ignore[index]
        h.data = h.data.clamp(-0.3, 0.3)
        return model[4](model[3](h)).square().mean()  # type: ignore[index]

    check(body, loss, r(2, 3), r(3, 3))
