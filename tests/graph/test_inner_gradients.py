"""Cuts that cross a gradient taken inside the program."""

from __future__ import annotations

import torch
from torch import nn

from headway.graph.record import record


class Penalty(nn.Module):
    """A loss that holds the gradient of its first part with respect to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x))).sum()
        (slope,) = torch.autograd.grad(y, [self.first.weight], create_graph=True)
        return y + (slope**2).sum()


def test_no_cut_between_a_weights_use_and_a_gradient_with_respect_to_it() -> None:
    graph = record(Penalty(), lambda model, x: model(x), torch.randn(4, 3))
    gradient = next(call.index for call in graph.calls if call.function == "torch.autograd.grad")
    assert all(cut.index > gradient for cut in graph.cuts)
    assert {index for index, reason in graph.refused_cuts if "autograd.grad" in reason} >= set(range(1, gradient + 1))
