"""modded-nanogpt's record 29 against a plain reading of its code in float64 (github.com/KellerJordan/modded-nanogpt,
records/track_1_short/2025-09-03_FA3).

`reading` is written from that code, one layer and one head at a time; nothing of it is shared with the code under test
but the parameters. Rotations there turn the other way and pair other channels, which a permutation of the channels of
queries and keys undoes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call, zoo
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import State

VOCAB, LENGTH, D, HEADS, LONG, SHORT = 61, 19, 32, 2, 9, 4
HEAD, LAYERS, EPS = D // HEADS, 12, 1.1920929e-7
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(11))
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 12, [0] * LENGTH])
WINDOWS = [LONG, *[SHORT] * 3, LONG, *[SHORT] * 2, LONG, *[SHORT] * 3, LONG]
TABLES = {0: 0, 1: 1, 2: 2, 9: 0, 10: 1, 11: 2}
Parameters = dict[str, Tensor]


def small() -> arch_dsl.Model:
    sizes = {"vocab": VOCAB, "max_positions": LENGTH, "d_model": D, "block.attention.heads": HEADS}
    windows = {"block.attention.mask.size": SHORT, "overrides.0,4,11.block.attention.mask.size": LONG}
    return arch_dsl.resolve(arch_dsl.patch(zoo.load("modded_nanogpt"), {**sizes, **windows}))


def norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def rotated(x: Tensor) -> Tensor:
    """x `[time, head_dim]`, of which half of the channels have the frequency 0 (class Rotary)."""
    quarter = HEAD // 4
    frequencies = 1280.5791 ** -(torch.arange(0, 2 * quarter, 2, dtype=torch.float32) / (2 * quarter))
    frequencies = torch.cat([frequencies, torch.zeros(quarter)])
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().double(), angles.sin().double()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x1 * -sin + x2 * cos], -1)


def as_theirs(x: Tensor) -> Tensor:
    """The channels of a head in their order: ours turns the pairs (i, i + quarter), theirs (half + i, i)."""
    quarter = HEAD // 4
    first, second, third, fourth = x.split(quarter, dim=-1)
    return torch.cat([second, third, first, fourth], -1)


def attention(p: Parameters, at: str, layer: int, x: Tensor, ids: Tensor, documents: Tensor) -> Tensor:
    q, k, v = (x @ p[f"{at}.{name}_projection.weight"].T for name in ("query", "key", "value"))
    if layer in TABLES:
        embedding = f"block.{TABLES[layer]}.attention.value.value_embedding.table"
        own, embedded = (p[f"{at}.value.value_embedding.{name}"] for name in ("own", "embedded"))
        v = own * v + embedded * p[embedding][ids]
    else:
        v = p[f"{at}.value.gate.constant"].view(()) * v
    out = []
    for head in range(HEADS):
        own = slice(head * HEAD, (head + 1) * HEAD)
        qh, kh = (rotated(as_theirs(norm(part[:, own]))) for part in (q, k))
        rows = []
        for i in range(len(x)):  # flash attention with window_size (w, 0) reads w + 1 keys
            read = [j for j in range(max(0, i - WINDOWS[layer] + 1), i + 1) if documents[j] == documents[i]]
            weights = torch.stack([0.12 * (qh[i] @ kh[j]) for j in read]).softmax(0)
            gate = torch.sigmoid(p[f"{at}.sdpa.gate.outer.weight"][head] @ x[i, :12])
            rows.append(gate * (weights @ v[read, own]))
        out.append(torch.stack(rows))
    return torch.cat(out, -1) @ p[f"{at}.output_projection.weight"].T


def reading(p: Parameters, ids: Tensor, documents: Tensor) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    x = x0 = norm(p["embedding"][ids])
    left: list[Tensor] = []
    for layer in range(LAYERS):
        if layer >= LAYERS // 2:
            x = x + p[f"skips.{layer}.mirror.weight"] * left.pop()
        x = p[f"skips.{layer}.x0_mix.own"] * x + p[f"skips.{layer}.x0_mix.first"] * x0
        if layer != 7:
            x = x + attention(p, f"block.{layer}.attention", layer, norm(x), ids, documents)
        hidden = norm(x) @ p[f"block.{layer}.ffn.input_projection.weight"].T
        x = x + hidden.relu().square() @ p[f"block.{layer}.ffn.output_projection.weight"].T
        if layer < LAYERS // 2:
            left.append(x)
    return 30 * torch.sigmoid(norm(x) @ p["unembedding.weight"].T / 7.5)


@pytest.fixture(scope="module")
def module() -> arch_dsl.Decoder:
    built = arch_dsl.compile(small()).double()
    randomize(built)
    return built


def test_logits_and_gradients_are_those_of_the_code(module: arch_dsl.Decoder):
    parameters = dict(module.named_parameters())
    rows = zip(TOKENS, DOCUMENTS, strict=True)
    expected = torch.stack([reading(parameters, ids, documents) for ids, documents in rows])
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    theirs = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    logits = module(TOKENS, Call(documents=DOCUMENTS))
    ours = torch.autograd.grad((logits * weights).sum(), list(parameters.values()))
    torch.testing.assert_close(logits + 15, expected, rtol=1e-9, atol=1e-9)
    for path, a, b in zip(parameters, ours, theirs, strict=True):
        floor = 1e-8 * max(b.abs().max().item(), 1.0)
        torch.testing.assert_close(a, b, rtol=1e-8, atol=floor, msg=lambda text, p=path: f"{p}: {text}")


def test_decoding_gives_the_same_logits(module: arch_dsl.Decoder):
    state = State()
    with torch.no_grad():
        steps = [module(TOKENS[:, t : t + 1], Call(state=state)) for t in range(LENGTH)]
        torch.testing.assert_close(torch.cat(steps, 1), module(TOKENS), rtol=1e-9, atol=1e-9)


def test_frequencies_are_those_of_a_head_of_128():
    rope = arch_dsl.resolve(zoo.load("modded_nanogpt")).block["attention"].query[1]
    found = rope.theta ** -(torch.arange(32) / 32)
    torch.testing.assert_close(found, (1 / 1024) ** torch.linspace(0, 1, 32), rtol=1e-6, atol=0)


def test_initial_values_are_those_of_the_code():
    started = dict(arch_dsl.compile(small()).named_parameters())
    zero = {name for name, value in started.items() if not value.any()}
    outputs = {f"block.{layer}.{name}.output_projection.weight" for layer in range(12) for name in ("attention", "ffn")}
    gates = {f"block.{layer}.attention.sdpa.gate.outer.weight" for layer in range(12)}
    mixed = {f"skips.{layer}.x0_mix.first" for layer in range(12)}
    assert zero == {
        name for name in (*outputs, *gates, *mixed, "unembedding.weight") if not name.startswith("block.7.a")
    }
    assert all(started[f"skips.{layer}.x0_mix.own"].item() == 1 for layer in range(12))
    assert {started[f"skips.{layer}.mirror.weight"].item() for layer in range(6, 12)} == {1}
    table = started["block.0.attention.value.value_embedding.table"]
    assert table.std().item() == pytest.approx(1, abs=0.05) == started["embedding"].std().item()


def test_parameters_are_those_of_its_code_but_numbers_that_act_on_nothing():
    width, words = 768, 50304
    tables, layers = 5 * words * width, 11 * (4 * width**2 + 6 * 12) + 12 * 8 * width**2
    scalars = (6 + 5) + 12 * 2 + 6 * 2  # skips and the layers without a table; x0 lambdas; layers with one
    assert arch_dsl.cost(arch_dsl.resolve(zoo.load("modded_nanogpt")), tokens=1).parameters == tables + layers + scalars
    assert scalars == 12 + 2 * 12 + 2 * 12 + 4 - 17  # of its `scalars`, padded to a multiple of 8
