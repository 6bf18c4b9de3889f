"""Attention with grouped heads, masks, scores and gates at five positions against loops over queries and keys."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab.arch_dsl import Call
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.primitives.scores import alibi_slopes
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import randomize

D, T, HEADS = 12, 5, 4


def attention(**fields: Any) -> nn.Module:
    """An attention branch in float64 with random parameters and a norm in front."""
    data = {"type": "attention", "heads": HEADS, "pre": ["rmsnorm"], **fields}
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": None, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, backend="reference")
    module = parse(Branch, data).build(ctx).double()
    randomize(module)
    return module


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def read(module: nn.Module, x: Tensor) -> Tensor:
    return formulas.rmsnorm(x, module.pre.rmsnorm.weight, 1e-6)


def split(module: nn.Module, name: str, hidden: Tensor, head_dim: int) -> Tensor:
    """Queries, keys or values `[batch, time, heads, head_dim]`."""
    layer = getattr(module, f"{name}_projection")
    y = torch.einsum("bti,oi->bto", hidden, layer.weight)
    return (y if layer.bias is None else y + layer.bias).reshape(2, T, -1, head_dim)


def joined(module: nn.Module, x: Tensor, heads: Tensor) -> Tensor:
    """x plus the output map of all heads' outputs."""
    layer = module.output_projection
    update = torch.einsum("bti,oi->bto", heads.reshape(2, T, -1), layer.weight)
    return x + (update if layer.bias is None else update + layer.bias)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("head_dim", [None, 5], ids=["derived", "5"])
@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1], ids=["default", "multi-head", "grouped", "multi-query"])
def test_heads_share_keys_in_groups(x, kv_heads, head_dim, bias):
    module = attention(kv_heads=kv_heads, head_dim=head_dim, bias=bias)
    width = head_dim or D // HEADS
    q, k, v = (split(module, name, read(module, x), width) for name in ("query", "key", "value"))
    assert k.shape[2] == v.shape[2] == (kv_heads or HEADS)
    assert_close(module(x, Call()), joined(module, x, formulas.attend(q, k, v)))


@pytest.mark.parametrize("size", [1, 2, 3, T, 100])
def test_window_sees_the_last_positions(x, size):
    module = attention(mask={"type": "window", "size": size})
    q, k, v = (split(module, name, read(module, x), 3) for name in ("query", "key", "value"))
    expected = formulas.attend(q, k, v, visible=lambda i, j: i - size < j <= i)
    assert_close(module(x, Call()), joined(module, x, expected))


@pytest.mark.parametrize(
    ("mask", "size"), [("causal", 100), ({"type": "window", "size": 3}, 3)], ids=["causal", "window"]
)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 17])
def test_masks_count_their_pairs(mask, size, tokens):
    spec = parse(Branch, {"type": "attention", "heads": 1, "mask": mask})
    assert spec.mask.pairs(tokens) == sum(1 for i in range(tokens) for j in range(tokens) if i - size < j <= i)


