"""Llama's descendants against transformers: two kinds of layers, fixed factors, parallel branches, fused maps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from archlab import arch_dsl
from tests.arch_dsl.parity import (
    GRADIENTS,
    LOGITS,
    Published,
    errors,
    model_of,
    outline,
    outline_of_zoo,
    theirs_of,
    trials_of,
    unexplained,
)
from tests.arch_dsl.zoo.test_parity_modern import (
    GEMMA2,
    GLU,
    LLAMA3,
    NORM,
    OLMO2,
    OLMO2_NORM,
    ROPE,
    ROTATION,
    UNIT,
    spec,
)
from tests.arch_dsl.zoo.test_parity_modern import sizes as common

WINDOW = {"type": "window", "size": 9}
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 9}
FAR = {**ROTATION, "rope_theta": 300.0}


def theirs(name: str, text: str = "", **fields: Any) -> Any:
    """What makes a model of transformers without a padding token, whose embedding would get no gradient."""

    def build() -> nn.Module:
        import transformers

        config, model = getattr(transformers, f"{name}{text}Config"), getattr(transformers, f"{name}ForCausalLM")
        return model(config(**common(pad_token_id=None, **fields)))  # type: ignore[no-any-return]

    return build


GEMMA3: dict[str, Any] = {
    **{name: value for name, value in GEMMA2.items() if name != "logits"},
    "overrides": {
        "1::2": {
            "block.attention.mask": "causal",
            "block.attention.positional": {**ROPE, "theta": 300.0, "scaling": {"type": "linear", "factor": 4.0}},
        }
    },
}
GEMMA3["block"] = {
    **GEMMA3["block"],
    "attention": {**GEMMA3["block"]["attention"], "scores": [], "qk_norm": UNIT},
}
# The end of the ramp lies below a channel, to which it is rounded, and beyond it with one position more.
RAMP = {"original_max_position_embeddings": 64, "beta_fast": 3.0, "beta_slow": 0.574}
YARN = {"type": "yarn", "factor": 4.0, "original": 64, "beta_fast": 3.0, "beta_slow": 0.574}
SLOW = [OLMO2_NORM, {**ROPE, "scaling": YARN}]
OLMO3 = {
    **OLMO2,
    "n_layers": 4,
    "block": {
        **OLMO2["block"],
        "attention": {**OLMO2["block"]["attention"], "head_dim": 16, "mask": WINDOW},
    },
    "overrides": {
        "1::2": {"block.attention.mask": "causal", "block.attention.query": SLOW, "block.attention.key": SLOW}
    },
}
PLAIN = {"type": "layernorm", "eps": 0.03, "bias": False}
TURNED = {**ROPE, "pairs": "interleaved"}


def parallel(attention: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The spec of Command R with other fields of its attention, or of the model."""
    group = {"pre": [PLAIN], "attention": {"heads": 4, "kv_heads": 2, "positional": TURNED, **attention}, "ffn": GLU}
    return {
        "d_model": 32,
        "n_layers": 2,
        "block": {"parallel": group},
        "final": [PLAIN],
        "logits": [{"type": "scale", "by": 0.3}],
        **more,
    }


SOFT = {"type": "weighted", "update": 0.3}
GRANITE = spec({"scale": 0.4, "join": SOFT}, embed=[{"type": "scale", "by": 3.0}])
GRANITE["block"]["ffn"] = {**GLU, "join": SOFT}
GRANITE |= {"logits": [{"type": "scale", "by": 0.4}], "unembedding": {"tied": True}}
STABLELM = spec({"bias": ["query", "key", "value"], "positional": {**ROPE, "fraction": 0.5}})
STABLELM["block"]["norm"] = {"type": "layernorm", "eps": 0.03}
NEMOTRON = spec({"head_dim": 12, "positional": {**ROPE, "fraction": 0.5}})
NEMOTRON["block"] |= {
    "norm": {"type": "layernorm", "unit_offset": True, "eps": 0.03},
    "ffn": {"type": "mlp", "width": 40, "activation": "relu2"},
}
GLM4 = spec({"head_dim": 12, "bias": ["query", "key", "value"], "positional": {**TURNED, "fraction": 0.5}})
GLM4["block"]["norm"] = {**NORM, "placement": "sandwich"}
SLOWED = {**ROPE, "scaling": {"type": "llama3", "factor": 4.0, "original": 16}}
BEHIND = {"heads": 4, "kv_heads": 2, "head_dim": 16, "query": [NORM, SLOWED], "key": [NORM, SLOWED], "post": [NORM]}
EXAONE4: dict[str, Any] = {
    **OLMO2,
    "block": {"attention": BEHIND, "ffn": {**GLU, "post": [NORM]}},
    "unembedding": {"tied": True},
}
EXAONE4_TURNS = {
    **EXAONE4,
    "n_layers": 4,
    "unembedding": {"tied": False},
    "block": {**EXAONE4["block"], "attention": {**BEHIND, "mask": WINDOW}},
    "overrides": {"1::2": {"block.attention.mask": "causal", "block.attention.positional": None}},
}
LLAMA3_HEADS = {"head_dim": 16, "rope_parameters": {**ROTATION, **LLAMA3, "rope_type": "llama3", "factor": 4.0}}
FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}
ERNIE = spec({"head_dim": 12, "positional": TURNED}, unembedding={"tied": True})
HALF = {**ROTATION, "partial_rotary_factor": 0.5}
FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.5,
    "tie_word_embeddings": True,
}
COHERE = {"tie_word_embeddings": True, "layer_norm_eps": 0.03, "logit_scale": 0.3}

