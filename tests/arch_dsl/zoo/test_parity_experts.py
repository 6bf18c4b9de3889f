"""DeepSeek's experts against transformers: latent attention, groups of experts, a bias for the choice alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from archlab import arch_dsl
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
from tests.arch_dsl.their_modules import as_buffers
from tests.arch_dsl.zoo.test_parity_families import RAMP, TURNED
from tests.arch_dsl.zoo.test_parity_families import YARN as SCALING
from tests.arch_dsl.zoo.test_parity_modern import NORM, ROPE, ROTATION, sizes

YARN = {**ROTATION, **RAMP, "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}
LATENT = {"kv_lora_rank": 20, "q_lora_rank": 18, "qk_rope_head_dim": 16, "qk_nope_head_dim": 12, "v_head_dim": 10}
EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "experts_implementation": "eager",
    "pad_token_id": None,
}


INDEXER_EPS = 0.3  # enough that another value chooses other keys


def theirs(name: str, **fields: Any) -> Any:
    """What makes a model of transformers whose biases of the choice are not 0, and norms of latents as the others."""

    def build() -> nn.Module:
        import transformers

        config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
        found: nn.Module = as_buffers(model(config(**sizes(**EXPERTS, **fields))), "e_score_correction_bias")
        for path, part in found.named_modules():
            if path.endswith("a_layernorm"):
                part.variance_epsilon = NORM["eps"]  # type: ignore[assignment]
            elif path.endswith("indexer.k_norm"):
                part.eps = INDEXER_EPS  # type: ignore[assignment]
        for path, value in found.named_buffers():
            if path.endswith("e_score_correction_bias"):
                value.copy_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(path))))
        return found

    return build


def latent(**fields: Any) -> dict[str, Any]:
    """The attention of DeepSeek at the sizes of LATENT."""
    return {
        "type": "mla",
        "heads": 4,
        "head_dim": 12,
        "kv_latent": 20,
        "kv_inner": [NORM],
        "query_latent": 18,
        "query_inner": [NORM],
        "rotary_dim": 16,
        "value_dim": 10,
        "rotary": {**ROPE, "pairs": "interleaved", "scaling": {**SCALING, "attention_factor": 1}},
        "scale": 28**-0.5 * (0.07 * math.log(4) + 1) ** 2,
        **fields,
    }


def spec(attention: dict[str, Any], *, tied: bool = False, **experts: Any) -> dict[str, Any]:
    """Three layers, of which the last has experts."""
    moe = {"type": "moe", "experts": 6, "top_k": 3, "width": 24, "shared": 48, **experts}
    block = {"norm": NORM, "attention": attention, "dense": {"type": "swiglu", "width": 40}, "ffn": moe}
    overrides = {":2": {"block.ffn": None}, "2": {"block.dense": None}}
    return {"d_model": 32, "n_layers": 3, "block": block, "overrides": overrides, "unembedding": {"tied": tied}}


LOSS = {"type": "switch", "over": "sequence"}
GROUPS = {"n_group": 3, "topk_group": 2}
SIGMOID: dict[str, Any] = {"routing": "sigmoid", "balance": {"type": "bias", "auxiliary": LOSS}}
V2 = {**LATENT, "rope_parameters": YARN, "num_key_value_heads": 4, "routed_scaling_factor": 1.5}
INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 9}
HALF_TURNED = {**ROPE, "fraction": 0.5, "scaling": {**SCALING, "attention_factor": 1}}
INDEX = {
    "type": "lightning_indexer",
    "heads": 16,
    "head_dim": 32,
    "top": 9,
    "queries": "latent",
    "query": [HALF_TURNED],
    "key": [{"type": "layernorm", "eps": INDEXER_EPS}, HALF_TURNED],
}
GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 12}
HALF = {**ROTATION, "partial_rotary_factor": 0.5}
UNSCALED = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
INTERLEAVED = {**ROPE, "pairs": "interleaved"}
GLM_INDEX = {
    **INDEX,
    "query": [{**INTERLEAVED, "fraction": 0.5}],
    "key": [INDEX["key"][0], {**INTERLEAVED, "fraction": 0.5}],
}
OVER = {**NORM, "over": "heads"}
M2_TURNED = {**ROPE, "fraction": 0.5}
MINIMAX_M2: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 3,
    "block": {
        "norm": NORM,
        "attention": {**GQA, "query": [OVER, M2_TURNED], "key": [OVER, M2_TURNED]},
        "ffn": {"type": "moe", "experts": 6, "top_k": 3, "width": 40, "routing": "sigmoid", "balance": "bias"},
    },
    "unembedding": {"tied": False},
}
THIRD = {**ROPE, "theta": 1000.0, "fraction": 0.334}
MIMO = spec(
    {
        **{"heads": 4, "kv_heads": 2, "head_dim": 12, "value_dim": 10, "value": [{"type": "scale", "by": 0.6}]},
        **{"positional": THIRD, "scores": ["sinks"], "mask": {"type": "window", "size": 9}},
    },
    shared=0,
    routing="sigmoid",
    scale=1.5,
    balance="bias",
)
MIMO["overrides"] = {
    "0,2": {
        **{"block.attention.kv_heads": 1, "block.attention.scores": [], "block.attention.mask": "causal"},
        "block.attention.positional": {**THIRD, "theta": 100.0},
    },
    "0": {"block.ffn": None},
    "1:": {"block.dense": None},
}
MIMO_ROPE = {**ROTATION, "partial_rotary_factor": 0.334}
MIMO_KINDS = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {"full_attention": MIMO_ROPE, "sliding_attention": {**MIMO_ROPE, "rope_theta": 1000.0}},
}
ERNIE = {"moe_layer_start_index": 2, "moe_num_shared_experts": 2}

ALL = [
    Published(
        "deepseek_v2",
        theirs("DeepseekV2", **V2, **GROUPS, topk_method="group_limited_greedy"),
        spec(latent(), normalize=False, scale=1.5, groups=3, group_top_k=2, balance=LOSS),
        "deepseek",
        "deepseek_v2",
    ),
    Published(
        "deepseek_v2-lite",
        theirs("DeepseekV2", **{**V2, "q_lora_rank": None}),
        spec(latent(query_latent=None, query_inner=[]), normalize=False, scale=1.5, balance=LOSS),
        "deepseek_lite",
        "deepseek_v2/lite",
    ),
    Published(
        "deepseek_v3",
        theirs("DeepseekV3", **V2, **GROUPS, norm_topk_prob=True, num_mtp_layers=0),
        spec(latent(), scale=1.5, groups=3, group_top_k=2, group_score="top2", **SIGMOID),
        "deepseek",
        "deepseek_v3",
    ),
    Published(
        "deepseek_v32",
        theirs("DeepseekV32", **V2, **GROUPS, **INDEXER, norm_topk_prob=True),
        spec(latent(scores=[INDEX]), scale=1.5, groups=3, group_top_k=2, group_score="top2", **SIGMOID),
        "deepseek",
        "deepseek_v32",
    ),
    Published(
        "glm_moe_dsa",
        theirs("GlmMoeDsa", **LATENT, **UNSCALED, **INDEXER, num_key_value_heads=4, routed_scaling_factor=1.5),
        spec(latent(rotary=INTERLEAVED, scale=None, scores=[GLM_INDEX]), scale=1.5, routing="sigmoid", balance="bias"),
        "deepseek",
        "glm_moe_dsa",
    ),
    Published(
        "kimi_k2",
        theirs("DeepseekV3", **V2, n_group=1, topk_group=1, norm_topk_prob=True, num_mtp_layers=0),
        spec(latent(), scale=1.5, routing="sigmoid", balance="bias"),
        "deepseek",
        "kimi_k2",
    ),
    Published(
        "glm4_moe",
        theirs(
            "Glm4Moe",
            head_dim=12,
            rope_parameters=HALF,
            attention_bias=True,
            use_qk_norm=True,
            routed_scaling_factor=1.5,
            num_mtp_layers=0,
        ),
        spec(
            {**GQA, "bias": ["query", "key", "value"], "qk_norm": NORM, "positional": {**ROPE, "fraction": 0.5}},
            scale=1.5,
            **SIGMOID,
        ),
        "glm4_moe",
        "glm4_moe/355b",
    ),
    Published(
        "dots1",
        theirs("Dots1", head_dim=12, num_key_value_heads=4, norm_topk_prob=True, routed_scaling_factor=1.5),
        spec({**GQA, "kv_heads": 4, "qk_norm": NORM, "positional": ROPE}, scale=1.5, routing="sigmoid", balance="bias"),
        "glm4_moe",
        "dots1",
    ),
    Published(
        "mimo_v2_flash",
        theirs(
            "MiMoV2Flash",
            **MIMO_KINDS,
            **UNSCALED,
            num_key_value_heads=1,
            head_dim=12,
            v_head_dim=10,
            sliding_window=9,
            attention_value_scale=0.6,
            routed_scaling_factor=1.5,
        ),
        MIMO,
        "glm4_moe",
        "mimo_v2_flash",
    ),
    Published(
        "minimax_m2",
        theirs("MiniMaxM2", head_dim=12, rope_parameters=HALF, num_local_experts=6),
        MINIMAX_M2,
        "mixtral",
        "minimax_m2",
    ),
    Published(
        "ernie4_5_moe",
        theirs("Ernie4_5_Moe", **ERNIE, moe_num_experts=6, tie_word_embeddings=True),
        spec({"heads": 4, "kv_heads": 2, "positional": TURNED}, tied=True, balance="bias"),
        "ernie4_5_moe",
        "ernie4_5_moe",
    ),
    Published(
        "ernie4_5_moe-unshared",
        theirs("Ernie4_5_Moe", **{**ERNIE, "moe_num_shared_experts": 0}, moe_num_experts=6, tie_word_embeddings=True),
        spec({"heads": 4, "kv_heads": 2, "positional": TURNED}, tied=True, shared=0, balance="bias"),
        "ernie4_5_moe",
        "ernie4_5_moe/300b-a47b",
    ),
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


@pytest.mark.slow
@pytest.mark.parametrize("published", ALL, ids=str)
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []


@pytest.mark.parametrize("published", ALL, ids=str)
def test_a_checkpoint_that_transformers_wrote_is_imported(published, tmp_path):
    theirs_of(published).save_pretrained(tmp_path / "theirs")
    given = read_checkpoint(tmp_path / "theirs")
    assert any(".experts.5." in name for name in given)  # a tensor for each expert
    layout = load_layout(published.layout)
    found = import_checkpoint(tmp_path / "theirs", model_of(published), layout, tmp_path / "ours")
    assert (found.fresh, found.ignored) == ([], [])
    module = arch_dsl.compile(model_of(published))
    module.load_state_dict(read_weights(found.file)[1])
    with torch.no_grad():
        assert relative(module(TOKENS), expected(published)) <= LOGITS


def test_a_checkpoint_of_the_lite_model_fits_the_map_of_the_others(tmp_path):
    lite = next(published for published in ALL if published.id == "deepseek_v2-lite")
    theirs_of(lite).save_pretrained(tmp_path / "theirs")
    found = import_checkpoint(tmp_path / "theirs", model_of(lite), load_layout("deepseek"), tmp_path / "ours")
    assert (found.fresh, found.ignored) == ([], [])
