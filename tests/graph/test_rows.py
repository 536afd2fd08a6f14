"""Whose numbers a call draws, told by records with two numbers of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from headway.graph.model import ModelGraph
from headway.graph.picture import by_micro_batch
from headway.graph.record import record
from headway.graph.rows import Rows, drawn, with_owners

Draw = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def windows(x: torch.Tensor) -> torch.Tensor:  # [samples, 4, 6] -> [samples x 2, 2, 6], as Swin does
    return x.view(-1, 2, 2, 6).roll(1, 1).transpose(1, 2).contiguous().view(-1, 2, 6)


CASES: dict[str, tuple[str, Draw]] = {
    "samples first": ("0", lambda m, x: F.dropout(x)),
    "length first": ("1", lambda m, x: F.dropout(x.transpose(0, 1))),
    "in the middle of four": ("2", lambda m, x: F.dropout(x.view(-1, 2, 2, 6).permute(1, 2, 0, 3))),
    "windows": ("0", lambda m, x: F.dropout(windows(x))),
    "windows of a weight's making": ("0", lambda m, x: F.dropout(m(windows(x)).softmax(-1))),
    "steps of all samples": ("0::1", lambda m, x: F.dropout(x.transpose(0, 1).reshape(-1, 6))),
    "two views": ("0::1", lambda m, x: F.dropout(torch.cat([x, x + 1]))),
    "two views of windows": ("0:2:", lambda m, x: F.dropout(torch.cat([windows(x), windows(-x)]))),
    "one of two views": ("0", lambda m, x: F.dropout(torch.cat([x, x + 1]).chunk(2)[1])),
    "each repeated": ("0", lambda m, x: F.dropout(x.repeat_interleave(3, 0))),
    "all repeated": ("0::1", lambda m, x: F.dropout(x.repeat(3, 1, 1))),
    "a token before each window": (
        "0", lambda m, x: F.dropout(torch.cat([m.weight[:1, None].expand(2 * len(x), 1, 6), windows(x)], 1))
    ),
    "noise for windows": ("0", lambda m, x: windows(x) * (torch.rand(2 * len(x), 1, 1) + 1).floor_()),
    "noise for views": ("0::1", lambda m, x: torch.cat([x, x]) + torch.randn(2 * len(x), 4, 6).mul(2)),
    "noise that is divided": ("0::1", lambda m, x: x + torch.randn(4 * len(x), 6).view(4, -1, 6).transpose(0, 1)),
    "a coin": ("all", lambda m, x: x * torch.rand(())),
    "of a weight": ("all", lambda m, x: F.linear(x, F.dropout(m.weight))),
    "of as many positions as samples": ("all", lambda m, x: x[..., :4] + F.dropout(torch.ones(6, 4))[:4]),
    "an order of all": ("0", lambda m, x: x[torch.randperm(len(x))]),
    "between samples": ("batch", lambda m, x: F.dropout(x.flatten(1) @ x.flatten(1).T)),
    "the largest of all": ("batch", lambda m, x: F.dropout(x[x > 0])),
    "one after the other": ("batch", lambda m, x: torch.stack([F.dropout(row) for row in x])),
    "which of a table": ("batch", lambda m, x: x * torch.multinomial(torch.ones(6), len(x), True)[:, None, None]),
}  # fmt: skip


def seen(draw: Draw, sizes: tuple[int, int]) -> ModelGraph:
    torch.manual_seed(0)
    net, x = nn.Linear(6, 6), torch.randn(6, 4, 6)
    graphs = [record(net, lambda m, b: draw(m, b).mean(), x[:size]) for size in sizes]
    return with_owners(*graphs)


@pytest.mark.parametrize("sizes", [(6, 2), (4, 3), (1, 4)])
@pytest.mark.parametrize("name", CASES)
def test_whose_numbers_are_drawn(name: str, sizes: tuple[int, int]) -> None:
    """With 4 samples of length 4, or 6 of width 6, no shape tells."""
    want, draw = CASES[name]
    assert {str(rows) for _, rows in drawn(seen(draw, sizes))} == {want}


def test_what_a_check_tells_of() -> None:
    assert [call.function for call in by_micro_batch(seen(CASES["windows"][1], (4, 3)))] == []
    assert [call.function for call in by_micro_batch(seen(CASES["a coin"][1], (4, 3)))] == []
    assert [call.function for call in by_micro_batch(seen(CASES["an order of all"][1], (4, 3)))] == ["torch.randperm"]
    assert len(by_micro_batch(seen(CASES["between samples"][1], (4, 3)))) == 1


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.drop = dim, nn.Dropout()

    def forward(self, x: torch.Tensor) -> Any:
        return self.drop(x.transpose(0, self.dim)).transpose(0, self.dim)


def test_layers_of_a_kind_share_a_line_unless_they_differ() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, 4)
    for dims, lines in (
        ((1, 1, 1), {"*.drop * dropout": "1"}),
        ((0, 1), {"@1.0.1.0.1.0.0.1": "0", "@1.0.2.0.1.0.0.1": "1"}),
    ):
        net = nn.Sequential(*(Block(dim) for dim in dims))
        graphs = [record(net, lambda m, b: m(b).mean(), x[:size]) for size in (4, 2)]
        assert with_owners(*graphs).rows == lines


def test_rows_as_text() -> None:
    for rows in (
        Rows("all"),
        Rows("batch"),
        Rows("sample"),
        Rows("sample", 2),
        Rows("sample", 0, None, 1),
        Rows("sample", 1, 3),
    ):
        assert Rows.parse(str(rows)) == rows
    assert Rows.parse("0:2:").parts((12, 5), 3) == (2, 2)
    assert Rows.parse("0:2:").parts((9, 5), 3) is None
    assert Rows.parse("0::1").parts((12,), 3) == (4, 1)
    assert Rows.parse("2").parts((12, 3), 3) is None
