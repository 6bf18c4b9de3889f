"""Recurrent mixers against transformers: Mamba-2, and gated DeltaNet beside gated attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.weights.conversion import export_tensors, import_tensors
from archlab.arch_dsl.weights.files import read_checkpoint
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
from tests.arch_dsl.their_modules import GATED_DELTA, by_torch, modeling, put_back
from tests.arch_dsl.zoo.test_parity_modern import NORM, QWEN3_NEXT, ROPE, ROTATION, UNIT, sizes


@pytest.fixture(scope="module", autouse=True)
def _theirs() -> Iterator[None]:
    with put_back("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        yield


def mamba2(**more: Any) -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 10,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 16,  # less than the tokens, which it does not divide
        "layer_norm_epsilon": 0.03,
        "tie_word_embeddings": True,
    }
    return Mamba2ForCausalLM(Mamba2Config(**{**fields, **more}))


def _l2norm(x: torch.Tensor, dim: int = -1, eps: float = 0.0) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + 0.5)


def gated_delta(name: str, text: str, **more: Any) -> nn.Module:
    """A model of Qwen's with gated DeltaNet in two of three layers."""
    import transformers

    module = modeling({"Qwen3Next": "qwen3_next", "Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe"}[name])
    by_torch(module, *GATED_DELTA)
    module.l2norm = _l2norm  # type: ignore[attr-defined]  # whose 1e-6 could not be seen
    fields = {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 2.0,
        "rope_parameters": {**ROTATION, "partial_rotary_factor": 0.5},
    }
    config, model = getattr(transformers, f"{name}{text}Config"), getattr(transformers, f"{name}ForCausalLM")
    return model(config(**sizes(**{**fields, **more})))  # type: ignore[no-any-return]


def qwen3_next(**more: Any) -> nn.Module:
    return gated_delta("Qwen3Next", "", **{"num_experts": 0, **more})


GATE = {"type": "gate", "activation": "silu"}
MAMBA2 = {
    "d_model": 32,
    "n_layers": 2,
    "block": {
        "norm": NORM,
        "mamba2": {"head_dim": 10, "value_dim": 8, "sdpa": [GATE, {**NORM, "over": "heads"}]},
    },
}
CONV = {"type": "short_conv", "activation": "silu"}
DELTA = {
    "heads": 4,
    "key_heads": 2,
    "head_dim": 6,
    "value_dim": 10,
    "query": [CONV, {"type": "l2norm", "eps": 0.5}],
    "key": [CONV, {"type": "l2norm", "eps": 0.5}],
    "sdpa": [{"type": "rmsnorm", "eps": 2.0}, GATE],
}
WIDE = {**UNIT, "eps": 2.0}
ROTATED = [WIDE, {**ROPE, "fraction": 0.5}]
HYBRID = {
    **QWEN3_NEXT,
    "n_layers": 3,
    "block": {
        "norm": WIDE,
        "gated_delta_net": DELTA,
        "attention": {**QWEN3_NEXT["block"]["attention"], "query": ROTATED, "key": ROTATED},
        "ffn": QWEN3_NEXT["block"]["ffn"],
    },
    "overrides": {"1": {"block.gated_delta_net": None}, "::2": {"block.attention": None}},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "experts_implementation": "eager",
}
MOE = {"type": "moe", "experts": 6, "top_k": 2, "width": 24, "shared": 20, "shared_gate": True}
SPARSE = {**HYBRID, "block": {**HYBRID["block"], "ffn": {**MOE, "balance": {"type": "switch"}}}}
ALL = [
    Published("mamba2", mamba2, MAMBA2, "mamba2", "mamba2"),
    Published(
        "mamba2-untied",
        lambda: mamba2(tie_word_embeddings=False, use_conv_bias=False),
        arch_dsl.canonical(
            arch_dsl.patch(
                arch_dsl.load(MAMBA2),
                {
                    "unembedding.tied": False,
                    **{f"block.mamba2.{n}.short_conv.bias": False for n in ("query", "key", "value")},
                },
            )
        ),
        "mamba2",
    ),
    Published("qwen3_next-hybrid", qwen3_next, HYBRID, "qwen3_next"),
    Published("qwen3_next-experts", lambda: qwen3_next(**EXPERTS), SPARSE, "qwen3_next", "qwen3_next", spread=1.5),
    Published("qwen3_5", lambda: gated_delta("Qwen3_5", "Text"), HYBRID, "qwen3_5", "qwen3_5"),
    Published(
        "qwen3_5_moe",
        lambda: gated_delta("Qwen3_5Moe", "Text", **EXPERTS),
        SPARSE,
        "qwen3_5",
        "qwen3_5_moe",
        spread=1.5,
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
    theirs = sum(value.numel() for value in theirs_of(published).parameters())
    assert arch_dsl.cost(model_of(published)).parameters == theirs


@pytest.mark.parametrize("published", [each for each in ALL if each.zoo], ids=str)
def test_architecture_is_that_of_the_zoo(published):
    assert outline(model_of(published)) == outline_of_zoo(published.zoo)


@pytest.mark.parametrize("published", trials_of(ALL))
def test_altering_any_field_breaks_the_parity(published):
    assert unexplained(published) == []


def test_the_text_of_a_checkpoint_that_reads_images_too_is_imported(tmp_path):
    """Its names begin otherwise; the encoder of images is left out."""
    import transformers

    text = theirs_of(next(published for published in ALL if published.id == "qwen3_5"))
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config=eyes)  # type: ignore[union-attr, operator]
    whole = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())  # type: ignore[union-attr]
    whole.lm_head.load_state_dict(text.lm_head.state_dict())  # type: ignore[union-attr]
    whole.save_pretrained(tmp_path)
    given = read_checkpoint(tmp_path)
    assert "model.language_model.embed_tokens.weight" in given
    found = import_tensors(load_layout("qwen3_5"), arch_dsl.resolve(arch_dsl.load(HYBRID), vocab=VOCAB), given)
    assert found.fresh == [] and found.ignored == [name for name in given if name.startswith("model.visual.")] != []
    plain = import_tensors(
        load_layout("qwen3_5"), arch_dsl.resolve(arch_dsl.load(HYBRID), vocab=VOCAB), text.state_dict()
    )
    assert all(torch.equal(found.tensors[name], value) for name, value in plain.tensors.items())


def test_experts_may_be_stored_in_one_tensor_or_one_by_one():
    published = next(published for published in ALL if published.id == "qwen3_5_moe")
    model, layout = model_of(published), load_layout(published.layout)
    in_one = theirs_of(published).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in in_one
    found = import_tensors(layout, model, in_one).tensors
    one_by_one = import_tensors(layout, model, weights_of(published)).tensors
    assert found.keys() == one_by_one.keys()
    assert all(torch.equal(found[name], value) for name, value in one_by_one.items())
    assert export_tensors(layout, model, found).keys() == weights_of(published).keys()
    with pytest.raises(SpecError, match=r"experts\.0\.gate_proj\.weight: is not in the checkpoint"):
        import_tensors(layout, model, {name: value for name, value in in_one.items() if "experts" not in name})
