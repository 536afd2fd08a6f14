"""Research on weights and losses: pruned, quantised, faded in, aligned, sorted, and derived twice."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import prune

from tests.zoo.plain import Family, classes, r, square
from tests.zoo.research_learning import mlp


def pruned() -> Any:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    for layer in net[::2]:
        prune.l1_unstructured(layer, "weight", 0.4)
    return net, classes, (r(4, 6), torch.randint(0, 3, (4,)))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        ctx.save_for_backward((x >= low) & (x <= high))
        return x.round().clamp(low, high)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        (inside,) = ctx.saved_tensors
        return slope * inside, None, None


def quantised_on_the_way() -> Any:
    class Layer(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.inner, self.step = nn.Linear(a, b), nn.Parameter(torch.tensor(0.1))
            self.register_buffer("low", torch.tensor(0.0))
            self.register_buffer("high", torch.tensor(0.0))
            self.register_buffer("begun", torch.tensor(False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low, high = x.detach().aminmax()
            if not self.begun:
                self.low.copy_(low)
                self.high.copy_(high)
                self.begun.fill_(True)
            else:
                self.low.lerp_(low, 0.1)
                self.high.lerp_(high, 0.1)
            size = ((self.high - self.low) / 15).clamp(min=1e-6)
            x = _Round.apply((x - self.low) / size, 0.0, 15.0) * size + self.low
            weight = _Round.apply(self.inner.weight / self.step, -8.0, 7.0) * self.step
            return F.linear(x, weight, self.inner.bias)

    return nn.Sequential(Layer(6, 8), nn.ReLU(), Layer(8, 8), nn.ReLU(), Layer(8, 3)), square, r(4, 6)


def grown_by_fading() -> Any:
    class Progressive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(4, 6 * 16)
            self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
            self.colours = nn.ModuleList(nn.Conv2d(6, 3, 1) for _ in range(3))
            self.alpha, self.depth = 0.3, 2

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            x = self.start(z).view(-1, 6, 4, 4)
            before = None
            for i in range(self.depth + 1):
                if i:
                    x = F.interpolate(x, scale_factor=2)
                    before = x
                x = F.leaky_relu(self.blocks[i](x), 0.2)
                x = x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()
            out = self.colours[self.depth](x)
            assert before is not None
            return torch.lerp(self.colours[self.depth - 1](before), out, self.alpha)

    return Progressive(), square, r(3, 4)


def convolutional_memory() -> Any:
    class ConvLstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.ModuleList(nn.Conv2d(a + 4, 16, 3, padding=1) for a in (1, 4))
            self.out = nn.Conv2d(4, 1, 1)

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            shape = (len(frames), 4, *frames.shape[-2:])
            states = [(frames.new_zeros(shape), frames.new_zeros(shape)) for _ in self.gates]
            made: deque[torch.Tensor] = deque(maxlen=3)
            for t in range(frames.shape[1] + 2):
                x = frames[:, t] if t < frames.shape[1] else made[-1]
                for i, gate in enumerate(self.gates):
                    h, c = states[i]
                    a, b, o, g = gate(torch.cat([x, h], 1)).chunk(4, 1)
                    c = b.sigmoid() * c + a.sigmoid() * g.tanh()
                    states[i] = (o.sigmoid() * c.tanh(), c)
                    x = states[i][0]
                made.append(self.out(x))
            return torch.stack(list(made), 1)

    return ConvLstm(), square, r(2, 4, 1, 5, 5)


def soft_alignment() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        a, b = (model(part) for part in batch)
        cost = torch.cdist(a, b).square()
        rows, columns = cost.shape[1:]
        table: dict[tuple[int, int], torch.Tensor] = {(0, 0): cost.new_zeros(len(cost))}
        far = cost.new_full((len(cost),), 1e6)
        for i in range(1, rows + 1):
            for j in range(1, columns + 1):
                near = [table.get(at, far) for at in ((i - 1, j), (i, j - 1), (i - 1, j - 1))]
                table[i, j] = cost[:, i - 1, j - 1] - 0.5 * torch.logsumexp(-torch.stack(near) / 0.5, 0)
        return table[rows, columns].mean()

    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)), loss, [r(2, 5, 2), r(2, 4, 2)]


def lagrangian() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        state, acceleration = batch
        total = torch.zeros(())
        for q, wanted in zip(state, acceleration, strict=True):
            hessian = torch.autograd.functional.hessian(lambda s: model(s).sum(), q, create_graph=True)
            slope = torch.autograd.functional.jacobian(lambda s: model(s).sum(), q, create_graph=True)
            mass = hessian[2:, 2:] + torch.eye(2, dtype=q.dtype)
            force = slope[:2] - hessian[2:, :2] @ q[2:]
            total = total + F.mse_loss(torch.linalg.solve(mass, force), wanted)
        return total / len(state)

    return mlp(4, 8, 8, 1, act=nn.Softplus), loss, (r(3, 4), r(3, 2))


def sorted_softly() -> Any:
    class Ranks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = mlp(4, 8, 8, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            score = self.score(x)
            far = (score - score.mT).abs()
            n = score.shape[1]
            weight = (n + 1 - 2 * torch.arange(1, n + 1)).to(score)
            order = ((score @ weight[None] - far.sum(2, keepdim=True)).mT / 0.5).softmax(-1)
            gain = (2**y - 1)[:, None] @ order.mT
            best = np.log2(np.arange(2, n + 2))
            return -(gain.squeeze(1) / torch.from_numpy(best).to(score)).sum(1).mean()

    return Ranks(), lambda m, b: m(*b), (r(3, 5, 4), torch.randint(0, 3, (3, 5)).double())


@dataclass
class Outputs:
    """What a model of several heads gives."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]
    extra: dict[str, torch.Tensor | None]


def heads_and_hints() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.heads, self.weights = nn.ModuleList(nn.Linear(6, 3) for _ in range(2)), nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor, low: bool = False) -> Outputs:
            hidden = []
            for layer in self.layers:
                with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
                    x = x + layer(x).relu()
                hidden.append(x)
            logits = torch.stack([head(h) for head, h in zip(self.heads, hidden[1::2], strict=True)])
            return Outputs(logits, hidden, {"norm": x.norm(), "none": None})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        out = model(x)
        each = torch.stack([F.cross_entropy(logits, y) for logits in out.logits])
        hints = sum(F.mse_loss(a, b.detach()) for a, b in zip(out.hidden, out.hidden[1:], strict=False))
        return (each * (-model.weights).exp() + model.weights).sum() + 0.1 * hints + 1e-3 * out.extra["norm"]

    return Model(), loss, (r(4, 6), torch.randint(0, 3, (4,)))


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
