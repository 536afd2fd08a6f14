"""Programs that draw random numbers train the same whatever the micro-batches and stages."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from headway.graph.model import ModelGraph
from headway.graph.record import record
from headway.graph.rows import with_owners
from headway.layout.split import split
from headway.run.hold import drop_others
from headway.run.randomness import Chance
from headway.run.stage import Stage
from tests.run.staged import Trained, difference, train_staged

SAMPLES, WIDTH = 6, 4
LENGTH = 3
"""As many as the samples of one micro-batch of two: then no shape tells samples from steps."""

Forward = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A linear layer, what is to be tried, and another linear layer; it takes sequences and their lengths."""

    def __init__(self, forward: Forward, **parts: nn.Module) -> None:
        super().__init__()
        self.begin, self.end, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.way(self, self.begin(batch["x"]), batch["lengths"])
        return self.end(h.reshape(len(batch["x"]), -1, WIDTH)).square().flatten(1).sum(1)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


def recurrent(kind: type[nn.RNNBase], first: bool, **options: Any) -> tuple[Forward, dict[str, nn.Module]]:
    """Several layers with dropout between them, which torch draws within one call."""

    def forward(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out = net.cell(x if first else x.transpose(0, 1))[0]
        return out if first else out.transpose(0, 1)

    return forward, {"cell": kind(WIDTH, WIDTH, num_layers=3, dropout=0.4, batch_first=first, **options)}


def packed(sort: bool, again: bool) -> tuple[Forward, dict[str, nn.Module]]:
    """Sequences of different lengths, packed by length; in a region that backward computes again."""

    def forward(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            together = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=not sort)
            out, (last, _) = net.cell(together)
            return rnn.pad_packed_sequence(out, batch_first=True, total_length=LENGTH)[0] + last[-1, :, None]

        x = x if sort else x[lengths.argsort(descending=True)]
        lengths = lengths if sort else lengths.sort(descending=True)[0]
        return checkpoint(run, x, use_reentrant=False) if again else run(x)

    return forward, {"cell": nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.4, batch_first=True)}


