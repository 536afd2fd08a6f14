"""Research on shapes: points, graphs, trees, domains, patches that are hidden, and cells that are searched for."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

from tests.zoo.plain import Family, classes, r, square
from tests.zoo.research_vision import convs, own


@dataclass
class Cloud:
    xyz: torch.Tensor
    feature: torch.Tensor | None = None


def farthest_points() -> Any:
    class Abstraction(nn.Module):
        def __init__(self, a: int, b: int, count: int) -> None:
            super().__init__()
            self.mlp, self.count = nn.Sequential(nn.Linear(a + 3, b), nn.ReLU(), nn.Linear(b, b)), count

        def forward(self, cloud: Cloud) -> Cloud:
            xyz = cloud.xyz
            rows = torch.arange(len(xyz))
            far, at, picks = torch.full(xyz.shape[:2], 1e9).to(xyz), torch.zeros(len(xyz), dtype=torch.long), []
            for _ in range(self.count):
                picks.append(at)
                far = torch.minimum(far, (xyz - xyz[rows, at][:, None]).square().sum(-1))
                at = far.argmax(-1)
            centre = xyz[rows[:, None], torch.stack(picks, 1)]
            near = torch.cdist(centre, xyz).topk(4, largest=False).indices
            group = xyz[rows[:, None, None], near] - centre[:, :, None]
            if cloud.feature is not None:
                group = torch.cat([group, cloud.feature[rows[:, None, None], near]], -1)
            return Cloud(centre, self.mlp(group).amax(2))

    class PointNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 9))
            self.steps, self.head = nn.ModuleList([Abstraction(0, 8, 8), Abstraction(8, 8, 4)]), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            turn = self.turn(x).amax(1).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
            cloud = Cloud(x @ turn)
            for step in self.steps:
                cloud = step(cloud)
            assert cloud.feature is not None
            return self.head(cloud.feature.amax(1)), (turn @ turn.mT - torch.eye(3, dtype=x.dtype)).norm()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        said, straight = model(x)
        return F.cross_entropy(said, y) + 0.01 * straight

    return PointNet(), loss, (r(2, 16, 3), torch.randint(0, 3, (2,)))


def sparse_graph() -> Any:
    class Gcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.attend = nn.ParameterDict(
                {"left": nn.Parameter(torch.randn(6)), "right": nn.Parameter(torch.randn(6))}
            )

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            count = len(x)
            degree = torch.zeros(count, dtype=x.dtype).index_add_(
                0, edges[1], torch.ones(edges.shape[1], dtype=x.dtype)
            )
            weight = degree.clamp(min=1).rsqrt()
            adjacency = torch.sparse_coo_tensor(edges.flip(0), weight[edges[0]] * weight[edges[1]], (count, count))
            for layer in self.layers[:2]:
                x = x + torch.sparse.mm(adjacency, layer(x)).relu()
            h = self.layers[2](x)
            score = F.leaky_relu(h[edges[0]] @ self.attend["left"] + h[edges[1]] @ self.attend["right"], 0.2)
            top = torch.full((count,), -1e9).to(x).scatter_reduce(0, edges[1], score.detach(), "amax")
            share = (score - top[edges[1]]).exp()
            total = torch.zeros(count, dtype=x.dtype).index_add(0, edges[1], share)
            share = share / total[edges[1]].clamp(min=1e-9)
            return torch.zeros_like(h).index_add(0, edges[1], share[:, None] * h[edges[0]])

    return Gcn(), lambda m, b: m(*b).square().mean(), (r(8, 6), torch.randint(0, 8, (2, 20)))


def soft_trees() -> Any:
    class Forest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pick, self.at = nn.Parameter(torch.randn(4, 3, 6)), nn.Parameter(torch.randn(4, 3))
            self.leaf, self.norm = nn.Parameter(torch.randn(4, 8, 2)), nn.BatchNorm1d(6, affine=False)
            self.register_buffer("bits", torch.tensor(list(itertools.product((0.0, 1.0), repeat=3))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            feature = torch.einsum("bf,tdf->btd", self.norm(x), self.pick.softmax(-1))
            right = (2 * (feature - self.at)).sigmoid()[:, :, None]
            path = (right * self.bits + (1 - right) * (1 - self.bits)).prod(-1)
            return torch.einsum("btl,tlc->bc", path, self.leaf)

    return Forest(), classes, (r(6, 6), torch.randint(0, 2, (6,)))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        return -ctx.strength * slope, None


class Symmetric(nn.Module):
    """A square matrix made the same as its transpose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


