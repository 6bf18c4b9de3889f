"""Hymba against a plain reading of its published code in float64 (arXiv:2411.13676; its file modeling_hymba.py).

Everything below `reading` is written from that code, one head and one token at a time; nothing of it is shared with the
code under test but the parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from archlab import arch_dsl
from archlab.arch_dsl import Call, Model, SpecError, zoo
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import State
from tests.arch_dsl.parity import relative, surviving
from tests.arch_dsl.specs import assert_plain_agrees

VOCAB, LENGTH, META, WINDOW, LAYERS = 61, 28, 4, 16, 5  # a token reads so many tokens before it
D, HEADS, GROUPS, HEAD, VALUE = 32, 4, 2, 8, 16
GLOBAL, PRODUCERS = (0, 4), {2: 1, 3: 1}  # kv_reuse_group [1, 2, 3]
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(11))
Parameters = dict[str, Tensor]
MODEL: Model = arch_dsl.resolve(zoo.load("hymba", "tiny"), vocab=VOCAB, max_positions=LENGTH)


def module_of(model: Model = MODEL) -> Any:
    """A model in float64 with random parameters."""
    built = arch_dsl.compile(model).double().eval()
    randomize(built, 0.3)
    return built


def norm(weight: Tensor, x: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    """x `[time, head_dim]` turned by its positions, with the base of `rope_type: ntk` for 4 times the positions."""
    half = HEAD // 2
    base = 10000.0 * (2 * 8192 / 2048 - 1) ** (HEAD / (HEAD - 2))
    frequencies = base ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def visible(layer: int, i: int, j: int) -> bool:
    """Their masks: causal, and in layers that are not global within the window, or a meta token."""
    return j <= i and (layer in GLOBAL or i - j <= WINDOW or j < META)


def attention(p: Parameters, layer: int, x: Tensor, held: dict[int, tuple[list[Tensor], list[Tensor]]]) -> Tensor:
    """The heads' outputs side by side `[time, heads value_dim]`; keys arrive rotated where another layer made them."""
    at = f"block.{layer}.parallel.members.attention"
    if layer not in PRODUCERS:
        k, v = (x @ p[f"{at}.{name}_projection.weight"].T for name in ("key", "value"))
        held[layer] = [rotated(each) for each in k.split(HEAD, -1)], list(v.split(VALUE, -1))
    keys, values = held[PRODUCERS.get(layer, layer)]
    rows = range(len(x))
    seen = torch.tensor([[visible(layer, i, j) for j in rows] for i in rows])
    out = []
    for head, q in enumerate((x @ p[f"{at}.query_projection.weight"].T).split(HEAD, -1)):
        group = head // (HEADS // GROUPS)
        scores = rotated(q) @ keys[group].T / HEAD**0.5
        out.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values[group])
    return torch.cat(out, -1)


def mamba(p: Parameters, layer: int, x: Tensor) -> Tensor:
    """The scan's outputs `[time, channels]`, opened by their gate."""

    def w(name: str) -> Tensor:
        return p[f"block.{layer}.parallel.members.mamba.{name}"]

    inner, gate = x @ w("value_projection.weight").T, x @ w("sdpa.gate.projection.weight").T
    kernel, bias = w("value.short_conv.weight")[:, 0], w("value.short_conv.bias")
    state, found = torch.zeros_like(w("log_a")), []
    for t in range(len(x)):
        u = silu(sum(inner[t - back] * kernel[:, -1 - back] for back in range(min(t, 3) + 1)) + bias)
        rank = norm(w("dt.rmsnorm.weight"), u @ w("rank_projection.weight").T)
        step = softplus(w("step_weight") @ rank + w("step_bias"))
        b = norm(w("key.rmsnorm.weight"), u @ w("key_projection.weight").T)
        c = norm(w("query.rmsnorm.weight"), u @ w("query_projection.weight").T)
        state = torch.exp(-step[:, None] * w("log_a").exp()) * state + (step * u)[:, None] * b
        found.append((state @ c + w("skip") * u) * silu(gate[t]))
    return torch.stack(found)


