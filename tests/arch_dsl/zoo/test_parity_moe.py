"""Mixtures of experts against transformers: softmax and sigmoid routing, shared experts, biases, clamps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from archlab import arch_dsl
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.weights.files import read_checkpoint, read_weights
from archlab.arch_dsl.weights.layout import load_layout
from archlab.search.models.weights import import_checkpoint
from tests.arch_dsl.parity import (
    GRADIENTS,
    LOGITS,
    TOKENS,
    Published,
    errors,
    expected,
    model_of,
    outline,
    outline_of_zoo,
    relative,
    theirs_of,
    unexplained,
)
from tests.arch_dsl.zoo.test_parity_modern import GPT_OSS, NORM, OLMO2_NORM, RAMP, ROPE, ROTATION, sizes, spec

MOE = {"type": "moe", "experts": 6, "top_k": 2, "width": 24}


def experts(attention: dict[str, Any], ffn: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The spec of Llama with experts in place of its feed-forward."""
    found = spec(attention, **more)
    return {**found, "block": {**found["block"], "ffn": {**MOE, **ffn}}}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    fields = sizes(intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, experts_implementation="eager")
    return MixtralForCausalLM(MixtralConfig(**fields))


def qwen2_moe() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    fields = {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "experts_implementation": "eager",
    }
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes(**fields)))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes(**fields, head_dim=12, experts_implementation="eager")))


def olmoe() -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    fields = sizes(intermediate_size=24, num_experts=6, num_experts_per_tok=2, experts_implementation="eager")
    return OlmoeForCausalLM(OlmoeConfig(**fields, pad_token_id=None))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    fields = {
        "head_dim": 16,
        "intermediate_size": 24,
        "max_position_embeddings": 256,
        "sliding_window": 9,
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {**ROTATION, **RAMP, "rope_type": "yarn", "factor": 4.0, "truncate": False},
        "experts_implementation": "eager",
    }
    return GptOssForCausalLM(GptOssConfig(**sizes(**fields)))


LOWER = "(0.5 - relu(0.5 - x))"  # min(x, 0.5)
GPT_OSS_MOE = {
    **MOE,
    "bias": True,
    "router_bias": True,
    "activation": f"{LOWER} * sigmoid(1.702 * {LOWER})",
    "linear": "0.5 * hardtanh(x / 0.5) + 1",
}
BALANCE = {"type": "switch", "coefficient": 0.01}
QWEN2_MOE = {**MOE, "top_k": 3, "normalize": False, "shared": 20, "shared_gate": True}

ALL = [
    Published("mixtral", mixtral, experts({}, {}), "mixtral", "mixtral"),
    Published(
        "qwen2_moe",
        qwen2_moe,
        spec({"bias": ["query", "key", "value"]}, n_layers=4, overrides={"1::2": {"block.ffn": QWEN2_MOE}}),
        "llama",
        spread=1.0,
    ),
    Published(
        "qwen3_moe",
        qwen3_moe,
        experts({"head_dim": 12, "qk_norm": NORM}, {"balance": {**BALANCE, "over": "global_batch"}}),
        "llama",
        "qwen3_moe",
    ),
    Published(
        "olmoe",
        olmoe,
        {
            **experts({}, {"normalize": False}),
            "block": {
                "norm": NORM,
                "attention": {"heads": 4, "kv_heads": 2, "query": [OLMO2_NORM, ROPE], "key": [OLMO2_NORM, ROPE]},
                "ffn": {**MOE, "normalize": False, "balance": BALANCE},
            },
        },
        "llama",
        "olmoe",
    ),
    Published("gpt_oss", gpt_oss, {**GPT_OSS, "block": {**GPT_OSS["block"], "ffn": GPT_OSS_MOE}}, "gpt_oss", "gpt_oss"),
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


@pytest.mark.parametrize(
    "published",
    [pytest.param(each, id=each.id, marks=[] if each.id == "mixtral" else [pytest.mark.slow]) for each in ALL],
)
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []


@pytest.mark.parametrize("published", ALL, ids=str)
def test_a_checkpoint_that_transformers_wrote_is_imported(published, tmp_path):
    theirs_of(published).save_pretrained(tmp_path / "theirs")
    layout = load_layout(published.layout)
    given = read_checkpoint(tmp_path / "theirs")
    if published.id != "gpt_oss":
        assert any(".experts.5." in name for name in given)  # a tensor for each expert
    found = import_checkpoint(tmp_path / "theirs", model_of(published), layout, tmp_path / "ours")
    assert (found.fresh, found.ignored) == ([], [])
    module = arch_dsl.compile(model_of(published))
    module.load_state_dict(read_weights(found.file)[1])
    with torch.no_grad():
        assert relative(module(TOKENS), expected(published)) <= LOGITS


def test_sigmoid_routing_with_shared_experts_is_that_of_deepseek_v3():
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    config = deepseek.DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=24,
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    theirs = deepseek.DeepseekV3MoE(config)
    randomize(theirs)
    ffn = {**MOE, "top_k": 3, "routing": "sigmoid", "scale": 2.5, "shared": 48}
    data = {"d_model": 32, "n_layers": 1, "vocab": 9, "block": {"ffn": ffn}}
    ours = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(data))).block[0].ffn
    gate, up = theirs.experts.gate_up_proj.chunk(2, 1)
    shared = theirs.shared_experts
    ours.load_state_dict(
        {
            "router.weight": theirs.gate.weight,
            "experts.gate_projection.weight": gate,
            "experts.input_projection.weight": up,
            "experts.output_projection.weight": theirs.experts.down_proj,
            "shared.gate_projection.weight": shared.gate_proj.weight,
            "shared.input_projection.weight": shared.up_proj.weight,
            "shared.output_projection.weight": shared.down_proj.weight,
        }
    )
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert relative(ours.update(x, Call()), theirs(x)) <= LOGITS
