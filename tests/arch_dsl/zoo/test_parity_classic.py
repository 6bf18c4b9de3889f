"""GPT, GPT-2 and their relatives against transformers: layer norms, biases, learned positions or ALiBi."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from tests.arch_dsl.parity import (
    GRADIENTS,
    LENGTH,
    LOGITS,
    VOCAB,
    Published,
    errors,
    model_of,
    outline,
    theirs_of,
    trials_of,
    unexplained,
)

NORM = {"type": "layernorm", "eps": 0.03}  # large enough to be seen
MLP = {"type": "mlp", "width": 48, "bias": True, "activation": "gelu_tanh"}
SIZES: dict[str, Any] = {"d_model": 32, "n_layers": 2}
BIASED = {"heads": 4, "bias": True}


def gpt1() -> nn.Module:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, afn="gelu", layer_norm_epsilon=0.03
    )
    return OpenAIGPTLMHeadModel(config)


GPT1 = Published(
    "gpt1",
    gpt1,
    {
        **SIZES,
        "max_positions": LENGTH,
        "embed": ["learned"],
        "block": {"norm": {**NORM, "placement": "post"}, "attention": BIASED, "ffn": {**MLP, "width": 128}},
    },
    "gpt1",
    "gpt1",
)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=48,
        layer_norm_epsilon=0.03,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


GPT2 = Published(
    "gpt2",
    gpt2,
    {
        **SIZES,
        "max_positions": LENGTH,
        "embed": ["learned"],
        "block": {"norm": NORM, "attention": BIASED, "ffn": MLP},
    },
    "gpt2",
    "gpt2",
)


def gpt_neo() -> nn.Module:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        hidden_size=32,
        intermediate_size=48,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=7,
        layer_norm_epsilon=0.03,
        attn_implementation="eager",
    )
    return GPTNeoForCausalLM(config)


GPT_NEO = Published(
    "gpt_neo",
    gpt_neo,
    {
        "d_model": 32,
        "n_layers": 4,
        "max_positions": LENGTH,
        "embed": ["learned"],
        "block": {"norm": NORM, "attention": {"heads": 4, "bias": ["output"], "scale": 1.0}, "ffn": MLP},
        "overrides": {"1::2": {"block.attention.mask": {"type": "window", "size": 7}}},
    },
    "gpt_neo",
    "gpt_neo",
)


def gpt_neox(activation: str) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act=activation,
        use_parallel_residual=True,
        layer_norm_eps=0.03,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return GPTNeoXForCausalLM(config)


def of_two_norms(activation: str) -> dict[str, Any]:
    """GPT-NeoX and Pythia."""
    rope = {"type": "rope", "fraction": 0.5, "theta": 100.0}
    attention = {**BIASED, "pre": [NORM], "positional": rope}
    return {
        **SIZES,
        "block": {"parallel": {"attention": attention, "ffn": {**MLP, "activation": activation, "pre": [NORM]}}},
        "final": [NORM],
        "unembedding": {"tied": False},
    }


GPT_NEOX = Published("gpt_neox", lambda: gpt_neox("gelu_fast"), of_two_norms("gelu_tanh"), "gpt_neox", "gpt_neox")
PYTHIA = Published("pythia", lambda: gpt_neox("gelu"), of_two_norms("gelu"), "gpt_neox", "pythia")


def opt(factored: bool) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=24 if factored else 32,
        num_hidden_layers=2,
        ffn_dim=48,
        max_position_embeddings=LENGTH,
        do_layer_norm_before=not factored,
        num_attention_heads=4,
        attn_implementation="eager",
    )
    model = OPTForCausalLM(config)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.03  # no field of the configuration
    return model


def opt_spec(norm: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **SIZES,
        "max_positions": LENGTH,
        "embed": [{"type": "learned", "offset": 2}],
        "block": {"norm": norm, "attention": BIASED, "ffn": {**MLP, "activation": "relu"}},
        **more,
    }


OPT = Published("opt", lambda: opt(False), opt_spec(NORM), "opt", "opt")
OPT_350M = Published(
    "opt-350m",
    lambda: opt(True),
    opt_spec({**NORM, "placement": "post"}, embedding={"width": 24}),
    "opt",
)


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, layer_norm_epsilon=0.03)
    return BloomForCausalLM(config)


BLOOM = Published(
    "bloom",
    bloom,
    {
        **SIZES,
        "embed": [NORM],
        "block": {
            "norm": NORM,
            "attention": {**BIASED, "positional": "alibi"},
            "ffn": {**MLP, "width": 128},
        },
    },
    "bloom",
    "bloom",
)

INTERLEAVED = {"type": "rope", "fraction": 0.5, "pairs": "interleaved"}


def gptj() -> nn.Module:
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_inner=48,
        layer_norm_epsilon=0.03,
        attn_implementation="eager",
    )
    return GPTJForCausalLM(config)


def codegen() -> nn.Module:
    from transformers import CodeGenConfig, CodeGenForCausalLM

    config = CodeGenConfig(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=8,
        rotary_dim=4,
        n_inner=48,
        layer_norm_epsilon=0.03,
    )
    return CodeGenForCausalLM(config)


def of_one_norm(heads: int) -> dict[str, Any]:
    """GPT-J and CodeGen."""
    attention = {"heads": heads, "positional": INTERLEAVED}
    return {
        **SIZES,
        "block": {"parallel": {"pre": [NORM], "attention": attention, "ffn": MLP}},
        "final": [NORM],
        "unembedding": {"tied": False, "bias": True},
    }


GPTJ = Published("gptj", gptj, of_one_norm(4), "gptj", "gpt_j")
CODEGEN = Published("codegen", codegen, {**of_one_norm(8), "d_model": 64}, "codegen", "codegen")


def falcon(**fields: Any) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        layer_norm_epsilon=0.03,
        ffn_hidden_size=48,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        **{"attn_implementation": "eager", **fields},
    )
    return FalconForCausalLM(config)


PLAIN = {"type": "mlp", "width": 48, "activation": "gelu"}
ROPE = {"type": "rope", "theta": 100.0}
FALCON_7B = Published(
    "falcon-7b",
    lambda: falcon(multi_query=True, parallel_attn=True, bias=False),
    {
        **SIZES,
        "block": {
            "parallel": {"pre": [NORM], "attention": {"heads": 4, "kv_heads": 1, "positional": ROPE}, "ffn": PLAIN}
        },
        "final": [NORM],
    },
    "falcon",
    "falcon_7b",
)
FALCON_40B = Published(
    "falcon-40b",
    lambda: falcon(new_decoder_architecture=True, num_kv_heads=2, bias=False),
    {
        **SIZES,
        "block": {
            "parallel": {
                "attention": {"pre": [NORM], "heads": 4, "kv_heads": 2, "positional": ROPE},
                "ffn": {**PLAIN, "pre": [NORM]},
            }
        },
        "final": [NORM],
    },
    "falcon_40b",
    "falcon_40b",
)
FALCON_RW = Published(
    "falcon-rw",
    # Not eager, which adds ALiBi twice: to the mask and to the logits (transformers 5.23).
    lambda: falcon(multi_query=False, parallel_attn=False, alibi=True, bias=True, attn_implementation="sdpa"),
    {
        **SIZES,
        "block": {
            "norm": NORM,
            "attention": {**BIASED, "positional": {"type": "alibi", "by": 8**-0.5}},
            "ffn": {**PLAIN, "bias": True},
        },
    },
    "falcon",
    "falcon_rw",
)

ALL = [GPT1, GPT2, GPT_NEO, GPT_NEOX, PYTHIA, OPT, OPT_350M, BLOOM, GPTJ, CODEGEN]
ALL += [FALCON_7B, FALCON_40B, FALCON_RW]


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
    assert outline(model_of(published)) == outline(arch_dsl.resolve(zoo.load(published.zoo)))


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []
