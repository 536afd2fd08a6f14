"""Hub series: models of transformers for sound beside text, and for time series, beyond the given zoo, tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.zoo.hub import Built, ids, of
from tests.zoo.hub_senses import LLAMA, QWEN2, SOUND


def series(features: int = 1) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        length = 24 + 3
        return {
            "past_values": torch.rand(2, length) + 0.5,
            "past_time_features": torch.randn(2, length, features),
            "past_observed_mask": torch.ones(2, length),
            "future_values": torch.rand(2, 8) + 0.5,
            "future_time_features": torch.randn(2, 8, features),
        }

    return inputs


def decisions() -> dict[str, Any]:
    return {
        "states": torch.randn(2, 6, 5),
        "actions": torch.randn(2, 6, 3),
        "rewards": torch.randn(2, 6, 1),
        "returns_to_go": torch.randn(2, 6, 1),
        "timesteps": torch.arange(6).repeat(2, 1),
        "attention_mask": torch.ones(2, 6),
    }


SERIES = {"prediction_length": 8, "context_length": 24, "num_time_features": 1, "lags_sequence": [1, 2, 3]}

SOUNDS: Mapping[str, Any] = {
    "qwen2_audio": of(
        "Qwen2AudioForConditionalGeneration",
        lambda: {
            "input_ids": torch.cat([torch.full((2, 10), 120), ids(8)], 1),
            "input_features": torch.randn(2, 16, 40),
            "labels": ids(18),
            "feature_attention_mask": torch.ones(2, 40).long(),
            "attention_mask": torch.ones(2, 18).long(),
        },
        text_config=QWEN2,
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 20,
        },
        audio_token_index=120,
    ),
    "voxtral": of(
        "VoxtralForConditionalGeneration",
        lambda: {
            "input_ids": torch.cat([torch.full((2, 5), 120), ids(8)], 1),
            "input_features": torch.randn(2, 16, 40),
            "labels": ids(13),
        },
        text_config=LLAMA,
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "num_mel_bins": 16,
            "max_source_positions": 20,
        },
        audio_token_id=120,
    ),
    "wav2vec2_xvector": of(
        "Wav2Vec2ForXVector",
        lambda: {"input_values": torch.randn(2, 1600), "labels": torch.tensor([1, 2])},
        tdnn_dim=[16, 16, 32],
        tdnn_kernel=[3, 1, 1],
        tdnn_dilation=[1, 1, 1],
        xvector_output_dim=16,
        **SOUND,
    ),
    "clvp": of(
        "ClvpForCausalLM",
        lambda: {"input_ids": ids(), "labels": ids()},
        "ClvpDecoderConfig",
        num_mel_attn_blocks=1,
        feature_size=16,
        max_text_tokens=64,
    ),
    "pop2piano": of(
        "Pop2PianoForConditionalGeneration", lambda: {"input_features": torch.randn(2, 10, 32), "labels": ids(8)}
    ),
}

SERIES_MODELS: Mapping[str, Any] = {
    "time_series": of("TimeSeriesTransformerForPrediction", series(), **SERIES),
    "autoformer": of("AutoformerForPrediction", series(), label_length=4, moving_average=5, **SERIES),
    "patchtst": of(
        "PatchTSTForPrediction",
        lambda: {"past_values": torch.randn(2, 32, 2), "future_values": torch.randn(2, 8, 2)},
        num_input_channels=2,
        context_length=32,
        prediction_length=8,
        patch_length=4,
        patch_stride=4,
        loss="mse",
    ),
    "patchtst_mask": of(
        "PatchTSTForPretraining",
        lambda: {"past_values": torch.randn(2, 32, 2)},
        num_input_channels=2,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        random_mask_ratio=0.4,
    ),
    "timesfm": of(
        "TimesFmModelForPrediction",
        lambda: {"past_values": [torch.randn(32) for _ in range(2)], "future_values": torch.randn(2, 8)},
        patch_length=8,
        horizon_length=8,
        context_length=32,
    ),
    "decision": of("DecisionTransformerModel", decisions, state_dim=5, act_dim=3, hidden_size=32, max_ep_len=16),
    "perceiver_image": of(
        "PerceiverForImageClassificationLearned",
        lambda: {"inputs": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 2])},
        image_size=16,
        d_latents=32,
        num_latents=8,
        num_blocks=1,
        num_self_attends_per_block=4,
        num_self_attention_heads=4,
        num_cross_attention_heads=1,
    ),
}


FAMILIES: Mapping[str, Callable[[], Built]] = {**SOUNDS, **SERIES_MODELS}
