"""Hybrids of attention and recurrent mixers against transformers: in turn, side by side, with experts, with factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from archlab import arch_dsl
from tests.arch_dsl.parity import (
    GRADIENTS,
    LOGITS,
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
from tests.arch_dsl.zoo.test_parity_mixers import _l2norm
from tests.arch_dsl.zoo.test_parity_modern import GLU, NORM, ROPE, ROTATION, sizes

HALF = {**ROTATION, "partial_rotary_factor": 0.5}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 10, "mamba_expand": 2, "mamba_chunk_size": 16}


@pytest.fixture(scope="module", autouse=True)
def _theirs() -> Iterator[None]:
    with put_back("olmo_hybrid"):
        yield


def theirs(name: str, **fields: Any) -> Any:
    """What makes a model of transformers without a padding token, whose embedding would get no gradient."""

    def build() -> nn.Module:
        import transformers

        config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
        return model(config(**{**sizes(pad_token_id=None), **fields}))  # type: ignore[no-any-return]

    return build


def olmo_hybrid() -> nn.Module:
    """With epsilons that can be seen, where theirs are constants."""
    by_torch(modeling("olmo_hybrid"), *GATED_DELTA)
    modeling("olmo_hybrid").l2norm = _l2norm
    layers = ["linear_attention", "full_attention", "linear_attention"]
    linear = {"linear_num_key_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
    more: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": layers, "num_key_value_heads": 4}
    more["rope_parameters"] = {"rope_type": "default", "rope_theta": None}  # no rotations
    model: nn.Module = theirs("OlmoHybrid", **linear, **more)()
    for layer in model.model.layers[::2]:  # type: ignore[union-attr, index]
        layer.linear_attn.o_norm.variance_epsilon = 2.0  # type: ignore[union-attr]
    return model


def minimax() -> nn.Module:
    """With the factors of DeepNorm, as published, and an epsilon that can be seen in linear attention."""
    layers = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    factors = {f"{name}_alpha_factor": 8**0.25 for name in ("full_attn", "linear_attn", "mlp")}
    more = {"num_hidden_layers": 4, "layer_types": layers, "head_dim": 12, "num_local_experts": 6, "block_size": 16}
    model: nn.Module = theirs("MiniMax", **factors, **more, **EXPERTS)()
    for layer in (0, 2, 3):
        model.model.layers[layer].self_attn.norm.variance_epsilon = 20.0  # type: ignore[union-attr, index]
    return model


def in_turn(mixer: dict[str, Any], attention: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Three layers of a recurrent mixer and attention in the second of them."""
    (name,) = mixer
    overrides = {"1": {f"block.{name}": None}, "::2": {"block.attention": None}}
    block = {"norm": NORM, **mixer, "attention": {"heads": 4, "kv_heads": 2, **attention}, "ffn": GLU}
    return {"d_model": 32, "n_layers": 3, "block": block, "overrides": overrides, "unembedding": {"tied": False}} | more


GATE = {"type": "gate", "activation": "silu"}
SSD = {"head_dim": 10, "value_dim": 8, "sdpa": [GATE, {**NORM, "over": "heads"}]}
BAMBA = in_turn({"mamba2": SSD}, {"positional": {**ROPE, "fraction": 0.5}})
MOE = {"type": "moe", "experts": 6, "top_k": 2, "width": 24, "shared": 20, "balance": {"type": "switch"}}
GRANITE = in_turn(
    {"mamba2": SSD},
    {"scale": 0.4},
    embed=[{"type": "scale", "by": 3.0}],
    logits=[{"type": "scale", "by": 0.4}],
    unembedding={"tied": True},
)
GRANITE["block"] |= {"ffn": MOE, "join": {"type": "weighted", "update": 0.3}}
FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.5,
    "tie_word_embeddings": True,
}
CONV = {"type": "short_conv", "bias": True, "activation": "silu"}


def scale(by: float) -> dict[str, Any]:
    return {"type": "scale", "by": by}


