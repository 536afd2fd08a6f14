"""Gradient hooks that the program registers: on one stage alone, or refused, wherever the model is cut."""

from __future__ import annotations

import torch
from torch import nn

from headway.errors import SplitError
from headway.graph.record import record
from headway.layout.split import split
from tests.graph.programs import square
from tests.run.staged import difference, train_staged, train_whole


class Hooked(nn.Module):
    """Halves a gradient; the hook is registered right after the value is made, or after it was used."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.a(x).cos()
        y = z * 1.1
        if not self.late and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
            z = z.exp()
        z = self.b(y if self.late else z).tanh()
        if self.late and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return self.c(z.sin()) + y  # type: ignore[no-any-return]


def outcomes(late: bool) -> list[str]:
    torch.manual_seed(0)
    model, batch = Hooked(late).double(), torch.randn(4, 3).double()
    graph = record(model, square, batch)
    want = train_whole(model, square, batch, graph)
    names = [cut.name for cut in graph.cuts]
    found = []
    for number, first in enumerate(names):
        for cuts in ([first], *([first, second] for second in names[number + 1 :])):
            try:
                got = train_staged(model, square, batch, 4, split(graph, cuts), 2)
            except SplitError as refusal:
                assert "register_hook" in str(refusal), cuts
                found.append("refused")
            else:
                assert difference(want, got) < 1e-12, cuts
                found.append("equal")
    return found


def test_a_hook_on_what_was_just_made_runs_once_at_every_border() -> None:
    assert set(outcomes(late=False)) == {"equal"}


def test_a_hook_on_what_an_earlier_stage_makes_is_refused() -> None:
    """A later stage has a part of its gradient only."""
    assert set(outcomes(late=True)) == {"equal", "refused"}
