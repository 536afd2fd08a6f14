"""Research on series, tables and pairs: forecasters, recommenders, decoders in the loss, weights that are pruned."""

from __future__ import annotations

from collections import OrderedDict
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.plain import Family, r, square
from tests.zoo.research_learning import mlp, own


def periods() -> Any:
    class TimesNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(2, 6), nn.Linear(6, 2)
            self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.into((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5))
            for block in self.blocks:
                spectrum = torch.fft.rfft(h, dim=1).abs()
                strength = spectrum.mean((0, 2))
                strength[0] = 0
                top = strength.topk(2).indices.detach().cpu().numpy()
                outs = []
                for frequency in top:
                    period = max(h.shape[1] // int(frequency), 1)
                    padded = F.pad(h.mT, (0, -h.shape[1] % period)).unflatten(-1, (-1, period))
                    outs.append(block(padded).flatten(2)[..., : h.shape[1]].mT)
                share = spectrum.mean(-1)[:, top].softmax(-1)
                h = h + (torch.stack(outs, -1) * share[:, None, None]).sum(-1)
            return self.out(h)

    return TimesNet(), square, r(3, 12, 2)


def residual_forecasts() -> Any:
    class NBeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(mlp(8, 10, 10, 3 + 3) for _ in range(4))
            grid = torch.linspace(0, 1, 12)
            self.register_buffer("basis", torch.stack([grid**k for k in range(3)]), persistent=False)

        def forward(self, x: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
            forecast, parts = torch.zeros(len(x), 4).to(x), []
            for block in self.blocks:
                back, ahead = block(x).chunk(2, -1)
                x = x - back @ self.basis[:, :8]
                parts.append(ahead @ self.basis[:, 8:])
                forecast += parts[-1]
            return OrderedDict(forecast=forecast, rest=x, parts=torch.stack(parts))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.smooth_l1_loss(out["forecast"], batch[1]) + 0.1 * out["rest"].abs().mean() + out["parts"].var(0).mean()

    return NBeats(), loss, (r(3, 8), r(3, 4))


def gated_forecast() -> Any:
    class Grn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 12), nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + F.glu(self.b(F.elu(self.a(x)))))

    class Tft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns = nn.ModuleDict({name: nn.Linear(1, 6) for name in ("price", "load", "wind")})
            self.pick, self.grns = nn.Linear(18, 3), nn.ModuleDict({n: Grn() for n in self.columns})
            self.past, self.ahead = nn.LSTM(6, 6, batch_first=True), nn.LSTM(6, 6, batch_first=True)
            self.attend, self.last = nn.MultiheadAttention(6, 2, batch_first=True), nn.ModuleList([Grn(), Grn()])
            self.out = nn.Linear(6, 3)

        def forward(self, **series: torch.Tensor) -> torch.Tensor:
            each = {n: self.grns[n](self.columns[n](x[..., None])) for n, x in series.items()}
            weight = self.pick(torch.cat(list(each.values()), -1)).softmax(-1)
            h = sum(w[..., None] * e for w, e in zip(weight.unbind(-1), each.values(), strict=True))
            past, state = self.past(h[:, :6])
            h = torch.cat([past, self.ahead(h[:, 6:], state)[0]], 1)
            mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
            seen, _ = self.attend(h, h, h, attn_mask=mask)
            return self.out(reduce(lambda y, grn: grn(y), self.last, h + seen)[:, 6:])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        goal = batch["load"][:, 6:, None]
        error = goal - model(**batch)
        level = torch.tensor([0.1, 0.5, 0.9]).to(error)
        return torch.maximum(level * error, (level - 1) * error).mean()

    return Tft(), loss, {name: r(3, 9) for name in ("price", "load", "wind")}


def sampled_forecast() -> Any:
    class DeepAr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.ModuleList([nn.LSTMCell(1, 6), nn.LSTMCell(6, 6)]), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().mean(1, keepdim=True).clamp(min=1e-3)
            x, states, total, value = x / scale, [None, None], x.new_zeros(()), x.new_zeros(len(x))
            for t in range(x.shape[1]):
                h = value[:, None]
                for i, cell in enumerate(self.cells):
                    states[i] = cell(h, states[i])
                    h = states[i][0]
                mean, spread = self.out(h).unbind(-1)
                belief = torch.distributions.StudentT(4.0, mean, F.softplus(spread) + 1e-2)
                total = total - belief.log_prob(x[:, t]).mean()
                value = x[:, t] if t < 4 else belief.sample()
            return total / x.shape[1]

    return DeepAr(), own, r(3, 7)


