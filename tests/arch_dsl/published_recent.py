"""Configurations of models of 2025 and 2026 in transformers, from our resolved models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archlab.arch_dsl.model.model import Model
from tests.arch_dsl.published_hybrids import built
from tests.arch_dsl.their_modules import GATED_DELTA, by_torch, modeling

Facts = dict[str, Any]


def _attention(branch: Any) -> Facts:
    heads = {"num_attention_heads": branch.heads, "num_key_value_heads": branch.kv_heads}
    return {**heads, "head_dim": branch.head_dim}


def _rope(theta: float, fraction: float = 1.0) -> Facts:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction}


def _experts(moe: Any, count: str = "num_experts") -> Facts:
    return {count: moe.experts, "num_experts_per_tok": moe.top_k, "experts_implementation": "eager"}


def _qwen3_5(model: Model, layers: list[Facts]) -> Facts:
    """Gated DeltaNet in all layers but each fourth."""
    linear, ffn, attention = layers[0]["gated_delta_net"], layers[0]["ffn"], layers[3]["attention"]
    sparse = ffn.type == "moe"
    by_torch(modeling("qwen3_5_moe" if sparse else "qwen3_5"), *GATED_DELTA)
    width = {"moe_intermediate_size": ffn.width, "shared_expert_intermediate_size": ffn.shared} if sparse else {}
    return {
        **_attention(attention),
        **(width | _experts(ffn) if sparse else {"intermediate_size": ffn.width}),
        "rope_parameters": _rope(1e7, 0.25),
        "layer_types": ["full_attention" if "attention" in layer else "linear_attention" for layer in layers],
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.heads,
        "linear_key_head_dim": linear.head_dim,
        "linear_value_head_dim": linear.value_dim,
    }


def _minimax_m2(model: Model, layers: list[Facts]) -> Facts:
    ffn, attention = layers[0]["ffn"], layers[0]["attention"]
    return {
        **_attention(attention),
        **_experts(ffn, "num_local_experts"),
        "intermediate_size": ffn.width,
        "rope_parameters": _rope(5e6, 0.5),
    }


def _sigmoid_experts(layers: list[Facts]) -> Facts:
    """The fields of DeepSeek's configurations for dense feed-forwards in the first layers and experts in the others."""
    dense, moe = layers[0]["dense"], layers[-1]["ffn"]
    kinds = ["dense" if "dense" in layer else "sparse" for layer in layers]
    return {
        **_experts(moe, "n_routed_experts"),
        "intermediate_size": dense.width,
        "moe_intermediate_size": moe.width,
        "mlp_layer_types": kinds,
        "routed_scaling_factor": moe.scale,
        "rms_norm_eps": 1e-5,
    }


def _mimo_v2_flash(model: Model, layers: list[Facts]) -> Facts:
    """Windows have twice the key and value heads of full attention, which the first layer has."""
    full, near = layers[0]["attention"], layers[1]["attention"]
    kinds = ["sliding_attention" if layer["attention"].mask.window else "full_attention" for layer in layers]
    return {
        **_sigmoid_experts(layers),
        **_attention(full),
        "v_head_dim": full.value_dim,
        "sliding_window": near.mask.window,
        "layer_types": kinds,
        "attention_value_scale": full.value[0].by,
        "rope_parameters": {"full_attention": _rope(5e6, 0.334), "sliding_attention": _rope(1e4, 0.334)},
    }


def _glm_moe_dsa(model: Model, layers: list[Facts]) -> Facts:
    attention, moe = layers[0]["attention"], layers[-1]["ffn"]
    (indexer,) = attention.scores
    return {
        **_sigmoid_experts(layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "n_shared_experts": moe.shared // moe.width,
        "kv_lora_rank": attention.kv_latent,
        "q_lora_rank": attention.query_latent,
        "qk_rope_head_dim": attention.rotary_dim,
        "qk_nope_head_dim": attention.head_dim,
        "v_head_dim": attention.value_dim,
        "index_n_heads": indexer.heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


RECENT: dict[str, Callable[[Facts], Any]] = {
    "qwen3_5": built("Qwen3_5", _qwen3_5, config="TextConfig"),
    "qwen3_5_moe": built("Qwen3_5Moe", _qwen3_5, config="TextConfig"),
    "minimax_m2": built("MiniMaxM2", _minimax_m2),
    "mimo_v2_flash": built("MiMoV2Flash", _mimo_v2_flash),
    "glm_moe_dsa": built("GlmMoeDsa", _glm_moe_dsa),
}
