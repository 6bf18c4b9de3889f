"""Kimi Linear against transformers: Kimi Delta Attention, latent attention without positions, experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from archlab import arch_dsl
from tests.arch_dsl.parity import (
    GRADIENTS,
    LOGITS,
    VOCAB,
    Published,
    decoded,
    errors,
    expected,
    model_of,
    outline,
    relative,
    theirs_of,
    trials_of,
    unexplained,
)
from tests.arch_dsl.published_kimi import kimi_linear
from tests.arch_dsl.their_modules import modeling, put_back
from tests.arch_dsl.zoo.test_parity_mixers import _l2norm


@pytest.fixture(scope="module", autouse=True)
def _theirs() -> Iterator[None]:
    with put_back("kimi_linear"):
        yield


def small(**more: Any) -> nn.Module:
    """Layers by turns of both mixers, all with experts: a checkpoint of layers without them has names of its own."""
    modeling("kimi_linear").l2norm = _l2norm  # whose 1e-6 could not be seen
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["sparse"] * 3,
        "moe_intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 5,
        "linear_num_heads": 3,
        "linear_head_dim": 8,
        "rms_norm_eps": 0.03,
    }
    model = kimi_linear(**{**fields, **more})
    for name, module in model.named_modules():
        if name.endswith("kv_a_layernorm"):
            module.variance_epsilon = 0.03  # which it does not take from its configuration, and too small to be seen
    return model


NORM = {"type": "rmsnorm", "eps": 0.03}
CONV = {"type": "short_conv", "activation": "silu"}
UNIT = [CONV, {"type": "l2norm", "eps": 0.5}]
KDA = {"heads": 3, "head_dim": 8, "query": UNIT, "key": UNIT, "sdpa": [NORM, {"type": "gate", "rank": "head_dim"}]}
MLA = {
    **{"type": "mla", "heads": 4, "head_dim": 8, "value_dim": 5},
    **{"kv_latent": 10, "rotary_dim": 6, "rotary": None, "kv_inner": [NORM]},
}
MOE = {
    **{"type": "moe", "experts": 6, "top_k": 2, "width": 24, "shared": 24},
    **{"routing": "sigmoid", "scale": 2.446, "balance": "bias"},
}
KIMI: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 3,
    "block": {"norm": NORM, "kda": KDA, "attention": MLA, "ffn": MOE},
    "overrides": {"1": {"block.kda": None}, "::2": {"block.attention": None}},
    "unembedding": {"tied": False},
}
ALL = [Published("kimi_linear", small, KIMI, "kimi_linear", spread=1.5)]


@pytest.mark.parametrize("published", ALL, ids=str)
def test_logits_and_gradients_are_those_of_transformers(published):
    logits, gradients = errors(published)
    assert logits <= LOGITS and gradients <= GRADIENTS


@pytest.mark.parametrize("published", ALL, ids=str)
def test_logits_of_reading_token_by_token_are_those_of_transformers(published):
    assert relative(decoded(published), expected(published)) <= LOGITS


@pytest.mark.parametrize("published", ALL, ids=str)
def test_parameters_are_counted_as_theirs(published):
    theirs = sum(value.numel() for value in theirs_of(published).parameters())
    assert arch_dsl.cost(model_of(published)).parameters == theirs


def test_architecture_is_that_of_the_zoo_but_for_the_layer_without_experts():
    whole = arch_dsl.resolve(arch_dsl.zoo.load("kimi_linear", "tiny"))
    ((first, *layers),) = outline(whole)[1]
    assert [branch["name"] for branch in first] == ["kda", "dense"]
    assert [layers] == outline(model_of(ALL[0]))[1]


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
