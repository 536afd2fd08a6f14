"""Shelves of science: torch-geometric, monai and keras beyond the given zoo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.shelves import Built, collect, judged, lib, pixels, squares, told


def torch_geometric() -> Iterator[tuple[str, Callable[[], Built]]]:
    convs: dict[str, Callable[[Any], Any]] = {
        "cheb": lambda g: g.ChebConv(8, 8, 2),
        "sage": lambda g: g.SAGEConv(8, 8),
        "graph": lambda g: g.GraphConv(8, 8),
        "tag": lambda g: g.TAGConv(8, 8, 2),
        "arma": lambda g: g.ARMAConv(8, 8),
        "sg": lambda g: g.SGConv(8, 8, 2),
        "appnp": lambda g: g.APPNP(3, 0.1),
        "gatv2": lambda g: g.GATv2Conv(8, 4, heads=2),
        "transformer": lambda g: g.TransformerConv(8, 4, heads=2),
        "gated": lambda g: g.GatedGraphConv(8, 2),
        "res_gated": lambda g: g.ResGatedGraphConv(8, 8),
        "mf": lambda g: g.MFConv(8, 8),
        "le": lambda g: g.LEConv(8, 8),
        "cluster": lambda g: g.ClusterGCNConv(8, 8),
        "gen": lambda g: g.GENConv(8, 8),
        "film": lambda g: g.FiLMConv(8, 8),
        "eg": lambda g: g.EGConv(8, 8, num_heads=2),
        "general": lambda g: g.GeneralConv(8, 8),
        "edge": lambda g: g.EdgeConv(nn.Sequential(nn.Linear(16, 8), nn.ReLU())),
        "gin": lambda g: g.GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        "ssg": lambda g: g.SSGConv(8, 8, 0.1),
    }

    class Net(nn.Module):
        def __init__(self, conv: Callable[[Any], Any], pool: str) -> None:
            super().__init__()
            g = lib("torch_geometric.nn")
            self.convs = nn.ModuleList(conv(g) for _ in range(3))
            self.norm, self.out = g.GraphNorm(8), nn.Linear(8, 3)
            self.pool = g.TopKPooling(8) if pool == "topk" else g.SAGPooling(8) if pool == "sag" else None
            self.read = g.SoftmaxAggregation(learn=True) if pool == "softmax" else g.MeanAggregation()

        def forward(self, batch: Any) -> torch.Tensor:
            x, edges, graph = batch["x"], batch["edges"], batch["graph"]
            for conv in self.convs:
                x = x + conv(x, edges).relu()
            x = self.norm(x, graph)
            if self.pool is not None:
                x, edges, _, graph, _, _ = self.pool(x, edges, batch=graph)
            return F.cross_entropy(self.out(self.read(x, graph, dim_size=2)), batch["y"])

    def net(conv: Callable[[Any], Any], pool: str) -> Built:
        data = {"x": torch.randn(12, 8), "edges": torch.randint(0, 6, (2, 30)), "graph": torch.arange(12) // 6}
        data["edges"][:, 15:] += 6
        return Net(conv, pool), lambda m, b: m(b), data | {"y": torch.randint(0, 3, (2,))}

    for number, (name, conv) in enumerate(convs.items()):
        pool = ("", "topk", "softmax", "sag")[number % 4]
        yield f"{name} {pool}".strip(), lambda c=conv, p=pool: net(c, p)

    yield (
        "set2set",
        lambda: (
            lib("torch_geometric.nn").Set2Set(4, 3),
            lambda m, b: m(*b).square().mean(),
            (torch.randn(6, 4), torch.arange(6) // 3),
        ),
    )


def monai() -> Iterator[tuple[str, Callable[[], Built]]]:
    nets = lambda: lib("monai.networks.nets")  # noqa: E731
    yield "segresnet", pixels(lambda: nets().SegResNet(3, 8, 1, 3, blocks_down=(1, 1, 1), blocks_up=(1, 1)), 16, 3, 1)
    yield (
        "dynunet",
        pixels(lambda: nets().DynUNet(3, 1, 3, [3] * 4, [1, 2, 2, 2], [2, 2, 2], filters=[8, 8, 16, 16]), 32, 3, 1),
    )
    yield (
        "swin_unetr",
        pixels(
            lambda: nets().SwinUNETR(
                1, 3, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), spatial_dims=2
            ),
            64,
            2,
            1,
        ),
    )
    yield "basic_unet", pixels(lambda: nets().BasicUNet(2, 1, 3, (8, 8, 16, 16, 16, 8)), 32, 2, 1)
    yield "unet_plus_plus", pixels(lambda: nets().BasicUNetPlusPlus(2, 1, 3, (8, 8, 16, 16, 16, 8)), 32, 2, 1)
    yield (
        "flexible_unet",
        pixels(lambda: nets().FlexibleUNet(3, 3, "resnet10", decoder_channels=(32, 16, 16, 8, 8)), 64),
    )
    yield (
        "mednext",
        pixels(
            lambda: nets().MedNeXt(2, 8, 1, 3, blocks_down=(1, 1, 1, 1), blocks_bottleneck=1, blocks_up=(1, 1, 1, 1)),
            32,
            2,
            1,
        ),
    )
    yield (
        "densenet",
        lambda: (
            nets().DenseNet(2, 1, 10, block_config=(1, 1, 1)),
            judged,
            {"x": torch.randn(2, 1, 32, 32), "y": torch.randint(0, 10, (2,))},
        ),
    )
    yield (
        "autoencoder_kl",
        lambda: (
            nets().AutoencoderKL(
                2,
                1,
                1,
                num_res_blocks=(1, 1),
                channels=(8, 16),
                attention_levels=(False, True),
                norm_num_groups=8,
                latent_channels=4,
            ),
            squares,
            {"x": torch.randn(2, 1, 16, 16)},
        ),
    )


def keras() -> Iterator[tuple[str, Callable[[], Built]]]:
    class Wrapped(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.net(x, training=True), y)

    def built(make: Callable[[Any], Any], x: torch.Tensor) -> Built:
        k = lib("keras")
        k.utils.clear_session()
        k.utils.set_random_seed(int(torch.initial_seed()))
        return Wrapped(make(k)), told, {"x": x, "y": torch.randint(0, 10, (len(x),))}

    def lstm(k: Any) -> Any:
        la = k.layers
        return k.Sequential(
            [la.Input((12,)), la.Embedding(100, 16), la.LSTM(16, return_sequences=True), la.LSTM(16), la.Dense(10)]
        )

    def functional(k: Any) -> Any:
        la, start = k.layers, k.Input((16, 16, 3))
        h = la.Conv2D(8, 3, padding="same")(start)
        for _ in range(3):
            h = la.Add()([h, la.Conv2D(8, 3, padding="same")(la.ReLU()(la.LayerNormalization()(h)))])
        return k.Model(start, la.Dense(10)(la.GlobalAveragePooling2D()(h)))

    def attention(k: Any) -> Any:
        la, start = k.layers, k.Input((8, 16))
        h = la.LayerNormalization()(start + la.MultiHeadAttention(2, 8)(start, start))
        return k.Model(start, la.Dense(10)(la.GlobalAveragePooling1D()(h + la.Dense(16, activation="gelu")(h))))

    yield "lstm", lambda: built(lstm, torch.randint(0, 100, (4, 12)).float())
    yield "functional", lambda: built(functional, torch.randn(2, 16, 16, 3))
    yield "attention", lambda: built(attention, torch.randn(2, 8, 16))


FAMILIES = collect(torch_geometric, monai, keras)
