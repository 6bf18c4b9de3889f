"""Gemma 3n, text, in transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from archlab.arch_dsl.primitives.masks import Causal


def gemma3n(**fields: Any) -> nn.Module:
    """A model of that configuration."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    words = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return Gemma3nForCausalLM(Gemma3nTextConfig(**words, attn_implementation="eager", **fields))  # type: ignore[no-any-return]


def rotations(near: float, far: float) -> dict[str, Any]:
    """Those of layers with a window, and of the others."""
    bases = {"sliding_attention": near, "full_attention": far}
    return {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()}


def as_ours(facts: dict[str, Any]) -> nn.Module:
    """The model of transformers that is ours."""
    model = facts["model"]
    layers = [(block["parallel"].branches["attention"], block["ffn"]) for block in model.layers()]
    attention, last = layers[0]
    tokens, laurel = model.block["tokens"], model.block["parallel"].branches["laurel"]
    return gemma3n(
        vocab_size=model.vocab,
        vocab_size_per_layer_input=tokens.rows,
        hidden_size=model.d_model,
        hidden_size_per_layer_input=tokens.width,
        intermediate_size=last.width,
        num_hidden_layers=model.n_layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        layer_types=["full_attention" if each.mask == Causal() else "sliding_attention" for each, _ in layers],
        sliding_window=attention.mask.window,
        num_kv_shared_layers=sum(each.kv == "earlier" for each, _ in layers),
        laurel_rank=laurel.rank,
        activation_sparsity_pattern=[ffn.preactivation[0].sparsity if ffn.preactivation else 0.0 for _, ffn in layers],
        altup_num_inputs=model.streams.n,
        altup_coef_clip=model.streams.clip,
        final_logit_softcapping=model.logits[0].cap,
        rope_parameters=rotations(1e4, 1e6),
    )