def reading(p: Parameters, ids: Tensor) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    h, held = torch.cat([p["prompt"], p["embedding"][ids]]), {}
    for layer in range(LAYERS):
        at = f"block.{layer}.parallel"
        x = norm(p[f"{at}.pre.rmsnorm.weight"], h)
        heads = attention(p, layer, x, held), mamba(p, layer, x)
        normed = [
            norm(p[f"{at}.members.{name}.sdpa.rmsnorm.weight"].flatten(), each)
            for name, each in zip(("attention", "mamba"), heads, strict=True)
        ]
        h = h + (normed[0] + normed[1]) / 2 @ p[f"{at}.output_projection.weight"].T
        at = f"block.{layer}.ffn"
        x = norm(p[f"{at}.pre.rmsnorm.weight"], h)
        opened = silu(x @ p[f"{at}.gate_projection.weight"].T) * (x @ p[f"{at}.input_projection.weight"].T)
        h = h + opened @ p[f"{at}.output_projection.weight"].T
    return norm(p["final.rmsnorm.weight"], h)[META:] @ p["embedding"].T


def test_logits_and_gradients_are_those_of_the_code():
    module = module_of()
    parameters = dict(module.named_parameters())
    expected = torch.stack([reading(parameters, ids) for ids in TOKENS])
    found = module(TOKENS)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mine, theirs = (torch.autograd.grad((each * weight).sum(), list(parameters.values())) for each in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for path, a, b in zip(parameters, mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * b.abs().max().item(), msg=path)


@pytest.mark.parametrize("pieces", [[1] * LENGTH, [3, 18, 1, 6], [24, 4]], ids=str)
def test_decoding_gives_the_same_logits_and_holds_the_first_keys_and_the_last(pieces: list[int]):
    module, state = module_of(), State()
    with torch.no_grad():
        steps = [module(piece, Call(state=state)) for piece in TOKENS.split(pieces, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), module(TOKENS), rtol=1e-9, atol=1e-9)
    held = state.layers["block.1"]["block.1.parallel.attention.key"]
    assert held.shape == (2, META + WINDOW + 1, GROUPS, HEAD)
    assert not [path for path in state.layers["block.2"] if path.endswith((".key", ".value"))]


@pytest.mark.parametrize("padded", [slice(0, 3), slice(15, 17)], ids=["before", "between"])
def test_padding_is_held_with_the_keys_that_are_kept(padded: slice):
    module, state = module_of(), State()
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, padded] = True
    rest = [None if not part.any() else part for part in padding.split([14, 1, 3, 10], 1)]
    with torch.no_grad():
        whole = module(TOKENS, Call(padding=padding))
        pieces = zip(TOKENS.split([14, 1, 3, 10], 1), rest, strict=True)
        steps = [module(piece, Call(padding=part, state=state)) for piece, part in pieces]
    torch.testing.assert_close(torch.cat(steps, 1)[~padding], whole[~padding], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(whole[0, -1], module(TOKENS)[0, -1], atol=1e-3)


def test_it_is_written_as_plain_pytorch():
    assert_plain_agrees(MODEL)


def test_altering_any_field_breaks_the_parity():
    named = dict(module_of().named_parameters())
    expected = torch.stack([reading(named, ids) for ids in TOKENS]).detach()

    def breaks(changed: Model) -> bool:
        try:
            module = arch_dsl.compile(changed).double().eval()
        except SpecError:
            return True
        own = dict(module.named_parameters())
        if {path: value.shape for path, value in own.items()} != {path: value.shape for path, value in named.items()}:
            return True
        with torch.no_grad():
            for path, value in own.items():
                value.copy_(named[path])
            return not relative(module(TOKENS), expected) <= 1e-10

    assert not breaks(MODEL)
    assert [path for path, _ in surviving("hymba", MODEL, breaks)] == []


def test_parameters_are_those_computed_by_hand():
    d, inner, heads, ffn, rank, state = 1600, 3200, 25, 5504, 100, 16
    mixer = d * (2 * inner + heads * 64) + inner * d  # x, gate and queries; the output map
    scan = 5 * inner + inner * (rank + 2 * state) + rank * inner + inner + inner * state + inner + rank + 2 * state
    layer = mixer + scan + 2 * inner + 3 * d * ffn + 2 * d
    keys_and_values = d * 5 * (64 + 128)
    by_hand = 32 * layer + 17 * keys_and_values + 32001 * d + 128 * d + d
    assert arch_dsl.cost(arch_dsl.resolve(zoo.load("hymba", "1.5b")), tokens=1).parameters == by_hand == 1_522_797_824
