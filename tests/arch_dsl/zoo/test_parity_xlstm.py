"""xLSTM against transformers' own form of it, without the package xlstm: chunks, the rest of a sequence, and caps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from archlab import arch_dsl
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
)
from tests.arch_dsl.zoo.test_parity_modern import GLU, NORM


def xlstm(**more: Any) -> nn.Module:
    """With small caps, which show, and two chunks of 16 tokens before the 8 that they leave."""
    from transformers import xLSTMConfig, xLSTMForCausalLM

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "ffn_proj_factor": 1.25,
        "ffn_round_up_to_multiple_of": 8,
        "gate_soft_cap": 1.5,
        "output_logit_soft_cap": 2.0,
        "norm_eps": 0.03,
        "chunk_size": 16,
        "use_cache": False,
        "pad_token_id": None,
    }
    return xLSTMForCausalLM(xLSTMConfig(**{**fields, **more}))


CAP = "1.5 * tanh(x / 1.5)"
SDPA = [{"type": "groupnorm", "bias": False, "eps": 0.03}, {"type": "gate"}]


def spec(head_dim: int = 8, value_dim: int = 16, **more: Any) -> dict[str, Any]:
    gates = {"decay": {"type": "sigmoid", "function": CAP}, "input_gate": CAP}
    mlstm = {"heads": 2, "head_dim": head_dim, "value_dim": value_dim, "sdpa": SDPA, **gates}
    return {
        "d_model": 32,
        "n_layers": 2,
        "block": {"norm": NORM, "mlstm": mlstm, "ffn": GLU},
        "unembedding": {"tied": False},
        "logits": [{"type": "softcap", "cap": 2.0}],
        **more,
    }


ALL = [
    Published("xlstm", xlstm, spec(), "xlstm", "xlstm", spread=0.5),
    Published(
        "xlstm-wide",
        lambda: xlstm(qk_dim_factor=1.0, v_dim_factor=1.5),
        spec(16, 24),
        "xlstm",
        spread=0.5,
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


def test_architecture_is_that_of_the_zoo():
    assert outline(model_of(ALL[0])) == outline_of_zoo("xlstm")


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
