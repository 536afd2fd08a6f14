"""Plain loops: programs in torch alone whose way, or length, depends on the batch, on values or on chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.plain import classes, r, square

Family = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]]


def own(model: Any, batch: Any) -> torch.Tensor:
    """Give the loss that the model computes itself."""
    return model(batch)


def stochastic_depth() -> Any:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(6))
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if self.training and torch.rand(()).item() < 0.5:
                    continue
                x = x + block(x)
            return self.head(x)

    return Deep(), classes, (r(4, 6), torch.randint(0, 3, (4,)))


def layer_drop_on_host() -> Any:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                if random.random() > 0.4:
                    x = x + block(x).tanh()
            return self.head(x)

    random.seed(torch.initial_seed())  # which layers the recorded run leaves out
    return Deep(), classes, (r(4, 4), torch.randint(0, 3, (4,)))


def early_exit() -> Any:
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block, head in zip(self.blocks, self.heads, strict=True):
                x = x + block(x).tanh()
                scores = head(x)
                if scores.softmax(-1).max() > 0.6:
                    break
            return scores

    return Exits(), classes, (r(4, 6), torch.randint(0, 3, (4,)))


def ode_with_adaptive_steps() -> Any:
    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            t, step = 0.0, 0.5
            while t < 1.0:
                step = min(step, 1.0 - t)
                one = self.f(x)
                two = self.f(x + step * one)
                error = (step * (two - one)).abs().max().item()
                if error > 0.3 and step > 0.05:
                    step /= 2
                    continue
                x, t, step = x + step * (one + two) / 2, t + step, step * 1.5
            return self.head(x)

    return Ode(), square, r(3, 4)


def tree_recursion() -> Any:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.join, self.head = nn.Embedding(9, 6), nn.Linear(12, 6), nn.Linear(6, 3)

        def node(self, tree: Any) -> torch.Tensor:
            if isinstance(tree, int):
                return self.leaf(torch.tensor(tree))
            return self.join(torch.cat([self.node(part) for part in tree])).tanh()

        def forward(self, batch: Any) -> torch.Tensor:
            scores = torch.stack([self.head(self.node(tree)) for tree in batch["trees"]])
            return F.cross_entropy(scores, batch["y"])

    shapes: list[Any] = [((1, 2), 3), (4, (5, (6, 7))), (8, 0)]
    random.Random(torch.initial_seed()).shuffle(shapes)
    return Tree(), own, {"y": torch.randint(0, 3, (3,)), "trees": shapes}


def pointer_network() -> Any:
    class Pointer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.cell = nn.LSTM(2, 6, batch_first=True), nn.LSTMCell(2, 6)
            self.a, self.b, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, points: torch.Tensor) -> torch.Tensor:
            memory, (h, c) = self.read(points)
            state, given = (h[0], c[0]), torch.zeros_like(points[:, 0])
            taken = torch.zeros(points.shape[:2], dtype=torch.bool)
            total = points.new_zeros(len(points))
            for _ in range(points.shape[1]):
                state = self.cell(given, state)
                scores = self.v((self.a(memory) + self.b(state[0])[:, None]).tanh()).squeeze(-1)
                logs = scores.masked_fill(taken, -1e9).log_softmax(-1)
                choice = logs.argmax(-1)
                total = total + logs.gather(1, choice[:, None]).squeeze(1)
                taken = taken.scatter(1, choice[:, None], True)
                given = points[torch.arange(len(points)), choice]
            return -total.mean()

    return Pointer(), own, r(3, 4, 2)


def beams() -> Any:
    class Beams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.out = nn.Embedding(7, 6), nn.GRUCell(6, 6), nn.Linear(6, 7)

        def forward(self, start: torch.Tensor) -> torch.Tensor:
            hidden, score, last = start, start.new_zeros(len(start)), torch.zeros(len(start), dtype=torch.int64)
            for _ in range(3):
                hidden = self.cell(self.embed(last), hidden)
                every = (score[:, None] + self.out(hidden).log_softmax(-1)).flatten()
                score, index = every.topk(4)
                hidden, last = hidden[index // 7], index % 7
            return -score.mean()

    return Beams(), own, r(2, 6)


def spiking() -> Any:
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return (x > 0).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad / (1 + x.abs()) ** 2

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = x.new_zeros(len(x), 8), x.new_zeros(len(x), 3)
            for t in range(x.shape[1]):
                first = 0.9 * first + self.a(x[:, t])
                spikes = Spike.apply(first - 1)
                first = first - spikes.detach()
                second = 0.9 * second + self.b(spikes)
            return second

    return Spiking(), classes, (r(4, 5, 4), torch.randint(0, 3, (4,)))


def transducer() -> Any:
    class Transducer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.pred = nn.GRU(3, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
            self.embed, self.join = nn.Embedding(6, 6), nn.Linear(6, 6)

        def forward(self, batch: Any) -> torch.Tensor:
            sound, text = batch
            h, (u, length) = self.enc(sound)[0], (text.shape[1], sound.shape[1])
            g = self.pred(F.pad(self.embed(text), (0, 0, 1, 0)))[0]
            logs = self.join((h[:, :, None] + g[:, None]).tanh()).log_softmax(-1)
            alpha = {(0, 0): logs.new_zeros(len(text))}
            for t in range(length):
                for k in range(u + 1):
                    ways = []
                    if t:
                        ways.append(alpha[t - 1, k] + logs[:, t - 1, k, 0])
                    if k:
                        ways.append(alpha[t, k - 1] + logs[:, t, k - 1].gather(1, text[:, k - 1 : k])[:, 0])
                    if ways:
                        alpha[t, k] = torch.stack(ways).logsumexp(0)
            return -(alpha[length - 1, u] + logs[:, length - 1, u, 0]).mean()

    return Transducer(), own, (r(2, 4, 3), torch.randint(1, 6, (2, 2)))


def routed_experts() -> Any:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
            self.up, self.down = nn.Parameter(r(2, 4, 6, 8) / 3), nn.Parameter(r(2, 4, 8, 6) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, gate in enumerate(self.gate):
                weight, chosen = gate(x).softmax(-1).topk(2)
                out = torch.zeros_like(x)
                for expert in chosen.unique().tolist():
                    rows, slot = (chosen == expert).nonzero(as_tuple=True)
                    y = F.gelu(x[rows] @ self.up[layer, expert]) @ self.down[layer, expert]
                    out.index_add_(0, rows, y * weight[rows, slot, None])
                x = x + out
            return x

    return Routed(), square, r(5, 6)


def packed_sequences() -> Any:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(20, 6), nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(10, 3)

        def forward(self, batch: Any) -> torch.Tensor:
            x = self.embed(batch["ids"])
            packed = nn.utils.rnn.pack_padded_sequence(x, batch["lengths"], batch_first=True, enforce_sorted=False)
            out, lengths = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            mask = torch.arange(out.shape[1])[None] < lengths[:, None]
            mean = (out * mask[..., None]).sum(1) / lengths[:, None]
            return F.cross_entropy(self.head(mean), batch["y"])

    lengths = torch.randint(2, 7, (3,))
    return Packed(), own, {"ids": torch.randint(0, 20, (3, 7)), "lengths": lengths, "y": torch.randint(0, 3, (3,))}


def speech_ctc() -> Any:
    class Ctc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rnn, self.out = nn.Conv1d(3, 6, 3, 2, 1), nn.GRU(6, 6, 2, batch_first=True), nn.Linear(6, 5)

        def forward(self, batch: Any) -> torch.Tensor:
            h = self.out(self.rnn(self.conv(batch["x"]).relu().mT)[0]).log_softmax(-1)
            return F.ctc_loss(h.transpose(0, 1), batch["y"], (batch["n"] + 1) // 2, batch["m"])

    return Ctc(), own, {
        "x": r(2, 3, 20), "y": torch.randint(1, 5, (2, 4)), "n": torch.tensor([20, 16]),
        "m": torch.randint(2, 5, (2,)),
    }  # fmt: skip


def scheduled_sampling() -> Any:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.out = nn.Embedding(9, 6), nn.LSTMCell(6, 6), nn.Linear(6, 9)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            state, token, losses = None, y[:, 0], []
            for t in range(1, y.shape[1]):
                state = self.cell(self.embed(token), state)
                scores = self.out(state[0])
                losses.append(F.cross_entropy(scores, y[:, t]))
                token = y[:, t] if torch.rand(1) < 0.5 else scores.argmax(-1)
            return torch.stack(losses).mean()

    return Decoder(), own, torch.randint(0, 9, (3, 6))


def optional_parts() -> Any:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image = nn.Embedding(9, 6), nn.Linear(4, 6)
            self.body, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 2)

        def forward(self, batch: Any) -> torch.Tensor:
            h = self.text(batch["text"]).mean(1)
            if "image" in batch:
                h = h + self.image(batch["image"])
            for layer in self.body:
                h = layer(h).relu()
                if "scale" in batch:
                    h = h * batch["scale"][:, None]
            return F.cross_entropy(self.head(h), batch["y"])

    batch = {"text": torch.randint(0, 9, (3, 5)), "y": torch.randint(0, 2, (3,)), "image": r(3, 4), "scale": r(3)}
    if torch.initial_seed() % 2:
        batch.pop("image")
    return Optional(), own, batch


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
