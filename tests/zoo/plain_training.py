"""Plain training: losses and tricks that researchers write, in torch alone: teachers, banks, penalties, inner loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.plain import r, square
from tests.zoo.plain_loops import own

Family = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]]


def mlp(*widths: int) -> nn.Sequential:
    """Make a plain network."""
    layers = [part for a, b in zip(widths, widths[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def gradient_penalty() -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        real, noise = batch
        fake = model["g"](noise)
        mixed = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(model["d"](mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        return model["d"](fake).mean() - model["d"](real).mean() + 10 * penalty

    return nn.ModuleDict({"g": mlp(3, 8, 8, 4), "d": mlp(4, 8, 8, 1)}), loss, (r(4, 4), r(4, 3))


def inner_loop() -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        x, y, x2, y2 = batch
        weights = dict(model.head.named_parameters())
        h = model.body(x)
        for _ in range(2):
            inner = F.mse_loss(functional_call(model.head, weights, (h,)), y)
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(model.head, weights, (model.body(x2),)), y2)

    class Maml(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(3, 8, 8, 6), mlp(6, 6, 2)

    return Maml(), loss, (r(4, 3), r(4, 2), r(4, 3), r(4, 2))


def memory_bank() -> Any:
    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = mlp(6, 8, 8, 4)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("bank", F.normalize(r(8, 4), dim=-1))
            self.register_buffer("place", torch.zeros((), dtype=torch.int64))

        def forward(self, batch: Any) -> torch.Tensor:
            a, b = batch
            q = F.normalize(self.query(a), dim=-1)
            with torch.no_grad():
                for p, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    k.data.mul_(0.9).add_(p.data, alpha=0.1)
                k = F.normalize(self.key(b), dim=-1)
            scores = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.bank.clone().t()], 1)
            with torch.no_grad():
                start = int(self.place)
                self.bank[start : start + len(k)] = k
                self.place.fill_((start + len(k)) % 8)
            return F.cross_entropy(scores / 0.1, torch.zeros(len(a), dtype=torch.int64))

    return Moco(), own, (r(4, 6), r(4, 6))


def moving_teacher() -> Any:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.predict = mlp(5, 8, 8, 4), mlp(4, 6, 4)
            self.teacher = torch.optim.swa_utils.AveragedModel(self.student)

        def forward(self, batch: Any) -> torch.Tensor:
            a, b = batch
            with torch.no_grad():
                goals = self.teacher(b), self.teacher(a)
            told = self.predict(self.student(a)), self.predict(self.student(b))
            return sum(2 - 2 * F.cosine_similarity(t, g).mean() for t, g in zip(told, goals, strict=True))

    return Mean(), own, (r(4, 5), r(4, 5))


def ensemble_of_modules() -> Any:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.members = mlp(4, 8, 6), nn.ModuleList(mlp(6, 6, 2) for _ in range(3))
            self.base = copy.deepcopy(self.members[0]).to("meta")
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            return torch.stack([member(h) for member in self.members]).mean(0)

    net = Ensemble()
    del net.base
    return net, square, r(3, 4)


def stacked_ensemble() -> Any:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            members = [mlp(6, 6, 2) for _ in range(3)]
            params, _ = stack_module_state(members)  # type: ignore[arg-type]
            self.stacked = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(p.detach()) for n, p in params.items()})
            self.names = list(params)
            self.body = mlp(4, 8, 6)
            self.__dict__["base"] = members[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            params = {name: self.stacked[name.replace(".", "_")] for name in self.names}
            base = self.__dict__["base"]
            return vmap(lambda p: functional_call(base, p, (h,)))(params).mean(0)

    return Stacked(), square, r(3, 4)


def jacobian_penalty() -> Any:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(3, 6, 6), mlp(6, 6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(self.body(x))
            slopes = torch.func.vmap(torch.func.jacrev(self.head))(self.body(x))
            return y.square().mean() + 0.1 * slopes.square().mean()

    return Smooth(), own, r(3, 3)


def multi_task() -> Any:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(6, 8, 8)
            self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 1), "c": nn.Linear(8, 4)})
            self.weights = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.body(x)
            return {name: head(h) for name, head in self.heads.items()}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out = model(batch["x"])
        each = torch.stack(
            [
                F.cross_entropy(out["a"], batch["a"]),
                F.huber_loss(out["b"].squeeze(-1), batch["b"]),
                F.binary_cross_entropy_with_logits(out["c"], batch["c"]),
            ]
        )
        return (each * (-model.weights).exp() + model.weights).sum()

    batch = {"x": r(4, 6), "a": torch.randint(0, 3, (4,)), "b": r(4), "c": torch.rand(4, 4, dtype=torch.float64)}
    return Tasks(), loss, batch


def policy_ratio() -> Any:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.value = mlp(4, 8, 8), nn.Linear(8, 2), nn.Linear(8, 1)
            self.spread = nn.Parameter(torch.zeros(2))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        h = model.body(batch["obs"])
        policy = torch.distributions.Normal(model.mean(h), model.spread.exp())
        ratio = (policy.log_prob(batch["act"]).sum(-1) - batch["old"]).exp()
        gain = batch["adv"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        value = F.mse_loss(model.value(h).squeeze(-1), batch["ret"])
        return 0.5 * value - surrogate - 0.01 * policy.entropy().sum(-1).mean()

    return Agent(), loss, {"obs": r(6, 4), "act": r(6, 2), "old": r(6), "adv": r(6), "ret": r(6)}


def preference_pairs() -> Any:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(12, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
            self.out = nn.Linear(8, 12, bias=False)
            self.out.weight = self.net[0].weight  # type: ignore[assignment]
            self.reference = copy.deepcopy(self.net).requires_grad_(False)

    def said(net: Any, out: Any, tokens: torch.Tensor) -> torch.Tensor:
        logs = out(net(tokens[:, :-1])).log_softmax(-1)
        return logs.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            before = [said(model.reference, model.out, tokens) for tokens in batch]
        now = [said(model.net, model.out, tokens) for tokens in batch]
        return -F.logsigmoid(0.1 * (now[0] - before[0] - now[1] + before[1])).mean()

    return Policy(), loss, (torch.randint(0, 12, (3, 6)), torch.randint(0, 12, (3, 6)))


def reversible() -> Any:
    class Couple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, f: Any, g: Any, *weights: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            with torch.no_grad():
                a = a + f(b)
                b = b + g(a)
            ctx.f, ctx.g, ctx.weights = f, g, weights
            ctx.save_for_backward(torch.cat([a, b], -1))
            return torch.cat([a, b], -1)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (y,) = ctx.saved_tensors
            a2, b2 = y.chunk(2, -1)
            with torch.no_grad():
                b = b2 - ctx.g(a2)
                a = a2 - ctx.f(b)
            with torch.enable_grad():
                x = torch.cat([a, b], -1).requires_grad_()
                p, q = x.chunk(2, -1)
                p = p + ctx.f(q)
                out = torch.cat([p, q + ctx.g(p)], -1)
                slopes = torch.autograd.grad(out, (x, *ctx.weights), grad)
            return (slopes[0], None, None, *slopes[1:])

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.ModuleList(nn.ModuleList([mlp(3, 5, 3), mlp(3, 5, 3)]) for _ in range(3))
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for f, g in self.pairs:  # type: ignore[misc]
                x = Couple.apply(x, f, g, *f.parameters(), *g.parameters())
            return self.head(x)

    return Reversible(), square, r(3, 6)


def checkpointed_sequence() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.head = nn.Linear(4, 6), mlp(6, 6, 6, 6, 6), nn.Linear(6, 2)
            self.cross = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint_sequential(self.body, 2, self.first(x), use_reentrant=False)
            x = x + checkpoint(lambda q: self.cross(q, q, q, need_weights=False)[0], x, use_reentrant=False)
            return self.head(x)

    return Model(), square, r(2, 5, 4)


def adversarial_step() -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        plain = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(plain, x, retain_graph=True)
        return plain + F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)

    return mlp(4, 8, 8, 3), loss, (r(4, 4), torch.randint(0, 3, (4,)))


def score_matching() -> Any:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(5, 8, 8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            level = torch.rand(len(x), 1, dtype=x.dtype) + 0.1
            noise = torch.randn_like(x)
            return (self.net(torch.cat([x + level * noise, level.log()], 1)) * level + noise).square().sum(1).mean()

    return Score(), own, r(5, 4)


def distilled_layers() -> Any:
    class Hint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).requires_grad_(False)
            self.student = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            for layer in self.teacher:
                layer.register_forward_hook(lambda module, args, out: setattr(module, "kept", out))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x
            with torch.no_grad():
                for layer in self.teacher:
                    h = layer(h).relu()
            total = x.new_zeros(())
            for i, layer in enumerate(self.student):
                x = layer(x).relu()
                total = total + F.mse_loss(x, self.teacher[2 * i + 1].kept)
            return total + F.mse_loss(x, h)

    return Hint(), own, r(4, 6)


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
