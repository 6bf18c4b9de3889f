"""Mamba-3 against a plain reading of its paper in float64, its initial values, and its sizes.

The reading is written from the paper's recurrence over h and its code's settings, one token at a time; the code under
test never has h, and computes another recurrence over the tokens before.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import Call, State
from tests.arch_dsl.compiler.test_costs import kept
from tests.arch_dsl.primitives.test_linear_attention import rms, sigmoid, silu
from tests.arch_dsl.specs import assert_computes, assert_plain_agrees

Parameters = dict[str, Tensor]
D, LAYERS, VOCAB, LENGTH = 12, 2, 31, 11
HEADS, GROUPS, STATE, WIDTH = 4, 2, 5, 6
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
SIZES = {"key_heads": GROUPS, "head_dim": STATE, "value_dim": WIDTH}
MIXERS: dict[str, dict[str, Any]] = {
    "published": {"head_dim": STATE, "value_dim": WIDTH},
    "grouped, all turned": {**SIZES, "rotation": 1.0, "scale": 0.7},
    "as Mamba-2 writes": {**SIZES, "trapezoid": False},
    "real": {**SIZES, "rotation": 0.0},
    "without offsets": {**SIZES, "offset": None, "skip": False},
    "fixed decays without steps": {**SIZES, "decay": "constant"},
    "decays of Mamba-2": {**SIZES, "decay": "mamba2"},
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def model(mixer: dict[str, Any], **more: Any) -> arch_dsl.Model:
    block = {"mixer": {"type": "mamba3", "pre": ["rmsnorm"], **mixer}}
    return arch_dsl.resolve(arch_dsl.load({"d_model": D, "n_layers": LAYERS, "vocab": VOCAB, "block": block, **more}))


def made(name: str, backend: str = "reference", **more: Any) -> arch_dsl.Decoder:
    module = arch_dsl.compile(model({**MIXERS[name], **more}), backend=backend).double()
    randomize(module, 0.5)
    if MIXERS[name].get("decay") == "constant":
        for layer in module.block:  # the table of decays is in float32
            layer.mixer.decay.log_f = torch.log1p(-(2.0 ** -torch.arange(5, 5 + HEADS, dtype=torch.float64)))
    return module


# The paper


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def rates_and_steps(x: Tensor, p: Parameters) -> tuple[Tensor, Tensor]:
    """A_t and Delta_t of a token."""
    if "decay.bias" not in p:
        return torch.log1p(-(2.0 ** -torch.arange(5, 5 + HEADS, dtype=x.dtype))), torch.ones(HEADS, dtype=x.dtype)
    step = softplus(p["decay.projection.weight"] @ x + p["decay.bias"])
    if "decay.a" in p:
        return -torch.exp(p["decay.a"]), step
    return -torch.clamp(softplus(p["decay.rate_projection.weight"] @ x), min=1e-4), step


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Channels 2i and 2i + 1 as a complex number, times exp(i angle)."""
    out = x.clone()
    for i, angle in enumerate(angles):
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i] = a * torch.cos(angle) - b * torch.sin(angle)
        out[2 * i + 1] = a * torch.sin(angle) + b * torch.cos(angle)
    return out


