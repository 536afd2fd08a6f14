"""Random programs: torch calls, modules, views, writes and reads in any order, cut anywhere, give the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from headway.graph.record import record
from headway.layout.split import split
from tests.run.staged import difference, train_staged, train_whole

WIDTH = 4
ORDERS = (
    "linear",
    "weight",
    "add",
    "tanh",
    "write",
    "view",
    "chunk",
    "choose",
    "branch",
    "loop",
    "detach",
    "list",
    "fixed",
)

step = st.tuples(st.sampled_from(ORDERS), st.integers(0, 7), st.integers(0, 7))
inner = st.lists(step, min_size=1, max_size=4)
program = st.lists(st.one_of(step, st.tuples(st.just("module"), inner, st.integers(0, 7))), min_size=4, max_size=10)


class Program(nn.Module):
    """Carries out a list of orders on a list of tensors of [rows, WIDTH]."""

    def __init__(self, orders: list[Any], layers: nn.ModuleList, weights: nn.ParameterList) -> None:
        super().__init__()
        self.orders, self.layers, self.weights = orders, layers, weights  # layers and weights are shared: tied
        self.inner = nn.ModuleList(Program(o[1], layers, weights) for o in orders if o[0] == "module")

    def forward(self, values: list[torch.Tensor], fixed: torch.Tensor) -> list[torch.Tensor]:
        values, inner = list(values), iter(self.inner)
        for order, a, b in self.orders:
            if order == "module":
                values = next(inner)(values[-3:], fixed)
                continue
            x, y = values[a % len(values)], values[b % len(values)]
            values.append(self.carry_out(order, a, b, x, y, fixed))
        return values

    def carry_out(
        self, order: str, a: int, b: int, x: torch.Tensor, y: torch.Tensor, fixed: torch.Tensor
    ) -> torch.Tensor:
        if order == "linear":
            return self.layers[a % len(self.layers)](y)
        if order == "weight":
            return x @ self.weights[b % len(self.weights)]
        if order == "add":
            return x * 0.5 + y
        if order == "tanh":
            return y.tanh()
        if order == "write":
            out = torch.zeros_like(x) if a % 2 else x * 1
            out[:, a % WIDTH] = y[:, b % WIDTH]
            return out.add_(y)
        if order == "view":
            out = x * 1
            part = out[:, : 1 + a % WIDTH]
            part.mul_(2)
            return out.add_(0.1)
        if order == "chunk":
            first, second = x.chunk(2, dim=-1)
            return torch.cat([second, first.flip(-1)], -1)
        if order == "choose":
            index = x.argmax(-1, keepdim=True)
            return y + y.gather(-1, index) * fixed[: len(y)]
        if order == "branch":
            return x * 2 if y.sum() > 0 else x - y
        if order == "loop":
            for _ in range(int(y.detach().abs().sum().item() * 10) % 3):
                x = (x * 0.7).sin() + 0.1
            return x
        if order == "detach":
            return x + y.detach()
        if order == "list":
            kept = [x * (i + 1) for i in range(2)]
            return torch.stack(kept).mean(0)
        return x * (fixed[: len(x)].cumsum(-1) + torch.arange(WIDTH))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Sum what the program leaves, once through one more weight that the loss function takes itself."""
    values = model([batch * 1, batch + 1], batch)
    return (values[-1] @ model.weights[0]).square().mean() + sum(v.mean() for v in values[-2:])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(orders=program, data=st.data())
def test_random_program_in_stages(orders: list[Any], data: Any) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
    model = Program(orders, layers, weights).double()
    batch = torch.randn(3, WIDTH, dtype=torch.float64)
    graph = record(model, loss, batch)
    want = train_whole(model, loss, batch, graph)
    assume(len(graph.cuts) > 1 and bool(want.loss.isfinite()))
    for stages, steps in ((2, 4), (data.draw(st.integers(3, 5)), 2)):  # what a stage learns takes effect by and by
        count = min(stages - 1, len(graph.cuts))
        places = st.lists(st.integers(0, len(graph.cuts) - 1), min_size=count, max_size=count, unique=True)
        cuts = [graph.cuts[i].name for i in sorted(data.draw(places))]
        got = train_staged(model, loss, batch, graph.samples, split(graph, cuts), steps)
        assert difference(want, got) < 1e-12, (cuts, orders)
