"""RWKV-7 against a plain reading of its paper in float64, its initial values, its sizes, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import SpecError, zoo
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import Call, State
from tests.arch_dsl.specs import assert_computes

D, LAYERS, VOCAB, LENGTH, HEAD = 12, 2, 31, 9, 6
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
Parameters = dict[str, Tensor]
RANKS = {"decay_rank": 5, "rate_rank": 4, "value_rank": 3, "gate_rank": 7}
CHANNEL_MIX = {"type": "mlp", "activation": "relu2", "pre": ["layernorm", {"type": "token_shift", "power": 4}]}
MIXERS: dict[str, dict[str, Any]] = {
    "published": RANKS,
    "constants": {"decay_rank": 0, "rate_rank": 0, "value_rank": 0, "gate_rank": 0, "bonus": False},
    "heads": {**RANKS, "decay": "head", "rate": "head", "value_rank": 0},
}


def model(mixer: dict[str, Any], **more: Any) -> arch_dsl.Model:
    own = {"type": "rwkv7", "head_dim": HEAD, "pre": ["layernorm"], **mixer}
    data = {"d_model": D, "n_layers": LAYERS, "vocab": VOCAB, "block": {"mixer": own, "ffn": CHANNEL_MIX}}
    return arch_dsl.resolve(arch_dsl.load({**data, "embed": ["layernorm"], "final": ["layernorm"], **more}))


def built(mixer: dict[str, Any], backend: str = "reference", **more: Any) -> arch_dsl.Decoder:
    module = arch_dsl.compile(model(mixer, **more), backend=backend).double()
    randomize(module, 0.5)
    return module


# The paper


def normed(x: Tensor, p: Parameters, at: str, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * p[f"{at}.weight"] + p[f"{at}.bias"]


def token_shift(x: Tensor, mu: Tensor) -> Tensor:
    """Of a sequence `[time, d_model]`: lerp, with mu the share of the token itself."""
    rows = [mu * x[t] + (1 - mu) * (x[t - 1] if t else torch.zeros_like(x[0])) for t in range(len(x))]
    return torch.stack(rows)


def loramlp(x: Tensor, p: Parameters, name: str, between: Any = lambda x: x) -> Tensor:
    """f(x A) B + lambda; the value's share reads what values do."""
    out, mu = torch.zeros((), dtype=torch.float64), "value_share" if name == "shared_value" else f"{name}.mix"
    if f"{name}.inner.weight" in p:
        out = between(token_shift(x, p[mu]) @ p[f"{name}.inner.weight"].T) @ p[f"{name}.outer.weight"].T
    return out + p.get(f"{name}.base", torch.zeros((), dtype=torch.float64))


