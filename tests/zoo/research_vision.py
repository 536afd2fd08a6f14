"""Research on images, graphs, tables and sets: detectors, matching, sampling, trees and fields, as papers' code."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import spectral_norm, weight_norm

from tests.zoo.plain import Family, classes, r


def convs(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in itertools.pairwise(widths))
    )


def own(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def set_matching() -> Any:
    class Detr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.query = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(5, 8))
            layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
            self.decoder, self.kind, self.box = nn.TransformerDecoder(layer, 2), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.decoder(self.query.expand(len(x), -1, -1), self.body(x).flatten(2).mT)
            return self.kind(h), self.box(h).sigmoid()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, targets = batch
        kinds, boxes = model(images)
        total = torch.zeros(())
        for kind, box, (label, place) in zip(kinds, boxes, targets, strict=True):
            with torch.no_grad():
                cost = torch.cdist(box, place, 1) - kind.softmax(-1)[:, label]
                order = min(
                    itertools.permutations(range(5), len(label)),
                    key=lambda p: sum(float(cost[q, i]) for i, q in enumerate(p)),
                )
            chosen = torch.tensor(order)
            goal = torch.full((5,), 3)
            goal[chosen] = label
            total = total + F.cross_entropy(kind, goal) + F.l1_loss(box[chosen], place)
        return total

    targets = [(torch.randint(0, 3, (n,)), torch.rand(n, 4, dtype=torch.float64)) for n in (2, 3)]
    return Detr(), loss, (r(2, 3, 8, 8), targets)


def hard_negatives() -> Any:
    class Ssd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([convs(3, 6, 6), nn.Sequential(nn.MaxPool2d(2), convs(6, 6, 6))])
            self.kinds = nn.ModuleList(nn.Conv2d(6, 2 * 3, 3, padding=1) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outs = []
            for stage, kind in zip(self.stages, self.kinds, strict=True):
                x = stage(x)
                outs.append(kind(x).permute(0, 2, 3, 1).reshape(len(x), -1, 3))
            return torch.cat(outs, 1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        each = F.cross_entropy(model(x).mT, y, reduction="none")
        positive = y > 0
        rank = each.detach().masked_fill(positive, 0).sort(1, descending=True)[1].sort(1)[1]
        kept = positive | (rank < 3 * positive.sum(1, keepdim=True))
        return each[kept].sum() / positive.sum().clamp(min=1)

    return Ssd(), loss, (r(2, 3, 8, 8), (torch.rand(2, 160) > 0.9).long() * torch.randint(1, 3, (2, 160)))


def proposals() -> Any:
    def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
        inside = (high - low).clamp(min=0).prod(-1)
        size = lambda t: (t[:, 2:] - t[:, :2]).prod(-1)  # noqa: E731
        return inside / (size(a)[:, None] + size(b) - inside)

    class TwoStage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.score, self.shift = convs(3, 6, 6), nn.Conv2d(6, 1, 1), nn.Conv2d(6, 4, 1)
            self.head = nn.Sequential(nn.Linear(6 * 4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            feature = self.body(x)
            score, shift = self.score(feature).flatten(1), self.shift(feature).flatten(2).mT.tanh()
            side = torch.arange(x.shape[-1], dtype=x.dtype)
            centre = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).flatten(0, 1)
            total = score.sigmoid().mean()
            for i in range(len(x)):
                boxes = torch.cat([centre - 2 + shift[i, :, :2], centre + 2 + shift[i, :, 2:]], -1)
                order, kept = score[i].topk(12).indices.tolist(), []
                far = overlap(boxes, boxes)
                while order and len(kept) < 4:
                    kept.append(order.pop(0))
                    order = [j for j in order if float(far[kept[-1], j]) < 0.3]
                for j in kept:
                    x0, y0, x1, y1 = (int(v) for v in boxes[j].round().clamp(0, x.shape[-1]).tolist())
                    crop = feature[i : i + 1, :, y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)]
                    said = self.head(F.adaptive_avg_pool2d(crop, 2).flatten(1))
                    total = total + F.cross_entropy(said, y[i : i + 1]) + boxes[j].square().mean() * 1e-3
            return total

    return TwoStage(), lambda m, b: m(*b), (r(2, 3, 8, 8), torch.randint(0, 3, (2,)))


def unpooled() -> Any:
    class SegNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.ModuleList([convs(3, 4), convs(4, 6)]), nn.ModuleList([convs(6, 4), convs(4, 3)])
            self.pool, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for down in self.down:
                x, index = self.pool(down(x))
                kept.append(index)
            for up in self.up:
                x = up(self.back(x, kept.pop()))
            return x

    return SegNet(), classes, (r(2, 3, 8, 8), torch.randint(0, 3, (2, 8, 8)))


def warped() -> Any:
    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(6))
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LocalResponseNorm(2), nn.LPPool2d(2, 2), nn.Flatten())
            self.head = nn.LazyLinear(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turn = self.where(x).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype)
            grid = F.affine_grid(turn, list(x.shape), align_corners=False)
            return self.head(self.body(F.grid_sample(x, grid, align_corners=False)))

    model = Warp()
    model(torch.zeros(1, 1, 8, 8))
    return model, classes, (r(3, 1, 8, 8), torch.randint(0, 3, (3,)))


def styled() -> Any:
    class Modulated(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.weight, self.style, self.noise = (
                nn.Parameter(torch.randn(b, a, 3, 3)),
                nn.Linear(4, a),
                nn.Parameter(torch.zeros(())),
            )

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            n, a, height, width = x.shape
            weight = self.weight * (self.style(w) + 1)[:, None, :, None, None]
            weight = weight * weight.square().sum((2, 3, 4), keepdim=True).add(1e-8).rsqrt()
            y = F.conv2d(x.reshape(1, n * a, height, width), weight.flatten(0, 1), padding=1, groups=n)
            return F.leaky_relu(y.view(n, -1, height, width) + self.noise * torch.randn(n, 1, height, width).to(x), 0.2)

    class Style(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 4))
            self.start, self.layers = (
                nn.Parameter(torch.randn(6, 4, 4)),
                nn.ModuleList(Modulated(6, 6) for _ in range(3)),
            )
            self.judge = nn.Sequential(spectral_norm(nn.Conv2d(6, 6, 3)), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1))
            self.register_buffer("length", torch.zeros(()))

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            w = self.map(z)
            x = self.start.expand(len(z), -1, -1, -1)
            for layer in self.layers:
                x = F.interpolate(layer(x, w), scale_factor=1.5, mode="bilinear")
            (slope,) = torch.autograd.grad((x * torch.randn_like(x)).sum(), w, create_graph=True)
            size = slope.square().sum(-1).sqrt()
            mean = self.length + 0.1 * (size.mean().detach() - self.length)
            self.length.copy_(mean)
            return F.softplus(-self.judge(x)).mean() + (size - mean).square().mean()

    model = Style()
    model.judge(torch.zeros(1, 6, 13, 13))
    return model, own, r(3, 4)


def cycled() -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        a, b = batch
        fake_b, fake_a = model["ab"](a), model["ba"](b)
        for judge in ("a", "b"):
            for p in model[judge].parameters():
                p.requires_grad = False
        fooled = (model["b"](fake_b) - 1).square().mean() + (model["a"](fake_a) - 1).square().mean()
        back = F.l1_loss(model["ba"](fake_b), a) + F.l1_loss(model["ab"](fake_a), b)
        for judge in ("a", "b"):
            for p in model[judge].parameters():
                p.requires_grad = True
        told = sum(
            (model[n](real) - 1).square().mean() + model[n](fake.detach()).square().mean()
            for n, real, fake in (("a", a, fake_a), ("b", b, fake_b))
        )
        return fooled + 10 * back + told

    make = lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))  # noqa: E731
    judge = lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 6, 4, 2)), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 1))  # noqa: E731
    return nn.ModuleDict({"ab": make(), "ba": make(), "a": judge(), "b": judge()}), loss, [r(2, 3, 8, 8), r(2, 3, 8, 8)]


def perceptual() -> Any:
    class Content(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.judge = convs(3, 6, 6, 3), convs(3, 6, 6, 6).requires_grad_(False)
            for layer in self.judge:
                layer.register_forward_hook(lambda module, args, out: vars(module).update(seen=[out]))

        def features(self, x: torch.Tensor) -> list[torch.Tensor]:
            self.judge(x)
            return [layer.seen.pop() for layer in self.judge]  # type: ignore[operator, union-attr]

        def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
            def gram(f: torch.Tensor) -> torch.Tensor:
                return torch.einsum("bchw,bdhw->bcd", f, f) / f[0].numel()

            with torch.no_grad():
                want = [gram(f) for f in self.features(style)]
                like = self.features(x)[1]
            made = self.features(self.net(x))
            styles = (F.mse_loss(gram(f), g) for f, g in zip(made, want, strict=True))
            return F.mse_loss(made[1], like) + sum(styles)

    return Content(), lambda m, b: m(*b), (r(2, 3, 6, 6), r(2, 3, 6, 6))


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
