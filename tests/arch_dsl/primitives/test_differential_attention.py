"""Differential attention against the paper's formulas and DiffLlama of transformers, and what it refuses to share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import Case, load, randomize
from tests.arch_dsl.specs import assert_decodes, assert_keeps, assert_plain_agrees

D, T, HEADS = 16, 6, 4
DEPTH = 2
PAPER = ["rmsnorm", "differential_scale"]


def branch(**fields: Any) -> nn.Module:
    """A branch of the third layer in float64 with random parameters."""
    data = {"type": "differential_attention", "heads": HEADS, **fields}
    facts: dict[str, Any] = {"d_model": D, "n_layers": 4, "vocab": 19, "max_positions": 12, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, depth=DEPTH, backend="reference")
    module = parse(Branch, data).build(ctx).double()
    randomize(module)
    return module


def model(**fields: Any) -> arch_dsl.Model:
    attention = {"type": "differential_attention", "heads": HEADS, "pre": ["rmsnorm"], **fields}
    sizes = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": 12}
    return load({**sizes, "block": {"attention": attention}})


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def dot(a: Tensor, b: Tensor) -> float:
    return sum(one * other for one, other in zip(a.tolist(), b.tolist(), strict=True))


def by_hand(module: nn.Module, x: Tensor, start: float, kv_heads: int, **how: Any) -> Tensor:
    """arXiv:2410.05258, eq. 1 to 3, a head at a time."""
    weights = {name: getattr(module, f"{name}_projection").weight for name in ("query", "key", "value", "output")}
    q, k, v = (torch.einsum("bti,oi->bto", x, weights[name]) for name in ("query", "key", "value"))
    group = HEADS // kv_heads
    head_dim = q.shape[-1] // (2 * HEADS)
    q, k = q.reshape(2, T, kv_heads, 2, group, head_dim), k.reshape(2, T, kv_heads, 2, head_dim)
    v = v.reshape(2, T, kv_heads, 2 * head_dim)
    terms = [math.exp(dot(getattr(module, f"lambda_q{i}"), getattr(module, f"lambda_k{i}"))) for i in (1, 2)]
    share = terms[0] - terms[1] + start  # eq. 2
    heads = []
    for head in range(HEADS):
        j, i = divmod(head, group)
        first, second = (
            formulas.attend(q[:, :, j, half, i, None], k[:, :, j, half, None], v[:, :, j, None], **how)
            for half in (0, 1)
        )
        heads.append(first - share * second)  # eq. 1
        if len(module.sdpa._modules):
            normed = formulas.rmsnorm(heads[-1], module.sdpa.rmsnorm.weight, 1e-6)
            heads[-1] = normed * (1 - (0.8 - 0.6 * math.exp(-0.3 * DEPTH)))  # eq. 3
    return x + torch.einsum("bti,oi->bto", torch.cat(heads, 2).flatten(2), weights["output"])


FORMS = {
    "plain": {},
    "constant": {"lambda_init": 0.5},
    "paper": {"sdpa": PAPER},
    "grouped": {"kv_heads": 2, "head_dim": 3, "sdpa": PAPER},
    "multi_query": {"kv_heads": 1, "lambda_init": 0.0},
}


@pytest.mark.parametrize("name", FORMS)
def test_follows_the_equations(x: Tensor, name: str):
    fields = FORMS[name]
    module, start = branch(**fields), fields.get("lambda_init", 0.8 - 0.6 * math.exp(-0.3 * DEPTH))
    expected = by_hand(module, x, start, fields.get("kv_heads", HEADS))
    torch.testing.assert_close(module(x, Call()), expected, atol=1e-12, rtol=1e-12)


def test_a_window_holds_for_both_softmaxes(x: Tensor):
    module = branch(mask={"type": "window", "size": 3}, kv_heads=2, lambda_init=0.3)
    expected = by_hand(module, x, 0.3, 2, visible=lambda i, j: i - 3 < j <= i)
    torch.testing.assert_close(module(x, Call()), expected, atol=1e-12, rtol=1e-12)


def test_lambda_starts_as_in_the_paper():
    """Equal to lambda_init but for four vectors of N(0, 0.1^2), and 0.2, 0.356, 0.471 for the first layers."""
    module = arch_dsl.compile(load({**WIDE, "n_layers": 3}), seed=1)
    starts = [layer.attention.lambda_init for layer in module.block]
    assert [round(start, 3) for start in starts] == [0.2, 0.356, 0.471]
    vectors = [value for name, value in module.named_parameters() if ".lambda_" in name]
    assert len(vectors) == 12
    assert torch.stack(vectors).std().item() == pytest.approx(0.1, rel=0.1)


WIDE: dict[str, Any] = {
    "d_model": 512,
    "n_layers": 1,
    "vocab": 19,
    "block": {"attention": {"type": "differential_attention", "heads": 2}},
}


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_agrees_with_diffllama_of_transformers(x: Tensor, kv_heads: int):
    """Its norm has no weight, its heads are all first queries and then all second ones, its values are halves."""
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

    config = DiffLlamaConfig(
        hidden_size=D, num_attention_heads=2 * HEADS, num_key_value_heads=2 * kv_heads, max_position_embeddings=32,
        head_dim=4, rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    theirs = DiffLlamaAttention(config, DEPTH).double().eval()
    randomize(theirs)
    norm = {"type": "rmsnorm", "weight": False, "eps": 1e-5}
    sites = {"query": ["rope"], "key": ["rope"], "sdpa": [norm, "differential_scale"]}
    ours = branch(head_dim=4, kv_heads=kv_heads, **sites)
    rows = {
        "query": theirs.q_proj.weight.reshape(2, kv_heads, HEADS // kv_heads, 4, D).transpose(0, 1),
        "key": theirs.k_proj.weight.reshape(2, kv_heads, 4, D).transpose(0, 1),
        "value": theirs.v_proj.weight.reshape(2, kv_heads, 4, D).transpose(0, 1),
    }
    weights = {f"{name}_projection.weight": value.reshape(-1, D) for name, value in rows.items()}
    weights |= {name: value for name, value in theirs.named_parameters() if name.startswith("lambda")}
    ours.load_state_dict({**weights, "output_projection.weight": theirs.o_proj.weight})
    positions = DiffLlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected, _ = theirs(x, position_embeddings=positions, attention_mask=mask)
        torch.testing.assert_close(ours(x, Call()) - x, expected, atol=2e-6, rtol=2e-6)
        for name, value in ours.named_parameters():  # none of them is left out
            before = value.clone()
            value.view(-1)[::2] *= 1.5
            assert not torch.allclose(ours(x, Call()) - x, expected, atol=1e-4), name
            value.copy_(before)


MORE = {
    "rotated": {"kv_heads": 2, "query": ["rmsnorm", "rope"], "key": ["rmsnorm", "rope"], "sdpa": PAPER},
    "gated": {"sdpa": [*PAPER, "gate"], "value": ["gate"], "key": ["shift"]},
    "window": {"mask": {"type": "window", "size": 4}, "scores": ["alibi", "sinks"], "kv_heads": 2},
    "forgetting": {"scores": [{"type": "softcap", "cap": 2.0}, "forget_gate"]},
    "pruned": {"scores": [{"type": "forget_gate", "prune": 0.9}]},
    "memory": {"memory": 3, "kv_heads": 1},
    "positions": {"queries": "positions", "scores": ["transformer_xl"], "kv_heads": 2},
    "values": {"value": ["value_residual"], "head_dim": 3},
    "bigbird": {"mask": {"type": "bigbird", "block": 2, "window_blocks": 1, "globals": 1, "random": 1}},
}


def case(name: str) -> Case:
    return Case(name, model(**MORE[name]), ("differential_attention",), plain=False)


@pytest.mark.parametrize("name", [name for name in MORE if name != "bigbird"])  # which looks ahead
def test_decoding_reads_in_pieces_as_at_once_and_holds_what_its_cost_says(name: str):
    assert_decodes(case(name))


@pytest.mark.parametrize("name", MORE)
def test_activations_are_what_autograd_keeps(name: str):
    assert_keeps(case(name).model, rel=0.05)


@pytest.mark.parametrize("name", MORE)
def test_is_written_as_plain_pytorch(name: str):
    assert_plain_agrees(case(name).model)


def test_has_the_parameters_of_attention_of_twice_the_heads_and_four_vectors():
    """arXiv:2410.05258, section 2.1: half the heads, so that both have as many parameters."""
    plain = arch_dsl.cost(load({**WIDE, "block": {"attention": {"type": "attention", "heads": 4}}}), 128)
    own = arch_dsl.cost(load(WIDE), 128)
    assert own.parameters == plain.parameters + 4 * 128
    assert own.cache == plain.cache
    assert own.flops_matmul == plain.flops_matmul + 2 * 128 * 128 * 512  # values are twice as wide


def test_diff_attention_is_its_published_name():
    short = {"type": "diff_attention", "heads": 4}
    long = {"type": "differential_attention", "heads": 4, "sdpa": [{"type": "rmsnorm", "eps": 1e-5}, PAPER[1]]}
    assert parse(Branch, short) == parse(Branch, long)


def test_layers_share_it_with_one_lambda_init():
    shared = model(share="stack", lambda_init=0.8)
    assert arch_dsl.cost(shared, 5).parameters < arch_dsl.cost(model(lambda_init=0.8), 5).parameters
    with pytest.raises(SpecError, match="share: lets layers share a lambda_init that follows the depth of each"):
        model(share="stack")
