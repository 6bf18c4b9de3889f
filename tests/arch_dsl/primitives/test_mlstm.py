"""mLSTM against a plain reading of its paper in float64, without a stabilizer; and its stabilizer with gates so large
that only it has numbers for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.parts.context import Call, State
from archlab.arch_dsl.primitives.mlstm import normalized, stabilizers
from archlab.kernels.linear_recurrence.reference import linear_recurrence
from archlab.kernels.linear_recurrence.torch_ops import chunked
from tests.arch_dsl.primitives.test_linear_attention import (
    LAYERS,
    LENGTH,
    TOKENS,
    VOCAB,
    Parameters,
    built,
    maps,
    model,
    sigmoid,
)
from tests.arch_dsl.specs import assert_computes

CAP = "3 * tanh(x / 3)"
XLSTM_7B = {"decay": {"type": "sigmoid", "function": CAP}, "input_gate": CAP, "sdpa": ["groupnorm", "gate"]}
MIXERS: dict[str, dict[str, Any]] = {
    "paper": {"heads": 3},
    "capped": {"heads": 2, "head_dim": 5, "value_dim": 6, **XLSTM_7B},
    "grouped": {"heads": 4, "key_heads": 2, "head_dim": 5, "value_dim": 6, "scale": 0.7},
    "channels": {"heads": 2, "decay": {"type": "low_rank", "rank": 3}},
}


def gates(x: Tensor, p: Parameters, capped: bool) -> tuple[Tensor, Tensor]:
    """i and f `[time, heads]`, f also with channels of the keys."""
    i = x @ p["input_projection.weight"].T + p["input_projection.bias"]
    if "decay.outer.weight" in p:
        f = x @ p["decay.projection.weight"].T @ p["decay.outer.weight"].T + p["decay.outer.bias"]
        return torch.exp(i), (sigmoid(f) ** (1 / 16)).unflatten(-1, (i.shape[1], -1))
    f = x @ p["decay.projection.weight"].T + p["decay.projection.bias"]
    if capped:
        i, f = 3 * torch.tanh(i / 3), 3 * torch.tanh(f / 3)
    return torch.exp(i), sigmoid(f)[..., None]


def layer_norm(x: Tensor, p: Parameters, h: int) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
    return normed * p["sdpa.layernorm.weight"][h] + p["sdpa.layernorm.bias"][h]


def mlstm(x: Tensor, p: Parameters, mixer: dict[str, Any]) -> Tensor:
    """arXiv:2405.04517, eq. 19 to 27: C_t = f_t C_(t-1) + i_t v_t k_t^T, n_t = f_t n_(t-1) + i_t k_t and
    h_t = o_t * C_t q_t / max(|n_t^T q_t|, 1), keys being those of the map over sqrt(d)."""
    (q, k, v), (i, f) = maps(x, p), gates(x, p, "sdpa" in mixer)
    heads, groups = mixer["heads"], mixer.get("key_heads", mixer["heads"])
    d, width, outputs = q.shape[1] // groups, v.shape[1] // heads, []
    k = k * mixer.get("scale", d**-0.5)
    for h in range(heads):
        g = slice(h // (heads // groups) * d, (h // (heads // groups) + 1) * d)
        c, n, rows = torch.zeros(width, d, dtype=x.dtype), torch.zeros(d, dtype=x.dtype), []
        for t in range(len(x)):
            c = c * f[t, h] + i[t, h] * torch.outer(v[t, h * width : (h + 1) * width], k[t, g])
            n = n * f[t, h] + i[t, h] * k[t, g]
            rows.append(c @ q[t, g] / torch.clamp((n @ q[t, g]).abs(), min=1))
        outputs.append(layer_norm(torch.stack(rows), p, h) if "sdpa" in mixer else torch.stack(rows))
    out = torch.cat(outputs, -1)
    return out * sigmoid(x @ p["sdpa.gate.projection.weight"].T) if "sdpa" in mixer else out


def reading(mixer: dict[str, Any], p: Parameters, tokens: Tensor) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    x = p["embedding"][tokens]
    for layer in range(LAYERS):
        start = f"block.{layer}.mixer."
        own = {n.removeprefix(start): v for n, v in p.items() if n.startswith(start)}
        x = x + mlstm(x, own, mixer) @ own["output_projection.weight"].T
    return x @ p["embedding"].T


@pytest.mark.parametrize("name", MIXERS)
def test_logits_and_gradients_are_those_of_the_paper(name: str):
    module = built({"type": "mlstm", **MIXERS[name]})
    parameters = dict(module.named_parameters())
    expected = torch.stack([reading(MIXERS[name], parameters, row) for row in TOKENS])
    assert_computes(module, TOKENS, expected)


@pytest.mark.parametrize("length", [1, 2, 67])
@pytest.mark.parametrize("name", MIXERS)
def test_chunks_give_what_steps_give(name: str, length: int):
    tokens = torch.arange(2 * length).reshape(2, length) * 7 % VOCAB
    mixer = {"type": "mlstm", **MIXERS[name]}
    steps, chunks = (built(mixer, backend, max_positions=80) for backend in ("reference", "torch"))
    torch.testing.assert_close(chunks(tokens), steps(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_tokens_read_in_pieces_have_the_logits_of_reading_them_at_once(name: str, documents: bool):
    module = built({"type": "mlstm", **MIXERS[name], "documents": documents})
    numbers = (torch.arange(LENGTH) >= torch.tensor([[5], [9]])).long() if documents else None
    state, found = State(), []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        part = None if numbers is None else numbers[:, start:end]
        found.append(module(TOKENS[:, start:end], Call(state=state, documents=part)))
    torch.testing.assert_close(torch.cat(found, 1), module(TOKENS, Call(documents=numbers)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MIXERS)
def test_a_document_is_read_as_if_it_stood_alone(name: str):
    module = built({"type": "mlstm", **MIXERS[name], "documents": True})
    both = module(TOKENS, Call(documents=(torch.arange(LENGTH) >= 9).long().expand(2, -1)))
    torch.testing.assert_close(both[:, 9:], module(TOKENS[:, 9:]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(both[:, :9], module(TOKENS[:, :9]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MIXERS)
def test_tokens_that_nothing_may_read_leave_the_state_as_it_is(name: str):
    module = built({"type": "mlstm", **MIXERS[name]})
    padding = torch.zeros(2, LENGTH + 3, dtype=torch.bool)
    padding[:, [0, 1, 9]] = True
    padded = torch.full((2, LENGTH + 3), 7)
    padded[~padding] = TOKENS.flatten()
    found = module(padded, Call(padding=padding))[~padding].unflatten(0, TOKENS.shape)
    torch.testing.assert_close(found, module(TOKENS), rtol=1e-9, atol=1e-9)


# The stabilizer


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_stabilizers_are_those_of_a_loop():
    log_f, log_i, before = -drawn(2, 9, 3).square(), 5 * drawn(2, 9, 3, seed=2), drawn(2, 3, seed=3).abs()
    wanted, m = [], before
    for t in range(9):
        m = torch.maximum(log_f[:, t] + m, log_i[:, t].clamp(min=0))
        wanted.append(m)
    torch.testing.assert_close(stabilizers(log_f, log_i, before), torch.stack(wanted, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("height", [-3000.0, -60.0, 60.0, 3000.0])
@pytest.mark.parametrize("recur", [linear_recurrence, chunked], ids=["steps", "chunks"])
def test_gates_of_any_size_give_numbers_and_gradients(recur: Any, height: float):
    """Where exp(i) has no number in float32, and where log f is -300 or nothing fades."""
    shapes = {"q": (1, 70, 2, 4), "k": (1, 70, 2, 4), "v": (1, 70, 2, 3)}
    given = {name: drawn(*shape, seed=seed).float() for seed, (name, shape) in enumerate(shapes.items())}
    given["log_f"] = -(300 * drawn(1, 70, 2, seed=7).clamp(min=0)).float()
    given["log_i"] = height + drawn(1, 70, 2, seed=8).float()
    leaves = {name: value.requires_grad_() for name, value in given.items()}
    out, _, m = normalized(recur, **leaves)
    out.sum().backward()
    assert out.isfinite().all() and m.isfinite().all() and (m >= 0).all()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves.values())
    exact = normalized(linear_recurrence, **{name: value.detach().double() for name, value in given.items()})[0]
    assert float((out.detach() - exact).abs().max()) <= 1e-4 * max(1.0, float(exact.abs().max()))
    assert bool(out.any()) == (height > -100)


def test_large_input_gates_read_the_newest_value():
    """i grows by exp(40) from token to token: what is read is v_t times the sign of q_t . k_t."""
    q, k, v = (drawn(1, 6, 1, 4, seed=seed) for seed in (1, 2, 3))
    log_i = 40 * torch.arange(1, 7, dtype=torch.float64)[None, :, None]
    out, _, _ = normalized(linear_recurrence, q, k, v, torch.zeros_like(log_i), log_i)
    torch.testing.assert_close(out, v * (q * k).sum(-1, keepdim=True).sign(), rtol=1e-9, atol=1e-9)


# Fields


def test_gates_start_as_published():
    module = arch_dsl.compile(model({"type": "mlstm", "heads": 4, "start": -10.0}))
    for layer in module.block:
        mixer = layer.mixer
        assert not mixer.input_projection.weight.any() and not mixer.decay.projection.weight.any()
        assert mixer.input_projection.bias.tolist() == [-10.0] * 4
        assert mixer.decay.projection.bias.tolist() == [3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        ({"heads": 3, "rule": "delta"}, r"'rule' is not a key of mlstm"),
        ({"heads": 3, "decay": None}, r"decay"),
        ({"heads": 3, "input_gate": "tan(x)"}, r"input_gate: .*tan"),
        ({"heads": 5}, r"5 heads do not divide 24 channels"),
        ({"heads": 3, "decay": {"type": "sigmoid", "function": "y"}}, r"decay.function"),
    ],
)
def test_what_makes_no_sense_is_refused(mixer: dict[str, Any], said: str):
    with pytest.raises(SpecError, match=said):
        model({"type": "mlstm", **mixer})
