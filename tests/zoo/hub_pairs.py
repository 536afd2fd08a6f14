"""Hub pairs: models of transformers that see, hear and read, and those of time series, beyond the given zoo, tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.zoo.hub import Built, ids, masked, of
from tests.zoo.hub_senses import SIGHT, TEXT


def pair(size: int = 32) -> dict[str, Any]:
    return {"input_ids": ids(), "pixel_values": torch.randn(2, 3, size, size), "return_loss": True}


def seen(count: int = 16, token: int = 120, **more: Any) -> Callable[[], dict[str, Any]]:
    """Text after the places of `count` image tokens."""

    def inputs() -> dict[str, Any]:
        tokens = torch.cat([torch.ones(2, 1, dtype=torch.int64), torch.full((2, count), token), ids(8)], 1)
        batch = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 32, 32), "labels": tokens.clone()}
        return batch | {"attention_mask": torch.ones_like(tokens)} | more

    return inputs


def question() -> dict[str, Any]:
    return masked() | {"pixel_values": torch.randn(2, 3, 32, 32)}


def document() -> dict[str, Any]:
    return masked() | {"bbox": torch.randint(0, 20, (2, 16, 4)).sort(-1)[0], "pixel_values": torch.randn(2, 3, 32, 32)}


PAIRS: Mapping[str, Any] = {
    "chinese_clip": of("ChineseCLIPModel", pair, text_config=TEXT, vision_config=SIGHT, projection_dim=16),
    "clipseg": of(
        "CLIPSegForImageSegmentation",
        lambda: {
            "input_ids": ids(),
            "pixel_values": torch.randn(2, 3, 32, 32),
            "labels": torch.rand(2, 32, 32).round(),
        },
        text_config=TEXT,
        vision_config=SIGHT,
        projection_dim=16,
        extract_layers=[0, 1, 2],
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    ),
    "siglip2": of(
        "Siglip2Model",
        lambda: {
            "input_ids": ids(),
            "pixel_values": torch.randn(2, 16, 3 * 64),
            "pixel_attention_mask": torch.ones(2, 16).long(),
            "spatial_shapes": torch.tensor([[4, 4]] * 2),
            "return_loss": True,
        },
        text_config=TEXT | {"projection_size": 32},
        vision_config=SIGHT | {"num_patches": 16},
    ),
    "owlv2": of("Owlv2Model", pair, text_config=TEXT, vision_config=SIGHT, projection_dim=16),
    "metaclip_2": of("MetaClip2Model", pair, text_config=TEXT, vision_config=SIGHT, projection_dim=16),
    "blip_vqa": of(
        "BlipForQuestionAnswering",
        lambda: {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 32, 32), "labels": ids(6)},
        text_config=TEXT | {"encoder_hidden_size": 32, "projection_dim": 16},
        vision_config=SIGHT,
        projection_dim=16,
        image_text_hidden_size=16,
    ),
    "blip_retrieval": of(
        "BlipForImageTextRetrieval",
        lambda: {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 32, 32)},
        text_config=TEXT | {"encoder_hidden_size": 32},
        vision_config=SIGHT,
        projection_dim=16,
        image_text_hidden_size=16,
    ),
    "blip2": of(
        "Blip2ForConditionalGeneration",
        seen(4),
        vision_config=SIGHT,
        qformer_config=TEXT | {"encoder_hidden_size": 32, "cross_attention_frequency": 2},
        text_config=TEXT | {"model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 64},
        num_query_tokens=4,
        image_token_index=120,
    ),
    "instructblip": of(
        "InstructBlipForConditionalGeneration",
        seen(4, qformer_input_ids=torch.ones(2, 6, dtype=torch.int64) * 5),
        vision_config=SIGHT,
        qformer_config=TEXT | {"encoder_hidden_size": 32, "cross_attention_frequency": 2},
        text_config=TEXT | {"model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 64},
        num_query_tokens=4,
        image_token_index=120,
    ),
    "git": of("GitForCausalLM", question, vision_config=SIGHT),
    "kosmos2": of(
        "Kosmos2ForConditionalGeneration",
        lambda: {
            "pixel_values": torch.randn(2, 3, 32, 32),
            "input_ids": ids(),
            "labels": ids(),
            "image_embeds_position_mask": (torch.arange(16) < 4).long().repeat(2, 1),
        },
        text_config={
            "vocab_size": 128,
            "embed_dim": 32,
            "layers": 4,
            "ffn_dim": 64,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
        vision_config=SIGHT,
        latent_query_num=4,
    ),
    "pix2struct": of(
        "Pix2StructForConditionalGeneration",
        lambda: {"flattened_patches": torch.rand(2, 12, 2 + 16), "labels": ids(8)},
        vision_config={
            "hidden_size": 32,
            "patch_embed_hidden_size": 16,
            "d_ff": 64,
            "d_kv": 8,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "seq_len": 32,
        },
        text_config={"vocab_size": 128, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4},
    ),
    "vilt": of("ViltForQuestionAnswering", lambda: question() | {"labels": torch.rand(2, 5)}),
    "lxmert": of(
        "LxmertForPreTraining",
        lambda: {
            "input_ids": ids(),
            "visual_feats": torch.randn(2, 4, 16),
            "visual_pos": torch.rand(2, 4, 4),
            "labels": ids(),
            "matched_label": torch.tensor([0, 1]),
        },
        l_layers=2,
        r_layers=2,
        x_layers=2,
        visual_feat_dim=16,
        num_object_labels=8,
        num_attr_labels=8,
        task_obj_predict=False,
        task_qa=False,
        visual_obj_loss=False,
    ),
    "layoutlmv3": of(
        "LayoutLMv3ForTokenClassification",
        lambda: document() | {"labels": torch.randint(0, 5, (2, 16))},
        input_size=32,
        coordinate_size=6,
        shape_size=4,
        max_position_embeddings=66,
        rel_pos_bins=8,
        rel_2d_pos_bins=8,
        max_rel_pos=16,
        max_rel_2d_pos=16,
    ),
    "udop": of(
        "UdopForConditionalGeneration",
        lambda: {
            "input_ids": ids(),
            "bbox": torch.rand(2, 16, 4),
            "pixel_values": torch.randn(2, 3, 32, 32),
            "labels": ids(8),
        },
    ),
}

FAMILIES: Mapping[str, Callable[[], Built]] = PAIRS
