"""LAuReL against its formula in float64 and transformers' Gemma 3n; the paper's form, said with an mlp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import Call
from archlab.arch_dsl.conformance.effects import randomize

X = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.4
ROOT = {"type": "weighted", "stream": 0.5**0.5, "update": 0.5**0.5}
FFN = {"type": "mlp", "width": 24}


def layer(block: dict[str, Any]) -> Any:
    data = {"d_model": 16, "n_layers": 1, "vocab": 9, "block": block}
    module = arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(data))).double()
    randomize(module)
    return module.block[0]  # type: ignore[index]


def test_computes_its_formula():
    branch = layer({"laurel": {"rank": 3, "norm": {"type": "rmsnorm", "eps": 0.01}}}).laurel
    x, again = X.clone().requires_grad_(), X.clone().requires_grad_()
    low = again @ branch.input_projection.weight.T @ branch.output_projection.weight.T
    length = ((low**2).sum(-1, keepdim=True) / 16 + 0.01) ** 0.5
    expected = again + low / length * branch.norm.weight
    found = branch.update(x, Call())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-8, atol=1e-8)


def test_beside_a_branch_it_is_that_of_gemma_3n():
    theirs: Any = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    config = theirs.Gemma3nTextConfig(hidden_size=16, laurel_rank=3, rms_norm_eps=0.01)
    norm = {"type": "rmsnorm", "eps": 0.01}
    group = layer({"parallel": {"pre": [norm], "ffn": FFN, "laurel": {"rank": 3, "norm": norm}, "join": ROOT}}).parallel
    block, before = theirs.Gemma3nTextLaurelBlock(config).double(), theirs.Gemma3nRMSNorm(16, eps=0.01).double()
    with torch.no_grad():
        block.linear_left.weight.copy_(group.members.laurel.input_projection.weight)
        block.linear_right.weight.copy_(group.members.laurel.output_projection.weight)
        block.post_laurel_norm.weight.copy_(group.members.laurel.norm.weight)
        before.weight.copy_(group.pre.rmsnorm.weight)
        normed = before(X)  # in float32, as all norms there
        gated = X + group.members.ffn.update(normed.double(), Call())
        expected = (gated + block(normed.double())) / 2**0.5
        torch.testing.assert_close(group(X, Call()), expected, rtol=1e-5, atol=1e-5)


def test_the_papers_form_is_an_mlp_beside_the_branch():
    """x + f(x) + x A B, arXiv:2411.07501."""
    low = {"type": "mlp", "activation": "identity", "width": 3}
    group = layer({"parallel": {"ffn": {**FFN, "pre": ["rmsnorm"]}, "laurel": low}}).parallel
    a, b = group.members.laurel.input_projection.weight, group.members.laurel.output_projection.weight
    expected = X + group.members.ffn.update(X, Call()) + X @ a.T @ b.T
    torch.testing.assert_close(group(X, Call()), expected, rtol=1e-9, atol=1e-9)
