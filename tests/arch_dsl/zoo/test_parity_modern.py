"""Llama and its relatives against transformers: RMS norms, gated feed-forwards, RoPE, grouped heads, windows, caps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from archlab import arch_dsl
from tests.arch_dsl.parity import (
    GRADIENTS,
    LENGTH,
    LOGITS,
    VOCAB,
    Published,
    errors,
    model_of,
    outline,
    outline_of_zoo,
    theirs_of,
    trials_of,
    unexplained,
)

NORM = {"type": "rmsnorm", "eps": 0.03}  # large enough to be seen
ROPE = {"type": "rope", "theta": 100.0}
GLU = {"type": "swiglu", "width": 40}
ROTATION = {"rope_type": "default", "rope_theta": 100.0}


def sizes(**more: Any) -> dict[str, Any]:
    """The fields of a configuration that all of these share."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 0.03,
        "max_position_embeddings": 2 * LENGTH,
        "rope_parameters": ROTATION,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        **more,
    }


def spec(attention: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The spec of Llama with other fields of its attention, or of the model."""
    block = {"norm": NORM, "attention": {"heads": 4, "kv_heads": 2, "positional": ROPE, **attention}, "ffn": GLU}
    return {"d_model": 32, "n_layers": 2, "block": block, "unembedding": {"tied": False}, **more}


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes(**more)))


def scaled(**fields: Any) -> Any:
    """A Llama whose rotations were slowed down, read beyond the length that it was trained on."""
    return lambda: llama(rope_parameters={**ROTATION, "factor": 4.0, **fields}, max_position_embeddings=16, head_dim=16)


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**sizes(sliding_window=9)))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**sizes(use_sliding_window=False)))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**sizes(head_dim=12)))


def olmo2() -> nn.Module:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**sizes()))


def gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    fields = {
        "num_hidden_layers": 4,
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 9,
        "tie_word_embeddings": True,
        "pad_token_id": None,  # else its embedding gets no gradient
    }
    return Gemma2ForCausalLM(Gemma2Config(**sizes(**fields)))


def qwen3_next() -> nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    fields = {
        "head_dim": 16,
        "layer_types": ["full_attention", "full_attention"],
        "num_experts": 0,
        "rope_parameters": {**ROTATION, "partial_rotary_factor": 0.5},
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes(**fields)))


class _Nothing(nn.Module):
    """Stands where their experts were."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(x), None


def gpt_oss() -> nn.Module:
    """Without its feed-forward branches, which are mixtures of experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    fields = {
        "head_dim": 16,
        "max_position_embeddings": 256,
        "sliding_window": 9,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {**ROTATION, **RAMP, "rope_type": "yarn", "factor": 4.0, "truncate": False},
    }
    model = GptOssForCausalLM(GptOssConfig(**sizes(**fields)))
    for layer in model.model.layers:
        layer.mlp, layer.post_attention_layernorm = _Nothing(), nn.Identity()
    return model


UNIT = {**NORM, "unit_offset": True}
GEMMA2 = {
    "d_model": 32,
    "n_layers": 4,
    "embed": [{"type": "scale", "width_power": 0.5}],
    "block": {
        "norm": {**UNIT, "placement": "sandwich"},
        "attention": {
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 12,
            "scale": 20**-0.5,
            "positional": ROPE,
            "scores": [{"type": "softcap", "cap": 5.0}],
            "mask": {"type": "window", "size": 9},
        },
        "ffn": {"type": "glu", "width": 40, "activation": "gelu_tanh"},
    },
    "overrides": {"1::2": {"block.attention.mask": "causal"}},
    "logits": [{"type": "softcap", "cap": 3.0}],
}
OLMO2_NORM = {**NORM, "over": "heads"}
OLMO2 = {
    "d_model": 32,
    "n_layers": 2,
    "block": {
        "attention": {
            "heads": 4,
            "kv_heads": 2,
            "query": [OLMO2_NORM, ROPE],
            "key": [OLMO2_NORM, ROPE],
            "post": [NORM],
        },
        "ffn": {**GLU, "post": [NORM]},
    },
    "final": [NORM],
    "unembedding": {"tied": False},
}
QWEN3_NEXT = spec(
    {
        "head_dim": 16,
        "query": [UNIT, {**ROPE, "fraction": 0.5}],
        "key": [UNIT, {**ROPE, "fraction": 0.5}],
        "sdpa": ["gate"],
    }
)
QWEN3_NEXT["block"]["norm"] = UNIT
del QWEN3_NEXT["block"]["attention"]["positional"]
# The ends of the ramp lie within the channels of a head.
RAMP = {"original_max_position_embeddings": 64, "beta_fast": 3.0, "beta_slow": 0.5}
YARN = {"type": "yarn", "factor": 4.0, "original": 64, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GPT_OSS = {
    "d_model": 32,
    "n_layers": 4,
    "block": {
        "norm": NORM,
        "attention": {
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "bias": True,
            "positional": {**ROPE, "scaling": YARN},
            "scores": ["sinks"],
            "mask": {"type": "window", "size": 9},
        },
    },
    "overrides": {"1::2": {"block.attention.mask": "causal"}},
    "unembedding": {"tied": False},
}

ALL = [
    Published("llama", llama, spec({}), "llama", "llama"),
    Published(
        "llama-tied", lambda: llama(tie_word_embeddings=True), spec({}, unembedding={"tied": True}), "llama", "smollm2"
    ),
    *(
        Published(
            f"llama-{name}",
            scaled(rope_type=name, **theirs),
            spec({"head_dim": 16, "positional": {**ROPE, "scaling": {"factor": 4.0, **scaling}}}),
            "llama",
            "llama3/3.1-8b" if name == "llama3" else None,
        )
        for name, theirs, scaling in (
            ("linear", {}, {"type": "linear"}),
            ("dynamic", {}, {"type": "dynamic_ntk", "original": 16}),
            ("yarn", {**RAMP, "truncate": False}, YARN),
            ("llama3", LLAMA3, {"type": "llama3", "original": 16}),
        )
    ),
    Published("mistral", mistral, spec({"mask": {"type": "window", "size": 9}}), "llama", "mistral"),
    Published("qwen2", qwen2, spec({"bias": ["query", "key", "value"]}), "llama", "qwen2_5/7b"),
    Published("qwen3", qwen3, spec({"head_dim": 12, "qk_norm": NORM}), "llama", "qwen3/8b"),
    Published("olmo2", olmo2, OLMO2, "olmo2", "olmo2"),
    Published("gemma2", gemma2, GEMMA2, "gemma2", "gemma2/27b"),
    Published("qwen3_next", qwen3_next, QWEN3_NEXT, "qwen3_next"),
    Published("gpt_oss-attention", gpt_oss, GPT_OSS, "gpt_oss"),
]


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
    assert outline(model_of(published)) == outline_of_zoo(published.zoo)


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
