"""Latent attention against the paper's formulas, DeepSeek's modules in transformers, and what it holds in decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.parts.watching import Watch
from archlab.arch_dsl.primitives.latent_attention import _LatentAttention
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import Case, load, randomize
from tests.arch_dsl.specs import assert_decodes, assert_keeps, assert_plain_agrees

D, T, HEADS = 16, 6, 4


def branch(**fields: Any) -> nn.Module:
    """A branch in float64 with random parameters."""
    data = {"type": "latent_attention", "heads": HEADS, "kv_latent": 6, **fields}
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": None, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, backend="reference")
    module = parse(Branch, data).build(ctx).double()
    randomize(module)
    return module


def model(**fields: Any) -> arch_dsl.Model:
    attention = {"type": "latent_attention", "heads": HEADS, "kv_latent": 6, **fields}
    sizes = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": 12}
    return load({**sizes, "block": {"attention": {**attention, "pre": ["rmsnorm"]}}})


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


FORMS = {
    "latent": {},
    "norm": {"kv_inner": ["rmsnorm"]},
    "rotated": {"rotary_dim": 4},
    "grouped": {"kv_heads": 2, "rotary_dim": 2, "value_dim": 5},
    "query_latent": {"query_latent": 5, "query_inner": ["rmsnorm"], "kv_inner": ["rmsnorm"], "rotary_dim": 4},
    "everything": {"query_latent": 5, "rotary_dim": 2, "value_dim": 3, "head_dim": 6, "bias": True, "scale": 0.7},
}


def by_hand(module: nn.Module, x: Tensor, **fields: Any) -> Tensor:
    """arXiv:2405.04434, eq. 9 to 19, a head at a time: the numbers of the equations stand beside their lines."""
    head_dim, rotated = fields.get("head_dim", D // HEADS), fields.get("rotary_dim", 0)

    def of(name: str, source: Tensor) -> Tensor:
        layer = getattr(module, f"{name}_projection")
        y = torch.einsum("bti,oi->bto", source, layer.weight)
        return y if layer.bias is None else y + layer.bias

    def normed(name: str, latent: Tensor) -> Tensor:
        site = getattr(module, name)
        return formulas.rmsnorm(latent, site.rmsnorm.weight, 1e-6) if len(site._modules) else latent

    kv = normed("kv_inner", of("kv_latent", x))  # 9
    queries = normed("query_inner", of("query_latent", x)) if "query_latent" in fields else x  # 12
    q = of("query", queries).reshape(2, T, HEADS, head_dim)  # 13
    k, v = (of(name, kv).reshape(2, T, fields.get("kv_heads", HEADS), -1) for name in ("key", "value"))  # 10, 11
    if rotated:
        turned = formulas.rope(of("rotary_query", queries).reshape(2, T, HEADS, rotated), 10_000.0, rotated)  # 14
        shared = formulas.rope(of("rotary_key", x).reshape(2, T, 1, rotated), 10_000.0, rotated)  # 15
        q = torch.cat([q, turned], -1)  # 16
        k = torch.cat([k, shared.repeat(1, 1, k.shape[2], 1)], -1)  # 17
    factor = fields.get("scale", (head_dim + rotated) ** -0.5) * (head_dim + rotated) ** 0.5
    heads = formulas.attend(q * factor, k, v)  # 18
    return x + of("output", heads.reshape(2, T, -1))  # 19


@pytest.mark.parametrize("name", FORMS)
def test_follows_the_equations(x: Tensor, name: str):
    module = branch(**FORMS[name])
    atol = 1e-6 if "rotary_dim" in FORMS[name] else 1e-12  # angles are in float32
    torch.testing.assert_close(module(x, Call()), by_hand(module, x, **FORMS[name]), atol=atol, rtol=atol)


def deepseek(version: int, queries: int | None, interleaved: bool) -> tuple[nn.Module, Any]:
    """An attention module of transformers with random weights, and what it takes beside hidden states."""
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    sizes: dict[str, Any] = {
        "hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": 6,
        "q_lora_rank": queries, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
        "attention_bias": True, "max_position_embeddings": 32,
    }  # fmt: skip
    if version == 2:
        config = DeepseekV2Config(**sizes)
        module, rotary = v2.DeepseekV2Attention(config, 0), v2.DeepseekV2RotaryEmbedding(config)
    else:
        config = DeepseekV3Config(**sizes, rope_interleave=interleaved)
        module, rotary = v3.DeepseekV3Attention(config, 0), v3.DeepseekV3RotaryEmbedding(config)
    config._attn_implementation = "eager"
    module = module.double().eval()
    randomize(module)
    positions = rotary(torch.zeros(2, T, D, dtype=torch.float64), torch.arange(T)[None])
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)
    return module, {"position_embeddings": positions, "attention_mask": mask[None, None]}


def imported(ours: nn.Module, theirs: nn.Module) -> None:
    """Their weights in our maps: theirs have keys beside values, and turned channels after the others."""
    rows = {"query": (0, 6), "rotary_query": (6, 10), "key": (0, 6), "value": (6, 11)}
    queries = theirs.q_proj if theirs.q_lora_rank is None else theirs.q_b_proj
    weights: dict[str, Tensor] = {}
    for name, source in (
        ("query", queries),
        ("rotary_query", queries),
        ("key", theirs.kv_b_proj),
        ("value", theirs.kv_b_proj),
    ):
        first, last = rows[name]
        weights[f"{name}_projection.weight"] = source.weight.unflatten(0, (HEADS, -1))[:, first:last].flatten(0, 1)
    for kind in ("weight", "bias"):
        both = getattr(theirs.kv_a_proj_with_mqa, kind)
        weights[f"kv_latent_projection.{kind}"], weights[f"rotary_key_projection.{kind}"] = both[:6], both[6:]
        weights[f"output_projection.{kind}"] = getattr(theirs.o_proj, kind)
        if theirs.q_lora_rank is not None:
            weights[f"query_latent_projection.{kind}"] = getattr(theirs.q_a_proj, kind)
    weights["kv_inner.rmsnorm.weight"] = theirs.kv_a_layernorm.weight
    if theirs.q_lora_rank is not None:
        weights["query_inner.rmsnorm.weight"] = theirs.q_a_layernorm.weight
    ours.load_state_dict(weights)


@pytest.mark.parametrize("queries", [7, None], ids=["query_latent", "plain_queries"])
@pytest.mark.parametrize(("version", "interleaved"), [(2, True), (3, True), (3, False)], ids=["v2", "v3", "v3_half"])
def test_agrees_with_deepseek_of_transformers(x: Tensor, version: int, queries: int | None, interleaved: bool):
    theirs, given = deepseek(version, queries, interleaved)
    fields: dict[str, Any] = {"bias": ["kv_latent", "rotary_key", "output"], "kv_inner": ["rmsnorm"]}
    if queries:
        fields |= {"query_latent": queries, "query_inner": ["rmsnorm"], "bias": ["query_latent", *fields["bias"]]}
    rotary = {"type": "rope", "pairs": "interleaved" if interleaved else "half"}
    ours = branch(**fields, head_dim=6, value_dim=5, rotary_dim=4, rotary=rotary)
    imported(ours, theirs)
    with torch.no_grad():
        expected, _ = theirs(x, **given)
        torch.testing.assert_close(ours(x, Call()) - x, expected, atol=2e-6, rtol=2e-6)
        for name, value in ours.named_parameters():  # none of them is left out
            before = value.clone()
            value.view(-1)[::2] *= 1.5
            assert not torch.allclose(ours(x, Call()) - x, expected, atol=1e-4), name
            value.copy_(before)


HELD = {
    "latent": ({"rotary_dim": 4}, 6 + 4),
    "normed": ({"rotary_dim": 4, "kv_inner": ["rmsnorm"], "key": ["rmsnorm"], "value": ["rmsnorm"]}, 6 + 4),
    "grouped": ({"kv_heads": 1, "query_latent": 5}, 6),
    "gated_keys": ({"rotary_dim": 4, "key": ["gate"]}, 6 + 4 + D),
    "gated_values": ({"value_dim": 3, "value": [{"type": "gate", "granularity": "headwise"}]}, 6 + 3 * HEADS),
    "both": ({"rotary_dim": 4, "key": ["rmsnorm", "rope"], "query": ["rope"], "value": ["gate"]}, 4 + 2 * D),
    "forgetting": ({"rotary_dim": 4, "scores": ["forget_gate", "sinks"]}, 6 + 4 + HEADS),
}
MORE = {
    "window": {"rotary_dim": 2, "mask": {"type": "window", "size": 4}, "value": ["shift"]},
    "pruned": {"rotary_dim": 2, "scores": [{"type": "forget_gate", "prune": 0.9}]},
    "xl": {"rotary_dim": 2, "scores": [{"type": "softcap", "cap": 2.0}, "transformer_xl"]},
    "carried": {"kv_inner": ["short_conv", "gate"], "query_latent": 5, "query_inner": ["gate"], "query": ["shift"]},
    "carried_apart": {"kv_inner": ["short_conv"], "mask": {"type": "causal", "documents": True}, "key": ["shift"]},
    "values": {"value": ["value_residual"], "sdpa": ["rmsnorm", "gate"], "rotary_dim": 4, "rotary": "xpos"},
    "shared": {"share": "stack", "rotary_dim": 4, "scores": ["alibi"]},
}


ABSORBED = {
    "latent": {"rotary_dim": 4},
    "no_rotation": {"query_latent": 5},
    "grouped": {"kv_heads": 2, "value_dim": 5, "rotary_dim": 2, "kv_inner": ["rmsnorm"], "scale": 0.7},
    "one_key": {"kv_heads": 1, "query": ["rmsnorm"], "bias": ["kv_latent", "query", "output"]},
    "capped": {"rotary_dim": 2, "scores": [{"type": "softcap", "cap": 2.0}, "sinks"], "sdpa": ["rmsnorm", "gate"]},
    "window": {"rotary_dim": 2, "mask": {"type": "window", "size": 4}, "zero": ["key"]},
}


def case(name: str) -> Case:
    fields = HELD[name][0] if name in HELD else (MORE | ABSORBED)[name]
    return Case(name, model(**fields), ("latent_attention",), plain=False)


@pytest.mark.parametrize("name", [*HELD, *MORE])
def test_decoding_reads_in_pieces_as_at_once_and_holds_what_its_cost_says(name: str):
    assert_decodes(case(name))


@pytest.mark.parametrize("name", ABSORBED)
def test_few_tokens_read_latents_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch):
    asked, plain = [], _LatentAttention.absorbed
    monkeypatch.setattr(
        _LatentAttention, "absorbed", lambda *given: (asked.append(given[1].shape[1]), plain(*given))[1]
    )
    assert_decodes(case(name))
    assert asked and max(asked) <= branch(**ABSORBED[name]).few


@pytest.mark.parametrize(
    "fields",
    [
        {"key": ["rmsnorm"]},
        {"value": ["gate"]},
        {"bias": ["value"]},
        {"scores": ["forget_gate"]},
        {"weights": {"type": "sigmoid", "bias": 0.0}},
    ],
    ids=str,
)
def test_latents_are_not_read_where_something_comes_between(fields: dict[str, Any]):
    assert branch(**fields).few == 0


def test_whoever_watches_sees_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_LatentAttention, "absorbed", None)
    module, call = branch(rotary_dim=4), Call(held={}, watch=Watch(frozenset(), print))
    assert module(torch.randn(1, 1, D, dtype=torch.float64), call).shape == (1, 1, D)


@pytest.mark.parametrize("name", HELD)
def test_decoding_holds_latents_and_rotated_keys_unless_a_site_knows_tokens(name: str):
    assert arch_dsl.cost(case(name).model, 10).cache == 2 * 10 * HELD[name][1]


@pytest.mark.parametrize("name", [*HELD, *(name for name in MORE if name != "carried_apart")])
def test_activations_are_what_autograd_keeps(name: str):
    assert_keeps(case(name).model, rel=0.05)


@pytest.mark.parametrize("name", [*HELD, *MORE])
def test_is_written_as_plain_pytorch(name: str):
    assert_plain_agrees(case(name).model)


def test_deepseek_v2_has_the_parameters_of_its_paper():
    """Section 3.1.2 of arXiv:2405.04434: 128 heads of 128, d_c 512, d_c' 1536, d_R 64, beside d_model 5120."""
    fields = {"heads": 128, "head_dim": 128, "kv_latent": 512, "query_latent": 1536, "rotary_dim": 64}
    attention = {"type": "latent_attention", **fields, "query_inner": ["rmsnorm"], "kv_inner": ["rmsnorm"]}
    whole = load({"d_model": 5120, "n_layers": 60, "vocab": 19, "block": {"attention": attention}})
    cost = arch_dsl.cost(whole, 1)
    maps = 5120 * (1536 + 512 + 64) + 1536 * 128 * (128 + 64) + 512 * 128 * 2 * 128 + 128 * 128 * 5120
    assert cost.non_embedding == 60 * (maps + 1536 + 512)
    assert cost.cache == 60 * (512 + 64)


def test_a_variant_of_the_rotated_channels_leaves_the_other_initial_values():
    one, two = (dict(arch_dsl.compile(model(rotary_dim=dims), seed=3).named_parameters()) for dims in (None, 4))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert {name.split(".")[-2] for name in two.keys() - one.keys()} == {
        "rotary_query_projection",
        "rotary_key_projection",
    }


def test_mla_is_its_published_name():
    short = {"type": "mla", "heads": 4, "kv_latent": 6, "rotary_dim": 2}
    long = {**short, "type": "latent_attention", "kv_inner": ["rmsnorm"]}
    assert parse(Branch, short) == parse(Branch, long)