def time_mix(x: Tensor, p: Parameters, first: list[Tensor]) -> Tensor:
    """Section 4 of the paper for one sequence; `first` gets the values of the first layer."""
    r, k, v = (token_shift(x, p[f"{n}_share"]) @ p[f"{n}_projection.weight"].T for n in ("receptance", "key", "value"))
    rates = torch.sigmoid(loramlp(x, p, "rate"))
    decays = torch.exp(-math.exp(-0.5) * torch.sigmoid(loramlp(x, p, "decay", torch.tanh)))
    if "shared_value.base" in p:
        v = v + (first[0] - v) * torch.sigmoid(loramlp(x, p, "shared_value"))
    first.append(v)
    outputs = []
    for h in range(D // HEAD):
        own = slice(h * HEAD, (h + 1) * HEAD)
        state, rows = torch.zeros(HEAD, HEAD, dtype=x.dtype), []  # values, keys
        for t in range(len(x)):
            w, a = (y[t] if y.ndim == 2 else y for y in (decays, rates))
            w, a = (y[own] if len(y) == D else y[h].repeat(HEAD) for y in (w, a))
            kappa = k[t, own] * p["removal"][own]
            kappa = kappa / torch.sqrt((kappa**2).sum())
            key = k[t, own] * (1 + (a - 1) * p["replacement"][own])
            state = state @ (torch.diag(w) - torch.outer(kappa, a * kappa)) + torch.outer(v[t, own], key)
            read = normed(
                state @ r[t, own], {n: y[h] for n, y in p.items() if "layernorm" in n}, "sdpa.layernorm", 64e-5
            )
            bonus = (r[t, own] * p["bonus"][h] * key).sum() * v[t, own] if "bonus" in p else 0.0
            rows.append(read + bonus)
        outputs.append(torch.stack(rows))
    out = torch.cat(outputs, -1)
    if "gate.inner.weight" in p:
        out = out * loramlp(x, p, "gate", torch.sigmoid)
    return out @ p["output_projection.weight"].T


def reading(p: Parameters, tokens: Tensor) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    x, first = normed(p["embedding"][tokens], p, "embed.layernorm"), []
    for layer in range(LAYERS):
        mixer, ffn = (
            {n.removeprefix(start): v for n, v in p.items() if n.startswith(start)}
            for start in (f"block.{layer}.mixer.", f"block.{layer}.ffn.")
        )
        x = x + time_mix(normed(x, mixer, "pre.layernorm"), mixer, first)
        inner = (
            token_shift(normed(x, ffn, "pre.layernorm"), ffn["pre.token_shift.mix"]) @ ffn["input_projection.weight"].T
        )
        x = x + torch.clamp(inner, min=0) ** 2 @ ffn["output_projection.weight"].T
    return normed(x, p, "final.layernorm") @ p["embedding"].T


@pytest.mark.parametrize("name", MIXERS)
def test_logits_and_gradients_are_those_of_the_paper(name: str):
    module = built(MIXERS[name])
    parameters = dict(module.named_parameters())
    expected = torch.stack([reading(parameters, row) for row in TOKENS])
    assert_computes(module, TOKENS, expected)


@pytest.mark.parametrize("name", MIXERS)
def test_chunks_give_what_steps_give(name: str):
    steps, chunks = (built(MIXERS[name], backend) for backend in ("reference", "torch"))
    for length in (1, 2, 67):
        tokens = torch.arange(2 * length).reshape(2, length) * 7 % VOCAB
        torch.testing.assert_close(chunks(tokens), steps(tokens), rtol=1e-9, atol=1e-9)


def test_tokens_read_one_by_one_have_the_logits_of_reading_them_at_once():
    module, state = built(RANKS, "torch"), State()
    found = [module(TOKENS[:, t : t + 1], Call(state=state)) for t in range(LENGTH)]
    torch.testing.assert_close(torch.cat(found, 1), module(TOKENS), rtol=1e-9, atol=1e-9)


# Initial values and sizes


def test_all_but_the_four_large_maps_start_as_published():
    module = arch_dsl.compile(model({}, d_model=48, n_layers=4))
    for depth, layer in enumerate(module.block):
        mixer, n, ratio = layer.mixer, torch.arange(48, dtype=torch.float64), depth / 3
        line, inside = n / 47 - 0.5, (n % HEAD - 2.5) / 2.5
        zigzag, left = inside * inside.abs(), 1 - depth / 4
        wanted = {
            mixer.decay.base: -6 + 6 * (n / 47) ** (1 + ratio**0.3) + 0.5 + 2.5 * zigzag,
            mixer.rate.base: -0.19 + 0.3 * zigzag + 0.4 * line,
            mixer.removal: 0.71 - 0.1 * line,
            mixer.replacement: torch.full((48,), 1.02),
            mixer.bonus: torch.full((8, 6), -0.04),
            mixer.key_share: (n / 48) ** (0.7 * left),
            mixer.decay.mix: (n / 48) ** (0.9 * left),
            mixer.gate.mix: (n / 48) ** (0.2 * left),
            layer.ffn.pre.token_shift.mix: (n / 48) ** left**4,
        }
        if depth:
            wanted[mixer.shared_value.base] = 0.73 - 0.4 * line
        for found, start in wanted.items():
            torch.testing.assert_close(found.detach(), start.float(), rtol=1e-5, atol=6e-5)
        assert not mixer.decay.inner.weight.any() and mixer.decay.outer.weight.std() < 0.2 / 48**0.5
        assert (mixer.shared_value is None) == (depth == 0)


@pytest.mark.parametrize("size", ["0.1b", "0.4b", "1.5b", "2.9b"])
def test_sizes_are_those_of_the_formula_of_the_paper(size: str):
    """With r the sum of the four ranks and r_v that of values."""
    model = arch_dsl.resolve(zoo.load("rwkv7", size))
    mixer, wide, deep, words = model.block["rwkv7"], model.d_model, model.n_layers, model.vocab
    ranks = mixer.decay_rank + mixer.rate_rank + mixer.value_rank + mixer.gate_rank
    first = 2 * wide * mixer.value_rank + wide
    wanted = 2 * words * wide + 4 * wide + deep * wide * (12 * wide + 2 * ranks + 19) - first
    assert arch_dsl.cost(model, tokens=1).parameters == wanted


def test_ranks_follow_the_width_as_in_its_code():
    found = {wide: model({}, d_model=wide, n_layers=2).block["mixer"] for wide in (48, 768, 4128)}
    ranks = {w: (m.decay_rank, m.rate_rank, m.value_rank, m.gate_rank) for w, m in found.items()}
    assert ranks == {48: (32, 32, 32, 32), 768: (64, 64, 32, 128), 4128: (160, 160, 96, 320)}


def test_a_single_layer_has_no_values_to_mix_in():
    assert model({}, n_layers=1).block["mixer"].value_rank == 0


@pytest.mark.parametrize(
    ("mixer", "more", "message"),
    [
        ({"head_dim": 7}, {}, r"block.mixer.head_dim: heads of 7 channels do not make up d_model 12"),
        ({"decay": "token"}, {}, r"block.mixer.decay: 'token' is not a decay \(channel, head\)"),
        ({"rate": "heads"}, {}, r"block.mixer.rate: 'heads' is not a rate; did you mean 'head'"),
        ({"gate_rank": -1}, {}, r"block.mixer.gate_rank: must be at least 0"),
        ({"value_rank": 4}, {"n_layers": 1}, r"value_rank: is that of a map which mixes in the first layer's values"),
        ({"zero": ["gate"]}, {}, r"zero: must be true, false or a list of receptance, key, value, output"),
        ({"bonus": 3}, {}, r"block.mixer.bonus: must be true or false"),
        ({"share": "stack"}, {}, r"rwkv7 differs from layer to layer"),
        ({"pre": [{"type": "token_shift", "power": 1, "start": 0.3}]}, {}, r"pre.0.start: is where every channel"),
    ],
)
def test_what_makes_no_sense_is_refused(mixer: dict[str, Any], more: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        model(mixer, **more)
