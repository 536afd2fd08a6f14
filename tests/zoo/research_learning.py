"""Research on learning: policies, generators, flows, energies, self-supervision and meta-learning, as papers' code."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform
from torch.nn import functional as F  # noqa: N812

from tests.zoo.plain import Family, r


def mlp(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def own(model: nn.Module, batch: Any) -> Any:
    return model(batch)


class Parts(nn.Module):
    """Networks under names, which the loss function calls."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def reinforce() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        state, reward = batch
        policy = Categorical(logits=model(state))
        action = policy.sample()
        gain = reward.gather(1, action[:, None]).squeeze(1)
        return -(policy.log_prob(action) * (gain - gain.mean())).mean() - 0.01 * policy.entropy().mean()

    return mlp(4, 8, 8, 3), loss, (r(5, 4), r(5, 3))


def proximal_policy() -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        h = model.body(batch["state"])
        value = model.value(h).squeeze(-1)
        advantage, last = [], torch.zeros_like(value[:, 0])
        for t in reversed(range(value.shape[1] - 1)):
            delta = batch["reward"][:, t] + 0.9 * value[:, t + 1].detach() - value[:, t].detach()
            last = delta + 0.9 * 0.95 * last * batch["alive"][:, t]
            advantage.insert(0, last)
        gain = torch.stack(advantage, 1)
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        policy = Independent(Normal(model.mean(h[:, :-1]), model.spread.exp().expand(2)), 1)
        ratio = (policy.log_prob(batch["action"]) - batch["before"]).exp()
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return (value[:, :-1] - (gain + value[:, :-1]).detach()).square().mean() - clipped

    model = Parts(body=mlp(3, 8, 8), value=nn.Linear(8, 1), mean=nn.Linear(8, 2))
    model.spread = nn.Parameter(torch.zeros(2))
    batch = {"state": r(3, 6, 3), "reward": r(3, 5), "alive": (r(3, 5) > -1).double(), "action": r(3, 5, 2)}
    return model, loss, batch | {"before": r(3, 5) - 3}


