"""sLSTM against a plain reading of its paper in float64, without a stabilizer; and what it holds while decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.parts.context import Call, State
from archlab.kernels.slstm.reference import slstm as steps
from archlab.kernels.slstm.torch_ops import slstm as written_out
from tests.arch_dsl.primitives.test_linear_attention import (
    LAYERS,
    LENGTH,
    TOKENS,
    D,
    Parameters,
    built,
    model,
    sigmoid,
)
from tests.arch_dsl.primitives.test_mlstm import layer_norm
from tests.arch_dsl.specs import assert_computes

MIXERS: dict[str, dict[str, Any]] = {"paper": {"heads": 3}, "normed": {"heads": 4, "sdpa": ["groupnorm"]}}


def slstm(x: Tensor, p: Parameters, heads: int) -> Tensor:
    """arXiv:2405.04517, eq. 8 to 14 for one sequence, with one matrix R per gate and head."""
    gates = (x @ p["gates_projection.weight"].T + p["gates_projection.bias"]).unflatten(-1, (4, heads, -1))
    outputs = []
    for k in range(heads):
        c = n = h = torch.zeros(D // heads, dtype=x.dtype)
        rows = []
        for t in range(len(x)):
            z, i, f, o = (gates[t, g, k] + p["recurrent"][g, k] @ h for g in range(4))
            c = sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
            n = sigmoid(f) * n + torch.exp(i)
            h = sigmoid(o) * c / n
            rows.append(h)
        outputs.append(layer_norm(torch.stack(rows), p, k) if "sdpa.layernorm.weight" in p else torch.stack(rows))
    return torch.cat(outputs, -1)


def reading(heads: int, p: Parameters, tokens: Tensor) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    x = p["embedding"][tokens]
    for layer in range(LAYERS):
        start = f"block.{layer}.mixer."
        x = x + slstm(x, {n.removeprefix(start): v for n, v in p.items() if n.startswith(start)}, heads)
    return x @ p["embedding"].T


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", MIXERS)
def test_logits_and_gradients_are_those_of_the_paper(name: str, backend: str):
    module = built({"type": "slstm", **MIXERS[name]}, backend)
    parameters = dict(module.named_parameters())
    expected = torch.stack([reading(MIXERS[name]["heads"], parameters, row) for row in TOKENS])
    assert_computes(module, TOKENS, expected)


@pytest.mark.parametrize("name", MIXERS)
def test_tokens_read_in_pieces_have_the_logits_of_reading_them_at_once(name: str):
    module, state, found = built({"type": "slstm", **MIXERS[name]}, "torch"), State(), []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        found.append(module(TOKENS[:, start:end], Call(state=state)))
    torch.testing.assert_close(torch.cat(found, 1), module(TOKENS), rtol=1e-9, atol=1e-9)


def test_padding_before_a_sequence_changes_nothing():
    module = built({"type": "slstm", "heads": 3})
    padding = (torch.arange(LENGTH + 4) < 4).expand(2, -1)
    padded = torch.cat([torch.full((2, 4), 7), TOKENS], 1)
    torch.testing.assert_close(module(padded, Call(padding=padding))[:, 4:], module(TOKENS), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("height", [-3000.0, 3000.0])
@pytest.mark.parametrize("form", [steps, written_out])
def test_gates_of_any_size_give_numbers_and_gradients(form: Any, height: float):
    rng = torch.Generator().manual_seed(1)
    gates, weights = torch.randn(1, 30, 4, 2, 3, generator=rng), torch.randn(4, 2, 3, 3, generator=rng)
    gates[:, :, 1] = 100 * gates[:, :, 1] + height
    gates[:, :, 2] *= 300
    leaves = [x.requires_grad_() for x in (gates, weights)]
    h, last = form(*leaves)
    found = torch.autograd.grad(h.sum(), leaves)
    assert all(x.isfinite().all() for x in (h, last, *found)) and h.abs().max() <= 1
    exact = torch.autograd.grad(steps(*(x.double() for x in leaves))[0].sum(), leaves)
    for a, b in zip(found, exact, strict=True):
        assert float((a - b).abs().max()) <= 1e-4 * float(b.abs().max())


def test_a_closed_input_gate_leaves_the_state_as_it_is_in_both_forms():
    rng = torch.Generator().manual_seed(2)
    gates, weights = (torch.randn(*shape, generator=rng).double() for shape in ((1, 12, 4, 2, 3), (4, 2, 3, 3)))
    closed = torch.zeros(12, dtype=torch.bool)
    closed[[0, 4, 5, 11]] = True
    masked = gates.clone()
    masked[:, closed, 1] = float("-inf")
    leaves = [masked.requires_grad_(), weights.requires_grad_()]
    found = {form: form(*leaves) for form in (steps, written_out)}
    alone, last = steps(gates[:, ~closed], weights)
    for h, held in found.values():
        torch.testing.assert_close(h[:, ~closed], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(held, last, rtol=1e-12, atol=1e-12)
    wanted, ours = (torch.autograd.grad((h.square().sum(), held.square().sum()), leaves) for h, held in found.values())
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gates_start_as_in_its_code():
    module = arch_dsl.compile(model({"type": "slstm", "heads": 3}))
    for depth, layer in enumerate(module.block):
        cell, write, forget, read = layer.mixer.gates_projection.bias.detach().unflatten(0, (4, 3, -1))
        wanted = 5 - 12 * (torch.arange(8) / 7) ** (0.3 + 1.3 * depth / (LAYERS - 1))
        torch.testing.assert_close(forget, wanted.expand(3, -1))
        assert not (cell.any() or write.any() or read.any() or layer.mixer.recurrent.any())


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        ({"heads": 5}, r"heads: 5 heads do not divide d_model 24"),
        ({}, r"heads"),
        ({"heads": 3, "share": "stack"}, r"slstm differs from layer to layer"),
    ],
)
def test_what_makes_no_sense_is_refused(mixer: dict[str, Any], said: str):
    with pytest.raises(SpecError, match=said):
        model({"type": "slstm", **mixer})
