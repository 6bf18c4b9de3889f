"""FoX and its Pro block against a plain reading of the paper's formulas in float64 (arXiv:2503.02130).

Everything below `reading` is written from the formulas, one head and one position at a time where that is how they
are stated; nothing of it is shared with the code under test but the parameters.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.conformance.effects import randomize

TOKENS = torch.randint(0, 61, (2, 23), generator=torch.Generator().manual_seed(11))
ENTRIES = ("fox_llama", "fox_pro", "transformer_llama", "transformer_pro")


def tiny(name: str) -> arch_dsl.Model:
    changes = {"vocab": 61, "max_positions": 23, "d_model": 24, "n_layers": 2, "block.attention.heads": 3}
    return arch_dsl.resolve(arch_dsl.patch(zoo.load(name), {**changes, "block.ffn.width": 40}))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def rotated(x: Tensor, theta: float) -> Tensor:
    """x `[time, head_dim]` turned by its positions, channel i with channel i + head_dim / 2."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        for i in range(half):
            angle = t * theta ** (-2 * i / (2 * half))
            a, b = x[t, i], x[t, i + half]
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


def shifted(x: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Eq. 14: a_t x_(t-1) + (1 - a_t) x_t with a_t = sigmoid(w . hidden_t); before the first token stands zero."""
    rows = []
    for t in range(x.shape[0]):
        share = sigmoid(weight @ hidden[t])
        before = x[t - 1] if t else torch.zeros_like(x[0])
        rows.append(share * before + (1 - share) * x[t])
    return torch.stack(rows)


def forgetting_attention(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None) -> Tensor:
    """Eqs. 11 to 13, one head: weights exp(q_i . k_j / sqrt(d) + sum of log f over j < l <= i), normalised."""
    time, d = q.shape
    out = torch.zeros_like(v)
    for i in range(time):
        logits = []
        for j in range(i + 1):
            decay = log_f[j + 1 : i + 1].sum() if log_f is not None else 0.0
            logits.append(q[i] @ k[j] / math.sqrt(d) + decay)
        weights = torch.stack(logits).softmax(0)
        out[i] = weights @ v[: i + 1]
    return out


def reading(
    p: dict[str, Tensor], tokens: Tensor, heads: int, *, pro: bool, forget: bool, theta: float | None
) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    x = p["embedding"][tokens]
    for layer in range(2):
        at = f"block.{layer}."
        hidden = rms(x, p[at + "attention.pre.rmsnorm.weight"], 1e-6)
        maps = {n: hidden @ p[f"{at}attention.{n}_projection.weight"].T for n in ("query", "key", "value")}
        d = maps["query"].shape[-1] // heads
        outputs = []
        for h in range(heads):
            q, k, v = (maps[n][:, h * d : (h + 1) * d] for n in ("query", "key", "value"))
            if pro:
                k = shifted(k, hidden, p[at + "attention.key.shift.projection.weight"][h])
                v = shifted(v, hidden, p[at + "attention.value.shift.projection.weight"][h])
                q = rms(q, p[at + "attention.query.rmsnorm.weight"], 1e-5)
                k = rms(k, p[at + "attention.key.rmsnorm.weight"], 1e-5)
            if theta is not None:
                q, k = rotated(q, theta), rotated(k, theta)
            log_f = None
            if forget:
                gate = at + "attention.scores.biases.forget_gate.projection."
                log_f = torch.log(sigmoid(hidden @ p[gate + "weight"][h] + p[gate + "bias"][h]))
            o = forgetting_attention(q, k, v, log_f)
            if pro:
                o = rms(o, p[at + "attention.sdpa.rmsnorm.weight"][h], 1e-6)
                o = o * sigmoid(hidden @ p[at + "attention.sdpa.gate.projection.weight"][h * d : (h + 1) * d].T)
            outputs.append(o)
        x = x + torch.cat(outputs, -1) @ p[at + "attention.output_projection.weight"].T
        hidden = rms(x, p[at + "ffn.pre.rmsnorm.weight"], 1e-6)
        gate = hidden @ p[at + "ffn.gate_projection.weight"].T
        up = hidden @ p[at + "ffn.input_projection.weight"].T
        x = x + (gate * sigmoid(gate) * up) @ p[at + "ffn.output_projection.weight"].T
    return rms(x, p["final.rmsnorm.weight"], 1e-6) @ p["unembedding.weight"].T


@pytest.mark.parametrize("name", ENTRIES)
def test_logits_and_gradients_are_those_of_the_formulas(name: str):
    module = arch_dsl.compile(tiny(name)).double()
    randomize(module)
    theta = 500_000.0 if name.startswith("transformer") else None
    parameters = dict(module.named_parameters())
    pro, forget = name.endswith("pro"), name.startswith("fox")
    expected = torch.stack([reading(parameters, row, 3, pro=pro, forget=forget, theta=theta) for row in TOKENS])
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    theirs = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    logits = module(TOKENS)
    ours = torch.autograd.grad((logits * weights).sum(), list(parameters.values()))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)  # rope and the decay are summed in float32
    for path, a, b in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item(), msg=lambda text, p=path: f"{p}: {text}"
        )


@pytest.mark.parametrize("name", ENTRIES)
def test_float32_on_the_chosen_kernels_agrees_with_the_formulas(name: str):
    exact, fast = arch_dsl.compile(tiny(name)).double(), arch_dsl.compile(tiny(name))
    randomize(exact)
    randomize(fast)
    theta = 500_000.0 if name.startswith("transformer") else None
    pro, forget = name.endswith("pro"), name.startswith("fox")
    expected = reading(dict(exact.named_parameters()), TOKENS[0], 3, pro=pro, forget=forget, theta=theta)
    error = (fast(TOKENS[:1])[0].double() - expected).norm() / expected.norm()
    assert error < 1e-5
