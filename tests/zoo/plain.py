"""Plain: model families written out in torch alone, one of each kind that a person would train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

Family = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]]


def r(*shape: int) -> torch.Tensor:
    """Draw numbers of a batch."""
    return torch.randn(*shape, dtype=torch.float64)


def classes(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of what the model says of x against y."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean square of what the model gives."""
    return model(batch).square().mean()


class Residual(nn.Module):
    """A convolution beside which its input goes on."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)
        self.short = nn.Conv2d(a, b, 1) if a != b else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        y += self.short(x)
        return self.act(y)


def resnet() -> Any:
    net = nn.Sequential(Residual(3, 6), Residual(6, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    return net, classes, (r(3, 3, 8, 8), torch.tensor([0, 1, 3]))


def unet() -> Any:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (3, 4, 6, 8)
            self.down = nn.ModuleList(Residual(a, b) for a, b in zip(widths, widths[1:], strict=False))
            self.up = nn.ModuleList(
                nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths[1:], widths[2:], strict=False)
            )
            self.mix = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a in widths[1:-1])
            self.out = nn.Conv2d(4, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for i, down in enumerate(self.down):
                x = down(x if i == 0 else F.max_pool2d(x, 2))
                kept.append(x)
            kept.pop()
            for up, mix in zip(reversed(self.up), reversed(self.mix), strict=True):
                x = mix(torch.cat([up(x), kept.pop()], 1)).relu()
            return self.out(x)

    return UNet(), classes, (r(2, 3, 8, 8), torch.randint(0, 2, (2, 8, 8)))


def gan() -> Any:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 6), nn.Tanh())
            self.d = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 1))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        noise, real = batch
        fake = model.g(noise)
        model.d.eval()  # the power iteration of spectral norm would run three times
        judged = model.d(torch.cat([real, fake.detach(), fake]))
        true, false, fooled = judged.chunk(3)
        return F.softplus(-true).mean() + F.softplus(false).mean() + F.softplus(-fooled).mean()

    return Gan(), loss, (r(4, 4), r(4, 6))


def vae() -> Any:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 6)), nn.Linear(3, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, spread = self.enc(x).chunk(2, -1)
            z = mean + spread.exp() * torch.randn_like(spread)
            return F.mse_loss(self.dec(z), x) - 0.5 * (1 + 2 * spread - mean**2 - (2 * spread).exp()).mean()

    return Vae(), lambda m, b: m(b), r(4, 8)


def triplet() -> Any:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
    return net, lambda m, b: F.triplet_margin_loss(*(m(x) for x in b), margin=3.0), [r(3, 1, 8, 8) for _ in range(3)]


def attention_seq2seq() -> Any:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.enc = nn.Embedding(20, 6), nn.GRU(6, 6, batch_first=True, bidirectional=True)
            self.cell, self.query, self.out = nn.GRUCell(6 + 12, 6), nn.Linear(6, 12), nn.Linear(6, 20)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            memory, state = self.enc(self.embed(x))
            h, outs = state.sum(0), []
            for t in range(y.shape[1]):
                weights = torch.einsum("bd,btd->bt", self.query(h), memory).softmax(-1)
                h = self.cell(torch.cat([self.embed(y[:, t]), torch.einsum("bt,btd->bd", weights, memory)], -1), h)
                outs.append(h)
            return self.out(torch.stack(outs, 1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x, y[:, :-1]).flatten(0, 1), y[:, 1:].flatten(), ignore_index=0)

    return Seq2Seq(), loss, (torch.randint(1, 20, (2, 7)), torch.randint(0, 20, (2, 6)))


def torch_transformer() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.t, self.out = nn.Embedding(20, 8), nn.Transformer(8, 2, 2, 2, 16, 0.0), nn.Linear(8, 20)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(len(y), dtype=torch.float64)
            return self.out(self.t(self.embed(x), self.embed(y), tgt_mask=mask, src_key_padding_mask=(x == 0).t()))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = (part.t() for part in batch)
        return F.cross_entropy(model(x, y[:-1]).flatten(0, 1), y[1:].flatten())

    return Model(), loss, (torch.randint(0, 20, (2, 7)), torch.randint(1, 20, (2, 6)))


def mixer() -> Any:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 4)
            self.tokens = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.channels = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patch(x).flatten(2).mT
            for token, channel in zip(self.tokens, self.channels, strict=True):
                x = x + token(F.layer_norm(x, (8,)).mT).mT
                x = x + channel(F.layer_norm(x, (8,))).relu()
            return self.head(x.mean(1))

    return Mixer(), classes, (r(2, 3, 8, 8), torch.tensor([1, 2]))


def message_passing() -> Any:
    class Gnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))
            self.update = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            x, (source, target) = batch["x"], batch["edges"].t()
            for message, update in zip(self.message, self.update, strict=True):
                sent = message(torch.cat([x[source], x[target]], -1)).relu()
                total = torch.zeros_like(x).index_add_(0, target, sent)
                most = torch.full_like(x, -1e9).scatter_reduce(0, target[:, None].expand_as(sent), sent, "amax")
                x = x + update(torch.cat([total, most.clamp(min=-1)], -1)).tanh()
            return x.new_zeros(2, 6).index_add(0, batch["graph"], x)

    return Gnn(), square, {"x": r(8, 6), "edges": torch.randint(0, 8, (20, 2)), "graph": torch.arange(8) // 4}


def nerf() -> Any:
    class Nerf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(27 if i == 0 else 16 + 27 * (i == 2), 16) for i in range(4))
            self.density, self.colour = nn.Linear(16, 1), nn.Linear(16, 3)

        def forward(self, points: torch.Tensor) -> torch.Tensor:
            waves = [f(points * 2**k) for k in range(4) for f in (torch.sin, torch.cos)]
            e = h = torch.cat([points, *waves], -1)
            for i, layer in enumerate(self.layers):
                h = layer(torch.cat([h, e], -1) if i == 2 else h).relu()
            alpha = 1 - (-F.relu(self.density(h)).squeeze(-1)).exp()
            through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
            return ((alpha * through)[..., None] * self.colour(h).sigmoid()).sum(1)

    return Nerf(), square, r(3, 5, 3)


def flow() -> Any:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log_det = x.new_zeros(len(x))
            for i, net in enumerate(self.nets):
                a, b = x.split(3, -1) if i % 2 else x.flip(-1).split(3, -1)
                scale, shift = net(a).tanh().chunk(2, -1)
                x = torch.cat([a, b * scale.exp() + shift], -1)
                log_det += scale.sum(-1)
            return (0.5 * x.square().sum(-1) - log_det).mean()

    return Flow(), lambda m, b: m(b), r(4, 6)


def energy_and_forces() -> Any:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = nn.Linear(3, 8), nn.Linear(8, 1), nn.Linear(1, 1)

        def forward(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            position = position.clone().requires_grad_()
            energy = self.b(self.a(position).tanh()).sum()
            (force,) = torch.autograd.grad(-energy, position, create_graph=True)
            return self.scale(energy.view(1)), force * self.scale.weight[0]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        energy, force = model(batch)
        return energy.square().mean() + force.square().mean()

    return Potential(), loss, r(5, 3)


def hypernetwork() -> Any:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.make = nn.Linear(4, 4), nn.Linear(3, 20)

        def forward(self, batch: Any) -> torch.Tensor:
            x, task = batch
            weight, bias = self.make(task.mean(0)).split((16, 4))
            y = functional_call(self.base, {"weight": weight.view(4, 4), "bias": bias}, (x,))
            return self.base(y.relu()) + y

    return Hyper(), square, (r(5, 4), r(5, 3))


def ensemble_by_vmap() -> Any:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.w, self.b = nn.Linear(4, 4), nn.Parameter(r(3, 4, 2)), nn.Parameter(r(3, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).relu()
            each = torch.vmap(lambda w, b: h @ w + b)(self.w, self.b)
            return each.mean(0) + torch.func.grad(lambda h: h.square().sum())(h)[:, :2]

    return Ensemble(), square, r(5, 4)


def diffusion() -> Any:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.a, self.b = nn.Linear(8, 6), Residual(3, 6), nn.Conv2d(6, 3, 3, padding=1)
            self.register_buffer("alphas", torch.linspace(0.99, 0.01, 10, dtype=torch.float64))

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            angle = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(4, dtype=torch.float64) / 4)
            return self.b(self.a(x) + self.time(torch.cat([angle.sin(), angle.cos()], -1))[..., None, None])

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        t, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        a = model.alphas[t].view(-1, 1, 1, 1)
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    return Denoiser(), loss, r(3, 3, 8, 8)


def wavenet() -> Any:
    class Wavenet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.utils.parametrizations.weight_norm
            self.first, self.out = nn.Conv1d(1, 4, 1), nn.Conv1d(4, 2, 1)
            self.layers = nn.ModuleList(norm(nn.Conv1d(4, 8, 2, dilation=2**i)) for i in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, skips = self.first(x), 0
            for i, layer in enumerate(self.layers):
                y = F.glu(layer(F.pad(x, (2**i, 0))), 1)
                skips = skips + y
                x = x + y
            return self.out(skips.relu())

    return Wavenet(), square, r(2, 1, 12)


def spectral() -> Any:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.drop = nn.Linear(1, 4), nn.Linear(4, 1)
            self.w = nn.ParameterList(nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex128) / 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lift(x).mT
            for w in self.w:
                f = torch.fft.rfft(x)
                out = torch.zeros_like(f)
                out[..., :3] = torch.einsum("bim,iom->bom", f[..., :3], w)
                x = x + torch.fft.irfft(out, n=x.shape[-1]).relu()
            return self.drop(x.mT)

    return Spectral(), square, r(3, 8, 1)


def vector_quantised() -> Any:
    class Vq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.Linear(6, 4), nn.Linear(4, 6)
            self.register_buffer("codes", r(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.enc(x)
            index = torch.cdist(z, self.codes).argmin(-1)
            q = self.codes[index]
            with torch.no_grad():
                hits = F.one_hot(index, 8).to(z.dtype)
                mean = hits.t() @ z / hits.sum(0).clamp(min=1)[:, None]
                self.codes.copy_(torch.where(hits.sum(0)[:, None] > 0, 0.9 * self.codes + 0.1 * mean, self.codes))
            return F.mse_loss(self.dec(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q.detach())

    return Vq(), lambda m, b: m(b), r(5, 6)


def adaptive_steps() -> Any:
    class Act(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cell, self.halt = nn.Linear(4, 6), nn.GRUCell(6, 6), nn.Linear(6, 1)
            self.out = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            h, left, total = torch.zeros_like(x), x.new_ones(len(x), 1), 0
            for _ in range(6):
                h = self.cell(x, h)
                p = self.halt(h).sigmoid() * left
                total, left = total + p * h, left - p
                if (left < 0.2).all():
                    break
            return self.out(total + left * h)

    return Act(), square, r(4, 4)


def key_value_cache() -> Any:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.ModuleList(nn.Linear(6, 18) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, d = x.shape
            cache = [{"k": x.new_zeros(b, t, d), "v": x.new_zeros(b, t, d)} for _ in self.qkv]
            outs = []
            for i in range(t):
                y = x[:, i]
                for layer, kept in zip(self.qkv, cache, strict=True):
                    q, k, v = layer(y).chunk(3, -1)
                    kept["k"] = torch.cat([kept["k"][:, 1:], k[:, None]], 1)
                    kept["v"] = kept["v"].index_copy(1, torch.tensor([i]), v[:, None])
                    y = y + ((q[:, None] @ kept["k"].mT).softmax(-1) @ kept["v"]).squeeze(1)
                outs.append(y)
            return torch.stack(outs, 1)

    return Cached(), square, r(2, 4, 6)


def hard_examples() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        worst, index = each.topk(2)
        return worst.mean() + each[each > each.mean()].sum() + 0.0 * index.sum()

    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), loss, (r(5, 4), torch.randint(0, 3, (5,)))


def contrastive() -> Any:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)), nn.EmbeddingBag(20, 4)
            self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, batch: Any) -> torch.Tensor:
            a, b = F.normalize(self.image(batch[0]), dim=-1), F.normalize(self.text(batch[1]), dim=-1)
            scores = self.scale.exp() * a @ b.t()
            target = torch.arange(len(a), device=scores.device)
            return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2

    return Clip(), lambda m, b: m(b), (r(4, 6), torch.randint(0, 20, (4, 5)))


def teacher_and_student() -> Any:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
            self.teacher.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                target = self.teacher(x).softmax(-1)
            return F.kl_div(self.student(x).log_softmax(-1), target.clone(), reduction="batchmean")

    return Both(), lambda m, b: m(b), r(4, 4)


def dueling() -> Any:
    class Dueling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value, self.advantage = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x).relu_()
            a = self.advantage(h)
            return self.value(h) + a - a.mean(-1, keepdim=True)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        now, later, action, reward = batch
        with torch.no_grad():
            target = reward + 0.9 * model(later).max(-1).values
        policy = torch.distributions.Categorical(logits=model(now))
        taken = model(now).gather(-1, action[:, None]).squeeze(-1)
        return F.smooth_l1_loss(taken, target) - 0.01 * policy.entropy().mean()

    return Dueling(), loss, (r(5, 4), r(5, 4), torch.randint(0, 3, (5,)), r(5))


def checkpointed_blocks() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(3))
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=i == 1) if i else block(x)
            return self.head(x)

    return Model(), square, r(2, 5, 8)


def mixed_precision() -> Any:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(batch.float())
            mask = torch.ones(y.shape, dtype=y.dtype)
        return (y * mask).double().square().mean()

    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), loss, r(4, 4)


def deep_equilibrium() -> Any:
    class Deq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject, self.f, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inject(x)
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(20):
                    new = torch.tanh(0.5 * self.f(z) + x)
                    if torch.allclose(new, z, atol=1e-3):
                        break
                    z = new
            return self.out(torch.tanh(0.5 * self.f(z) + x))

    return Deq(), square, r(3, 4)


def lazy_and_scripted() -> Any:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    net = nn.Sequential(nn.LazyLinear(6), scripted, nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Linear(6, 2))
    net[0](r(1, 4).float())
    return net, square, r(3, 4)


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
