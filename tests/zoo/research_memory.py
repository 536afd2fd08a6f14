"""Research on memory: routing, hashing, halting, and what a network writes down and reads again."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.plain import Family, classes, r, square
from tests.zoo.research_sequence import Texts, next_token, tokens


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
