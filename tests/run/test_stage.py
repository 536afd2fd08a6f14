"""Stages: a model cut anywhere, each part on its own copy with its own parameters alone, trains as the whole does."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from headway.errors import SplitError
from headway.graph.record import record
from headway.layout.split import split
from headway.run.stage import Stage
from headway.run.stage_walk import StageWalk
from tests.graph.programs import GPT, next_token, square, tokens
from tests.run.staged import check, difference, train_staged, train_whole

Case = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gpt() -> Case:
    return GPT(), next_token, tokens()


def frozen() -> Case:
    model = GPT()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.2", "norm")))
    return model, next_token, tokens()


class Skips(nn.Module):
    """Each result is used by the layers after the next as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            kept.append(x)
            if i >= 2:
                x = x + kept[i - 2]
        return x + kept[0]


def skips() -> Case:
    return Skips(), square, rows(4, 6)


def batch_norm() -> Case:
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers, nn.Linear(6, 2)), square, rows(5, 6)


def in_place() -> Case:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model[0](batch)
        x.mul_(2.0)
        y = model[1](x)
        y += x
        y[:, 0] = x[:, 1]
        out = torch.zeros(4, 2, 6, dtype=x.dtype)
        out[:, 0] = y
        y = model[2](y).relu_()
        out[:, 1] = y
        return (out * out).mean()

    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), loss, rows(4, 6)


def dictionaries() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> dict[str, Any]:
            h = {"x": self.a(x), "mask": mask.double()[:, None]}
            h["x"], extra = self.b(h["x"]) * h["mask"], (h["x"].argmax(-1), "text")
            return {"logits": self.c(h["x"]), "extra": extra}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = model(batch["x"], mask=batch["mask"])
        return F.cross_entropy(out["logits"], batch["y"]) + out["extra"][0].double().mean() * out["logits"].mean()

    return Model(), loss, {"x": rows(4, 6), "mask": torch.tensor([1, 0, 1, 1]), "y": torch.tensor([0, 1, 2, 0])}


def unused() -> Case:
    model = Skips()
    model.extra = nn.Linear(3, 3)
    model.layers[2].more = nn.Parameter(torch.zeros(2))
    return model, square, rows(4, 6)


class Functional(nn.Module):
    """Parameters used directly, also from the loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(5, 5) / 3) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))


def functional() -> Case:
    def loss(model: Functional, batch: torch.Tensor) -> torch.Tensor:
        x = batch
        for w in model.w:
            x = torch.tanh(x @ w + x)
        return ((x * model.scale - batch) ** 2).mean() + 1e-3 * sum((w * w).sum() for w in model.w)

    return Functional(), loss, rows(3, 5)


def reads() -> Case:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model[0](batch)
        x = x * 2 if x.sum() > 0 else x - 1
        chosen = x[x[:, 0] >= x[:, 0].median()]  # a shape that depends on values
        x = model[1](chosen).abs()
        if x.detach().numpy().max() > 1e6:
            return x.sum()
        steps = 1 + int(x.mean().item()) % 3
        for _ in range(steps):
            x = model[2](x).tanh()
        return x.mean() + x.nonzero().shape[0]

    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), loss, rows(8, 6)


def experts() -> Case:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, which = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                index = (which == number).nonzero().squeeze(-1)
                if index.numel():
                    out = out.index_add(0, index, expert(x[index]) * weight[index, None])
            return x + out

    return nn.Sequential(*(Experts() for _ in range(3))), square, rows(7, 6)


def dropout() -> Case:
    return GPT(dropout=0.3), next_token, tokens()


def host_chance() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh() * random.random() + float(numpy.random.rand())
            return x + torch.rand(())

    return Model(), square, rows(4, 6)


def checkpointed(reentrant: bool) -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            return x

    return Model(), square, rows(4, 6)


def recurrent() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(30, 6), nn.LSTM(6, 6, 2, batch_first=True)
            self.cell, self.head = nn.GRUCell(6, 6), nn.Linear(6, 30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = torch.tensor([x.shape[1], x.shape[1] - 2])
            packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True)
            y, (h, _) = self.rnn(packed)
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
            state, out = h[-1], []
            for t in range(y.shape[1]):
                state = self.cell(y[:, t], state)
                out.append(state)
            return self.head(torch.stack(out, 1))

    return Model(), next_token, tokens()


def parametrized() -> Case:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
    )
    return model, square, rows(4, 6)


class Clip(torch.autograd.Function):
    """Clamps forwards, and lets every gradient through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(weight)
        return x.clamp(-1, 1) * weight, x.sign()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        return g * weight, g.sum(0)


def custom_function() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.w = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                y, sign = Clip.apply(layer(x), self.w)
                x = x + y * sign
            return torch.vmap(lambda row: (row * self.w).sin())(x)

    return Model(), square, rows(4, 6)


def hooks() -> Case:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    return model, square, rows(4, 6)


def no_grad_teacher() -> Case:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = model[0](batch).softmax(-1)
            target[:, 0] += 1
        y = model[1](model[0](batch).detach() + batch)
        return F.mse_loss(model[2](y), target) + y[:, :2].contiguous().view(-1).var()

    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), loss, rows(4, 6)


def compiled() -> Case:
    model = GPT(layers=2)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1].compile(backend="eager")
    return model, next_token, tokens()


