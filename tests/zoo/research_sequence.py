"""Research on sequences: recurrences, scans, memories, caches and routing written by hand, as papers' code has them."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.plain import Family, classes, r, square


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


def mixture_of_depths() -> Any:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.block = nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.router(x).squeeze(-1)
            top, index = weight.topk(x.shape[1] // 2, sorted=False)
            index = index.sort(-1).values[..., None].expand(-1, -1, 8)
            y = self.block(x.gather(1, index)) * top.sigmoid()[..., None]
            return torch.zeros_like(x).scatter_add(1, index, y)

    return Texts([Depth() for _ in range(4)]), next_token, tokens(0, 20, 2, 9)


def experts_with_capacity() -> Any:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 12) / 3)
            self.down, self.balance = nn.Parameter(torch.randn(3, 12, 8) / 3), torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(0, 1)
            probability = self.gate(flat).softmax(-1)
            chosen = F.one_hot(probability.argmax(-1), 3)
            place = (chosen.cumsum(0) - 1) * chosen
            room = math.ceil(len(flat) / 3) + 1
            kept = chosen * (place < room)
            send = kept[..., None] * F.one_hot(place.clamp(max=room - 1), room)
            into = torch.einsum("nec,nd->ecd", send.to(x.dtype), flat)
            made = torch.bmm(torch.bmm(into, self.up).relu(), self.down)
            self.balance = 3 * (chosen.to(x.dtype).mean(0) * probability.mean(0)).sum()
            weights = send * probability[..., None]
            return torch.einsum("nec,ecd->nd", weights, made).view_as(x)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return next_token(model, batch) + 0.01 * sum(block.balance for block in model.blocks)

    return Texts([Switch() for _ in range(3)]), loss, tokens(0, 20, 2, 7)


def hashed_attention() -> Any:
    class Lsh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qk, v = self.qk(x), self.v(x)
            plane = torch.randn(8, 2, dtype=x.dtype)
            turned = qk.detach() @ plane
            bucket = torch.cat([turned, -turned], -1).argmax(-1) * x.shape[1] + torch.arange(x.shape[1])
            order = bucket.argsort(-1)
            back = order.argsort(-1)
            qk, v = (y.gather(1, order[..., None].expand_as(y)).unflatten(1, (-1, 4)) for y in (qk, v))
            look = torch.cat([qk, qk.roll(1, 1)], 2)
            weights = (qk @ F.normalize(look, dim=-1).mT).softmax(-1)
            y = (weights @ torch.cat([v, v.roll(1, 1)], 2)).flatten(1, 2)
            return y.gather(1, back[..., None].expand_as(y))

    return Texts([Lsh() for _ in range(3)]), next_token, tokens(0, 20, 2, 9)


def neural_turing_machine() -> Any:
    class Ntm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.control, self.out = nn.LSTMCell(4 + 6, 8), nn.Linear(8, 6 + 1 + 1 + 6 + 6), nn.Linear(14, 4)
            self.start = nn.Parameter(torch.randn(5, 6) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory, read, state, outs = self.start.expand(len(x), -1, -1), x.new_zeros(len(x), 6), None, []
            for t in range(x.shape[1]):
                state = self.cell(torch.cat([x[:, t], read], -1), state)
                key, strength, gate, erase, add = self.control(state[0]).split([6, 1, 1, 6, 6], -1)
                near = F.cosine_similarity(memory, key[:, None], -1) * F.softplus(strength)
                weight = near.softmax(-1)[..., None]
                memory = (
                    memory * (1 - weight * erase.sigmoid()[:, None]) + gate.sigmoid()[:, None] * weight * add[:, None]
                )
                read = (weight * memory).sum(1)
                outs.append(self.out(torch.cat([state[0], read], -1)))
            return torch.stack(outs, 1)

    return Ntm(), square, r(2, 6, 4)


Node = namedtuple("Node", "word left right", defaults=(None, None))


def tree_lstm() -> Any:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.leaf, self.join = nn.Embedding(20, 6), nn.Linear(6, 12), nn.Linear(12, 30)
            self.out = nn.Linear(6, 3)

        def visit(self, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
            if node.left is None:
                o, c = self.leaf(self.embed(torch.tensor([node.word]))).chunk(2, -1)
                return o.sigmoid() * c.tanh(), c
            (h1, c1), (h2, c2) = self.visit(node.left), self.visit(node.right)
            i, f1, f2, o, u = self.join(torch.cat([h1, h2], -1)).chunk(5, -1)
            c = i.sigmoid() * u.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
            return o.sigmoid() * c.tanh(), c

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            trees = [Node(0, Node(0, Node(a), Node(b)), Node(0, Node(c), Node(d))) for a, b, c, d in x.tolist()]
            return self.out(torch.cat([self.visit(tree)[0] for tree in trees]))

    return Tree(), classes, (tokens(0, 20, 3, 4), tokens(0, 3, 3))


def conditional_random_field() -> Any:
    class Crf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(20, 6), nn.LSTM(6, 4, batch_first=True, bidirectional=True)
            self.score, self.step = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            score = self.score(self.rnn(self.embed(x))[0])
            mask = x != 0
            alpha = score[:, 0]
            for t in range(1, x.shape[1]):
                ahead = (alpha[..., None] + self.step + score[:, t, None]).logsumexp(1)
                alpha = torch.where(mask[:, t, None], ahead, alpha)
            emitted = score.gather(-1, y[..., None]).squeeze(-1)
            steps = self.step[y[:, :-1], y[:, 1:]]
            gold = emitted[:, 0] + ((emitted[:, 1:] + steps) * mask[:, 1:]).sum(1)
            return (alpha.logsumexp(-1) - gold).mean()

    x = tokens(1, 20, 3, 7)
    x[1, 5:] = 0
    return Crf(), lambda m, b: m(*b), (x, tokens(0, 4, 3, 7))


def dropped_recurrent_weights() -> Any:
    class Awd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cells = nn.Embedding(20, 6), nn.ModuleList(nn.GRUCell(6, 6) for _ in range(3))
            self.head = nn.Linear(6, 20)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            words = F.dropout(torch.ones(20, 1, dtype=self.embed.weight.dtype), 0.2) * self.embed.weight
            h = F.embedding(x, words)
            for cell in self.cells:
                weight = F.dropout(cell.weight_hh, 0.3)
                state, outs = h.new_zeros(len(x), 6), []
                for t in range(x.shape[1]):
                    state = torch.gru_cell(h[:, t], state, cell.weight_ih, weight, cell.bias_ih, cell.bias_hh)
                    outs.append(state)
                h = torch.stack(outs, 1)
            return self.head(h), (h[:, 1:] - h[:, :-1]).square().mean()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        said, change = model(batch[:, :-1])
        return F.cross_entropy(said.flatten(0, 1), batch[:, 1:].flatten()) + change

    return Awd(), loss, tokens(0, 20, 2, 6)


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
