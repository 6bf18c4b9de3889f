"""Statistical top-k against its formula in float64, and against transformers' Gemma 3n."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call

X = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.4


def feed_forward(sparsity: float, width: int = 24, **more: Any) -> Any:
    ffn = {"type": "glu", "width": width, "preactivation": [{"type": "statistical_topk", "sparsity": sparsity}], **more}
    data = {"d_model": 16, "n_layers": 1, "vocab": 9, "block": {"ffn": ffn}}
    return arch_dsl.compile(arch_dsl.resolve(arch_dsl.load(data))).double().block[0].ffn  # type: ignore[index]


def thresholded(rows: Tensor, sparsity: float) -> Tensor:
    """arXiv:2506.06644, channel by channel, with the quantile as the root of the distribution function."""
    low, high = torch.tensor(-9.0, dtype=torch.float64), torch.tensor(9.0, dtype=torch.float64)
    for _ in range(70):
        middle = (low + high) / 2
        below = (1 + (middle / 2**0.5).erf()) / 2 < sparsity
        low, high = (middle, high) if below else (low, middle)
    found = []
    for row in rows.flatten(0, -2):
        mean = sum(row) / len(row)
        spread = (sum((channel - mean) ** 2 for channel in row) / len(row)) ** 0.5
        found.append(torch.stack([(channel - mean - low * spread).clamp(min=0) for channel in row]))
    return torch.stack(found).view_as(rows)


@pytest.mark.parametrize("sparsity", [0.2, 0.5, 0.95])
def test_computes_what_the_paper_says(sparsity: float):
    ffn, x, again = feed_forward(sparsity), X.clone().requires_grad_(), X.clone().requires_grad_()
    gate, value = again @ ffn.gate_projection.weight.T, again @ ffn.input_projection.weight.T
    hidden = thresholded(gate, sparsity)
    expected = (hidden * hidden.sigmoid() * value) @ ffn.output_projection.weight.T
    update = ffn.update(x, Call())
    torch.testing.assert_close(update, expected, rtol=1e-9, atol=1e-9)
    update.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-8, atol=1e-8)


def test_is_the_activation_sparsity_of_gemma_3n():
    """Whose quantile is rounded to float32."""
    theirs: Any = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_kv_shared_layers": 0}
    config = theirs.Gemma3nTextConfig(**sizes, layer_types=["full_attention"], activation_sparsity_pattern=[0.6])
    mlp = theirs.Gemma3nTextMLP(config, layer_idx=0).double()
    ours = feed_forward(0.6, activation="gelu_tanh")
    with torch.no_grad():
        for mine, other in (("gate", "gate"), ("input", "up"), ("output", "down")):
            getattr(ours, f"{mine}_projection").weight.copy_(getattr(mlp, f"{other}_proj").weight)
        torch.testing.assert_close(ours.update(X, Call()), mlp(X), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sparsity", [0.3, 0.95])
def test_passes_on_about_the_share_that_is_asked_for(sparsity: float):
    site = feed_forward(sparsity, width=4096).preactivation
    normal = 3.0 * torch.randn(1, 4, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 2.0
    assert float((site(normal, Call(), iter(())) == 0).double().mean()) == pytest.approx(sparsity, abs=0.02)
