"""Research on views and tasks: self-supervision, adaptation by gradients, laws of physics, beliefs over weights."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, jacrev, jvp, vmap
from torch.nn import functional as F  # noqa: N812

from tests.zoo.plain import Family, r
from tests.zoo.research_learning import Parts, mlp, own


def contrast_with_queue() -> Any:
    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = mlp(6, 8, 8, 4)
            self.key = deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = F.normalize(self.query(x + 0.1), dim=-1)
            with torch.no_grad():
                k = F.normalize(self.key(x - 0.1), dim=-1)
            logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
            start = int(self.place)
            self.queue[:, start : start + len(k)] = k.T
            self.place[0] = (start + len(k)) % 12
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    return MoCo(), own, r(4, 6)


def swapped_assignments() -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            model.prototypes.weight.copy_(F.normalize(model.prototypes.weight, dim=-1))
        said = [model.prototypes(F.normalize(model.body(view), dim=-1)) for view in batch]
        total = torch.zeros(())
        for i, scores in enumerate(said):
            with torch.no_grad():
                plan = (scores / 0.2).exp().T
                plan /= plan.sum()
                for _ in range(3):
                    plan /= plan.sum(1, keepdim=True) * len(plan)
                    plan /= plan.sum(0, keepdim=True) * plan.shape[1]
                goal = (plan * plan.shape[1]).T
            total = total - (goal * F.log_softmax(said[1 - i] / 0.1, -1)).sum(-1).mean()
        return total

    return Parts(body=mlp(6, 8, 8, 4), prototypes=nn.Linear(4, 5, bias=False)), loss, [r(4, 6), r(4, 6)]


def mixed_up() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        share = float(np.random.beta(0.4, 0.4))
        order = torch.randperm(len(x))
        said = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(said, y) + (1 - share) * F.cross_entropy(said, y[order])

    return mlp(6, 8, 8, 8, 3), loss, (r(4, 6), torch.randint(0, 3, (4,)))


def prototypes_of_episodes() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        support, query = (model(part.flatten(0, 1)).unflatten(0, part.shape[:2]) for part in batch)
        far = torch.cdist(query.flatten(0, 1), support.mean(1)).square()
        return F.cross_entropy(-far, torch.arange(query.shape[0]).repeat_interleave(query.shape[1]))

    return mlp(5, 8, 8, 4), loss, [r(3, 2, 5), r(3, 3, 5)]


def adapted_by_gradient() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        total = torch.zeros(())
        for x, y, x2, y2 in zip(*batch, strict=True):
            weights = dict(model.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(model, weights, (x,)), y)
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {n: w - 0.1 * s for (n, w), s in zip(weights.items(), slopes, strict=True)}
            total = total + F.mse_loss(functional_call(model, weights, (x2,)), y2)
        return total / len(batch[0])

    return mlp(3, 8, 8, 1), loss, [r(2, 4, 3), r(2, 4, 1), r(2, 4, 3), r(2, 4, 1)]


def hamiltonian() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, speed = batch
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        q, p = slope.chunk(2, -1)
        return F.mse_loss(torch.cat([p, -q], -1), speed)

    return mlp(4, 8, 8, 1), loss, (r(5, 4), r(5, 4))


def physics_informed() -> Any:
    def loss(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
        t, x = points[:, :1].clone().requires_grad_(), points[:, 1:].clone().requires_grad_()
        u = model(torch.cat([t, x], -1))
        ut, ux = torch.autograd.grad(u, (t, x), torch.ones_like(u), create_graph=True)
        (uxx,) = torch.autograd.grad(ux, x, torch.ones_like(ux), create_graph=True)
        start = model(torch.cat([torch.zeros_like(t), x], -1)) + torch.sin(math.pi * x)
        return (ut + u * ux - 0.01 * uxx).square().mean() + start.square().mean()

    return mlp(2, 8, 8, 8, 1), loss, torch.rand(6, 2, dtype=torch.float64)


def derivatives_by_transforms() -> Any:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def one(point: torch.Tensor) -> torch.Tensor:
            return model(point).squeeze(-1)

        value, along = jvp(model, (x,), (torch.ones_like(x),))
        return vmap(jacrev(one))(x).square().mean() + value.square().mean() + along.square().mean()

    return mlp(4, 8, 8, 1), loss, r(4, 4)


def bayes_by_backprop() -> Any:
    class Layer(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.mean, self.rho = nn.Parameter(torch.randn(b, a) / 2), nn.Parameter(torch.full((b, a), -3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            belief = Normal(self.mean, F.softplus(self.rho))
            weight = belief.rsample()
            self.cost = belief.log_prob(weight).sum() - Normal(0.0, 1.0).log_prob(weight).sum()
            return F.linear(x, weight)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        costs = lambda: sum(layer.cost for layer in model if hasattr(layer, "cost"))  # noqa: E731
        return sum(F.mse_loss(model(x), y) + 1e-3 * costs() for _ in range(2)) / 2

    return nn.Sequential(Layer(4, 8), nn.Tanh(), Layer(8, 8), nn.Tanh(), Layer(8, 2)), loss, (r(4, 4), r(4, 2))


def deep_kernel() -> Any:
    class Gp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.length, self.noise = (
                mlp(3, 8, 8, 2),
                nn.Parameter(torch.zeros(2)),
                nn.Parameter(torch.zeros(())),
            )

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = self.body(x) / self.length.exp()
            kernel = (-0.5 * torch.cdist(z, z).square()).exp() + (self.noise.exp() + 1e-3) * torch.eye(len(x)).to(x)
            root = torch.linalg.cholesky(kernel)
            solved = torch.cholesky_solve(y[:, None], root)
            return 0.5 * (y[:, None] * solved).sum() + root.diagonal().log().sum()

    return Gp(), lambda m, b: m(*b), (r(6, 3), r(6))


def neural_process() -> Any:
    class Process(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.latent, self.dec = mlp(2, 8, 8), mlp(8, 8, 8), mlp(5, 8, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            given = int(torch.randint(2, x.shape[1] - 1, (1,)))
            order = torch.randperm(x.shape[1])[:given]
            means = [self.latent(self.enc(torch.cat(p, -1)).mean(1)).chunk(2, -1)
                     for p in ((x[:, order], y[:, order]), (x, y))]  # fmt: skip
            prior, post = (Normal(m, 0.1 + 0.9 * s.sigmoid()) for m, s in means)
            z = post.rsample()[:, None].expand(-1, x.shape[1], -1)
            mean, spread = self.dec(torch.cat([x, z], -1)).chunk(2, -1)
            return kl_divergence(post, prior).sum(-1).mean() - Normal(mean, spread.exp()).log_prob(y).mean()

    return Process(), lambda m, b: m(*b), (r(3, 7, 1), r(3, 7, 1))


def optimal_transport() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = (model(part) for part in batch)
        cost = torch.cdist(x, y).square()
        u, v = torch.zeros_like(cost[:, 0]), torch.zeros_like(cost[0])
        for _ in range(30):
            before = u
            u = -0.5 * torch.logsumexp((v[None] - cost) / 0.5, 1)
            v = -0.5 * torch.logsumexp((u[:, None] - cost) / 0.5, 0)
            if (u - before).abs().max().item() < 1e-2:
                break
        return (((u[:, None] + v[None] - cost) / 0.5).exp() * cost).sum()

    return mlp(3, 8, 8, 2), loss, [r(4, 3), r(4, 3)]


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
