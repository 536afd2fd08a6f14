"""Research on sequences: recurrences, scans, memories, caches and routing written by hand, as papers' code has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.plain import Family


def tokens(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape)


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of each next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Texts(nn.Module):
    """Embedding, a stack of blocks, and a head."""

    def __init__(self, blocks: list[nn.Module], width: int = 8, words: int = 20) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(words, width), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h))


def selective_scan() -> Any:
    class Mamba(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(8, 24), nn.Linear(12, 8)
            self.conv = nn.Conv1d(12, 12, 3, padding=2, groups=12)
            self.project, self.step = nn.Linear(12, 2 + 8), nn.Linear(2, 12)
            self.a_log = nn.Parameter(torch.arange(1.0, 5).log().repeat(12, 1))
            self.skip = nn.Parameter(torch.ones(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, gate = self.into(x).chunk(2, -1)
            x = F.silu(self.conv(x.mT)[..., : x.shape[1]].mT)
            delta, b, c = self.project(x).split([2, 4, 4], -1)
            delta = F.softplus(self.step(delta))
            decay = torch.einsum("btd,dn->btdn", delta, -self.a_log.exp()).exp()
            added = torch.einsum("btd,btn,btd->btdn", delta, b, x)
            state, outs = x.new_zeros(len(x), 12, 4), []
            for t in range(x.shape[1]):
                state = decay[:, t] * state + added[:, t]
                outs.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
            return self.out((torch.stack(outs, 1) + x * self.skip) * F.silu(gate))

    return Texts([Mamba() for _ in range(3)]), next_token, tokens(0, 20, 2, 8)


def state_space_by_fft() -> Any:
    class S4(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_dt, self.c = nn.Parameter(torch.rand(8) - 3), nn.Parameter(torch.randn(8, 4, 2))
            self.log_real, self.imag = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.arange(4.0).repeat(8, 1))
            self.d, self.mix = nn.Parameter(torch.randn(8)), nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            a = torch.complex(-self.log_real.exp(), self.imag) * self.log_dt.exp()[:, None]
            power = a[..., None] * torch.arange(length, device=x.device)
            c = torch.view_as_complex(self.c) * (a.exp() - 1) / a
            kernel = 2 * torch.einsum("hn,hnl->hl", c, power.exp()).real
            spectrum = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(x.mT, n=2 * length)
            y = torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT + self.d * x
            return F.glu(self.mix(F.gelu(y)))

    return Texts([S4() for _ in range(3)]), next_token, tokens(0, 20, 2, 9)


def retention() -> Any:
    class Retention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkvg, self.out, self.norm = nn.Linear(8, 32), nn.Linear(8, 8), nn.GroupNorm(2, 8)
            self.register_buffer("decay", (1 - 2 ** -torch.arange(5.0, 7)).log())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v, g = self.qkvg(x).chunk(4, -1)
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
            state, outs = x.new_zeros(b, 2, 4, 4), []
            for i in range(t):
                state = state * self.decay.exp()[:, None, None] + k[:, :, i, :, None] * v[:, :, i, None, :]
                outs.append((q[:, :, i, None] @ state)[:, :, 0])
            y = torch.stack(outs, 1).flatten(2)
            return self.out(self.norm(y.flatten(0, 1)).view(b, t, -1) * F.silu(g))

    return Texts([Retention() for _ in range(2)]), next_token, tokens(0, 20, 2, 7)


def delta_rule() -> Any:
    class Delta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.rate, self.out = nn.Linear(8, 24), nn.Linear(8, 1), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            k, rate = F.normalize(k, dim=-1), self.rate(x).sigmoid()
            memory, y = x.new_zeros(len(x), 8, 8), torch.empty_like(x)
            for t in range(x.shape[1]):
                error = v[:, t] - torch.einsum("bkv,bk->bv", memory, k[:, t])
                memory = memory + rate[:, t, None] * k[:, t, :, None] * error[:, None]
                y[:, t] = torch.einsum("bkv,bk->bv", memory, q[:, t])
            return self.out(y)

    return Texts([Delta() for _ in range(3)]), next_token, tokens(0, 20, 2, 7)


def rotary_complex_and_cache() -> Any:
    @dataclass
    class Cache:
        keys: dict[int, torch.Tensor] = field(default_factory=dict)
        values: dict[int, torch.Tensor] = field(default_factory=dict)

        def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if layer in self.keys:
                k, v = torch.cat([self.keys[layer], k], 2), torch.cat([self.values[layer], v], 2)
            self.keys[layer], self.values[layer] = k, v
            return k, v

    def rotate(x: torch.Tensor, start: int) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        angle = torch.outer(torch.arange(start, start + x.shape[2]), 100 ** -torch.linspace(0, 1, 2)).to(x.dtype)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    class Attention(nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.layer, self.q, self.kv, self.out = layer, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, cache: Cache, start: int) -> torch.Tensor:
            q = rotate(self.q(x).unflatten(-1, (2, 4)).transpose(1, 2), start)
            k, v = self.kv(x).unflatten(-1, (2, 1, 4)).permute(2, 0, 3, 1, 4)
            k, v = cache.update(self.layer, rotate(k, start), v)
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            return self.out(y.transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
            self.layers = nn.ModuleList(Attention(i) for i in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache, outs = Cache(), []
            for start in range(0, x.shape[1], 4):
                h = self.embed(x[:, start : start + 4])
                for layer in self.layers:
                    h = h + layer(h, cache, start)
                outs.append(self.head(h))
            return torch.cat(outs, 1)

    return Model(), next_token, tokens(0, 20, 2, 9)


def segments_with_memory() -> Any:
    class Xl(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
            self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))

        def forward(
            self, x: torch.Tensor, memory: list[torch.Tensor] | None
        ) -> tuple[torch.Tensor, list[torch.Tensor]]:
            h, kept = self.embed(x), []
            for i, layer in enumerate(self.layers):
                kept.append(h.detach())
                context = h if memory is None else torch.cat([memory[i], h], 1)
                h = h + layer(h, context, context, need_weights=False)[0]
            return self.head(h), kept

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        memory, total = None, torch.zeros(())
        for piece in batch.split(5, 1):
            said, memory = model(piece[:, :-1], memory)
            total = total + F.cross_entropy(said.flatten(0, 1), piece[:, 1:].flatten())
        return total

    return Xl(), loss, tokens(0, 20, 2, 10)


def halting_by_sum() -> Any:
    class Universal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.halt, self.head = nn.Linear(8, 1), nn.Linear(8, 20)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.embed(x)
            total, left, out = h.new_zeros(h.shape[:2]), torch.ones_like(h[..., 0]), torch.zeros_like(h)
            for _ in range(6):
                p = self.halt(h).squeeze(-1).sigmoid()
                p = torch.where(total + p > 0.95, left, p)
                out, total, left = out + p[..., None] * h, total + p, left - p
                if bool((total > 0.95).all()):
                    break
                h = self.block(h)
            return self.head(out), left.mean()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        said, ponder = model(batch[:, :-1])
        return F.cross_entropy(said.flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * ponder

    return Universal(), loss, tokens(0, 20, 2, 6)


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
