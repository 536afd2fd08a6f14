"""Hub senses: vision, speech, multimodal and time-series models of transformers beyond the given zoo, tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.zoo.hub import LAYERS, Built, config, ids, of


def image(size: int = 32, classes: int = 5) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, classes, (2,))}


def segments(size: int = 32) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, 5, (2, size, size))}


def boxes(size: int = 64) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        labels = [{"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.4 + 0.3} for _ in range(2)]
        return {"pixel_values": torch.randn(2, 3, size, size), "labels": labels}

    return inputs


def masks() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 3, 64, 64),
        "mask_labels": [(torch.rand(2, 64, 64) > 0.5).float() for _ in range(2)],
        "class_labels": [torch.tensor([1, 2]) for _ in range(2)],
    }


def video() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.tensor([1, 2])}


def wave(length: int = 1600) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_values": torch.randn(2, length), "labels": torch.randint(3, 20, (2, 4))}


def spoken() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 40, 16), "labels": ids(8)}


STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
PYRAMID = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
SOUND = {
    "conv_dim": [16] * 3, "conv_stride": [5, 4, 2], "conv_kernel": [10, 4, 2], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 3, "ctc_zero_infinity": True,
}  # fmt: skip
TEXT = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SIGHT = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
LLAMA = TEXT | {"model_type": "llama", "num_key_value_heads": 2, "use_cache": False}
QWEN2 = TEXT | {"model_type": "qwen2", "num_key_value_heads": 2, "use_cache": False}


def backbone(*features: str) -> Any:
    return config(
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=list(features or ("stage2", "stage3", "stage4")),
    )


def swin(*features: str) -> Any:
    return config(
        "SwinConfig",
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=list(features),
    )


def late(model: str, inputs: Callable[[], dict[str, Any]], given: Callable[[], dict[str, Any]]) -> Callable[[], Built]:
    """Like `of`, with fields that need transformers to be imported."""
    return lambda: of(model, inputs, **given())()


DETECT = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "d_model": 32,
    "num_queries": 6,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
}

VISION: Mapping[str, Any] = {
    "beit": of("BeitForImageClassification", image()),
    "data2vec_vision": of("Data2VecVisionForImageClassification", image()),
    "bit": of("BitForImageClassification", image(64), embedding_size=8, num_groups=4, **STAGES),
    "regnet": of("RegNetForImageClassification", image(64), embedding_size=8, groups_width=8, **STAGES),
    "convnextv2": of("ConvNextV2ForImageClassification", image(64), patch_size=4, **STAGES),
    "efficientnet": of("EfficientNetForImageClassification", image(64), width_coefficient=0.25,
                       depth_coefficient=0.25, hidden_dim=320, image_size=64),
    "focalnet": of("FocalNetForImageClassification", image(32), embed_dim=16, depths=[1, 2], patch_size=4,
                   hidden_sizes=[16, 32], focal_levels=[2, 2], focal_windows=[3, 3]),
    "levit": of("LevitForImageClassification", image(64), image_size=64, hidden_sizes=[16, 32, 32], patch_size=16,
                num_attention_heads=[2, 2, 4], depths=[1, 1, 1], key_dim=[8, 8, 8], attention_ratio=[2, 2, 2]),
    "mobilevit": of("MobileViTForImageClassification", image(64), image_size=64, hidden_sizes=[16, 24, 32],
                    neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32], patch_size=2),
    "mobilevitv2": of("MobileViTV2ForImageClassification", image(64), image_size=64, width_multiplier=0.25,
                      patch_size=2),
    "pvt_v2": of("PvtV2ForImageClassification", image(64), hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1],
                 num_attention_heads=[1, 1, 2, 2]),
    "dinov2_reg": of("Dinov2WithRegistersForImageClassification", image()),
    "dinov3_vit": of("DINOv3ViTModel", lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "ijepa": of("IJepaForImageClassification", image()),
    "textnet": of("TextNetForImageClassification", image(64), stem_out_channels=8, hidden_sizes=[8, 16, 16, 32, 32]),
    "hgnet": of("HGNetV2ForImageClassification", image(64), stem_channels=[3, 8, 8], stage_in_channels=[8, 16, 16, 32],
                stage_mid_channels=[8, 8, 8, 16], stage_out_channels=[16, 16, 32, 32], hidden_sizes=[8, 16, 16, 32],
                depths=[1, 1, 1, 1], stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[2, 2, 2, 2],
                embedding_size=8),
    "vit_mae": of("ViTMAEForPreTraining", lambda: {"pixel_values": torch.randn(2, 3, 32, 32),
                  "noise": torch.rand(2, 16)}, decoder_hidden_size=32, decoder_num_hidden_layers=2,
                  decoder_num_attention_heads=4, decoder_intermediate_size=64),
    "vit_mim": of("ViTForMaskedImageModeling", lambda: {"pixel_values": torch.randn(2, 3, 32, 32),
                  "bool_masked_pos": torch.rand(2, 16) > 0.5}, encoder_stride=8),
    "swin_mim": of("SwinForMaskedImageModeling", lambda: {"pixel_values": torch.randn(2, 3, 32, 32),
                   "bool_masked_pos": torch.rand(2, 64) > 0.5}, encoder_stride=8, **SWIN),
    "swin2sr": of("Swin2SRForImageSuperResolution", lambda: {"pixel_values": torch.rand(2, 3, 16, 16)},
                  image_size=16, patch_size=1, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4,
                  upscale=2),
    "vivit": of("VivitForVideoClassification", video, num_frames=4, tubelet_size=[2, 8, 8]),
    "timesformer": of("TimesformerForVideoClassification", video, num_frames=4),
    "vitdet": of("VitDetModel", lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}, window_block_indices=[0, 2],
                 window_size=2),
    "depth_anything": late("DepthAnythingForDepthEstimation", lambda: {"pixel_values": torch.randn(2, 3, 28, 28)},
                           lambda: {"backbone_config": config("Dinov2Config", image_size=28, patch_size=14,
                                    out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False),
                                    "reassemble_hidden_size": 32, "patch_size": 14, "neck_hidden_sizes": [8, 8, 16, 16],
                                    "fusion_hidden_size": 16, "head_hidden_size": 8}),
    "vitmatte": late("VitMatteForImageMatting", lambda: {"pixel_values": torch.randn(2, 4, 64, 64)},
                     lambda: {"backbone_config": config("VitDetConfig", image_size=64, num_channels=4,
                              out_features=["stage4"]), "hidden_size": 32, "convstream_hidden_sizes": [8, 8],
                              "fusion_hidden_sizes": [16, 8, 8]}),
    "mobilevit_seg": of("MobileViTForSemanticSegmentation", segments(64), image_size=64, hidden_sizes=[16, 24, 32],
                        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32], patch_size=2, aspp_out_channels=16),
    "mobilenet_v2_seg": of("MobileNetV2ForSemanticSegmentation", segments(64), depth_multiplier=0.25, image_size=64),
    "convnext_upernet_swin": late("UperNetForSemanticSegmentation", segments(64), lambda: {
        "backbone_config": swin("stage1", "stage2", "stage3", "stage4"), "hidden_size": 16,
        "auxiliary_in_channels": 64, "auxiliary_channels": 8}),
    "conditional_detr": late("ConditionalDetrForObjectDetection", boxes(),
                             lambda: DETECT | {"backbone_config": backbone("stage4")}),
    "dab_detr": late("DabDetrForObjectDetection", boxes(),
                     lambda: DETECT | {"backbone_config": backbone("stage4"), "hidden_size": 32}),
    "detr_seg": late("DetrForSegmentation", lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": [
        {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.4 + 0.3,
         "masks": (torch.rand(2, 64, 64) > 0.5).float()} for _ in range(2)]},
        lambda: DETECT | {"backbone_config": backbone("stage1", "stage2", "stage3", "stage4"), "d_model": 64,
                          "encoder_attention_heads": 8, "decoder_attention_heads": 8}),
    "d_fine": late("DFineForObjectDetection", boxes(), lambda: {
        "encoder_hidden_dim": 32, "encoder_in_channels": [16, 16, 32], "decoder_in_channels": [32, 32, 32],
        "d_model": 32, "num_queries": 6, "decoder_layers": 4, "num_denoising": 0, "backbone_config": backbone(),
        "backbone": None, "encoder_ffn_dim": 64, "decoder_n_points": [2, 2, 2], "hidden_expansion": 1.0}),
    "rt_detr_v2": late("RTDetrV2ForObjectDetection", boxes(), lambda: {
        "encoder_hidden_dim": 32, "encoder_in_channels": [16, 16, 32], "decoder_in_channels": [32, 32, 32],
        "d_model": 32, "num_queries": 6, "decoder_layers": 4, "num_denoising": 4, "backbone_config": backbone(),
        "backbone": None, "encoder_ffn_dim": 64, "decoder_n_points": 2, "hidden_expansion": 1.0}),
    "mask2former": late("Mask2FormerForUniversalSegmentation", masks, lambda: {
        "backbone_config": swin("stage1", "stage2", "stage3", "stage4"), "hidden_dim": 32, "feature_size": 32,
        "mask_feature_size": 32, "encoder_layers": 2, "decoder_layers": 3, "num_queries": 6, "train_num_points": 64,
        "encoder_feedforward_dim": 64, "dim_feedforward": 64, "num_attention_heads": 4}),
    "superpoint": of("SuperPointForKeypointDetection", lambda: {"pixel_values": torch.rand(2, 3, 32, 32)}),
    "seggpt": of("SegGptModel", lambda: {"pixel_values": torch.randn(2, 3, 32, 32),
                 "prompt_pixel_values": torch.randn(2, 3, 32, 32), "prompt_masks": torch.randn(2, 3, 32, 32),
                 "labels": torch.randn(2, 3, 32, 32)}, image_size=[64, 32], merge_index=1,
                 intermediate_hidden_state_indices=[1, 3], decoder_hidden_size=16, pretrain_image_size=32),
}  # fmt: skip

SPEECH: Mapping[str, Any] = {
    "wav2vec2": of("Wav2Vec2ForCTC", wave(), **SOUND),
    "wav2vec2_pre": of("Wav2Vec2ForSequenceClassification", lambda: {"input_values": torch.randn(2, 1600),
                       "labels": torch.tensor([1, 2])}, classifier_proj_size=16, **SOUND),
    "hubert": of("HubertForCTC", wave(), **SOUND),
    "unispeech_sat": of("UniSpeechSatForCTC", wave(), **SOUND),
    "data2vec_audio": of("Data2VecAudioForCTC", wave(), conv_pos_kernel_size=3, **SOUND),
    "wav2vec2_conformer": of("Wav2Vec2ConformerForCTC", wave(), conv_depthwise_kernel_size=5, **SOUND),
    "sew_d": of("SEWDForCTC", wave(), squeeze_factor=2, **SOUND),
    "speech_to_text": of("Speech2TextForConditionalGeneration", spoken, input_feat_per_channel=16,
                         input_channels=1, conv_channels=32, max_source_positions=64, max_target_positions=64),
    "speecht5": of("SpeechT5ForSpeechToText", wave(), feat_extract_norm="group",
                   **{k: v for k, v in SOUND.items() if k in ("conv_dim", "conv_stride", "conv_kernel",
                      "num_conv_pos_embeddings", "num_conv_pos_embedding_groups")}),
    "ast": of("ASTForAudioClassification", lambda: {"input_values": torch.randn(2, 32, 16),
              "labels": torch.tensor([1, 2])}, max_length=32, num_mel_bins=16, patch_size=8, frequency_stride=8,
              time_stride=8),
    "encodec": of("EncodecModel", lambda: {"input_values": torch.randn(2, 1, 640)}, num_filters=8, hidden_size=16,
                  codebook_size=16, codebook_dim=16, upsampling_ratios=[4, 2], num_lstm_layers=1,
                  target_bandwidths=[24.0], sampling_rate=16000),
    "mimi": of("MimiModel", lambda: {"input_values": torch.randn(2, 1, 640)}, num_filters=8, hidden_size=32,
               codebook_size=16, codebook_dim=16, upsampling_ratios=[4, 2], num_quantizers=4,
               vector_quantization_hidden_dimension=16, num_semantic_quantizers=1, sampling_rate=16000,
               frame_rate=1000, upsample_groups=32, num_key_value_heads=4),
    "vits": of("VitsModel", lambda: {"input_ids": ids(8), "labels": None}, flow_size=16, spectrogram_bins=17,
               upsample_initial_channel=16, upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4],
               resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]], hidden_size=16, ffn_dim=32,
               num_attention_heads=2, posterior_encoder_num_wavenet_layers=2, prior_encoder_num_wavenet_layers=2),
    "fastspeech2": of("FastSpeech2ConformerModel", lambda: {
        "input_ids": ids(6), "spectrogram_labels": torch.randn(2, 12, 8), "duration_labels": torch.full((2, 6), 2),
        "pitch_labels": torch.randn(2, 6, 1), "energy_labels": torch.randn(2, 6, 1)}, num_mel_bins=8, hidden_size=32,
        encoder_layers=2, decoder_layers=2, encoder_linear_units=32, decoder_linear_units=32,
        speech_decoder_postnet_units=16, duration_predictor_channels=16, energy_predictor_channels=16,
        pitch_predictor_channels=16, encoder_num_attention_heads=2, decoder_num_attention_heads=2),
    "univnet": of("UnivNetModel", lambda: {"input_features": torch.randn(2, 8, 16)}, model_in_channels=8,
                  model_hidden_channels=8, num_mel_bins=16, resblock_kernel_sizes=[3, 3], kernel_predictor_conv_size=3,
                  resblock_stride_sizes=[2, 2], resblock_dilation_sizes=[[1, 3], [1, 3]],
                  kernel_predictor_hidden_channels=8),
    "hifigan": of("SpeechT5HifiGan", lambda: {"spectrogram": torch.randn(2, 12, 8)}, model_in_dim=8,
                  upsample_initial_channel=16, upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4],
                  resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]]),
    "seamless": of("SeamlessM4TForTextToText", lambda: {"input_ids": ids(), "labels": ids(8)}, hidden_size=32,
                   encoder_layers=2, decoder_layers=2, speech_encoder_layers=2, speech_encoder_intermediate_size=32,
                   t2u_vocab_size=32, t2u_encoder_layers=1, t2u_decoder_layers=1, unit_hifi_gan_vocab_size=32,
                   speech_encoder_attention_heads=4),
    "clvp_like_musicgen": of("MusicgenForCausalLM", lambda: {"input_ids": ids(8, 4), "labels": torch.randint(
        3, 100, (2, 8, 2))}, "MusicgenDecoderConfig", num_codebooks=2, audio_channels=1),
}  # fmt: skip

FAMILIES: Mapping[str, Callable[[], Built]] = {**VISION, **SPEECH}
