"""Hub readers: encoders, and encoders with decoders, of transformers beyond the given zoo, tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.zoo.hub import Built, answers, choices, ids, labelled, lm, masked, of, pairs, tagged

ENCODERS: Mapping[str, Any] = {
    "roberta": of("RobertaForMaskedLM", masked, max_position_embeddings=66),
    "xlm_roberta": of("XLMRobertaForTokenClassification", tagged, max_position_embeddings=66),
    "camembert": of("CamembertForQuestionAnswering", answers, max_position_embeddings=66),
    "roberta_prelayernorm": of("RobertaPreLayerNormForMaskedLM", masked, max_position_embeddings=66),
    "albert": of("AlbertForMaskedLM", masked, embedding_size=16),
    "electra": of("ElectraForPreTraining", lambda: {**masked(), "labels": torch.randint(0, 2, (2, 16))}),
    "mobilebert": of(
        "MobileBertForMaskedLM",
        masked,
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
        hidden_size=32,
    ),
    "layoutlm": of("LayoutLMForMaskedLM", lambda: masked() | {"bbox": torch.randint(0, 20, (2, 16, 4)).sort(-1)[0]}),
    "bros": of("BrosForTokenClassification", lambda: tagged() | {"bbox": torch.rand(2, 16, 4)}),
    "lilt": of(
        "LiltForTokenClassification",
        lambda: tagged() | {"bbox": torch.randint(0, 20, (2, 16, 4)).sort(-1)[0]},
        max_position_embeddings=66,
    ),
    "nystromformer": of("NystromformerForMaskedLM", masked, num_landmarks=4, segment_means_seq_len=16),
    "yoso": of("YosoForMaskedLM", masked, use_expectation=True),
    "mra": of("MraForMaskedLM", masked),
    "fnet": of("FNetForMaskedLM", lm),
    "xlnet": of("XLNetLMHeadModel", masked, d_model=32, d_inner=64),
    "xlm": of("XLMWithLMHeadModel", masked, emb_dim=32),
    "deberta_v2": of(
        "DebertaV2ForMaskedLM",
        masked,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=16,
        conv_kernel_size=3,
    ),
    "big_bird_sparse": of(
        "BigBirdForMaskedLM",
        lambda: lm_of(128),
        attention_type="block_sparse",
        block_size=8,
        num_random_blocks=1,
        max_position_embeddings=128,
    ),
    "data2vec_text": of("Data2VecTextForMaskedLM", masked, max_position_embeddings=66),
    "ernie": of("ErnieForMaskedLM", masked),
    "nezha": of(
        "RoCBertForMaskedLM",
        masked,
        pronunciation_vocab_size=128,
        shape_vocab_size=128,
        pronunciation_embed_dim=8,
        shape_embed_dim=8,
    ),
    "luke": of("LukeForMaskedLM", masked, entity_vocab_size=16, entity_emb_size=16, max_position_embeddings=66),
    "xmod": of("XmodForMaskedLM", masked, languages=["en"], default_language="en", max_position_embeddings=66),
    "modernbert": of("ModernBertForMaskedLM", masked, global_attn_every_n_layers=2, local_attention=8),
    "longformer_qa": of(
        "LongformerForQuestionAnswering", answers, attention_window=[8] * 4, sep_token_id=2, max_position_embeddings=66
    ),
    "splinter": of("SplinterForQuestionAnswering", answers),
    "markuplm": of(
        "MarkupLMForTokenClassification", tagged, max_position_embeddings=66, xpath_unit_hidden_size=8, max_depth=4
    ),
    "bert_nsp": of("BertForPreTraining", lambda: masked() | {"next_sentence_label": torch.tensor([0, 1])}),
    "bert_choice": of("BertForMultipleChoice", choices),
    "dpr": of("DPRQuestionEncoder", lambda: {"input_ids": ids()}, projection_dim=16),
    "eurobert": of("EuroBertForMaskedLM", masked),
    "deberta_cls": of("DebertaForSequenceClassification", labelled),
    "distilbert_qa": of("DistilBertForQuestionAnswering", answers),
    "gpt2_cls": of("GPT2ForSequenceClassification", labelled),
    "gpt2_double": of(
        "GPT2DoubleHeadsModel",
        lambda: {
            "input_ids": torch.randint(3, 100, (2, 3, 10)),
            "mc_labels": torch.randint(0, 3, (2,)),
            "labels": torch.randint(3, 100, (2, 3, 10)),
        },
    ),
    "llama_reward": of("LlamaForSequenceClassification", labelled),
    "canine_tag": of(
        "CanineForTokenClassification",
        tagged,
        local_transformer_stride=8,
        downsampling_rate=4,
        num_hash_functions=4,
        num_hash_buckets=64,
        max_position_embeddings=128,
    ),
}

SEQ2SEQ: Mapping[str, Any] = {
    "mt5": of("MT5ForConditionalGeneration", pairs),
    "umt5": of("UMT5ForConditionalGeneration", pairs),
    "switch": of(
        "SwitchTransformersForConditionalGeneration", pairs, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2
    ),
    "mbart": of("MBartForConditionalGeneration", pairs),
    "blenderbot": of("BlenderbotForConditionalGeneration", pairs),
    "blenderbot_small": of("BlenderbotSmallForConditionalGeneration", pairs),
    "m2m_100": of("M2M100ForConditionalGeneration", pairs),
    "nllb_moe": of(
        "NllbMoeForConditionalGeneration", pairs, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=16
    ),
    "marian": of("MarianMTModel", pairs, decoder_vocab_size=128),
    "led": of("LEDForConditionalGeneration", pairs, attention_window=[4] * 4),
    "pegasus_x": of("PegasusXForConditionalGeneration", pairs, block_size=4, num_global_tokens=2),
    "plbart": of("PLBartForConditionalGeneration", pairs),
    "mvp": of("MvpForConditionalGeneration", pairs),
    "prophetnet": of("ProphetNetForConditionalGeneration", pairs, ngram=2, num_buckets=8, relative_max_distance=16),
    "fsmt": of(
        "FSMTForConditionalGeneration",
        lambda: {**masked(), "labels": ids(16)},
        langs=["en", "de"],
        src_vocab_size=128,
        tgt_vocab_size=128,
    ),
    "t5_encoder": of("T5ForTokenClassification", tagged),
    "bart_cls": of(
        "BartForSequenceClassification",
        lambda: {"input_ids": torch.cat([ids(15), torch.full((2, 1), 2)], 1), "labels": torch.tensor([1, 2])},
    ),
    "t5gemma": of("T5GemmaForConditionalGeneration", pairs),
    "bert_generation": of("BertGenerationDecoder", lm, is_decoder=True),
}


def lm_of(length: int) -> dict[str, Any]:
    tokens = ids(length)
    return {"input_ids": tokens, "labels": tokens.clone()}


FAMILIES: Mapping[str, Callable[[], Built]] = {**ENCODERS, **SEQ2SEQ}
