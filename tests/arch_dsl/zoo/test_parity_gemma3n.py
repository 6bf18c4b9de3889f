"""Gemma 3n against transformers: streams with weights made of the token, per-layer tables, keys of earlier layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from archlab import arch_dsl
from archlab.arch_dsl.weights.conversion import import_tensors
from archlab.arch_dsl.weights.layout import load_layout
from tests.arch_dsl.parity import (
    GRADIENTS,
    LOGITS,
    VOCAB,
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
    weights_of,
)
from tests.arch_dsl.published_gemma3n import gemma3n, rotations

EPS, THETA, FAR, CLIP = 0.03, 100.0, 300.0, 0.9


def small() -> nn.Module:
    """Six layers, of which the last two read the keys of the third, a window, and of the fourth, which has none."""
    model: Any = gemma3n(
        vocab_size=VOCAB,
        vocab_size_per_layer_input=50,
        hidden_size=32,
        hidden_size_per_layer_input=6,
        intermediate_size=40,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=9,
        num_kv_shared_layers=2,
        laurel_rank=5,
        activation_sparsity_pattern=[0.7, 0.7, 0.0, 0.0, 0.0, 0.0],
        altup_num_inputs=3,
        altup_coef_clip=CLIP,
        final_logit_softcapping=3.0,
        rms_norm_eps=EPS,
        rope_parameters=rotations(THETA, FAR),
    )
    for layer in model.model.layers:
        bound(layer.altup)
    return model  # type: ignore[no-any-return]


def bound(altup: Any) -> None:
    """Clips the maps of coefficients outside training too, where theirs takes them as training left them: clipped."""
    for module in (altup.prediction_coefs, altup.correction_coefs):
        module.forward = lambda x, module=module: nn.functional.linear(x, module.weight.clamp(-CLIP, CLIP))


NORM = {"type": "rmsnorm", "eps": EPS}
ROOT = {"type": "weighted", "stream": 0.5**0.5, "update": 0.5**0.5}
ROPE = {"type": "rope", "theta": THETA}
ATTENTION = {
    **{"heads": 4, "kv_heads": 2, "head_dim": 12, "scale": 1, "qk_norm": NORM, "positional": ROPE, "post": [NORM]},
    **{"value": [{**NORM, "weight": False}], "mask": {"type": "window", "size": 9}},
}
TOKENS_OF_LAYERS = {
    **{"type": "per_layer_embedding", "width": 6, "rows": 50, "norm": {**NORM, "share": "stack"}},
    **{"pre": ["learned_scale"], "post": [NORM]},
}
ALTUP = {
    **{"type": "altup", "n": 3, "stream": "first", "router": NORM, "clip": CLIP, "others": ["tokens"]},
    **{"entry": "projected", "exit": "projected"},
}
AT = "block.parallel.attention"
GEMMA3N: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 6,
    "embed": [{"type": "scale", "width_power": 0.5}],
    "streams": ALTUP,
    "block": {
        "parallel": {"pre": [NORM], "attention": ATTENTION, "laurel": {"rank": 5, "norm": NORM}, "join": ROOT},
        "ffn": {"type": "glu", "width": 40, "activation": "gelu_tanh", "pre": [NORM], "post": [NORM]},
        "tokens": TOKENS_OF_LAYERS,
    },
    "overrides": {
        "1::2": {f"{AT}.mask": "causal", f"{AT}.positional": {**ROPE, "theta": FAR}},
        ":2": {"block.ffn.preactivation": [{"type": "statistical_topk", "sparsity": 0.7}]},
        "-2:": {f"{AT}.kv": "earlier"},
    },
    "final": [NORM],
    "logits": [{"type": "softcap", "cap": 3.0}],
}
ALL = [Published("gemma3n", small, GEMMA3N, "gemma3n", "gemma3n/e2b")]


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


def test_a_checkpoint_may_have_maps_of_keys_that_nothing_reads():
    model, unread = (
        model_of(ALL[0]),
        [f"model.layers.5.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")],
    )
    given = weights_of(ALL[0]) | dict.fromkeys(unread, torch.zeros(24, 32))
    assert import_tensors(load_layout("gemma3n"), model, given).ignored == unread


@pytest.mark.parametrize("published", ALL, ids=str)
def test_architecture_is_that_of_the_zoo(published):
    assert outline(model_of(published)) == outline_of_zoo(published.zoo)


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
