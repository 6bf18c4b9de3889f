"""Kimi Linear in transformers, computed by torch alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.arch_dsl.their_modules import by_torch, modeling


def kimi_linear(**fields: Any) -> nn.Module:
    """A model of that configuration."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    by_torch(modeling("kimi_linear"), "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    words = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    common = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return KimiLinearForCausalLM(KimiLinearConfig(**words, **common, **fields))  # type: ignore[no-any-return]


def as_ours(facts: dict[str, Any]) -> nn.Module:
    """The model of transformers that is ours."""
    model = facts["model"]
    layers = [dict(block.items()) for block in model.layers()]
    kda, dense = layers[0]["kda"], layers[0]["dense"]
    attention, moe = (next(layer[name] for layer in layers if name in layer) for name in ("attention", "ffn"))
    return kimi_linear(
        vocab_size=model.vocab,
        hidden_size=model.d_model,
        num_hidden_layers=model.n_layers,
        intermediate_size=dense.width,
        moe_intermediate_size=moe.width,
        num_local_experts=moe.experts,
        num_experts_per_tok=moe.top_k,
        n_shared_experts=moe.shared // moe.width,
        routed_scaling_factor=moe.scale,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        kv_lora_rank=attention.kv_latent,
        qk_nope_head_dim=attention.head_dim,
        qk_rope_head_dim=attention.rotary_dim,
        v_head_dim=attention.value_dim,
        linear_num_heads=kda.heads,
        linear_head_dim=kda.head_dim,
        layer_types=["linear_attention" if "kda" in layer else "full_attention" for layer in layers],
        mlp_layer_types=["dense" if "dense" in layer else "sparse" for layer in layers],
    )