def domain_adversary() -> Any:
    class Dann(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kind, self.domain = convs(3, 6, 6), nn.Linear(6, 3), nn.Linear(6, 2)
            self.mix = nn.Linear(6, 6)
            parametrize.register_parametrization(self.mix, "weight", Symmetric())
            self.steps = 0

        def forward(self, x: torch.Tensor, far: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            strength = 2 / (1 + math.exp(-0.1 * self.steps)) - 1 + 0.1
            h = self.mix(self.body(torch.cat([x, far])).mean((2, 3)))
            where = torch.arange(2).repeat_interleave(len(x))
            told = F.cross_entropy(self.domain(_Reverse.apply(h, strength)), where)
            return F.cross_entropy(self.kind(h[: len(x)]), y) + told

    return Dann(), lambda m, b: m(*b), (r(3, 3, 6, 6), r(3, 3, 6, 6), torch.randint(0, 3, (3,)))


def masked_patches() -> Any:
    class Mae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)  # noqa: E731
            self.patch, self.place = nn.Conv2d(3, 8, 2, 2), nn.Parameter(torch.randn(1, 16, 8))
            self.enc, self.dec = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), layer()
            self.hidden, self.out = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.patch(x).flatten(2).mT + self.place
            n, length, _ = h.shape
            order = torch.rand(n, length).argsort(1)
            back, kept = order.argsort(1), length // 4
            seen = h.gather(1, order[:, :kept, None].expand(-1, -1, 8))
            full = torch.cat([self.enc(seen), self.hidden.expand(n, length - kept, -1)], 1)
            full = self.dec(full.gather(1, back[..., None].expand(-1, -1, 8)) + self.place)
            goal = F.unfold(x, 2, stride=2).mT
            goal = (goal - goal.mean(-1, keepdim=True)) / (goal.var(-1, keepdim=True) + 1e-6).sqrt()
            mask = torch.ones(n, length).scatter_(1, order[:, :kept], 0).to(x)
            return ((self.out(full) - goal).square().mean(-1) * mask).sum() / mask.sum()

    return Mae(), own, r(2, 3, 8, 8)


def searched_cells() -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ops = nn.ModuleList(
                [nn.Identity(), nn.Conv2d(6, 6, 3, padding=1), nn.AvgPool2d(3, 1, 1), nn.Conv2d(6, 6, 1)]
            )

        def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            hard = F.gumbel_softmax(weights, hard=True)
            chosen = int(hard.argmax())
            return hard[chosen] * self.ops[chosen](x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.alpha = nn.Conv2d(3, 6, 1), nn.Parameter(torch.zeros(4, 4))
            self.cells, self.head = nn.ModuleList(Mixed() for _ in range(4)), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states = [self.stem(x)]
            for i, cell in enumerate(self.cells):
                states.append(cell(sum(states[-2:]), self.alpha[i]))
            return self.head(states[-1].mean((2, 3)))

    return Net(), classes, (r(2, 3, 6, 6), torch.randint(0, 3, (2,)))


def operators_of_functions() -> Any:
    class Fno(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 1, 1)
            self.local = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(3))
            self.waves = nn.ParameterList(torch.randn(2, 6, 6, 3, 3, dtype=torch.cfloat) / 6 for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.into(x)
            for wave, local in zip(self.waves, self.local, strict=True):
                spectrum = torch.fft.rfft2(h, norm="ortho")
                out = torch.zeros_like(spectrum)
                wave = wave.to(spectrum.dtype)
                out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], wave[0])
                out[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -3:, :3], wave[1])
                h = F.gelu(torch.fft.irfft2(out, s=h.shape[-2:], norm="ortho") + local(h))
            return self.out(h)

    return Fno(), square, r(2, 3, 8, 8)


FAMILIES: dict[str, Family] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__annotations__", {}) == {"return": "Any"}
}
