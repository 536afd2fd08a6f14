"""Hub: text models of transformers beyond the given zoo, tiny and with random weights, built from configurations."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]
Inputs = Callable[[], dict[str, Any]]

LAYERS = 4
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 128),
    **dict.fromkeys(
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim".split(),
        32,
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers num_encoder_layers encoder_layers "
        "decoder_layers".split(),
        LAYERS,
    ),
    **dict.fromkeys(
        "encoder_ffn_dim decoder_ffn_dim intermediate_size ffn_dim d_ff d_inner n_inner hidden_dim "
        "max_position_embeddings n_positions n_ctx encoder_ffn_embed_dim max_source_positions".split(),
        64,
    ),
    **dict.fromkeys(
        "encoder_attention_heads decoder_attention_heads num_attention_heads n_head n_heads num_heads num_experts "
        "num_local_experts n_routed_experts num_decoder_attention_heads num_encoder_attention_heads".split(),
        4,
    ),
    **dict.fromkeys(
        "d_kv head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim patch_size state_size expert_capacity".split(), 8
    ),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size image_size".split(), 32),
    **dict.fromkeys("q_lora_rank kv_lora_rank".split(), 16),
    **dict.fromkeys("num_key_value_heads num_experts_per_tok type_vocab_size eos_token_id".split(), 2),
    **dict.fromkeys("bos_token_id decoder_start_token_id".split(), 1),
    **dict.fromkeys("mask_time_prob mask_feature_prob layerdrop encoder_layerdrop decoder_layerdrop".split(), 0.0),
    **{"num_channels": 3, "rotary_dim": 4, "pad_token_id": 0, "num_labels": 5, "use_cache": False},
}
"""What a configuration is given where it has such a field."""


class Auto(nn.Module):
    """A model whose output carries its loss, or a sum of means of what it gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> Any:
        return self.net(**inputs)


def still(config: Any) -> Any:
    """Switch drop-out off, in the parts of a configuration too."""
    for name, value in list(vars(config).items()):
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
        if hasattr(value, "to_dict") and value is not config:
            still(value)
    return config


def config(name: str, **given: Any) -> Any:
    """Make a small configuration of a class of transformers; None takes a size out."""
    kind = getattr(importlib.import_module("transformers"), name)
    fields = inspect.signature(kind.__init__).parameters
    values = {key: value for key, value in SIZES.items() if key in fields} | given
    made = kind(**{key: value for key, value in values.items() if value is not None})
    for key, value in (("num_labels", 5), ("decoder_start_token_id", 1), ("pad_token_id", 0), ("use_cache", False)):
        if key == "num_labels" or key == "use_cache" or getattr(made, key, None) is None:
            try:
                setattr(made, key, value)
            except Exception:  # some are read-only
                pass
    return still(made)


def of(model: str, inputs: Inputs, config_name: str = "", **given: Any) -> Callable[[], Built]:
    """Say how a family is built: `given` are fields of its configuration."""

    def build() -> Built:
        kind = getattr(importlib.import_module("transformers"), model)
        made = config(config_name or kind.config_class.__name__, **given)
        return kind(made), inputs()

    return build


def ids(length: int = 16, samples: int = 2, low: int = 3, high: int = 100) -> torch.Tensor:
    """Draw tokens."""
    return torch.randint(low, high, (samples, length))


def lm() -> dict[str, Any]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked() -> dict[str, Any]:
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def labelled() -> dict[str, Any]:
    return {**masked(), "labels": torch.randint(0, 5, (2,))}


def tagged() -> dict[str, Any]:
    return {**masked(), "labels": torch.randint(0, 5, (2, 16))}


def answers() -> dict[str, Any]:
    batch = masked()
    del batch["labels"]
    return batch | {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}


def pairs() -> dict[str, Any]:
    return {**masked(), "labels": ids(8)}


def choices() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 100, (2, 3, 10)), "labels": torch.randint(0, 3, (2,))}


MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_chunk_size": 8}

