"""Other ways: batches on which a program does something else than when it was recorded, cut everywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from headway.graph.record import record
from headway.layout.split import split
from headway.run.stand_in import fits
from tests.run.staged import difference, train_staged, train_whole

WIDTH = 4


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check(model: nn.Module, loss: Any, recorded: Any, other: Any) -> None:
    """Record one batch, and train with another, cut in two at each place and in four at random."""
    model.double()
    graph = record(model, loss, recorded)
    want = train_whole(model, loss, other, graph)
    names = [cut.name for cut in graph.cuts]
    assert len(names) > 2
    draw = random.Random(0)
    ways = [[name] for name in names] + [
        [names[i] for i in sorted(draw.sample(range(len(names)), 3))] for _ in range(2) if len(names) > 3
    ]
    for cuts in ways:
        got = train_staged(model, loss, other, graph.samples, split(graph, cuts))
        assert difference(want, got) < 1e-10, cuts


class Masked(nn.Module):
    """Attention in torch calls, with a mask or without, and keys that are repeated where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x * mask[..., None]
        q, k, v = self.qkv(x).chunk(3, -1)
        if mask is not None:
            k, v = (each[:, :, None].expand(-1, -1, 2, -1).mean(2) for each in (k, v))
        scores = q @ k.mT / 2
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        return self.out(scores.softmax(-1) @ v)


def masked_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"], batch.get("mask")).square().mean()


@pytest.mark.parametrize("with_mask_first", [False, True])
def test_a_mask_may_come_or_go(with_mask_first: bool) -> None:
    torch.manual_seed(0)
    plain = {"x": r(2, 5, WIDTH)}
    masked = plain | {"mask": (torch.arange(5) < torch.tensor([[5], [3]])).double()}
    recorded, other = (masked, plain) if with_mask_first else (plain, masked)
    check(Masked(), masked_loss, recorded, other)


class Rounds(nn.Module):
    """A loop of torch calls as long as the batch says, with a weight used in it and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(r(WIDTH, WIDTH) / 2), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, rounds: int) -> torch.Tensor:
        for _ in range(rounds):
            x = x + torch.tanh(x @ self.w)
        return self.head(x * 2)


@pytest.mark.parametrize(("recorded", "now"), [(4, 2), (5, 2), (3, 1)])
def test_a_loop_of_calls_may_be_shorter(recorded: int, now: int) -> None:
    torch.manual_seed(0)
    check(
        Rounds(), lambda m, b: m(b["x"], int(b["n"])).square().mean(),
        {"x": r(3, WIDTH), "n": torch.tensor(recorded)}, {"x": r(3, WIDTH), "n": torch.tensor(now)},
    )  # fmt: skip


class Dropped(nn.Module):
    """Leaves layers out as Python's random numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if random.random() < 0.5:
                x = x + layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("seed", range(5))
def test_other_layers_are_left_out_than_when_recorded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    check(Dropped(), lambda m, b: m(b).square().mean(), r(3, WIDTH), r(3, WIDTH))


class Switched(nn.Module):
    """Computes with gradients or without, as the batch says: a border between must not lose them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.set_grad_enabled(bool(y.sum() > 0)):
            z = torch.tanh(self.b(y) * 2)
        return self.c(z + y)


def test_a_gradient_is_not_dropped_where_none_was_recorded() -> None:
    torch.manual_seed(0)
    model = Switched().double()
    with torch.no_grad():
        model.a.bias.zero_()
    x = r(3, WIDTH)
    x = x if model.a(x).sum() < 0 else -x
    check(model, lambda m, b: m(b).square().mean(), x, -x)


def test_what_needs_a_gradient_does_not_cross_without() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    graph = record(model, lambda m, b: m(b).mean(), torch.zeros(1, 2))
    (crossing,) = split(graph, [graph.cuts[0].name]).stages[0].sends
    assert crossing.differentiable and fits(crossing, torch.zeros(1)) and not fits(crossing, torch.zeros(1).long())