class Adapted(nn.Linear):
    """A linear layer with a low-rank addition, the layer itself frozen, as LoRA does it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.a, self.b = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(width, 2))
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.a.t() @ self.b.t()


def adapters() -> Case:
    return nn.Sequential(*(Adapted(6) for _ in range(4))), square, rows(4, 6)


CASES: dict[str, Callable[[], Case]] = {
    "tied gpt": gpt,
    "frozen first stage": frozen,
    "skips": skips,
    "batch norm": batch_norm,
    "in place": in_place,
    "dictionaries": dictionaries,
    "unused parameters": unused,
    "functional": functional,
    "reads": reads,
    "experts": experts,
    "dropout": dropout,
    "numbers drawn by python and numpy": host_chance,
    "checkpoint": lambda: checkpointed(False),
    "checkpoint, reentrant": lambda: checkpointed(True),
    "recurrent": recurrent,
    "parametrizations": parametrized,
    "custom function": custom_function,
    "hooks": hooks,
    "no grad": no_grad_teacher,
    "compiled blocks": compiled,
    "adapters": adapters,
}


@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_the_whole(name: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = CASES[name]()
    model.double()
    graph = record(model, loss, batch)
    assert len(graph.cuts) >= 3
    draw = random.Random(name)
    for stages in (2, 3, 4, 5):
        for _ in range(2):
            picked = sorted(draw.sample(range(len(graph.cuts)), min(stages - 1, len(graph.cuts))))
            cuts = [graph.cuts[i].name for i in picked]
            assert check(model, loss, batch, graph, cuts) < 1e-12, cuts


@pytest.mark.parametrize("name", CASES)
def test_every_single_cut(name: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = CASES[name]()
    model.double()
    graph = record(model, loss, batch)
    want = train_whole(model, loss, batch, graph)
    step = 1 + len(graph.cuts) // 25
    for cut in graph.cuts[::step]:
        got = train_staged(model, loss, batch, graph.samples, split(graph, [cut.name]))
        assert difference(want, got) < 1e-12, cut.name


@pytest.mark.parametrize("name", ["tied gpt", "batch norm", "experts", "dropout", "recurrent", "reads"])
def test_other_batches_need_no_new_recording(name: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = CASES[name]()
    model.double()
    graph = record(model, loss, batch)
    # between modules: there what depends on data (experts without samples, rows chosen) does not lie
    cuts = [c.name for c in graph.cuts if "#" not in c.name and "experts" not in c.name and "*" not in c.name][::2]
    parts = split(graph, cuts[:4])
    for seed in range(4):
        torch.manual_seed(seed)
        if batch.is_floating_point():
            other = torch.randn(3 + seed, *batch.shape[1:], dtype=batch.dtype)
        else:
            other = tokens(2, 7 + seed)
        want = train_whole(model, loss, other, graph, len(other))
        got = train_staged(model, loss, other, len(other), parts, steps=1)
        assert difference(want, got) < 1e-12


def test_stage_remembers_nothing_wrong_from_pass_to_pass() -> None:
    torch.manual_seed(0)
    model, loss, batch = gpt()
    model.double()
    graph = record(model, loss, batch)
    parts = split(graph, ["blocks.0.mlp", "blocks.2"])
    got = train_staged(model, loss, batch, graph.samples, parts, steps=3)
    assert difference(train_whole(model, loss, batch, graph), got) < 1e-12


@pytest.mark.parametrize("name", ["tied gpt", "reads", "experts", "checkpoint", "checkpoint, reentrant", "dropout"])
def test_a_pass_leaves_nothing_behind(name: str) -> None:
    """What a pass held is freed when it ends, not when Python next looks for circles of references."""
    model, loss, batch = CASES[name]()
    graph = record(model.double(), loss, batch)
    parts = split(graph, [graph.cuts[len(graph.cuts) // 2].name])
    train_staged(model, loss, batch, graph.samples, parts)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train_staged(model, loss, batch, graph.samples, parts, steps=3)
        gc.collect()
        left = [thing for thing in gc.garbage if isinstance(thing, (torch.Tensor, StageWalk))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [thing for thing in left if not isinstance(thing, nn.Parameter)]


def test_what_a_stage_does_not_have_is_named() -> None:
    model, loss, batch = skips()
    model.double()
    graph = record(model, loss, batch)
    parts = split(graph, ["layers.3"])
    stage = Stage.of(parts, 1, model, loss, torch.device("cpu"))
    with pytest.raises(SplitError, match="Linear takes a tensor or a parameter which this stage does not have"):
        stage.run(batch, {}, {})


def test_answers_are_needed_for_reads() -> None:
    model, loss, batch = reads()
    model.double()
    graph = record(model, loss, batch)
    parts = split(graph, [graph.cuts[-1].name])
    stage = Stage.of(parts, 1, model, loss, torch.device("cpu"))
    with pytest.raises(SplitError, match="had no answer"):
        stage.run(batch, {}, {})


def test_buffers_of_other_stages_stay() -> None:
    model, loss, batch = batch_norm()
    model.double()
    graph = record(model, loss, batch)
    parts = split(graph, ["4"])
    stage = Stage.of(parts, 0, model, loss, torch.device("cpu"))
    stage.run(batch, {}, {})
    assert int(model[1].num_batches_tracked) == 1 and int(model[4].num_batches_tracked) == 0
    assert parts.stages[0].owned_buffers == ("1.num_batches_tracked", "1.running_mean", "1.running_var")
