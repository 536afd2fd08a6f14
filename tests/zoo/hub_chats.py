"""Hub chats: language models of transformers that are shown pictures, beyond the given zoo, tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.zoo.hub import Built, ids, of
from tests.zoo.hub_pairs import seen
from tests.zoo.hub_senses import LLAMA, QWEN2, SIGHT, TEXT

CLIP_SIGHT = SIGHT | {"model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP_SIGHT = SIGHT | {"model_type": "siglip_vision_model", "vision_use_head": False}


def patches(merge: int = 2, token: int = 120) -> dict[str, Any]:
    """Two images of 4 x 4 patches for the Qwen family, merged 2 x 2."""
    count = 16 // merge**2
    tokens = torch.cat([ids(3), torch.full((2, 1), 118), torch.full((2, count), token), ids(8)], 1)
    kinds = (tokens == token).long()
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(32, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": kinds,
    }


VISION_QWEN = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 8,
    "mlp_ratio": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
CHATS: Mapping[str, Any] = {
    "llava_next": of(
        "LlavaNextForConditionalGeneration",
        lambda: {
            "input_ids": torch.cat([torch.full((2, 16 + 16 + 4), 120), ids(8)], 1),
            "labels": torch.cat([torch.full((2, 36), -100), ids(8)], 1),
            "pixel_values": torch.randn(2, 2, 3, 32, 32),
            "image_sizes": torch.tensor([[32, 32]] * 2),
        },
        text_config=LLAMA,
        vision_config=CLIP_SIGHT,
        image_token_index=120,
        image_grid_pinpoints=[[32, 32]],
        vision_feature_layer=-2,
        image_seq_length=16,
    ),
    "qwen2_vl": of(
        "Qwen2VLForConditionalGeneration",
        patches,
        text_config=QWEN2 | ROPE | {"max_window_layers": 4},
        vision_config=VISION_QWEN,
        image_token_id=120,
        vision_start_token_id=118,
        video_token_id=121,
    ),
    "qwen2_5_vl": of(
        "Qwen2_5_VLForConditionalGeneration",
        patches,
        text_config=QWEN2 | ROPE | {"max_window_layers": 4},
        vision_config=VISION_QWEN
        | {"intermediate_size": 64, "out_hidden_size": 32, "window_size": 32, "fullatt_block_indexes": [1]},
        image_token_id=120,
        vision_start_token_id=118,
        video_token_id=121,
    ),
    "gemma3_vision": of(
        "Gemma3ForConditionalGeneration",
        lambda: (
            seen(4)()
            | {"token_type_ids": torch.cat([torch.zeros(2, 1), torch.ones(2, 4), torch.zeros(2, 8)], 1).long()}
        ),
        text_config=TEXT | {"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
        vision_config=SIGLIP_SIGHT,
        mm_tokens_per_image=4,
        image_token_id=120,
    ),
    "idefics2": of(
        "Idefics2ForConditionalGeneration",
        lambda: seen(4)() | {"pixel_values": torch.randn(2, 1, 3, 32, 32)},
        vision_config=SIGHT,
        text_config=LLAMA | {"model_type": "mistral"},
        perceiver_config={
            "hidden_size": 32,
            "resampler_n_latents": 4,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
            "num_key_value_heads": 2,
        },
        image_token_id=120,
    ),
    "idefics3": of(
        "Idefics3ForConditionalGeneration",
        lambda: seen(4)() | {"pixel_values": torch.randn(2, 1, 3, 32, 32)},
        vision_config=SIGHT,
        text_config=LLAMA,
        scale_factor=2,
        image_token_id=120,
    ),
    "internvl": of(
        "InternVLForConditionalGeneration",
        seen(4),
        vision_config=SIGHT | {"image_size": [32, 32], "patch_size": [8, 8]},
        text_config=QWEN2,
        image_token_id=120,
        downsample_ratio=0.5,
    ),
    "mllama": of(
        "MllamaForConditionalGeneration",
        lambda: {
            "input_ids": ids(),
            "labels": ids(),
            "pixel_values": torch.randn(2, 1, 1, 3, 32, 32),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.int64),
            "aspect_ratio_mask": torch.ones(2, 1, 1).long(),
            "cross_attention_mask": torch.ones(2, 16, 1, 1).long(),
        },
        text_config=LLAMA
        | {
            "model_type": "mllama_text_model",
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision_config=SIGHT
        | {
            "attention_heads": 4,
            "num_global_layers": 2,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [1],
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
    ),
    "chameleon": of(
        "ChameleonForConditionalGeneration",
        lambda: {"input_ids": ids(), "labels": ids()},
        vq_config={
            "embed_dim": 16,
            "num_embeddings": 16,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "latent_channels": 16,
            "resolution": 32,
        },
        vocabulary_map={"<image>": 120, "IMGIMGA": 121},
    ),
    "aria": of(
        "AriaForConditionalGeneration",
        seen(4),
        text_config=TEXT
        | {
            "model_type": "aria_text",
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
            "num_key_value_heads": 2,
        },
        vision_config=SIGHT | {"model_type": "idefics3_vision"},
        image_token_index=120,
        projector_patch_to_query_dict={16: 4},
    ),
    "florence2": of(
        "Florence2ForConditionalGeneration",
        lambda: seen(5)() | {"pixel_values": torch.randn(2, 3, 64, 64)},
        text_config={
            "model_type": "bart",
            "vocab_size": 128,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        },
        vision_config={
            "embed_dim": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 2, 2, 2],
            "num_groups": [1, 2, 2, 2],
            "window_size": 2,
            "projection_dim": 32,
        },
        image_token_id=120,
    ),
}

FAMILIES: Mapping[str, Callable[[], Built]] = CHATS