ALL = [
    Published(
        "gemma3",
        theirs(
            "Gemma3",
            "Text",
            **TURNS,
            head_dim=12,
            query_pre_attn_scalar=20,
            tie_word_embeddings=True,
            rope_parameters={
                "sliding_attention": ROTATION,
                "full_attention": {**FAR, "rope_type": "linear", "factor": 4.0},
            },
        ),
        GEMMA3,
        "gemma2",
        "gemma3/27b",
    ),
    Published(
        "olmo3",
        theirs(
            "Olmo3",
            **TURNS,
            head_dim=16,
            max_position_embeddings=256,
            rope_parameters={
                "sliding_attention": ROTATION,
                "full_attention": {**ROTATION, **RAMP, "rope_type": "yarn", "factor": 4.0},
            },
        ),
        OLMO3,
        "olmo2",
        "olmo3",
    ),
    Published(
        "smollm3",
        theirs("SmolLM3", num_hidden_layers=4, no_rope_layer_interval=2, tie_word_embeddings=True),
        spec({}, n_layers=4, overrides={"1::2": {"block.attention.positional": None}}, unembedding={"tied": True}),
        "llama",
        "smollm3",
    ),
    Published("phi3", theirs("Phi3", sliding_window=9), spec({"mask": WINDOW}), "phi3", "phi3"),
    Published("phi4", theirs("Phi3"), spec({}), "phi3", "phi3/phi4"),
    Published("granite", theirs("Granite", **FACTORS), GRANITE, "llama", "granite3"),
    Published(
        "cohere",
        theirs("Cohere", **COHERE, use_qk_norm=True),
        parallel({"qk_norm": {**PLAIN, "per_head": True}}),
        "cohere",
        "command_r/plus",
    ),
    Published(
        "cohere2",
        theirs("Cohere2", **COHERE, **TURNS),
        parallel(
            {"mask": WINDOW},
            n_layers=4,
            overrides={
                "1::2": {"block.parallel.attention.mask": "causal", "block.parallel.attention.positional": None}
            },
        ),
        "cohere",
        "command_r7b",
    ),
    Published(
        "stablelm",
        theirs("StableLm", use_qkv_bias=True, layer_norm_eps=0.03, rope_parameters=HALF),
        STABLELM,
        "llama",
        "stablelm/2-1.6b",
    ),
    Published(
        "nemotron",
        theirs("Nemotron", head_dim=12, hidden_act="relu2", norm_eps=0.03, rope_parameters=HALF),
        NEMOTRON,
        "llama",
        "nemotron",
        spread=1.0,
    ),
    Published("glm4", theirs("Glm4", head_dim=12, rope_parameters=HALF), GLM4, "glm4", "glm4"),
    Published("exaone4", theirs("Exaone4", **TURNS, **LLAMA3_HEADS), EXAONE4_TURNS, "olmo2", "exaone4"),
    Published("exaone4-full", theirs("Exaone4", **FULL, **LLAMA3_HEADS), EXAONE4, "olmo2", "exaone4/1.2b"),
    Published(
        "seed_oss",
        theirs("SeedOss", head_dim=12),
        spec({"head_dim": 12, "bias": ["query", "key", "value"]}),
        "llama",
        "seed_oss",
    ),
    Published("ernie4_5", theirs("Ernie4_5", head_dim=12, tie_word_embeddings=True), ERNIE, "llama", "ernie4_5"),
]


@pytest.mark.parametrize("published", ALL, ids=str)
def test_logits_and_gradients_are_those_of_transformers(published):
    logits, gradients = errors(published)
    assert logits <= LOGITS and gradients <= GRADIENTS


@pytest.mark.parametrize("published", ALL, ids=str)
def test_parameters_are_counted_as_theirs(published):
    found = sum(value.numel() for value in theirs_of(published).parameters())
    assert arch_dsl.cost(model_of(published)).parameters == found


@pytest.mark.parametrize("published", ALL, ids=str)
def test_architecture_is_that_of_the_zoo(published):
    assert outline(model_of(published)) == outline_of_zoo(published.zoo)


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
