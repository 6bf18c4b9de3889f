"""The published linear mixers against a plain reading of their papers in float64, and what all of them must hold.

The readings are written from the papers' formulas, one sequence, head and token at a time; nothing of them is shared
with the code under test but the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import Call, State
from tests.arch_dsl.specs import assert_computes

D, LAYERS, VOCAB, LENGTH = 24, 3, 31, 21
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
Parameters = dict[str, Tensor]

MIXERS: dict[str, dict[str, Any]] = {
    "retnet": {"heads": 2},
    "gla": {"heads": 3},
    "hgrn2": {"heads": 3},
    "delta_net": {"heads": 3},
    "gated_delta_net": {"heads": 4, "key_heads": 2, "head_dim": 5, "value_dim": 6},
    "kda": {"heads": 2, "head_dim": 5, "value_dim": 6},
    "mamba2": {"value_dim": 6, "head_dim": 5},
}


def model(mixer: dict[str, Any], **more: Any) -> arch_dsl.Model:
    data = {"d_model": D, "n_layers": LAYERS, "vocab": VOCAB, "max_positions": 2 * LENGTH, "block": {"mixer": mixer}}
    return arch_dsl.resolve(arch_dsl.load({**data, **more}))


def built(mixer: dict[str, Any], backend: str = "reference", **more: Any) -> arch_dsl.Decoder:
    module = arch_dsl.compile(model(mixer, **more), backend=backend).double()
    randomize(module)
    return module


# The papers


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def conv(x: Tensor, p: Parameters, site: str) -> Tensor:
    """silu of a causal convolution of x `[time, channels]`, channel by channel; the last weight is the token's own."""
    weight, bias = p[f"{site}.short_conv.weight"], p.get(f"{site}.short_conv.bias", torch.zeros(x.shape[1]))
    rows = []
    for t in range(x.shape[0]):
        row = bias.clone()
        for i in range(weight.shape[-1]):
            before = t - (weight.shape[-1] - 1) + i
            if before >= 0:
                row = row + weight[:, 0, i] * x[before]
        rows.append(silu(row))
    return torch.stack(rows)


def maps(x: Tensor, p: Parameters) -> tuple[Tensor, ...]:
    return tuple(x @ p[f"{n}_projection.weight"].T for n in ("query", "key", "value") if f"{n}_projection.weight" in p)


def turned(x: Tensor) -> Tensor:
    """Rotary encoding of x `[time, head_dim]`."""
    half, out = x.shape[1] // 2, torch.empty_like(x)
    for t in range(x.shape[0]):
        for i in range(half):
            a = t * 10_000.0 ** (-2 * i / x.shape[1])
            out[t, i] = x[t, i] * math.cos(a) - x[t, i + half] * math.sin(a)
            out[t, i + half] = x[t, i] * math.sin(a) + x[t, i + half] * math.cos(a)
    return out


def retention(x: Tensor, p: Parameters, layer: int) -> Tensor:
    """arXiv:2307.08621, eq. 5 to 8, in the parallel form: (Q K^T * D) V with D_nm = gamma^(n - m)."""
    q, k, v = maps(x, p)
    heads, outputs = 2, []
    d, width = q.shape[1] // heads, v.shape[1] // heads
    for h in range(heads):
        gamma = 1 - 2.0 ** (-5 - h)
        rows = [[gamma ** (n - m) if n >= m else 0.0 for m in range(len(x))] for n in range(len(x))]
        decays = torch.tensor(rows, dtype=x.dtype)
        qh, kh = (turned(y[:, h * d : (h + 1) * d]) for y in (q, k))
        o = (qh @ kh.T / math.sqrt(d) * decays) @ v[:, h * width : (h + 1) * width]
        centred = o - o.mean(-1, keepdim=True)
        o = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
        outputs.append(o * p["sdpa.layernorm.weight"][h] + p["sdpa.layernorm.bias"][h])
    return silu(x @ p["sdpa.gate.projection.weight"].T) * torch.cat(outputs, -1)


