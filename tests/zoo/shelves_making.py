"""Shelves of what makes pictures and text: diffusers and x-transformers beyond the given zoo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.zoo.shelves import Built, collect, lib, squares, told


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


FAMILIES = collect(diffusers, x_transformers)