def transformer(first: bool) -> tuple[Forward, dict[str, nn.Module]]:
    def forward(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x if first else x.transpose(0, 1)
        out = net.block(x, x.tanh(), tgt_is_causal=False)
        return out if first else out.transpose(0, 1)

    return forward, {"block": nn.Transformer(WIDTH, 2, 1, 1, 4, dropout=0.3, batch_first=first)}


def windows(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Attention in windows of Swin's kind: [samples x 4, LENGTH, 4], by layer and function; a path that is dropped."""
    x = x.repeat_interleave(4, 1).unflatten(1, (LENGTH, 4)).transpose(1, 2).reshape(-1, LENGTH, WIDTH)
    x = x + net.attend(x, x, x)[0] * (0.7 + torch.rand(len(x), 1, 1, dtype=x.dtype)).floor_()
    heads = F.dropout(x, 0.2).unflatten(2, (2, 2)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).transpose(1, 2).flatten(2)


def views(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Two views of each sample, one after the other in one batch."""
    both = torch.cat([x, x + torch.randn_like(x)])
    one, other = F.dropout(net.begin(F.alpha_dropout(both, 0.2, True)), 0.4).chunk(2)
    return one - other.square()


def layer_drop(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Coins for the whole batch, by torch, Python and numpy: each decides on layers, in which more is drawn."""
    for layer in net.layers:  # type: ignore[union-attr]
        coins = (float(torch.rand(())), random.random(), float(numpy.random.rand()))
        if min(coins) > 0.2:
            x = x + layer(x)
    return x


def noise(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows of numpy's and Python's, between others that belong to all."""
    ratio = random.uniform(0.1, 0.5)
    keep = numpy.random.rand(*x.shape[:2]) > ratio
    x = x * torch.from_numpy(keep)[..., None]
    shift = [[random.random() for _ in range(WIDTH)] for _ in range(len(x))]
    x = F.linear(x + torch.tensor(shift, dtype=x.dtype)[:, None], F.dropout(net.begin.weight, 0.3))
    return x * float(numpy.random.normal()) + torch.normal(0.0, ratio, x.shape, dtype=x.dtype)


def build(name: str) -> Net:
    torch.manual_seed(0)
    layers = {"layers": nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4))}
    cases: dict[str, tuple[Forward, dict[str, nn.Module]]] = {
        "lstm": recurrent(nn.LSTM, False),
        "lstm of other widths": recurrent(nn.LSTM, True, proj_size=2, bidirectional=True),
        "gru": recurrent(nn.GRU, True),
        "rnn": recurrent(nn.RNN, False, bias=False),
        "packed": packed(True, False),
        "packed again": packed(True, True),
        "transformer": transformer(False),
        "transformer of batches": transformer(True),
        "windows": (windows, {"attend": nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)}),
        "views": (views, {}),
        "layer drop": (layer_drop, layers),
        "noise": (noise, {}),
    }
    way, parts = cases[name]
    return Net(way, **parts).double()


NAMES = (
    "lstm", "lstm of other widths", "gru", "rnn", "packed", "packed again", "transformer", "transformer of batches",
    "windows", "views", "layer drop", "noise",
)  # fmt: skip


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    return {"x": x, "lengths": torch.tensor([2, 3, 1, 3, 2, 3])}


def piece(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {key: value[start:stop] for key, value in batch.items()}


def trained(net: Net, graph: ModelGraph, cuts: tuple[str, ...], sizes: tuple[int, ...]) -> Trained:
    """Do one step: the micro-batches one after the other, each weighted by its samples."""
    total, gradients, start = torch.zeros((), dtype=torch.float64), {}, 0
    for size in sizes:
        own = piece(data(), start, start + size)
        done = train_staged(net, loss, own, size, split(graph, cuts), first=start)
        total += done.loss * size / SAMPLES
        for name, gradient in done.gradients.items():
            gradients[name] = gradients.get(name, 0) + gradient * size / SAMPLES
        start += size
    return Trained(total, gradients, {})


@pytest.mark.parametrize("name", NAMES)
def test_the_same_training_in_any_pieces(name: str) -> None:
    net = build(name)
    graphs = [record(net, loss, piece(data(), 0, size)) for size in (3, 2)]
    graph = with_owners(graphs[0], graphs[1])
    want = trained(net, graph, (), (6,))
    assert difference(want, trained(net, graph, (), (6,))) == 0.0
    for sizes in ((3, 3), (2, 2, 2), (2, 1, 2, 1)):
        assert difference(want, trained(net, graph, (), sizes)) < 1e-9, sizes
    cuts = [cut.name for cut in graph.cuts]
    for cut, sizes in ((cuts[len(cuts) // 2], (3, 3)), (cuts[-1], (4, 2))):
        assert difference(want, trained(net, graph, (cut,), sizes)) < 1e-9, (cut, sizes)
    whole = net.eval()
    assert want.loss != loss(whole, data())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_one_by_one_are_the_layers_together(kind: type[nn.RNNBase]) -> None:
    """With the dropout all but off, torch's own call is the oracle; packed or not, with states given."""

    class Drawn(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in ("lstm", "gru", "rnn_tanh"):
                return Chance(0, 0, 0, SAMPLES).call((0, 1), func, args, kwargs or {}, None, [1, 3, 5, 0, 4, 2])
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    net = kind(WIDTH, 5, num_layers=3, dropout=1e-12, bidirectional=True, batch_first=True).double()
    begin = torch.randn(6, SAMPLES, 5, dtype=torch.float64)
    states: Any = (begin, begin.tanh()) if kind is nn.LSTM else begin
    together = rnn.pack_padded_sequence(data()["x"], data()["lengths"], batch_first=True, enforce_sorted=False)
    for given in (data()["x"], together):
        with Drawn():
            got = torch.utils._pytree.tree_leaves(net(given, states))
        for a, b in zip(torch.utils._pytree.tree_leaves(net(given, states)), got, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cut", ["layers.2", "layers.3.1"])
def test_coins_that_fall_otherwise_in_evaluation(cut: str) -> None:
    """Without gradients it is not seen by `requires_grad` what a later stage cannot compute by itself."""
    net = build("layer drop").eval()
    graph = record(net, loss, piece(data(), 0, 3))
    whole, parts = split(graph, ()), split(graph, (cut,))
    models = [deepcopy(net) for _ in parts.stages]
    for part, model in zip(parts.stages, models, strict=True):
        drop_others(model, part.parameters)
    stages = [Stage.of(parts, i, model, loss, torch.device("cpu")) for i, model in enumerate(models)]
    alone = Stage.of(whole, 0, net, loss, torch.device("cpu"))
    with torch.no_grad():
        for seed in range(8):
            chance = Chance(seed, 0, 0, SAMPLES)
            want, made = alone.run(data(), {}, {}, chance), stages[0].run(data(), {}, {}, chance)
            got = stages[1].run(data(), made.sends, made.answers, chance)
            assert torch.equal(want.output, got.output), seed