def gla(x: Tensor, p: Parameters, layer: int) -> Tensor:
    """arXiv:2312.06635, section 4.4: S_t = (alpha_t^T 1) * S_(t-1) + k_t^T v_t with alpha per channel of the key."""
    q, k, v = maps(x, p)
    alpha = sigmoid(x @ p["decay.projection.weight"].T @ p["decay.outer.weight"].T + p["decay.outer.bias"]) ** (1 / 16)
    heads, outputs = 3, []
    d, width = q.shape[1] // heads, v.shape[1] // heads
    for h in range(heads):
        state = torch.zeros(d, width, dtype=x.dtype)
        rows = []
        for t in range(len(x)):
            keys = slice(h * d, (h + 1) * d)
            state = alpha[t, keys][:, None] * state + torch.outer(k[t, keys], v[t, h * width : (h + 1) * width])
            rows.append(q[t, keys] @ state / math.sqrt(d))
        outputs.append(rms(torch.stack(rows), p["sdpa.rmsnorm.weight"], 1e-6))
    return silu(x @ p["sdpa.gate.projection.weight"].T) * torch.cat(outputs, -1)


def hgrn2(x: Tensor, p: Parameters, layer: int) -> Tensor:
    """arXiv:2404.07904, eq. 4 to 6: S_t = Diag(f_t) S_(t-1) + (1 - f_t) i_t, with bounds from arXiv:2311.04823."""
    q, v = maps(x, p)
    shares = torch.exp(p["decay.table.weight"]) / torch.exp(p["decay.table.weight"]).sum(0)
    bound = torch.zeros(D, dtype=x.dtype)
    for i in range(1, layer + 1):
        bound = bound + shares[i]
    f = bound + (1 - bound) * sigmoid(x @ p["decay.projection.weight"].T)
    q, heads, outputs = silu(q), 3, []
    d = D // heads
    for h in range(heads):
        state, rows, part = torch.zeros(d, d, dtype=x.dtype), [], slice(h * d, (h + 1) * d)
        for t in range(len(x)):
            state = torch.diag(f[t, part]) @ state + torch.outer(1 - f[t, part], v[t, part])
            rows.append(state.T @ q[t, part] / math.sqrt(d))
        outputs.append(torch.stack(rows))
    return rms(torch.cat(outputs, -1), p["sdpa.rmsnorm.weight"], 1e-6)


def delta(x: Tensor, p: Parameters, layer: int) -> Tensor:
    """arXiv:2406.06484, eq. 3: S_t = S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t; gated,
    arXiv:2412.06464, eq. 10: S_(t-1) is multiplied by alpha_t before."""
    q, k, v = (conv(y, p, site) for y, site in zip(maps(x, p), ("query", "key", "value"), strict=True))
    beta = sigmoid(x @ p["beta_projection.weight"].T)
    gated = "decay.a" in p
    heads, groups = beta.shape[1], 2 if gated else 3
    d, width, outputs = q.shape[1] // groups, v.shape[1] // heads, []
    for h in range(heads):
        g = h // (heads // groups)
        state, rows = torch.zeros(width, d, dtype=x.dtype), []
        for t in range(len(x)):
            qt, kt = (unit(y[t, g * d : (g + 1) * d]) for y in (q, k))
            alpha = torch.ones((), dtype=x.dtype)
            if gated:
                step = torch.log1p(torch.exp(x[t] @ p["decay.projection.weight"][h] + p["decay.bias"][h]))
                alpha = torch.exp(-torch.exp(p["decay.a"][h]) * step)
            erase = torch.eye(d, dtype=x.dtype) - beta[t, h] * torch.outer(kt, kt)
            state = alpha * state @ erase + beta[t, h] * torch.outer(v[t, h * width : (h + 1) * width], kt)
            rows.append(state @ qt / math.sqrt(d))
        outputs.append(rms(torch.stack(rows), p["sdpa.rmsnorm.weight"], 1e-6))
    out = torch.cat(outputs, -1)
    return out * silu(x @ p["sdpa.gate.projection.weight"].T) if gated else out