def soft_actor_critic() -> Any:
    class Sac(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.q1, self.q2 = mlp(3, 8, 4), mlp(5, 8, 1), mlp(5, 8, 1)
            self.t1, self.t2 = deepcopy(self.q1).requires_grad_(False), deepcopy(self.q2).requires_grad_(False)
            self.log_alpha = nn.Parameter(torch.zeros(()))

        def act(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean, spread = self.actor(state).chunk(2, -1)
            base = Independent(Normal(mean, spread.clamp(-4, 1).exp()), 1)
            policy = TransformedDistribution(base, [TanhTransform(cache_size=1)])
            action = policy.rsample()
            return action, policy.log_prob(action)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        state, action, reward, after = batch
        alpha = model.log_alpha.exp()
        with torch.no_grad():
            ahead, log = model.act(after)
            pair = torch.cat([after, ahead], -1)
            goal = reward + 0.9 * (torch.min(model.t1(pair), model.t2(pair)).squeeze(-1) - alpha * log)
        pair = torch.cat([state, action], -1)
        critics = sum(F.mse_loss(q(pair).squeeze(-1), goal) for q in (model.q1, model.q2))
        mine, log = model.act(state)
        for q in (model.q1, model.q2):
            q.requires_grad_(False)
        pair = torch.cat([state, mine], -1)
        actor = (alpha.detach() * log - torch.min(model.q1(pair), model.q2(pair)).squeeze(-1)).mean()
        for q in (model.q1, model.q2):
            q.requires_grad_(True)
        return critics + actor - (model.log_alpha * (log.detach() - 2)).mean()

    return Sac(), loss, (r(4, 3), r(4, 2).tanh(), r(4), r(4, 3))


class Latent(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor
    deter: torch.Tensor


def world_model() -> Any:
    class Rssm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.cell = mlp(5, 8), nn.GRUCell(3 + 2, 6)
            self.prior, self.post, self.decode = mlp(6, 8, 6), mlp(6 + 8, 8, 6), mlp(9, 8, 5)

        def forward(self, seen: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            z, deter, total = seen.new_zeros(len(seen), 3), seen.new_zeros(len(seen), 6), seen.new_zeros(())
            for t in range(seen.shape[1]):
                deter = self.cell(torch.cat([z, action[:, t]], -1), deter)
                prior = Latent(*self.prior(deter).chunk(2, -1), deter)
                post = Latent(*self.post(torch.cat([deter, self.encode(seen[:, t])], -1)).chunk(2, -1), deter)
                here = Normal(post.mean, F.softplus(post.spread) + 0.1)
                z = here.rsample()
                total = total + kl_divergence(here, Normal(prior.mean, F.softplus(prior.spread) + 0.1)).sum(-1).mean()
                total = total + F.mse_loss(self.decode(torch.cat([z, deter], -1)), seen[:, t])
            return total

    return Rssm(), lambda m, b: m(*b), (r(3, 5, 5), r(3, 5, 2))


def langevin_energy() -> Any:
    def loss(model: nn.Module, real: torch.Tensor) -> torch.Tensor:
        fake = torch.rand_like(real).requires_grad_()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for _ in range(3):
            (slope,) = torch.autograd.grad(model(fake).sum(), fake)
            fake = (fake - 0.1 * slope + 0.01 * torch.randn_like(fake)).detach().requires_grad_()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        high, low = model(real), model(fake.detach())
        return (high - low).mean() + 0.1 * (high.square() + low.square()).mean()

    return mlp(4, 8, 8, 1, act=nn.SiLU), loss, r(4, 4)


def continuous_flow() -> Any:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(4, 12, 12, 3)

        def slope(self, t: float, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                x = x.requires_grad_() if x.is_leaf else x
                dx = self.net(torch.cat([x, torch.full_like(x[:, :1], t)], -1))
                trace = (torch.autograd.grad((dx * noise).sum(), x, create_graph=True)[0] * noise).sum(-1)
            return dx, -trace

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise, log = torch.randn_like(x).sign(), x.new_zeros(len(x))
            x = x.clone()
            for step in range(3):
                k1, l1 = self.slope(step / 3, x, noise)
                k2, l2 = self.slope(step / 3 + 1 / 6, x + k1 / 6, noise)
                x, log = x + k2 / 3, log + l2 / 3 + 0 * l1
            return (0.5 * x.square().sum(-1) + log).mean()

    return Field(), own, r(4, 3)


def autoregressive_flow() -> Any:
    class Masked(nn.Linear):
        def __init__(self, a: np.ndarray, b: np.ndarray) -> None:
            super().__init__(len(a), len(b))
            self.register_buffer("mask", torch.from_numpy((b[:, None] >= a[None]).astype(np.float64)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.mask.to(self.weight.dtype) * self.weight, self.bias)

    class Maf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            order, hidden = np.arange(4), np.arange(8) % 3
            out = np.concatenate([order - 1, order - 1])
            self.layers = nn.ModuleList(
                nn.Sequential(Masked(order, hidden), nn.ReLU(), Masked(hidden, out)) for _ in range(3)
            )
            self.mix = nn.ParameterList(torch.randn(4, 4) / 4 + torch.eye(4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log = x.new_zeros(len(x))
            for layer, mix in zip(self.layers, self.mix, strict=True):
                shift, scale = layer(x).chunk(2, -1)
                x, log = (x - shift) * (-scale.tanh()).exp(), log - scale.tanh().sum(-1)
                lower, upper = mix.tril(-1) + torch.eye(4, dtype=mix.dtype), mix.triu()
                x, log = x @ (lower @ upper).T, log + torch.linalg.slogdet(lower @ upper)[1]
            return (0.5 * x.square().sum(-1) - log).mean()

    return Maf(), own, r(4, 4)


def spline_flow() -> Any:
    class Spline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(mlp(2, 10, 2 * 9) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log = x.new_zeros(len(x))
            for i, net in enumerate(self.nets):
                keep, change = x.roll(i % 2, -1).chunk(2, -1) if i % 2 else x.chunk(2, -1)
                wide, high = net(keep).unflatten(-1, (2, 9)).split([5, 4], -1)
                wide, high = wide[..., :4].softmax(-1), high.softmax(-1)
                left, low = (F.pad(y.cumsum(-1), (1, 0)) for y in (wide, high))
                inside = (change > 0) & (change < 1)
                index = torch.searchsorted(left.detach()[..., 1:-1].contiguous(), change[..., None].detach()).clamp(
                    max=3
                )
                part = (change - left.gather(-1, index).squeeze(-1)) / wide.gather(-1, index).squeeze(-1)
                tall = high.gather(-1, index).squeeze(-1)
                new = torch.where(inside, low.gather(-1, index).squeeze(-1) + part * tall, change)
                slope = torch.where(inside, tall / wide.gather(-1, index).squeeze(-1), torch.ones_like(tall))
                x, log = torch.cat([keep, new], -1), log + slope.log().sum(-1)
            return (0.5 * x.square().sum(-1) - log).mean()

    return Spline(), own, torch.rand(4, 4, dtype=torch.float64)


def moving_codebook() -> Any:
    class VqVae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = mlp(6, 8, 8, 4), mlp(4, 8, 8, 6)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("count", torch.ones(5))
            self.register_buffer("total", self.codes.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.enc(x)
            index = torch.cdist(z, self.codes).argmin(-1)
            found = self.codes[index]
            if self.training:
                with torch.no_grad():
                    hot = F.one_hot(index, 5).to(z.dtype)
                    self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.total.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                    size = (self.count + 1e-3) / (self.count.sum() + 5e-3) * self.count.sum()
                    self.codes.copy_(self.total / size[:, None])
            through = z + (found - z).detach()
            return F.mse_loss(self.dec(through), x) + 0.25 * F.mse_loss(z, found.detach())

    return VqVae(), own, r(5, 6)


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
