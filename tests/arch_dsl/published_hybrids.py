"""Configurations of published hybrids, and of encoders with windows, in transformers; from our resolved models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from archlab.arch_dsl.model.model import Model
from tests.arch_dsl.their_modules import GATED_DELTA, by_torch, modeling

Facts = dict[str, Any]


def built(
    name: str, fields_of: Callable[[Model, list[Facts]], Facts], model: str = "CausalLM", config: str = "Config"
) -> Callable[[Facts], Any]:
    """What builds a model of transformers from ours, and from the branches of its layers."""

    def build(facts: Facts) -> Any:
        import transformers

        ours = facts["model"]
        layers = [dict(block.items()) for block in ours.layers()]
        own = {"vocab_size": ours.vocab, "hidden_size": ours.d_model, "num_hidden_layers": ours.n_layers}
        common = {"tie_word_embeddings": ours.unembedding.tied, "pad_token_id": None, "attn_implementation": "eager"}
        fields = own | common | fields_of(ours, layers)
        return getattr(transformers, f"{name}For{model}")(getattr(transformers, f"{name}{config}")(**fields))

    return build


def _first(layers: Sequence[Facts], name: str) -> Any:
    return next(layer[name] for layer in layers if name in layer)


def _attention(branch: Any) -> Facts:
    heads = {"num_attention_heads": branch.heads, "num_key_value_heads": branch.kv_heads}
    return {**heads, "head_dim": branch.head_dim}


def _mamba2(branch: Any) -> Facts:
    heads = {"mamba_n_heads": branch.heads, "mamba_d_head": branch.value_dim, "mamba_n_groups": branch.key_heads}
    return {**heads, "mamba_d_state": branch.head_dim, "mamba_chunk_size": 16}


def _types(layers: Sequence[Facts], other: str = "linear_attention") -> list[str]:
    return ["full_attention" if "attention" in layer else other for layer in layers]


def _rope(theta: float, **more: Any) -> Facts:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def _bamba(model: Model, layers: list[Facts]) -> Facts:
    return {
        **_attention(_first(layers, "attention")),
        **_mamba2(_first(layers, "mamba2")),
        **_rope(10_000.0, partial_rotary_factor=0.5),
        "intermediate_size": layers[0]["ffn"].width,
        "attn_layer_indices": [depth for depth, layer in enumerate(layers) if "attention" in layer],
    }


def _granite4(model: Model, layers: list[Facts]) -> Facts:
    ffn, attention = layers[0]["ffn"], _first(layers, "attention")
    sparse = ffn.type == "moe"
    return {
        **_attention(attention),
        **_mamba2(_first(layers, "mamba2")),
        "layer_types": _types(layers),
        "intermediate_size": ffn.width,
        "shared_intermediate_size": ffn.shared if sparse else ffn.width,
        "num_local_experts": ffn.experts if sparse else 0,
        "num_experts_per_tok": ffn.top_k if sparse else 0,
        "experts_implementation": "eager",
        "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": attention.scale or attention.head_dim**-0.5,
        "logits_scaling": 1 / model.logits[0].by,  # type: ignore[union-attr]
    }


def _falcon_h1(model: Model, layers: list[Facts]) -> Facts:
    group = layers[0]["parallel"].branches
    mamba = group["mamba2"]
    return {
        **_attention(group["attention"]),
        **_mamba2(mamba),
        **_rope(1e11),
        "mamba_d_ssm": mamba.heads * mamba.value_dim,
        "intermediate_size": layers[0]["ffn"].width,
        "embedding_multiplier": 5.656854249492381,
        "lm_head_multiplier": model.logits[0].by,  # type: ignore[union-attr]
        "key_multiplier": 0.390625,
        "attention_out_multiplier": 0.9375,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
    }


def _zamba2(model: Model, layers: list[Facts]) -> Facts:
    """Hybrid layers are those with a shared block; each of these is used in turn."""
    blocks = [dict(layer["sequential"].branches.items()) for layer in layers]
    used = [next((name for name in block if name in ("a", "b")), "") for block in blocks]
    depth = next(depth for depth, name in enumerate(used) if name)
    shared, mamba = dict(blocks[depth][used[depth]].branches.items()), blocks[depth]["mamba2"]
    attention = shared["attention"]
    return {
        "num_attention_heads": attention.heads,
        "intermediate_size": shared["ffn"].width,
        "adapter_rank": shared["ffn"].lora[0].rank,
        "use_shared_attention_adapter": bool(attention.lora),
        "use_mem_rope": bool(attention.query),
        "num_mem_blocks": len({*used} - {""}),
        "layers_block_type": ["hybrid" if name else "linear_attention" for name in used],
        "n_mamba_heads": mamba.heads,
        "mamba_ngroups": mamba.key_heads,
        "mamba_d_state": mamba.head_dim,
        "chunk_size": 16,
    }


def _jamba(model: Model, layers: list[Facts]) -> Facts:
    mamba, attention, experts = layers[0]["mamba"], _first(layers, "attention"), layers[1]["experts"]
    first = next(depth for depth, layer in enumerate(layers) if "attention" in layer)
    return {
        **{key: value for key, value in _attention(attention).items() if key != "head_dim"},
        "intermediate_size": layers[0]["ffn"].width,
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.top_k,
        "experts_implementation": "eager",
        "attn_layer_period": 8,
        "attn_layer_offset": first,
        "mamba_d_state": mamba.state,
        "mamba_dt_rank": mamba.dt_rank,
    }


def _lfm2(model: Model, layers: list[Facts]) -> Facts:
    heads = {key: value for key, value in _attention(_first(layers, "attention")).items() if key != "head_dim"}
    return {
        **heads,
        **_rope(1e6),
        "intermediate_size": layers[0]["ffn"].width,
        "block_auto_adjust_ff_dim": False,
        "layer_types": _types(layers, "conv"),
    }


def _olmo_hybrid(model: Model, layers: list[Facts]) -> Facts:
    by_torch(modeling("olmo_hybrid"), *GATED_DELTA)
    linear = layers[0]["gated_delta_net"]
    return {
        **_attention(_first(layers, "attention")),
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "intermediate_size": layers[0]["ffn"].width,
        "layer_types": _types(layers),
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.heads,
        "linear_key_head_dim": linear.head_dim,
        "linear_value_head_dim": linear.value_dim,
    }


def _modernbert(model: Model, layers: list[Facts]) -> Facts:
    return {
        "num_attention_heads": layers[0]["attention"].heads,
        "intermediate_size": layers[0]["ffn"].width,
        "local_attention": 2 * layers[1]["attention"].mask.each_side,
    }


def _minimax(model: Model, layers: list[Facts]) -> Facts:
    alpha = (2 * model.n_layers) ** 0.25
    return {
        **_attention(_first(layers, "attention")),
        **_rope(1e7),
        "layer_types": _types(layers),
        "intermediate_size": layers[0]["ffn"].width,
        "num_local_experts": layers[0]["ffn"].experts,
        "num_experts_per_tok": layers[0]["ffn"].top_k,
        "experts_implementation": "eager",
        "block_size": 16,
        **{f"{name}_alpha_factor": alpha for name in ("full_attn", "linear_attn", "mlp")},
    }


def _nemotron_h(model: Model, layers: list[Facts]) -> Facts:
    """Layers of one branch each, whose kind their names say."""
    names = {"mamba2": "linear_attention", "attention": "full_attention"}
    kinds = [next((names[name] for name in names if name in layer), layer.get("ffn")) for layer in layers]
    mamba, ffn = _first(layers, "mamba2"), _first(layers, "ffn")
    width = "moe_intermediate_size" if ffn.type == "moe" else "intermediate_size"
    theirs = {
        "n_routed_experts": "experts",
        "num_experts_per_tok": "top_k",
        "moe_shared_expert_intermediate_size": "shared",
        "routed_scaling_factor": "scale",
    }
    return {
        **_attention(_first(layers, "attention")),
        **{key: getattr(ffn, field) for key, field in theirs.items() if ffn.type == "moe"},
        width: ffn.width,
        "experts_implementation": "eager",
        "num_hidden_layers": None,
        "layers_block_type": [kind if isinstance(kind, str) else kind.type for kind in kinds],
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.value_dim,
        "n_groups": mamba.key_heads,
        "ssm_state_size": mamba.head_dim,
        "chunk_size": 16,
    }


def _llama4(model: Model, layers: list[Facts]) -> Facts:
    attention, ffn = layers[0]["attention"], _first(layers, "ffn")
    far = next(layer["attention"] for layer in layers if not layer["attention"].key)
    return {
        **_attention(attention),
        **_rope(5e5),
        "intermediate_size": ffn.width,
        "intermediate_size_mlp": next((layer["dense"].width for layer in layers if "dense" in layer), 1),
        "num_local_experts": ffn.experts,
        "num_experts_per_tok": ffn.top_k,
        "moe_layers": [depth for depth, layer in enumerate(layers) if "ffn" in layer],
        "use_qk_norm": len(attention.key) == 2,
        "attention_chunk_size": attention.mask.stride,
        "floor_scale": far.query[0].every,
    }


HYBRIDS: dict[str, Callable[[Facts], Any]] = {
    "bamba": built("Bamba", _bamba),
    "granite4": built("GraniteMoeHybrid", _granite4),
    "falcon_h1": built("FalconH1", _falcon_h1),
    "jamba": built("Jamba", _jamba),
    "zamba2": built("Zamba2", _zamba2),
    "lfm2": built("Lfm2", _lfm2),
    "minimax": built("MiniMax", _minimax),
    "olmo_hybrid": built("OlmoHybrid", _olmo_hybrid),
    "llama4": built("Llama4", _llama4, config="TextConfig"),
    "nemotron_h": built("NemotronH", _nemotron_h),
    "modernbert": built("ModernBert", _modernbert, "MaskedLM"),
}
