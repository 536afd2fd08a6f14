"""Shelves, continued: diffusers, x-transformers, torch-geometric, monai and keras beyond the given zoo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.shelves import Built, collect, judged, lib, pixels, squares, told


def diffusers() -> Iterator[tuple[str, Callable[[], Built]]]:
    r = torch.randn
    steps = lambda: torch.tensor([10, 500])  # noqa: E731
    heads: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 4}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    image = lambda: {"hidden_states": r(2, 4, 8, 8), "timestep": steps()}  # noqa: E731
    worded = lambda: image() | {"encoder_hidden_states": r(2, 8, 32)}  # noqa: E731
    table: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
        "unet_condition": (
            "UNet2DConditionModel",
            {
                "sample_size": 8,
                "block_out_channels": (16, 32),
                "down_block_types": down,
                "up_block_types": up,
                "cross_attention_dim": 32,
                "norm_num_groups": 8,
                "attention_head_dim": 8,
                "layers_per_block": 1,
            },
            lambda: {"sample": r(2, 4, 8, 8), "timestep": steps(), "encoder_hidden_states": r(2, 8, 32)},
        ),
        "dit": (
            "DiTTransformer2DModel",
            heads | {"in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 1000, "norm_num_groups": 8},
            lambda: image() | {"class_labels": torch.tensor([1, 2])},
        ),
        "vq": (
            "VQModel",
            {
                "block_out_channels": (16, 32),
                "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2,
                "norm_num_groups": 8,
                "num_vq_embeddings": 16,
                "latent_channels": 4,
            },
            lambda: {"sample": r(2, 3, 16, 16)},
        ),
        "tiny_vae": (
            "AutoencoderTiny",
            {
                "encoder_block_out_channels": (8, 8),
                "decoder_block_out_channels": (8, 8),
                "num_encoder_blocks": (1, 1),
                "num_decoder_blocks": (1, 1),
            },
            lambda: {"sample": r(2, 3, 16, 16)},
        ),
        "unet3d": (
            "UNet3DConditionModel",
            {
                "sample_size": 8,
                "block_out_channels": (16, 32),
                "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
                "cross_attention_dim": 32,
                "norm_num_groups": 8,
                "attention_head_dim": 4,
                "layers_per_block": 1,
            },
            lambda: {"sample": r(2, 4, 2, 8, 8), "timestep": steps(), "encoder_hidden_states": r(2, 8, 32)},
        ),
        "prior": (
            "PriorTransformer",
            heads | {"embedding_dim": 16, "num_embeddings": 7, "additional_embeddings": 4},
            lambda: {
                "hidden_states": r(2, 16),
                "timestep": steps(),
                "proj_embedding": r(2, 16),
                "encoder_hidden_states": r(2, 7, 16),
            },
        ),
        "flux": (
            "FluxTransformer2DModel",
            {
                "in_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 16,
                "axes_dims_rope": (4, 4, 8),
            },
            lambda: {
                "hidden_states": r(2, 16, 4),
                "encoder_hidden_states": r(2, 8, 32),
                "pooled_projections": r(2, 16),
                "timestep": torch.tensor([0.1, 0.5]),
                "img_ids": torch.zeros(16, 3),
                "txt_ids": torch.zeros(8, 3),
            },
        ),
        "aura_flow": (
            "AuraFlowTransformer2DModel",
            {
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "num_mmdit_layers": 1,
                "num_single_dit_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "joint_attention_dim": 32,
                "caption_projection_dim": 32,
                "out_channels": 4,
                "pos_embed_max_size": 64,
            },
            worded,
        ),
        "cogvideo": (
            "CogVideoXTransformer3DModel",
            heads
            | {
                "in_channels": 4,
                "out_channels": 4,
                "text_embed_dim": 32,
                "time_embed_dim": 8,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 5,
                "max_text_seq_length": 8,
                "patch_size": 2,
            },
            lambda: {
                "hidden_states": r(1, 2, 4, 8, 8),
                "encoder_hidden_states": r(1, 8, 32),
                "timestep": torch.tensor([5]),
            },
        ),
        "control": (
            "ControlNetModel",
            {
                "block_out_channels": (16, 32),
                "down_block_types": down,
                "cross_attention_dim": 32,
                "norm_num_groups": 8,
                "attention_head_dim": 8,
                "layers_per_block": 1,
                "conditioning_embedding_out_channels": (8, 16),
            },
            lambda: {
                "sample": r(2, 4, 8, 8),
                "timestep": steps(),
                "encoder_hidden_states": r(2, 8, 32),
                "controlnet_cond": r(2, 3, 16, 16),
            },
        ),
    }
    for name, (kind, given, inputs) in table.items():
        yield name, lambda k=kind, g=given, i=inputs: (getattr(lib("diffusers"), k)(**g), squares, i())


def x_transformers() -> Iterator[tuple[str, Callable[[], Built]]]:
    options: dict[str, dict[str, Any]] = {
        "alibi": {"alibi_pos_bias": True},
        "qk_norm": {"attn_qk_norm": True},
        "sandwich": {"sandwich_norm": True},
        "macaron": {"macaron": True},
        "one_kv": {"attn_one_kv_head": True},
        "gated": {"attn_gate_values": True, "gate_residual": True},
        "residual_attn": {"residual_attn": True},
        "scalenorm": {"use_scalenorm": True},
        "relu_squared": {"ff_relu_squared": True},
        "shift": {"shift_tokens": 1},
        "dynamic_pos": {"dynamic_pos_bias": True},
        "sparse_topk": {"attn_sparse_topk": 4},
        "xpos": {"rotary_xpos": True},
        "sandwich_coef": {"sandwich_coef": 1},
        "hyper": {"num_residual_streams": 2},
        "forgetting": {"attn_data_dependent_alibi": True},
        "deepnorm": {"scale_residual": True},
    }

    def text(given: dict[str, Any]) -> Built:
        x = lib("x_transformers")
        layers = x.Decoder(dim=32, depth=4, heads=4, attn_dim_head=8, **given)
        net = x.AutoregressiveWrapper(x.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers))
        return net, told, {"x": torch.randint(0, 100, (2, 17))}

    for name, given in options.items():
        yield name, lambda g=given: text(g)

    def both() -> Built:
        x = lib("x_transformers")
        net = x.XTransformer(
            dim=32,
            enc_num_tokens=50,
            enc_depth=2,
            enc_heads=4,
            enc_max_seq_len=16,
            dec_num_tokens=50,
            dec_depth=2,
            dec_heads=4,
            dec_max_seq_len=16,
            tie_token_emb=True,
        )
        return net, told, {"src": torch.randint(0, 50, (2, 12)), "tgt": torch.randint(0, 50, (2, 9))}

    yield "encoder_decoder", both


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


FAMILIES = collect(diffusers, x_transformers, torch_geometric, monai, keras)
