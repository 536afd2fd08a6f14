"""Model families of public libraries, tiny and with random weights: cut in three, they must train as they do whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from headway.graph.record import record
from headway.layout.split import split
from tests.run.staged import difference, train_staged, train_whole

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make zoo installs it")

TEXT: Mapping[str, Any] = {"vocab_size": 96, "pad_token_id": 0}
DECODER: Mapping[str, Any] = TEXT | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
ENCODER: Mapping[str, Any] = DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS: Mapping[str, Any] = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = EXPERTS | {"experts_implementation": "eager"}  # a Python loop over experts; the others refuse float64
GPT2 = TEXT | {"n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = TEXT | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 = T5 | {"decoder_start_token_id": 0}
IMAGE: Mapping[str, Any] = {"image_size": 32, "num_channels": 3, "num_labels": 5}
VIT = ENCODER | IMAGE | {"patch_size": 8}
RESNET = IMAGE | {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}


def text() -> dict[str, torch.Tensor]:
    """Make two sequences of 12 tokens with themselves as labels."""
    tokens = torch.randint(3, 96, (2, 12))
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded() -> dict[str, torch.Tensor]:
    """Make two sequences, the second half as long, with a mask."""
    batch = text()
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 6:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def images() -> dict[str, torch.Tensor]:
    """Make two images of 32x32 with a label each."""
    return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64), "labels": torch.randint(0, 5, (2,))}


FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, text),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, text),
    "llama padded": ("LlamaForCausalLM", "LlamaConfig", DECODER, padded),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"tie_word_embeddings": True}, text),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER, text),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}, text),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER | {"head_dim": 8}, text),
    "phi": ("PhiForCausalLM", "PhiConfig", DECODER, text),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER, text),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS, text),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER, padded),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER, padded),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, text),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT, images),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", RESNET, images),
}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Ask the model for the loss that it computes itself."""
    return model(**batch).loss


def build(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make a family's model in float64, and a batch for it."""
    model_name, config_name, options, batch = FAMILIES[family]
    torch.manual_seed(1)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**options))
    return model.double().train(), batch()


def thirds(graph: Any) -> list[str]:
    """Name the allowed cuts nearest to one and two thirds of the FLOPs."""
    done, sums = 0, []
    for call in graph.calls:
        sums.append(done)
        done += call.flops
    return [min(graph.cuts, key=lambda cut: abs(sums[cut.index] - done * n / 3)).name for n in (1, 2)]


@pytest.mark.filterwarnings("ignore")  # of model libraries about themselves
@pytest.mark.parametrize("family", FAMILIES)
def test_three_stages_train_as_the_whole(family: str) -> None:
    model, batch = build(family)
    graph = record(model, loss, batch)
    cuts = thirds(graph)
    assert len(set(cuts)) == 2, "too few places to cut"
    want = train_whole(model, loss, batch, graph)
    got = train_staged(model, loss, batch, graph.samples, split(graph, cuts))
    assert difference(want, got) < 1e-10