def kda(x: Tensor, p: Parameters, layer: int) -> Tensor:
    """arXiv:2510.26692, eq. 1: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_(t-1) + beta_t k_t v_t^T with alpha per
    channel, o_t = S_t^T q_t."""
    q, k, v = (conv(y, p, site) for y, site in zip(maps(x, p), ("query", "key", "value"), strict=True))
    beta = sigmoid(x @ p["beta_projection.weight"].T)
    steps = x @ p["decay.projection.weight"].T @ p["decay.outer.weight"].T + p["decay.bias"]
    heads, outputs = beta.shape[1], []
    d, width = q.shape[1] // heads, v.shape[1] // heads
    for h in range(heads):
        state, rows, keys = torch.zeros(d, width, dtype=x.dtype), [], slice(h * d, (h + 1) * d)
        for t in range(len(x)):
            qt, kt, vt = unit(q[t, keys]), unit(k[t, keys]), v[t, h * width : (h + 1) * width]
            alpha = torch.exp(-torch.exp(p["decay.a"][h]) * torch.log1p(torch.exp(steps[t, keys])))
            erase = torch.eye(d, dtype=x.dtype) - beta[t, h] * torch.outer(kt, kt)
            state = erase @ torch.diag(alpha) @ state + beta[t, h] * torch.outer(kt, vt)
            rows.append(state.T @ qt / math.sqrt(d))
        outputs.append(rms(torch.stack(rows), p["sdpa.rmsnorm.weight"], 1e-6))
    return torch.cat(outputs, -1) * sigmoid(x @ p["sdpa.gate.projection.weight"].T @ p["sdpa.gate.outer.weight"].T)


def mamba2(x: Tensor, p: Parameters, layer: int) -> Tensor:
    """arXiv:2405.21060, eq. 1, 2 and section 7.1: h_t = exp(dt A) h_(t-1) + dt B_t x_t, y_t = C_t h_t + D x_t per head
    of x, all heads reading one B and C; then a norm of y silu(z)."""
    c, b, inner = (conv(y, p, site) for y, site in zip(maps(x, p), ("query", "key", "value"), strict=True))
    steps = torch.log1p(torch.exp(x @ p["decay.projection.weight"].T + p["decay.bias"]))
    heads, outputs = steps.shape[1], []
    width = inner.shape[1] // heads
    for h in range(heads):
        state, rows = torch.zeros(c.shape[1], width, dtype=x.dtype), []
        for t in range(len(x)):
            own = inner[t, h * width : (h + 1) * width]
            state = torch.exp(-steps[t, h] * torch.exp(p["decay.a"][h])) * state + steps[t, h] * torch.outer(b[t], own)
            rows.append(c[t] @ state + p["skip"][h] * own)
        outputs.append(torch.stack(rows))
    z = x @ p["sdpa.gate.projection.weight"].T
    return rms(torch.cat(outputs, -1) * silu(z), p["sdpa.rmsnorm.weight"], 1e-5)


READINGS: dict[str, Callable[[Tensor, Parameters, int], Tensor]] = {
    "retnet": retention,
    "gla": gla,
    "hgrn2": hgrn2,
    "delta_net": delta,
    "gated_delta_net": delta,
    "kda": kda,
    "mamba2": mamba2,
}


def reading(name: str, p: Parameters, tokens: Tensor) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    x = p["embedding"][tokens]
    for layer in range(LAYERS):
        # what layers share is named in the first of them
        parts = ("block.0.mixer.decay.table.", "block.0.mixer."), (f"block.{layer}.mixer.", f"block.{layer}.mixer.")
        own = {n.removeprefix(cut): v for start, cut in parts for n, v in p.items() if n.startswith(start)}
        x = x + READINGS[name](x, own, layer) @ own["output_projection.weight"].T
    return x @ p["embedding"].T


def with_exact_tables(module: arch_dsl.Decoder) -> None:
    """Replaces tables of angles and decays, which are in float32, by exact ones."""
    for layer in module.block:
        layer.mixer.decay.log_f = torch.log1p(-(2.0 ** -torch.arange(5, 7, dtype=torch.float64)))
        for rope in (layer.mixer.query.rope, layer.mixer.key.rope):
            i, t = torch.arange(rope.cos.shape[1]), torch.arange(len(rope.cos), dtype=torch.float64)
            angles = t[:, None] * 10_000.0 ** (-i.double() / rope.cos.shape[1])
            rope.cos, rope.sin = angles.cos(), angles.sin()


@pytest.mark.parametrize("name", MIXERS)
def test_logits_and_gradients_are_those_of_the_paper(name: str):
    module = built({"type": name, **MIXERS[name]})
    if name == "retnet":
        with_exact_tables(module)
    parameters = dict(module.named_parameters())
    expected = torch.stack([reading(name, parameters, row) for row in TOKENS])
    assert_computes(module, TOKENS, expected)


