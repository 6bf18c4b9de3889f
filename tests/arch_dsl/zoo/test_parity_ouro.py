"""Ouro against a plain reading of its published code in float64 (arXiv:2510.25741; its file modeling_ouro.py).

Everything below `reading` is written from that code, one head at a time; nothing of it is shared with the code under
test but the parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call, zoo
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import State

VOCAB, LENGTH, D, HEADS, LAYERS, TURNS, EPS = 61, 13, 24, 3, 2, 4, 1e-6
HEAD = D // HEADS
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(11))
Parameters = dict[str, Tensor]


def module_of(**changes: Any) -> Any:
    """The entry of the zoo, small, in float64 with random parameters."""
    sizes = {"vocab": VOCAB, "max_positions": LENGTH, "d_model": D, "n_layers": LAYERS}
    widths = {"block.attention.heads": HEADS, "block.ffn.width": 40}
    built = arch_dsl.compile(arch_dsl.resolve(arch_dsl.patch(zoo.load("ouro"), {**sizes, **widths, **changes})))
    randomize(built.double())
    return built


def norm(p: Parameters, path: str, x: Tensor) -> Tensor:
    return p[f"{path}.rmsnorm.weight"] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def rotated(x: Tensor) -> Tensor:
    """x `[time, head_dim]` turned by its positions, channel i with channel i + head_dim / 2."""
    half = HEAD // 2
    frequencies = 1e6 ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(p: Parameters, at: str, x: Tensor) -> Tensor:
    q, k, v = (x @ p[f"{at}.{name}_projection.weight"].T for name in ("query", "key", "value"))
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    out = []
    for head in range(HEADS):
        own = slice(head * HEAD, (head + 1) * HEAD)
        scores = rotated(q[:, own]) @ rotated(k[:, own]).T / HEAD**0.5
        out.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v[:, own])
    return torch.cat(out, -1) @ p[f"{at}.output_projection.weight"].T


def fed_forward(p: Parameters, at: str, x: Tensor) -> Tensor:
    gate, up = (x @ p[f"{at}.{name}_projection.weight"].T for name in ("gate", "input"))
    return (gate * torch.sigmoid(gate) * up) @ p[f"{at}.output_projection.weight"].T


def reading(p: Parameters, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits after each turn `[turns, time, vocab]` of one sequence, and the probability of an exit there."""
    h, states, chances = p["embedding"][ids], [], []
    left = torch.ones(len(ids), dtype=torch.float64)
    for turn in range(TURNS):
        for layer in range(LAYERS):
            at = f"block.{layer}.attention"
            h = h + norm(p, f"{at}.post", attention(p, at, norm(p, f"{at}.pre", h)))
            at = f"block.{layer}.ffn"
            h = h + norm(p, f"{at}.post", fed_forward(p, at, norm(p, f"{at}.pre", h)))
        h = norm(p, "final", h)  # which the next turn reads
        rate = torch.sigmoid(h @ p["loop.exit.gate.weight"][0] + p["loop.exit.gate.bias"])
        chances.append(left * rate if turn < TURNS - 1 else left)
        left = left * (1 - rate)
        states.append(h @ p["unembedding.weight"].T)
    return torch.stack(states), torch.stack(chances)


def test_logits_exits_and_gradients_are_those_of_the_code():
    module = module_of()
    parameters = dict(module.named_parameters())
    rows = [reading(parameters, ids) for ids in TOKENS]
    expected = [torch.stack(parts, 1) for parts in zip(*rows, strict=True)]
    hidden = module.turns(module.embedded(TOKENS), Call())
    found = [torch.stack([module.logits(each) for each in hidden]), module.loop.exit.log_probabilities(hidden).exp()]
    rng = torch.Generator().manual_seed(5)
    weights = [torch.randn(each.shape, dtype=torch.float64, generator=rng) for each in expected]
    gradients = []
    for parts in (found, expected):
        mixed = sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
        gradients.append(torch.autograd.grad(mixed, list(parameters.values())))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    for path, a, b in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * b.abs().max().item(), msg=path)
    torch.testing.assert_close(module(TOKENS), expected[0][-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_tokens_are_read_after_the_turn_that_the_code_takes(threshold: float):
    module = module_of(**{"loop.exit.threshold": threshold}).eval()
    parameters, taken = dict(module.named_parameters()), set()
    for ids, logits in zip(TOKENS, module(TOKENS), strict=True):
        states, chances = reading(parameters, ids)
        reached = chances.cumsum(0) >= threshold
        reached[-1] = True
        first = reached.float().argmax(0)
        taken |= set(first.tolist())
        torch.testing.assert_close(logits, states[first, torch.arange(LENGTH)], rtol=1e-9, atol=1e-9)
    assert len(taken) > 2


def test_decoding_gives_the_same_logits():
    module, state = module_of().eval(), State()
    steps = [module(TOKENS[:, t : t + 1], Call(state=state)) for t in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, 1), module(TOKENS), rtol=1e-9, atol=1e-9)
    assert len(state.layers) >= TURNS * LAYERS


@pytest.mark.parametrize(("size", "layers"), [("1.4b", 24), ("2.6b", 48)])
def test_parameters_are_those_computed_by_hand(size: str, layers: int):
    d = 2048
    by_hand = 2 * 49152 * d + layers * (4 * d * d + 3 * d * 5632 + 4 * d) + d + d + 1
    assert arch_dsl.cost(arch_dsl.resolve(zoo.load("ouro", size)), tokens=1).parameters == by_hand
