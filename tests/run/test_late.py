"""Late: what a stage computes after all is put where the program itself will look for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headway.graph.record import record
from headway.layout.split import split
from tests.graph.programs import square
from tests.run.staged import difference, train_staged, train_whole


class Counting(nn.Module):
    """A layer that counts how deep it lies, and keeps what it was given, in a dict that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["depth"] += 1
        state["seen"].append(x)
        return x + self.layer(x) / state["depth"]


class Net(nn.Module):
    """Four such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"depth": 0, "seen": []}
        for layer in self.layers:
            x = layer(x, state)
        assert len(state["seen"]) == state["depth"] == len(self.layers)
        return x


def test_what_a_module_writes_into_its_arguments_is_not_written_into_copies() -> None:
    """Of the list of what was seen, the first values are absent on the later stages."""
    torch.manual_seed(0)
    model, batch = Net().double(), torch.randn(3, 4, dtype=torch.float64)
    graph = record(model, square, batch)
    want = train_whole(model, square, batch, graph)
    for cut in graph.cuts:
        assert difference(want, train_staged(model, square, batch, 3, split(graph, [cut.name]))) < 1e-12, cut.name
