"""Recurrent mixers against transformers: Mamba-2, and gated DeltaNet beside gated attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
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
    outline_of_zoo,
    relative,
    theirs_of,
    trials_of,
    unexplained,
)
from tests.arch_dsl.their_modules import GATED_DELTA, by_torch, modeling, put_back
from tests.arch_dsl.zoo.test_parity_modern import NORM, QWEN3_NEXT, ROPE, ROTATION, UNIT, sizes


@pytest.fixture(scope="module", autouse=True)
def _theirs() -> Iterator[None]:
    with put_back("qwen3_next"):
        yield


def mamba2(**more: Any) -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 10,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 16,  # less than the tokens, which it does not divide
        "layer_norm_epsilon": 0.03,
        "tie_word_embeddings": True,
    }
    return Mamba2ForCausalLM(Mamba2Config(**{**fields, **more}))


def _l2norm(x: torch.Tensor, dim: int = -1, eps: float = 0.0) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + 0.5)


def qwen3_next(**more: Any) -> nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    by_torch(modeling("qwen3_next"), *GATED_DELTA)
    modeling("qwen3_next").l2norm = _l2norm  # whose 1e-6 could not be seen
    fields = {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "rms_norm_eps": 2.0,
        "rope_parameters": {**ROTATION, "partial_rotary_factor": 0.5},
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes(**{**fields, **more})))


GATE = {"type": "gate", "activation": "silu"}
MAMBA2 = {
    "d_model": 32,
    "n_layers": 2,
    "block": {
        "norm": NORM,
        "mamba2": {"head_dim": 10, "value_dim": 8, "sdpa": [GATE, {**NORM, "over": "heads"}]},
    },
}
CONV = {"type": "short_conv", "activation": "silu"}
DELTA = {
    "heads": 4,
    "key_heads": 2,
    "head_dim": 6,
    "value_dim": 10,
    "query": [CONV, {"type": "l2norm", "eps": 0.5}],
    "key": [CONV, {"type": "l2norm", "eps": 0.5}],
    "sdpa": [{"type": "rmsnorm", "eps": 2.0}, GATE],
}
WIDE = {**UNIT, "eps": 2.0}
ROTATED = [WIDE, {**ROPE, "fraction": 0.5}]
HYBRID = {
    **QWEN3_NEXT,
    "n_layers": 3,
    "block": {
        "norm": WIDE,
        "gated_delta_net": DELTA,
        "attention": {**QWEN3_NEXT["block"]["attention"], "query": ROTATED, "key": ROTATED},
        "ffn": QWEN3_NEXT["block"]["ffn"],
    },
    "overrides": {"1": {"block.gated_delta_net": None}, "::2": {"block.attention": None}},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "experts_implementation": "eager",
}
MOE = {"type": "moe", "experts": 6, "top_k": 2, "width": 24, "shared": 20, "shared_gate": True}
SPARSE = {**HYBRID, "block": {**HYBRID["block"], "ffn": {**MOE, "balance": {"type": "switch"}}}}
ALL = [
    Published("mamba2", mamba2, MAMBA2, "mamba2", "mamba2"),
    Published(
        "mamba2-untied",
        lambda: mamba2(tie_word_embeddings=False, use_conv_bias=False),
        arch_dsl.canonical(
            arch_dsl.patch(
                arch_dsl.load(MAMBA2),
                {
                    "unembedding.tied": False,
                    **{f"block.mamba2.{n}.short_conv.bias": False for n in ("query", "key", "value")},
                },
            )
        ),
        "mamba2",
    ),
    Published("qwen3_next-hybrid", qwen3_next, HYBRID, "qwen3_next"),
    Published("qwen3_next-experts", lambda: qwen3_next(**EXPERTS), SPARSE, "qwen3_next", "qwen3_next", spread=1.5),
]


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


@pytest.mark.parametrize("published", [each for each in ALL if each.zoo], ids=str)
def test_architecture_is_that_of_the_zoo(published):
    assert outline(model_of(published)) == outline_of_zoo(published.zoo)


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
