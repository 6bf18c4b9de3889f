"""Models that are started from today against transformers: layers of one branch each, experts of squared ReLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from tests.arch_dsl.zoo.test_parity_hybrids import EXPERTS, GATE, theirs
from tests.arch_dsl.zoo.test_parity_modern import GLU, NORM, ROPE, ROTATION, sizes, spec


def nemotron_h(feed_forward: str) -> Any:
    """What makes a model with a bias of the choice of experts that is not 0."""
    ssd = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 10, "n_groups": 2, "time_step_min": 0.3}
    moe = {"n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20}
    layers = ["linear_attention", feed_forward, "linear_attention", "full_attention"]
    own = {"layers_block_type": layers, "num_hidden_layers": 4, "head_dim": 12, "layer_norm_epsilon": 0.03}
    make = theirs("NemotronH", **own, **ssd, **moe, **EXPERTS, chunk_size=16, routed_scaling_factor=1.5)

    def build() -> nn.Module:
        model: nn.Module = make()
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.linspace(-0.4, 0.4, 6))
        return model

    return build


def nemotron_h_spec(feed_forward: dict[str, Any]) -> dict[str, Any]:
    """Mamba-2, the feed-forward, Mamba-2, attention."""
    groups = {**NORM, "over": "heads", "groups": 2}
    slow = {"type": "mamba2", "floor": 0.3}
    mamba2 = {"value_dim": 8, "head_dim": 10, "key_heads": 2, "decay": slow, "sdpa": [GATE, groups]}
    attention = {"heads": 4, "kv_heads": 2, "head_dim": 12}
    kept = {"mamba2": "1,3", "attention": ":3", "ffn": "0,2,3"}
    return {
        "d_model": 32,
        "n_layers": 4,
        "block": {"norm": NORM, "mamba2": mamba2, "attention": attention, "ffn": feed_forward},
        "overrides": {layers: {f"block.{name}": None} for name, layers in kept.items()},
        "unembedding": {"tied": False},
    }


BIAS = {"type": "bias", "auxiliary": {"type": "switch"}}
SQUARED = {"type": "mlp", "width": 40, "activation": "relu2"}
MOE = {"type": "moe", "experts": 6, "top_k": 2, "width": 24, "shared": 20}
SQUARED_MOE = {**MOE, "expert": "mlp", "activation": "relu2", "routing": "sigmoid", "scale": 1.5, "balance": BIAS}

YARN = {"factor": 4.0, "beta_fast": 1.0, "beta_slow": 0.25}  # whose ends lie within the channels
SLOWED = {**ROPE, "scaling": {**YARN, "type": "yarn", "original": 16, "attention_factor": 1}}
MINISTRAL3 = spec({"head_dim": 16, "positional": SLOWED, "query": [{"type": "scale", "growth": 0.1, "every": 16}]})
GROWN = {**ROTATION, **YARN, "rope_type": "yarn", "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
GROWN |= {"mscale": 1.0, "mscale_all_dim": 1.0}


def llama4(**fields: Any) -> Any:
    """What makes a model whose queries grow every 7 positions in each second layer, from the first on."""
    moe = {"intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 6}
    own = {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "attention_chunk_size": 9, "floor_scale": 7}

    def build() -> nn.Module:
        from transformers import Llama4ForCausalLM, Llama4TextConfig

        return Llama4ForCausalLM(Llama4TextConfig(**sizes(head_dim=16) | own | moe | fields))  # type: ignore[no-any-return]

    return build


LLAMA4 = spec(
    {
        "head_dim": 16,
        "qk_norm": {**NORM, "weight": False},
        "positional": {**ROPE, "pairs": "interleaved"},
        "mask": {"type": "chunked", "stride": 9},
    },
    n_layers=4,
)
LLAMA4["block"]["ffn"] = {
    **MOE,
    "top_k": 1,
    "shared": 24,
    "routing": "sigmoid",
    "normalize": False,
    "weigh": "inputs",
}
ALONE: dict[str, Any] = {
    "block.attention.mask": "causal",
    "block.attention.key": [],
    "block.attention.query": [{"type": "scale", "growth": 0.1, "every": 7, "first": 1}],
}
LLAMA4["overrides"] = {"1::2": ALONE}
MAVERICK = {
    **LLAMA4,
    "block": {**LLAMA4["block"], "dense": GLU, "attention": {**LLAMA4["block"]["attention"], "qk_norm": None}},
    "overrides": {"3": ALONE, "1::2": {"block.dense": None}, "::2": {"block.ffn": None}},
}

ALL = [
    Published("nemotron_h", nemotron_h("moe"), nemotron_h_spec(SQUARED_MOE), "nemotron_h", "nemotron_h", spread=0.7),
    Published("nemotron_h 8b", nemotron_h("mlp"), nemotron_h_spec(SQUARED), "nemotron_h", "nemotron_h/8b", spread=0.7),
    Published(
        "ministral3",
        theirs("Ministral3", head_dim=16, max_position_embeddings=64, rope_parameters=GROWN),
        MINISTRAL3,
        "llama",
        "ministral3",
    ),
    Published("llama4", llama4(), LLAMA4, "llama4", "llama4"),
    Published(
        "llama4 maverick",
        llama4(moe_layers=[1, 3], use_qk_norm=False, no_rope_layer_interval=4),
        MAVERICK,
        "llama4",
        "llama4/maverick",
    ),
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
    assert unexplained(published) == []