def mixed(x: Tensor, p: Parameters, scale: float) -> Tensor:
    """h_t = alpha_t h_(t-1) + beta_t B_(t-1) x_(t-1)^T + gamma_t B_t x_t^T and y_t = h_t^T C_t + D x_t, where alpha =
    exp(Delta A), beta = (1 - lambda) Delta alpha and gamma = lambda Delta; of x `[time, d_model]`."""
    state = len(p["query.rmsnorm.weight"])
    groups = len(p["query_projection.weight"]) // state
    rows: list[Tensor] = []
    h: list[Any] = [0.0] * HEADS
    angle: list[Any] = [0.0] * HEADS
    last: list[Any] = [0.0] * HEADS
    for token in x:
        value = (p["value_projection.weight"] @ token).reshape(HEADS, -1)
        c_all, b_all = (
            rms((p[f"{n}_projection.weight"] @ token).reshape(groups, state), p[f"{n}.rmsnorm.weight"], 1e-5)
            for n in ("query", "key")
        )
        a, delta = rates_and_steps(token, p)
        shares = p.get("share_projection.weight")
        lam = torch.ones(HEADS, dtype=x.dtype) if shares is None else sigmoid(shares @ token)
        states, outs = [], []
        for n in range(HEADS):
            c, b = c_all[n // (HEADS // groups)], b_all[n // (HEADS // groups)]
            if "offset_query" in p:
                c, b = c + p["offset_query"][n], b + p["offset_key"][n]
            if "angle_projection.weight" in p:
                angle[n] = angle[n] + delta[n] * math.pi * torch.tanh(p["angle_projection.weight"] @ token)
                c, b = rotated(c, angle[n]), rotated(b, angle[n])
            alpha = torch.exp(delta[n] * a[n])
            new = torch.outer(b, value[n])
            states.append(alpha * h[n] + (1 - lam[n]) * delta[n] * alpha * last[n] + lam[n] * delta[n] * new)
            last[n] = new
            outs.append(scale * (states[-1].T @ c) + (p["skip"][n] * value[n] if "skip" in p else 0.0))
        h = states
        rows.append(torch.cat(outs) * silu(p["sdpa.gate.projection.weight"] @ token))
    return torch.stack(rows)


def parts_of(p: Parameters, start: str) -> Parameters:
    return {name.removeprefix(start): value for name, value in p.items() if name.startswith(start)}


def reading(p: Parameters, tokens: Tensor, scale: float) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    x = p["embedding"][tokens]
    for layer in range(LAYERS):
        own = parts_of(p, f"block.{layer}.mixer.")
        x = x + mixed(rms(x, own["pre.rmsnorm.weight"], 1e-6), own, scale) @ own["output_projection.weight"].T
    return x @ p["embedding"].T


@every_mixer
def test_logits_and_gradients_are_those_of_the_paper(name: str):
    module = made(name)
    parameters = dict(module.named_parameters())
    expected = torch.stack([reading(parameters, row, MIXERS[name].get("scale", 1.0)) for row in TOKENS])
    assert_computes(module, TOKENS, expected)


def test_the_model_of_the_zoo_gives_the_logits_of_its_code():
    """Mixer and gated feed-forward in turn, each after a norm, a norm at the end, and one table of tokens."""
    module = arch_dsl.compile(arch_dsl.resolve(zoo.load("mamba3", "tiny")), backend="torch").double()
    randomize(module, 0.5)
    p = dict(module.named_parameters())
    rows = []
    for tokens in TOKENS:
        x = p["embedding"][tokens]
        for layer in range(2):
            mixer, ffn = (parts_of(p, f"block.{layer}.{name}.") for name in ("mamba3", "ffn"))
            x = x + mixed(rms(x, mixer["pre.rmsnorm.weight"], 1e-5), mixer, 1.0) @ mixer["output_projection.weight"].T
            y = rms(x, ffn["pre.rmsnorm.weight"], 1e-5)
            inner = silu(y @ ffn["gate_projection.weight"].T) * (y @ ffn["input_projection.weight"].T)
            x = x + inner @ ffn["output_projection.weight"].T
        rows.append(rms(x, p["final.rmsnorm.weight"], 1e-5) @ p["embedding"].T)
    assert_computes(module, TOKENS, torch.stack(rows))


@pytest.mark.parametrize("name", ["published", "as Mamba-2 writes"])
def test_plain_pytorch_computes_the_same(name: str):
    assert_plain_agrees(model({**MIXERS[name], "documents": True}))


# What it must hold


@every_mixer
def test_chunks_give_what_steps_give(name: str):
    steps, chunks = (made(name, backend) for backend in ("reference", "torch"))
    for length in (1, 2, 67):
        tokens = torch.arange(2 * length).reshape(2, length) * 7 % VOCAB
        torch.testing.assert_close(chunks(tokens), steps(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("documents", [False, True])
@every_mixer
def test_tokens_read_in_pieces_have_the_logits_of_reading_them_at_once(name: str, documents: bool):
    module = made(name, "torch", documents=documents)
    numbers = (torch.arange(LENGTH) >= torch.tensor([[5], [7]])).long() if documents else None
    state, found = State(), []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        part = None if numbers is None else numbers[:, start:end]
        found.append(module(TOKENS[:, start:end], Call(state=state, documents=part)))
    torch.testing.assert_close(torch.cat(found, 1), module(TOKENS, Call(documents=numbers)), rtol=1e-9, atol=1e-9)


@every_mixer
def test_a_document_is_read_as_if_it_stood_alone(name: str):
    module = made(name, documents=True)
    both = module(TOKENS, Call(documents=(torch.arange(LENGTH) >= 6).long().expand(2, -1)))
    torch.testing.assert_close(both[:, 6:], module(TOKENS[:, 6:]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(both[:, :6], module(TOKENS[:, :6]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["as Mamba-2 writes", "published"])
def test_padding_leaves_the_state_as_it_is(name: str):
    """The token after it has none before it, as at the start of a sequence: the trapezoidal rule writes less there."""
    module = made(name)
    padding = torch.zeros(2, LENGTH + 1, dtype=torch.bool)
    padding[:, 9] = True
    padded = torch.cat([TOKENS[:, :9], torch.full((2, 1), 7), TOKENS[:, 9:]], 1)
    found = module(padded, Call(padding=padding))[:, ~padding[0]]
    same = 9 if name == "published" else LENGTH
    torch.testing.assert_close(found[:, :same], module(TOKENS)[:, :same], rtol=1e-9, atol=1e-9)
    assert same == LENGTH or not torch.allclose(found[:, 9], module(TOKENS)[:, 9], rtol=1e-9, atol=1e-9)


# Initial values and sizes


def test_all_but_the_maps_start_as_in_its_code():
    mixer = arch_dsl.compile(model({"heads": 2000, "head_dim": 2, "value_dim": 1, "rotation": 1.0}))
    mixer = mixer.block[0].mixer
    step = torch.nn.functional.softplus(mixer.decay.bias.detach())
    assert 0.00099 < step.min() < 0.00105 and 0.095 < step.max() < 0.1001
    assert step.log().mean() == pytest.approx(math.log(0.01), abs=0.1)
    for ones in (
        mixer.offset_query,
        mixer.offset_key,
        mixer.skip,
        mixer.query.rmsnorm.weight,
        mixer.key.rmsnorm.weight,
    ):
        assert (ones == 1).all()
    assert not any(getattr(vector, "decay", True) for vector in (mixer.offset_query, mixer.offset_key))


def test_a_layer_has_the_parameters_of_its_code_and_decoding_holds_its_states():
    """`in_proj` to z, x, B, C, dt, A, shares and angles; `out_proj`, dt's bias, D, the norms and biases of B and C."""
    wide, inner, heads, state, angles = 768, 1536, 24, 128, 32
    layer = arch_dsl.cost(model({}, d_model=wide), 512).children["stack"].children["layer (x2)"]
    mixer = layer.children["mixer"]
    in_proj = wide * (2 * inner + 2 * state + 3 * heads + angles)
    assert (
        mixer.parameters == in_proj + inner * wide + 2 * heads + 2 * state + 2 * heads * state + wide
    )  # the norm before it
    assert mixer.cache == heads * (64 * state + state + 64 + 1 + angles)  # the state, its last key, value and step
    assert mixer.flops_matmul == 512 * (2 * (in_proj + inner * wide) + 4 * inner * state)


@every_mixer
def test_activations_are_what_autograd_keeps(name: str):
    found = model(MIXERS[name], max_positions=300)
    for tokens in (20, 250):  # a part of a chunk, and as many as are counted in proportion
        assert arch_dsl.cost(found, tokens).activations == pytest.approx(kept(found, tokens), rel=0.002)


def test_angles_are_held_without_whole_turns():
    module, state = made("grouped, all turned"), State()
    for _ in range(40):
        module(TOKENS, Call(state=state))
    held = state.layers["block.0"]["block.0.mixer.angle"]
    assert held.min() >= 0 and held.max() < 2 * math.pi