FALCON_H1: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 2,
    "embed": [scale(3.0)],
    "block": {
        "parallel": {
            "pre": [NORM],
            "mamba2": {
                "pre": [scale(1.25)],
                "heads": 6,
                "head_dim": 10,
                "value_dim": 8,
                "decay": {"type": "mamba2", "factor": 0.35},
                "value": [scale(0.25), CONV],
                "key": [scale(0.7), CONV],
                "query": [scale(0.5), CONV],
                "sdpa": [{"type": "gate", "activation": "0.6 * x * sigmoid(0.6 * x)"}],
                "post": [scale(0.3)],
            },
            "attention": {
                "heads": 4,
                "kv_heads": 2,
                "query": [ROPE],
                "key": [ROPE, scale(0.4)],
                "post": [scale(0.8)],
            },
        },
        "ffn": {
            "type": "glu",
            "width": 40,
            "activation": "0.9 * x * sigmoid(0.9 * x)",
            "pre": [NORM],
            "post": [scale(0.6)],
        },
    },
    "final": [NORM],
    "unembedding": {"tied": False},
    "logits": [scale(0.4)],
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.6, 0.25, 0.7, 0.5, 0.35],
    "ssm_out_multiplier": 0.3,
    "key_multiplier": 0.4,
    "attention_out_multiplier": 0.8,
    "mlp_multipliers": [0.9, 0.6],
    "lm_head_multiplier": 0.4,
}
SPARSE = {k: v for k, v in MOE.items() if k != "shared"} | {"width": 40, "normalize": False}
JAMBA = in_turn({"mamba": {"state": 5, "query": [NORM], "key": [NORM], "dt": [NORM]}}, {})
JAMBA["block"]["experts"] = SPARSE
JAMBA |= {
    "n_layers": 5,
    "overrides": {
        "2": {"block.mamba": None},
        "0,1,3,4": {"block.attention": None},
        "::2": {"block.experts": None},
        "1::2": {"block.ffn": None},
    },
}
GATED_CONV = [{"type": "short_conv", "width": 3}, {"type": "gate", "activation": "identity"}]
LFM2 = in_turn(
    {"conv": {"type": "glu", "activation": "identity", "width": 32, "inner": GATED_CONV}},
    {"qk_norm": NORM, "positional": ROPE},
    unembedding={"tied": True},
)
L2 = {"type": "l2norm", "eps": 0.5}
SILU = {"type": "short_conv", "activation": "silu"}
OLMO_HYBRID: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 3,
    "block": {
        "gated_delta_net": {
            "heads": 4,
            "head_dim": 6,
            "value_dim": 10,
            "beta": "2 * sigmoid(x)",
            "pre": [NORM],
            "query": [SILU, L2],
            "key": [SILU, L2],
            "sdpa": [{**NORM, "eps": 2.0}, GATE],
        },
        "attention": {"heads": 4, "qk_norm": {**NORM, "over": "heads"}, "post": [NORM]},
        "ffn": {**GLU, "pre": [NORM]},
    },
    "overrides": {
        "1": {"block.gated_delta_net": None, "block.ffn.pre": [], "block.ffn.post": [NORM]},
        "::2": {"block.attention": None},
    },
    "final": [NORM],
    "unembedding": {"tied": False},
}
MINIMAX: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 4,
    "embed": [NORM],
    "block": {
        "norm": {**NORM, "placement": "deepnorm"},
        "lightning_attention": {
            "heads": 4,
            "head_dim": 12,
            "sdpa": [{"type": "rmsnorm", "over": "heads", "eps": 20.0}, {"type": "gate"}],
        },
        "attention": {"heads": 4, "kv_heads": 2, "head_dim": 12, "positional": ROPE},
        "ffn": SPARSE | {"normalize": True},
    },
    "overrides": {"1": {"block.lightning_attention": None}, "0,2,3": {"block.attention": None}},
    "unembedding": {"tied": False},
}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}

ALONE = {"type": "weighted", "stream": 0.0}
SHARED: dict[str, Any] = {
    "type": "sequential",
    "attention": {
        "heads": 4,
        "head_dim": 16,
        "scale": 8**-0.5,
        "concat": "embeddings",
        "share": "stack",
        "query": [ROPE],
        "key": [ROPE],
        "pre": [NORM],
        "join": ALONE,
    },
    "ffn": {**GLU, "activation": "gelu", "lora": [{"rank": 5}], "share": "stack", "pre": [NORM], "join": ALONE},
    "dense": {"activation": "identity", "join": ALONE},
}
MIXER: dict[str, Any] = {"value_dim": 8, "head_dim": 10, "decay": {"type": "mamba2", "floor": 0.3}, "pre": [NORM]}


def zamba2_spec(shared: dict[str, Any], overrides: dict[str, Any], **mixer: Any) -> dict[str, Any]:
    """Six layers of Mamba-2 with shared blocks before them."""
    group = {**shared, "mamba2": {**MIXER, "join": ALONE, **mixer}}
    return {"d_model": 32, "n_layers": 6, "block": {"sequential": group}, "overrides": overrides, "final": [NORM]}


