"""Encoder-decoders against transformers: T5 and its relatives, and T5Gemma; the source has padding."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from tests.arch_dsl.parity import (
    GRADIENTS,
    LOGITS,
    VOCAB,
    Published,
    errors,
    model_of,
    outline,
    theirs_of,
    unexplained,
)

RMS = {"type": "rmsnorm", "eps": 0.03}  # large enough to be seen


def t5(feed_forward: str, tied: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=12,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        layer_norm_epsilon=0.03,
        feed_forward_proj=feed_forward,
        pad_token_id=None,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = T5ForConditionalGeneration(config)
    if not tied:  # which its configuration no longer says (transformers 5)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def of_t5(ffn: dict[str, Any], **more: Any) -> dict[str, Any]:
    heads = {"heads": 4, "head_dim": 12, "scale": 1}
    buckets = {"type": "t5_buckets", "buckets": 8, "max_distance": 12, "share": "stack"}
    both = {"positional": {**buckets, "bidirectional": True}}
    return {
        "d_model": 32,
        "embedding": {"std": 1.0},
        "encoder": {
            "n_layers": 2,
            "block": {"norm": RMS, "attention": {**heads, **both, "mask": "full"}, "ffn": ffn},
        },
        "decoder": {
            "n_layers": 3,
            "block": {
                "norm": RMS,
                "attention": {**heads, "positional": buckets},
                "cross_attention": heads,
                "ffn": ffn,
            },
        },
        **more,
    }


def gated(activation: str) -> dict[str, Any]:
    return {"type": "glu", "activation": activation, "width": 48}


SCALED = {"logits": [{"type": "scale", "width_power": -0.5}]}
T5 = Published(
    "t5", lambda: t5("relu", True), of_t5({"type": "mlp", "activation": "relu", "width": 48}, **SCALED), "t5", "t5"
)
T5_V1_1 = Published(
    "t5-v1.1",
    lambda: t5("gated-gelu", False),
    of_t5(gated("gelu_tanh"), unembedding={"tied": False}),
    "t5_gated",
    "t5_v1_1",
    spread=1.0,
)
MT5 = Published("mt5", T5_V1_1.theirs, T5_V1_1.spec, "t5_gated", "mt5", spread=1.0)
UL2 = Published("ul2", lambda: t5("gated-silu", True), of_t5(gated("silu"), **SCALED), "t5_gated", "ul2", spread=1.0)


def t5gemma() -> nn.Module:
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
    from transformers.models.t5gemma import T5GemmaModuleConfig

    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 9,
        "rms_norm_eps": 0.03,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "pad_token_id": None,
    }
    full = T5GemmaModuleConfig(**fields, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    sliding = ["sliding_attention", "full_attention", "sliding_attention"]
    decoder = T5GemmaModuleConfig(**fields, num_hidden_layers=3, layer_types=sliding, is_decoder=True)
    both = {"vocab_size": VOCAB, "tie_word_embeddings": True, "attn_implementation": "eager"}
    config = T5GemmaConfig(encoder=full, decoder=decoder, **both)
    return T5GemmaForConditionalGeneration(config)


def of_t5gemma() -> dict[str, Any]:
    norm = {**RMS, "unit_offset": True}
    heads: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 12, "scale": 20**-0.5}
    heads["scores"] = [{"type": "softcap", "cap": 5.0}]
    rotated = {**heads, "positional": {"type": "rope", "theta": 100.0}}
    sandwich, ffn = {**norm, "placement": "sandwich"}, gated("gelu_tanh")
    embed = [{"type": "scale", "width_power": 0.5}]
    return {
        "d_model": 32,
        "embedding": {"shared": False},
        "encoder": {
            "n_layers": 2,
            "embed": embed,
            "block": {"norm": sandwich, "attention": {**rotated, "mask": "full"}, "ffn": ffn},
        },
        "decoder": {
            "n_layers": 3,
            "embed": embed,
            "block": {"norm": sandwich, "attention": rotated, "cross_attention": heads, "ffn": ffn},
            "overrides": {"::2": {"block.attention.mask": {"type": "window", "size": 9}}},
        },
        "logits": [{"type": "softcap", "cap": 3.0}],
    }


T5GEMMA = Published("t5gemma", t5gemma, of_t5gemma(), "t5gemma", spread=1.0)
ALL = [T5, T5_V1_1, MT5, UL2, T5GEMMA]


@pytest.mark.parametrize("published", ALL, ids=str)
def test_logits_and_gradients_are_those_of_transformers(published):
    logits, gradients = errors(published)
    assert logits <= LOGITS and gradients <= GRADIENTS


@pytest.mark.parametrize("published", ALL, ids=str)
def test_parameters_are_counted_as_theirs(published):
    theirs = sum(value.numel() for value in theirs_of(published).parameters())
    assert arch_dsl.cost(model_of(published)).parameters == theirs


@pytest.mark.parametrize("published", [each for each in ALL if each.zoo], ids=str)
def test_architecture_is_that_of_the_zoo(published):
    assert outline(model_of(published)) == outline(arch_dsl.resolve(zoo.load(published.zoo)))


@pytest.mark.slow
@pytest.mark.parametrize("published", [T5, T5GEMMA], ids=str)
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