# What all hold


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", [1, 2, 33, 67])
def test_chunks_give_what_steps_give(name: str, length: int):
    tokens = torch.arange(2 * length).reshape(2, length) * 7 % VOCAB
    steps, chunks = (
        built({"type": name, **MIXERS[name]}, backend, max_positions=80) for backend in ("reference", "torch")
    )
    torch.testing.assert_close(chunks(tokens), steps(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_tokens_read_in_pieces_have_the_logits_of_reading_them_at_once(name: str, documents: bool):
    module = built({"type": name, **MIXERS[name], "documents": documents})
    numbers = (torch.arange(LENGTH) >= torch.tensor([[5], [9]])).long() if documents else None
    state, found = State(), []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        part = None if numbers is None else numbers[:, start:end]
        found.append(module(TOKENS[:, start:end], Call(state=state, documents=part)))
    torch.testing.assert_close(torch.cat(found, 1), module(TOKENS, Call(documents=numbers)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "retnet"])
def test_a_document_is_read_as_if_it_stood_alone(name: str):
    module = built({"type": name, **MIXERS[name], "documents": True})
    numbers = (torch.arange(LENGTH) >= 9).long().expand(2, -1)
    both = module(TOKENS, Call(documents=numbers))
    torch.testing.assert_close(both[:, 9:], module(TOKENS[:, 9:]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(both[:, :9], module(TOKENS[:, :9]), rtol=1e-9, atol=1e-9)


def test_convolutions_before_a_branch_keep_documents_apart_as_it_does():
    for mixer in (
        {"type": "linear_attention", "heads": 3, "documents": True, "pre": ["short_conv"]},
        {"type": "attention", "heads": 3, "mask": {"type": "causal", "documents": True}, "pre": ["short_conv"]},
    ):
        module = built(mixer)
        assert module.keeps_documents_apart
        both = module(TOKENS, Call(documents=(torch.arange(LENGTH) >= 9).long().expand(2, -1)))
        torch.testing.assert_close(both[:, 9:], module(TOKENS[:, 9:]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "retnet"])
def test_tokens_that_nothing_may_read_change_no_others(name: str):
    module = built({"type": name, **MIXERS[name]})
    padding = torch.zeros(2, LENGTH + 4, dtype=torch.bool)
    padding[:, :4] = True
    padded = torch.cat([torch.full((2, 4), 7), TOKENS], 1)
    found = module(padded, Call(padding=padding))
    torch.testing.assert_close(found[:, 4:], module(TOKENS), rtol=1e-9, atol=1e-9)


def test_tokens_in_the_middle_that_nothing_may_read_leave_the_state_as_it_is():
    module = built({"type": "linear_attention", "heads": 3, "rule": "delta", "decay": "constant", "key": ["l2norm"]})
    padding = torch.zeros(2, LENGTH + 1, dtype=torch.bool)
    padding[:, 9] = True
    padded = torch.cat([TOKENS[:, :9], torch.full((2, 1), 7), TOKENS[:, 9:]], 1)
    found = module(padded, Call(padding=padding))[:, ~padding[0]]
    torch.testing.assert_close(found, module(TOKENS), rtol=1e-9, atol=1e-9)


def test_decays_start_where_the_papers_start_them():
    def decay(kind: dict[str, Any], heads: int = 2000) -> Any:
        mixer = {"type": "linear_attention", "heads": heads, "head_dim": 1, "decay": kind}
        return arch_dsl.compile(model(mixer)).block[0].mixer.decay

    mamba = decay({"type": "mamba2"})
    a, step = mamba.a.detach().exp(), torch.nn.functional.softplus(mamba.bias.detach())
    assert 1 <= a.min() < 1.1 and 15.9 < a.max() <= 16 and a.mean() == pytest.approx(8.5, abs=0.4)
    assert 0.00099 < step.min() < 0.00105 and 0.095 < step.max() < 0.1001
    assert step.log().mean() == pytest.approx(math.log(0.01), abs=0.1)
    kimi = decay({"type": "kda", "rank": 1})
    assert 1 <= kimi.a.min().exp() < 1.1 and 15.9 < kimi.a.max().exp() <= 16
    steps = torch.nn.functional.softplus(kimi.bias.detach())
    assert steps.log().mean() == pytest.approx(math.log(0.01), abs=0.1)
    learned, fixed = (decay({"type": "constant", "learned": learned}, 8) for learned in (True, False))
    expected = torch.tensor([math.log(1 - 2 ** (-5 - h)) for h in range(8)])
    torch.testing.assert_close(fixed.log_f, expected)
    torch.testing.assert_close(torch.nn.functional.logsigmoid(learned.logit), expected)
    assert decay({"type": "lower_bounded"}, 8).table.weight.abs().max() == 0