def gated_norm(**more: Any) -> list[Any]:
    return [GATE, {**NORM, "eps": 2.0, "over": "heads", **more}]


UPDATED = {**SHARED["attention"], "lora": [{"of": name, "rank": 5} for name in ("query", "key", "value")]}
ZAMBA2_ONE = zamba2_spec(
    {"a": {**SHARED, "attention": UPDATED}}, {"::2": {"block.sequential.a": None}}, sdpa=gated_norm()
)
ZAMBA2_TWO = zamba2_spec(
    {"a": SHARED, "b": SHARED},
    {"0,2,4": {"block.sequential.a": None}, "0,1,3,5": {"block.sequential.b": None}},
    sdpa=gated_norm(groups=2),
    key_heads=2,
)


def zamba2(layers: str, **more: Any) -> Any:
    """What makes a model whose layers are Mamba-2 (m), or have a shared block too (h); the epsilon of the
    gated norm can be seen, where theirs is a constant."""
    kinds = ["hybrid" if layer == "h" else "linear_attention" for layer in layers]
    ssd = {"n_mamba_heads": 8, "mamba_d_state": 10, "chunk_size": 16, "time_step_min": 0.3}
    attention = {"num_key_value_heads": 4, "adapter_rank": 5, "use_mem_rope": True, "hidden_act": "gelu"}
    own = {"num_hidden_layers": 6, "layers_block_type": kinds, "tie_word_embeddings": True}
    make = theirs("Zamba2", **own, **ssd, **attention, **more)

    def build() -> nn.Module:
        model: nn.Module = make()
        for layer in model.model.layers:  # type: ignore[union-attr]
            mixer = layer.mamba_decoder.mamba if hasattr(layer, "mamba_decoder") else layer.mamba  # type: ignore[union-attr]
            mixer.norm.variance_epsilon = 2.0  # type: ignore[union-attr]
        return model

    return build


ALL = [
    Published(
        "bamba",
        theirs("Bamba", **MAMBA2, num_hidden_layers=3, attn_layer_indices=[1], rope_parameters=HALF),
        BAMBA,
        "bamba",
        "bamba",
    ),
    Published(
        "granite4",
        theirs(
            "GraniteMoeHybrid",
            **MAMBA2,
            **FACTORS,
            **EXPERTS,
            num_local_experts=6,
            intermediate_size=24,
            shared_intermediate_size=20,
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            position_embedding_type=None,
        ),
        GRANITE,
        "granite4",
        "granite4",
    ),
    Published(
        "falcon_h1",
        theirs("FalconH1", **{**MAMBA2, "mamba_n_heads": 6}, **MULTIPLIERS, mamba_d_ssm=48),
        FALCON_H1,
        "bamba",
        "falcon_h1",
    ),
    Published(
        "jamba",
        theirs(
            "Jamba",
            **EXPERTS,
            num_hidden_layers=5,
            num_experts=6,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=4,
            attn_layer_offset=2,
            mamba_d_state=5,
        ),
        JAMBA,
        "jamba",
        "jamba",
        spread=0.7,
    ),
    Published(
        "lfm2",
        theirs(
            "Lfm2",
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            norm_eps=0.03,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=True,
        ),
        LFM2,
        "lfm2",
        "lfm2",
    ),
    Published(
        "zamba2 1.2b",
        zamba2("mhmhmh", use_shared_attention_adapter=True),
        ZAMBA2_ONE,
        "zamba2",
        "zamba2/1.2b",
        spread=0.7,
    ),
    Published(
        "zamba2 7b",
        zamba2("mhhhhh", num_mem_blocks=2, mamba_ngroups=2),
        ZAMBA2_TWO,
        "zamba2",
        "zamba2/7b",
        spread=0.7,
    ),
    Published("minimax", minimax, MINIMAX, "minimax", "minimax", spread=1.5),
    Published("olmo_hybrid", olmo_hybrid, OLMO_HYBRID, "olmo_hybrid", "olmo_hybrid"),
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
    found = sum(value.numel() for value in theirs_of(published).parameters())
    assert arch_dsl.cost(model_of(published)).parameters == found


@pytest.mark.parametrize("published", ALL, ids=str)
def test_architecture_is_that_of_the_zoo(published):
    assert outline(model_of(published)) == outline_of_zoo(published.zoo)


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    """But for the same function under its other name: `activation` is silu where it says nothing."""
    same = "[{type: feature_map, function: silu}] → [activation]"
    assert [each for each in unexplained(published) if same not in each] == []