@pytest.mark.parametrize("window", [None, 3], ids=["causal", "window"])
def test_alibi_lowers_distant_logits(x, window):
    mask = {"type": "window", "size": window} if window else "causal"
    module = attention(scores=["alibi"], mask=mask, kv_heads=2)
    q, k, v = (split(module, name, read(module, x), 3) for name in ("query", "key", "value"))
    slopes = [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    expected = formulas.attend(
        q, k, v, bias=lambda h, i, j: -slopes[h] * (i - j), visible=lambda i, j: i - (window or T) < j <= i
    )
    assert_close(module(x, Call()), joined(module, x, expected))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes_are_those_of_bloom_and_mpt(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bloom = build_alibi_tensor(torch.ones(1, 3, dtype=torch.long), heads, torch.float32)
    mpt = build_mpt_alibi_tensor(heads, 3)
    ours = torch.tensor(alibi_slopes(heads))
    assert_close(ours, bloom[:, 0, 1] - bloom[:, 0, 0], 1e-6)
    assert_close(ours, mpt[:, 0, 2] - mpt[:, 0, 1], 1e-6)


def test_query_and_key_sites_act_in_order(x):
    module = attention(kv_heads=2, head_dim=4, query=["rmsnorm", "rope"], key=["rmsnorm", "rope"], value=["rmsnorm"])
    hidden = read(module, x)
    made = {
        name: formulas.rmsnorm(split(module, name, hidden, 4), getattr(module, name).rmsnorm.weight, 1e-6)
        for name in ("query", "key", "value")
    }
    q, k = (formulas.rope(made[name], 10_000.0, 4) for name in ("query", "key"))
    assert_close(module(x, Call()), joined(module, x, formulas.attend(q, k, made["value"])), 1e-5)


# Gates: y * act(x W) or y + act(x W), arXiv:2505.06708, eq. 5 and table 1.

POSITIONS = ("query", "key", "value", "sdpa", "dense")
FINENESS = {
    "elementwise": {"granularity": "elementwise"},
    "headwise": {"granularity": "headwise"},
    "shared": {"granularity": "elementwise", "heads": "shared"},
    "scalar": {"granularity": "scalar"},
}

# The update after the output map has no heads.
PLACES = [
    (position, fineness)
    for position, fineness in itertools.product(POSITIONS, FINENESS)
    if position != "dense" or fineness in ("elementwise", "scalar")
]


def gated(y: Tensor, hidden: Tensor, gate: nn.Module, fineness: str, activation: str, combine: str) -> Tensor:
    """y `[batch, time, heads, head_dim]` or `[batch, time, D]`, one head and one channel at a time."""
    if gate.projection is None:
        raw = gate.constant.reshape(-1).expand(2, T, -1)
    else:
        raw = torch.einsum("bti,oi->bto", hidden, gate.projection.weight)
        raw = raw if gate.projection.bias is None else raw + gate.projection.bias
    heads = y if y.ndim == 4 else y[:, :, None, :]
    count, width = heads.shape[2:]
    out = torch.empty_like(heads)
    for head, channel in itertools.product(range(count), range(width)):
        if fineness == "elementwise":
            score = raw[..., head * width + channel]
        elif fineness == "headwise":
            score = raw[..., head]
        elif fineness == "shared":
            score = sum(raw[..., other * width + channel] for other in range(count)) / count
        else:
            score = raw[..., 0]
        opened = formulas.ACTIVATIONS[activation](score)
        value = heads[:, :, head, channel]
        out[:, :, head, channel] = value * opened if combine == "multiply" else value + opened
    return out.reshape(y.shape)


def by_hand(module: nn.Module, x: Tensor, position: str, *how: str) -> Tensor:
    """The gated attention branch."""
    hidden = read(module, x)
    made = {name: split(module, name, hidden, 3) for name in ("query", "key", "value")}
    if position in made:
        made[position] = gated(made[position], hidden, getattr(module, position).gate, *how)
    heads = formulas.attend(made["query"], made["key"], made["value"])
    if position == "sdpa":
        heads = gated(heads, hidden, module.sdpa.gate, *how)
    update = joined(module, torch.zeros_like(x), heads)
    return x + (gated(update, hidden, module.post.gate, *how) if position == "dense" else update)


@pytest.mark.parametrize("combine", ["multiply", "add"])
@pytest.mark.parametrize(("position", "fineness"), PLACES)
def test_gate_follows_the_formula(x, position, fineness, combine):
    site = "post" if position == "dense" else position
    activations = formulas.ACTIVATIONS if (position, fineness) == ("sdpa", "elementwise") else ("sigmoid", "silu")
    for activation, source in itertools.product(activations, ("hidden", "none")):
        gate = {"type": "gate", **FINENESS[fineness], "combine": combine, "activation": activation, "input": source}
        gate |= {"bias": True} if source == "hidden" and activation in ("silu", "gelu") else {}
        module = attention(kv_heads=2, **{site: [gate]})
        assert_close(module(x, Call()), by_hand(module, x, position, fineness, activation, combine))


@pytest.mark.parametrize(
    ("position", "fineness", "parameters"),
    [
        ("sdpa", "elementwise", D * D),
        ("sdpa", "headwise", D * HEADS),
        ("sdpa", "shared", D * D),
        ("sdpa", "scalar", D),
        ("query", "headwise", D * HEADS),
        ("key", "elementwise", D * 2 * 3),
        ("value", "headwise", D * 2),
        ("dense", "elementwise", D * D),
        ("dense", "scalar", D),
    ],
)
def test_gate_has_one_row_of_weights_per_score(position, fineness, parameters):
    site = "post" if position == "dense" else position
    module = attention(kv_heads=2, **{site: [{"type": "gate", **FINENESS[fineness]}]})
    assert getattr(module, site).gate.projection.weight.numel() == parameters


def test_a_gate_without_input_starts_half_open(x):
    module = attention(sdpa=[{"type": "gate", "input": "none"}])
    with torch.no_grad():
        module.sdpa.gate.constant.zero_()
    q, k, v = (split(module, name, read(module, x), 3) for name in ("query", "key", "value"))
    assert_close(module(x, Call()), joined(module, x, formulas.attend(q, k, v) / 2))
