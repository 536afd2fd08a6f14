"""repeated_blocks: which pieces of a program are the same piece again; and what `print(graph)` says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.graph.model import ModelGraph
from headway.graph.picture import parts
from headway.graph.record import record
from headway.graph.repeat import Block, repeated_blocks
from tests.graph.programs import GPT, next_token, square, tokens


class Residual(nn.Module):
    """Two convolutions with batch norm, and a shortcut that changes the width when it must."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside)
        self.second, self.norm2 = nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.short(x) + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


class Pairs(nn.Module):
    """Layers kept as pairs in lists that are never called, with additions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Bilinear(4, 4, 4)]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, both in self.layers:
            x = x + linear(x)
            x = x + both(x, x)
        return x


class Again(nn.Module):
    """One layer, called three times; with `checkpointed` each time in a region of its own."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layer, self.checkpointed = nn.Linear(4, 4), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
        return x


def blocks(model: nn.Module, *shape: int) -> tuple[Block, ...]:
    return repeated_blocks(record(model, square, torch.randn(*shape)))


@pytest.fixture(scope="module")
def gpt() -> ModelGraph:
    return record(GPT(12, 16, 2, dropout=0.1), next_token, tokens(3))


def test_the_blocks_of_a_gpt(gpt: ModelGraph) -> None:
    width = 16
    (block,) = repeated_blocks(gpt)
    assert (block.kind, block.count, block.name) == ("Block", 12, "blocks.0 ... blocks.11")
    assert block.paths == tuple(f"blocks.{i}" for i in range(12))
    assert block.parameters == 12 * width**2 + 9 * width + 4 * width, "weights, biases, norms"
    for path, (first, last) in zip(block.paths, block.spans, strict=True):
        inside = [c.index for c in gpt.calls if c.module == path or c.module.startswith(f"{path}.")]
        assert inside == list(range(first, last)) and len(inside) == block.calls


def test_the_equal_blocks_of_a_resnet() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Sequential(Residual(8, 8), Residual(8, 8), Residual(8, 8)),
        nn.Sequential(Residual(8, 16), Residual(16, 16), Residual(16, 16)),
        nn.Sequential(Residual(16, 32)),
    )
    found = blocks(model, 2, 3, 10, 10)
    assert [(b.kind, b.paths) for b in found] == [
        ("Residual", ("1.0", "1.1", "1.2")),
        ("Residual", ("2.1", "2.2")),  # 2.0 has another width, and a shortcut of its own
    ]
    assert found[1].parameters == 2 * (16 * 16 * 9 + 16) + 2 * 2 * 16


def test_no_block_in_layers_of_other_widths_or_other_settings() -> None:
    assert blocks(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), 3, 4) == ()
    near, far = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=2, dilation=2)
    assert blocks(nn.Sequential(near, far), 2, 4, 9) == (), "the same shapes, another dilation"
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert blocks(nn.Sequential(nn.Linear(4, 4), frozen), 2, 4) == ()
    assert blocks(nn.Sequential(nn.ReLU(), nn.ReLU()), 2, 4) == (), "no parameters"


def test_of_runs_within_runs_the_outermost_is_taken() -> None:
    stage = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
    (block,) = blocks(nn.Sequential(*stage), 2, 4)
    assert (block.kind, block.paths, block.calls, block.parameters) == ("Sequential", ("0", "1", "2"), 2, 40)


def test_pieces_of_several_modules() -> None:
    (pairs,) = blocks(Pairs(), 2, 4)
    assert (pairs.kind, pairs.paths) == ("Linear, Bilinear", ("layers.0", "layers.1", "layers.2"))
    assert (pairs.calls, pairs.parameters) == (3, 20 + 68), "the addition between the two is part of the piece"
    (layers,) = blocks(nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(4, 4), nn.ReLU())]), 2, 4)
    assert (layers.kind, layers.paths) == ("Linear, ReLU", ("0", "2", "4"))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layer_that_is_called_again(checkpointed: bool) -> None:
    (block,) = blocks(Again(checkpointed), 2, 4)
    assert (block.paths, block.parameters) == (("layer", "layer*1", "layer*2"), 20)


def test_a_graph_prints_as_a_dozen_lines_or_two(gpt: ModelGraph) -> None:
    lines = str(gpt).splitlines()
    assert 7 <= len(lines) <= 30 and max(map(len, lines)) <= 120
    text = "\n".join(lines)
    assert "blocks.0 ... blocks.11  Block x 12, 17 calls" in text and "blocks.5" not in text
    assert f"{len(gpt.cuts)} of {len(gpt.cuts)} places" in text
    assert "dropout x 24" in text and "for a micro-batch" not in text, "dropout is drawn for each sample"
    assert "no value is read" in text


def test_what_cannot_be_cut_is_grouped_and_its_share_told() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm, self.out = nn.LSTM(8, 32, 3), nn.BatchNorm1d(32), nn.Linear(32, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lstm(x)[0].mean(1)
            return self.out(x[torch.randperm(len(x))]) if x.sum() > 1e9 else self.out(self.norm(x))

    model = Tagger()
    graph = record(model, square, torch.randn(3, 5, 8))
    (large,) = [part for part in parts(graph) if part.parameters > 0.5]
    own = sum(p.numel() for p in model.lstm.parameters())
    assert large.name == "lstm (LSTM)" and large.parameters == pytest.approx(own / graph.num_parameters)
    text = str(graph)
    assert "together" in text and "lstm (LSTM), 1 call" in text
    assert "a module changes its buffers here" in text and "(norm)" in text
    assert "of what depends on parameters: bool" in text
    assert "3 buffers changed: norm." in text
    assert sum(part.flops for part in parts(graph)) == pytest.approx(1.0)