def click_through() -> Any:
    class Din(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(30, 4, padding_idx=0)
            self.tags = nn.EmbeddingBag(20, 4, mode="mean", padding_idx=0)
            self.attend, self.out = mlp(16, 8, 1, act=nn.PReLU), mlp(12, 8, 1, act=nn.PReLU)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            history, item = self.items(batch["history"]), self.items(batch["item"])
            pair = item[:, None].expand_as(history)
            score = self.attend(torch.cat([history, pair, history - pair, history * pair], -1)).squeeze(-1)
            score = score.masked_fill(batch["history"] == 0, float("-inf")).softmax(-1).nan_to_num()
            user = torch.einsum("bt,btd->bd", score, history)
            return self.out(torch.cat([user, item, self.tags(batch["tags"])], -1)).squeeze(-1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch), batch["clicked"])

    batch = {"history": torch.randint(0, 30, (4, 6)), "item": torch.randint(1, 30, (4,))}
    return Din(), loss, batch | {"tags": torch.randint(0, 20, (4, 3)), "clicked": torch.rand(4).round().double()}


def two_towers() -> Any:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = mlp(5, 8, 8, 4), nn.Sequential(nn.Embedding(20, 6), mlp(6, 8, 4))
            self.scale = nn.Parameter(torch.tensor(2.6))
            self.register_buffer("seen", torch.ones(20))

        def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.scale.clamp_(0, 2.5)
                self.seen.index_add_(0, item, torch.ones(len(item)).to(self.seen))
            a, b = F.normalize(self.user(user), dim=-1), F.normalize(self.item(item), dim=-1)
            logits = self.scale.exp() * a @ b.T - (self.seen[item] / self.seen.sum()).log()
            same = (item[:, None] == item) & ~torch.eye(len(item), dtype=torch.bool)
            logits = logits.masked_fill(same, -1e4)
            goal = torch.arange(len(item))
            return (F.cross_entropy(logits, goal) + F.cross_entropy(logits.T, goal)) / 2

    return Towers(), lambda m, b: m(*b), (r(5, 5), torch.randint(0, 20, (5,)))


def shared_softmax() -> Any:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.ModuleList([nn.Embedding(8, 6), nn.Embedding(22, 3)])
            self.lift, self.rnn = nn.Linear(3, 6, bias=False), nn.GRU(6, 6, 2, batch_first=True)
            self.out = nn.AdaptiveLogSoftmaxWithLoss(6, 30, [8, 20], div_value=2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rare = x >= 8
            h = torch.zeros(*x.shape, 6).to(self.lift.weight)
            h[~rare] = self.embed[0](x[~rare])
            h[rare] = self.lift(self.embed[1](x[rare] - 8))
            h, _ = self.rnn(h[:, :-1])
            return self.out(h.flatten(0, 1), x[:, 1:].flatten()).loss

    return Words(), own, torch.randint(0, 30, (3, 7))


def packed_encoder_and_greedy_decoder() -> Any:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.enc = nn.Embedding(20, 6, padding_idx=0), nn.LSTM(6, 6, 2, bidirectional=True)
            self.bridge, self.cell, self.out = nn.Linear(12, 12), nn.LSTMCell(12, 6), nn.Linear(6, 20)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            lengths = (x != 0).sum(1)
            packed = pack_padded_sequence(self.embed(x.T), lengths.cpu(), enforce_sorted=False)
            states, (last, _) = self.enc(packed)
            memory = pad_packed_sequence(states)[0].transpose(0, 1)[..., :6]
            state = tuple(
                part.contiguous() for part in self.bridge(last[-2:].transpose(0, 1).flatten(1)).tanh().chunk(2, -1)
            )
            token, outs, done = torch.ones(len(x), dtype=torch.long), [], torch.zeros(len(x), dtype=torch.bool)
            for _ in range(y.shape[1]):
                weight = (memory @ state[0][..., None]).softmax(1)
                state = self.cell(torch.cat([self.embed(token), (weight * memory).sum(1)], -1), state)
                outs.append(self.out(state[0]))
                token = outs[-1].argmax(-1).masked_fill(done, 0)
                done |= token == 2
                if done.all():
                    break
            said = torch.stack(outs, 1)
            return F.cross_entropy(said.mT, y[:, : said.shape[1]], ignore_index=0)

    x = torch.randint(1, 20, (3, 7))
    x[1, 5:], x[2, 3:] = 0, 0
    return Translate(), lambda m, b: m(*b), (x, torch.randint(1, 20, (3, 5)))


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
