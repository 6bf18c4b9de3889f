"""Canon layers, a residual short convolution at four points of a block, against the paper's formula written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl import Call
from tests.arch_dsl.conformance import TARGETS, TOKENS, build, load
from tests.arch_dsl.formulas import rmsnorm

BLOCK: dict[str, Any] = {
    "attention": {
        "heads": 4,
        "kv_heads": 2,
        "pre": ["rmsnorm", "canon"],
        "query": ["canon"],
        "key": ["canon"],
        "value": ["canon"],
    },
    "ffn": {
        "type": "glu",
        "width": 24,
        "pre": ["rmsnorm", "canon"],
        "preactivation": ["canon"],
        "linear": ["canon"],
    },
}


def model(block: dict[str, Any]) -> Any:
    return load({"d_model": 16, "n_layers": 1, "vocab": 19, "max_positions": 12, "block": block, "final": ["rmsnorm"]})


def canon(x: Tensor, weight: Tensor) -> Tensor:
    """h_t + sum_i w_i h_(t-i), i = 0 … 3 (arXiv:2512.17351): x `[batch, time, channels]`, weight `[channels, 1, 4]`,
    whose last number is w_0."""
    rows = []
    for t in range(x.shape[1]):
        row = x[:, t]
        for i in range(min(t + 1, 4)):
            row = row + weight[:, 0, 3 - i] * x[:, t - i]
        rows.append(row)
    return torch.stack(rows, 1)


def layer(at: Any, stream: Tensor) -> Tensor:
    """A LLaMA block with Canon-A, B, C and D, without rotations: 4 heads of 4 channels, keys and values of 2 heads."""
    x = rmsnorm(stream, at("attention.pre.rmsnorm.weight"), 1e-6)
    x = canon(x, at("attention.pre.short_conv.weight"))
    both = torch.cat([x @ at(f"attention.{name}_projection.weight").T for name in ("query", "key", "value")], -1)
    kernel = torch.cat([at(f"attention.{name}.short_conv.weight") for name in ("query", "key", "value")])
    q, k, v = canon(both, kernel).split([16, 8, 8], -1)
    heads = []
    for head in range(4):
        one, other = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        scores = q[..., one] @ k[..., other].mT / 2
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
        heads.append(scores.softmax(-1) @ v[..., other])
    stream = stream + torch.cat(heads, -1) @ at("attention.output_projection.weight").T
    x = canon(rmsnorm(stream, at("ffn.pre.rmsnorm.weight"), 1e-6), at("ffn.pre.short_conv.weight"))
    both = torch.cat([x @ at(f"ffn.{name}_projection.weight").T for name in ("gate", "input")], -1)
    kernel = torch.cat([at(f"ffn.{name}.short_conv.weight") for name in ("preactivation", "linear")])
    gate, value = canon(both, kernel).split(24, -1)
    return stream + (gate * gate.sigmoid() * value) @ at("ffn.output_projection.weight").T


def test_canon_layers_are_the_papers_at_all_four_points():
    module: Any = build(model(BLOCK))
    values = dict(module.named_parameters())
    stream = layer(lambda name: values[f"block.0.{name}"], values["embedding"][TOKENS])
    logits = rmsnorm(stream, values["final.rmsnorm.weight"], 1e-6) @ values["embedding"].T
    torch.testing.assert_close(module(TOKENS), logits, rtol=1e-10, atol=1e-10)
    wanted = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()), list(values.values()))
    module.loss(TOKENS, TARGETS, Call()).backward()
    for (name, value), gradient in zip(values.items(), wanted, strict=True):
        torch.testing.assert_close(value.grad, gradient, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
def test_a_canon_before_an_mlp_changes_what_its_activation_reads(activation: str):
    module: Any = build(model({"ffn": {"type": "mlp", "activation": activation, "preactivation": ["canon"]}}))
    ffn, x = module.block[0].ffn, torch.randn(2, 7, 16, dtype=torch.float64)
    inner = canon(x @ ffn.input_projection.weight.T, ffn.preactivation.short_conv.weight)
    inner = inner.relu().square() if activation == "relu2" else F.gelu(inner)
    torch.testing.assert_close(ffn.update(x, Call()), inner @ ffn.output_projection.weight.T, rtol=1e-10, atol=1e-10)


def test_a_canon_is_a_short_convolution_with_a_residual():
    written = {"type": "short_conv", "width": 4, "bias": False, "activation": "identity", "residual": True}
    ffn = {"type": "mlp", "pre": ["canon"]}
    assert model({"ffn": ffn}) == model({"ffn": {**ffn, "pre": [written]}})