DECODERS: Mapping[str, Any] = {
    "mistral": of("MistralForCausalLM", masked),
    "qwen2": of("Qwen2ForCausalLM", lm),
    "qwen2_moe": of("Qwen2MoeForCausalLM", lm, decoder_sparse_step=1),
    "gemma": of("GemmaForCausalLM", lm),
    "gemma3": of("Gemma3ForCausalLM", lm, "Gemma3TextConfig"),
    "phi": of("PhiForCausalLM", lm),
    "phi3": of("Phi3ForCausalLM", lm),
    "phimoe": of("PhimoeForCausalLM", lm),
    "gpt_neox": of("GPTNeoXForCausalLM", lm),
    "gpt_neox_japanese": of("GPTNeoXJapaneseForCausalLM", lm, intermediate_multiple_size=2),
    "gpt_bigcode": of("GPTBigCodeForCausalLM", masked),
    "codegen": of("CodeGenForCausalLM", lm),
    "bloom": of("BloomForCausalLM", masked),
    "falcon": of("FalconForCausalLM", masked),
    "falcon_alibi": of("FalconForCausalLM", masked, alibi=True, new_decoder_architecture=True),
    "mpt": of("MptForCausalLM", masked),
    "xglm": of("XGLMForCausalLM", masked),
    "mamba2": of(
        "Mamba2ForCausalLM",
        lm,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        expand=2,
        hidden_size=32,
    ),
    "rwkv": of("RwkvForCausalLM", lm, context_length=32),
    "recurrent_gemma": of(
        "RecurrentGemmaForCausalLM", lm, block_types=["recurrent", "attention"], lru_width=32, attention_window_size=8
    ),
    "zamba": of(
        "ZambaForCausalLM",
        lm,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        attention_hidden_size=64,
        attention_head_dim=16,
        head_dim=None,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    ),
    "zamba2": of(
        "Zamba2ForCausalLM",
        lm,
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=4,
        mamba_headdim=16,
        chunk_size=8,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        attention_hidden_size=None,
        head_dim=None,
    ),
    "jamba": of(
        "JambaForCausalLM",
        lm,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "minimax": of("MiniMaxForCausalLM", lm, block_size=8),
    "granitemoe": of("GraniteMoeForCausalLM", lm),
    "granitemoeshared": of("GraniteMoeSharedForCausalLM", lm, shared_intermediate_size=32),
    "olmo": of("OlmoForCausalLM", lm),
    "flex_olmo": of("FlexOlmoForCausalLM", lm),
    "cohere2": of("Cohere2ForCausalLM", lm),
    "glm": of("GlmForCausalLM", lm),
    "glm4_moe": of("Glm4MoeForCausalLM", lm, n_group=1, topk_group=1, first_k_dense_replace=1),
    "exaone4": of("Exaone4ForCausalLM", lm),
    "ernie4_5": of("Ernie4_5ForCausalLM", lm),
    "ernie4_5_moe": of("Ernie4_5_MoeForCausalLM", lm, moe_num_experts=4, moe_k=2, moe_layer_start_index=1),
    "arcee": of("ArceeForCausalLM", lm),
    "apertus": of("ApertusForCausalLM", lm),
    "bitnet": of("BitNetForCausalLM", lm),
    "seed_oss": of("SeedOssForCausalLM", lm),
    "persimmon": of("PersimmonForCausalLM", lm),
    "helium": of("HeliumForCausalLM", lm),
    "hunyuan_dense": of("HunYuanDenseV1ForCausalLM", lm),
    "longcat_flash": of(
        "LongcatFlashForCausalLM",
        lm,
        ffn_hidden_size=64,
        expert_ffn_hidden_size=32,
        zero_expert_num=2,
        moe_topk=2,
        n_routed_experts=4,
        num_key_value_heads=4,
        head_dim=8,
    ),
    "llama4": of(
        "Llama4ForCausalLM",
        lm,
        "Llama4TextConfig",
        intermediate_size_mlp=64,
        interleave_moe_layer_step=2,
        attention_chunk_size=8,
        moe_layers=[1, 3],
    ),
    "moshi": of("MoshiForCausalLM", lm),
    "xlstm": of(
        "xLSTMForCausalLM",
        lm,
        num_heads=4,
        num_blocks=4,
        chunk_size=8,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
        mode="train",
        hidden_size=32,
        embedding_dim=32,
    ),
    "kimi_linear": of("KimiLinearForCausalLM", lm),
    "vaultgemma": of("VaultGemmaForCausalLM", lm),
    "modernbert_decoder": of("ModernBertDecoderForCausalLM", lm),
    "nanochat": of("NanoChatForCausalLM", lm),
    "olmo_hybrid": of("OlmoHybridForCausalLM", lm),
    "minimax_m2": of("MiniMaxM2ForCausalLM", lm),
    "blt": of("BltForCausalLM", lm),
    "bert_decoder": of("BertLMHeadModel", masked, is_decoder=True),
    "blenderbot_decoder": of("BlenderbotForCausalLM", lm),
    "trocr": of("TrOCRForCausalLM", lm),
    "cpmant": of(
        "CpmAntForCausalLM",
        lm,
        dim_head=8,
        dim_ff=64,
        prompt_length=4,
        prompt_types=2,
        segment_types=4,
        position_bias_num_buckets=16,
        position_bias_max_distance=32,
    ),
}

FAMILIES: Mapping[str, Callable[[], Built]] = DECODERS
