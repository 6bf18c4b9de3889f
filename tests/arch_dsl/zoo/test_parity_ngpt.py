"""The normalised transformer against a plain reading of the paper's formulas in float64 (nGPT, arXiv:2410.01131).

Everything below `reading` is written from the formulas, one head and one position at a time; nothing of it is shared
with the code under test but the parameters.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call, zoo
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import State

TOKENS = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(11))
WIDTH, HEADS, HIDDEN = 24, 3, 40
NO_EPS = 1e-30  # the paper's norms have none


def tiny(**changes: Any) -> arch_dsl.Model:
    """The entry of the zoo, small, without the epsilons of its norms."""
    sizes = {"vocab": 61, "max_positions": 17, "d_model": WIDTH, "n_layers": 2}
    heads = {"block.attention.heads": HEADS, "block.ffn.width": HIDDEN}
    exact = {
        "block.attention.join.eps": NO_EPS,
        "block.ffn.join.eps": NO_EPS,
        "block.attention.query.1.eps": NO_EPS,
        "block.attention.key.1.eps": NO_EPS,
    }
    return arch_dsl.resolve(arch_dsl.patch(zoo.load("ngpt"), {**sizes, **heads, **exact, **changes}))


WITHOUT_ROPE = {
    "block.attention.query": {"remove": "rope"},
    "block.attention.key": {"remove": "rope"},
    "block.attention.query.0.eps": NO_EPS,
    "block.attention.key.0.eps": NO_EPS,
}


def norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True))


def scale(p: dict[str, Tensor], path: str, init: float, start: float) -> Tensor:
    """Section 2.5: the parameter begins at s_scale, and s is s_init / s_scale times it."""
    return p[f"{path}.weight"] * (init / start)


def rotated(x: Tensor) -> Tensor:
    """x `[time, head_dim]` turned by its positions, channel i with channel i + head_dim / 2."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        for i in range(half):
            angle = t * 10000 ** (-i / half)
            a, b = x[t, i], x[t, i + half]
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


def attended(p: dict[str, Tensor], at: str, h: Tensor, turn: bool) -> Tensor:
    """Eq. 12 to 16, with the softmax scaled by sqrt(d_k)."""
    root = 1 / math.sqrt(WIDTH)
    q, k, v = (h @ p[f"{at}.{name}_projection.weight"].T for name in ("query", "key", "value"))
    s_qk = scale(p, f"{at}.query.learned_scale.learned", 1.0, root)
    d = WIDTH // HEADS
    outputs = []
    for head in range(HEADS):
        part = slice(head * d, (head + 1) * d)
        turned = [rotated(x[:, part]) if turn else x[:, part] for x in (q, k)]
        ours, theirs = (norm(x) * s_qk[head] for x in turned)
        rows = []
        for i in range(len(h)):
            weights = torch.stack([math.sqrt(d) * (ours[i] @ theirs[j]) for j in range(i + 1)]).softmax(0)
            rows.append(weights @ v[: i + 1, part])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, -1) @ p[f"{at}.output_projection.weight"].T


def fed_forward(p: dict[str, Tensor], at: str, h: Tensor) -> Tensor:
    """Eq. 17 to 21."""
    u = h @ p[f"{at}.input_projection.weight"].T * scale(p, f"{at}.linear.learned_scale.learned", 1.0, 1.0)
    v = h @ p[f"{at}.gate_projection.weight"].T * scale(p, f"{at}.preactivation.learned_scale.learned", 1.0, 1.0)
    v = v * math.sqrt(WIDTH)
    return (u * v / (1 + torch.exp(-v))) @ p[f"{at}.output_projection.weight"].T


def stepped(p: dict[str, Tensor], at: str, h: Tensor, update: Tensor) -> Tensor:
    """Eq. 10 and 11, as the authors' code has them: |alpha|, and h normed before too."""
    alpha = scale(p, f"{at}.join.step", 0.05, 1 / math.sqrt(WIDTH)).abs()
    return norm(norm(h) + alpha * (norm(update) - norm(h)))


def reading(p: dict[str, Tensor], tokens: Tensor, turn: bool = True) -> Tensor:
    """Logits `[time, vocab]` of one sequence."""
    h = p["embedding"][tokens]
    for layer in range(2):
        h = stepped(p, f"block.{layer}.attention", h, attended(p, f"block.{layer}.attention", h, turn))
        h = stepped(p, f"block.{layer}.ffn", h, fed_forward(p, f"block.{layer}.ffn", h))
    z = h @ p["unembedding.weight"].T  # eq. 1
    return z * scale(p, "logit_maps.learned_scale.learned", 1.0, 1 / math.sqrt(WIDTH))  # eq. 3


@pytest.mark.parametrize(("changes", "most"), [({}, 1e-6), (WITHOUT_ROPE, 1e-9)], ids=["rope", "no rope"])
def test_logits_and_gradients_are_those_of_the_formulas(changes: dict[str, Any], most: float):
    module = arch_dsl.compile(tiny(**changes)).double()
    randomize(module)
    parameters = dict(module.named_parameters())
    expected = torch.stack([reading(parameters, row, not changes) for row in TOKENS])
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    theirs = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    logits = module(TOKENS)
    ours = torch.autograd.grad((logits * weights).sum(), list(parameters.values()))
    torch.testing.assert_close(logits, expected, rtol=most, atol=most)  # rope turns by angles in float32
    for path, a, b in zip(parameters, ours, theirs, strict=True):
        bound = 10 * most * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=10 * most, atol=bound, msg=lambda text, p=path: f"{p}: {text}")


def test_a_new_model_is_that_of_the_formulas_and_all_its_vectors_have_length_one():
    module = arch_dsl.compile(tiny()).double()
    module.constrain()
    parameters = dict(module.named_parameters())
    torch.testing.assert_close(module(TOKENS)[0], reading(parameters, TOKENS[0]), rtol=1e-6, atol=1e-6)
    for path, value in parameters.items():
        if value.ndim == 2 and "learned" not in path:
            along = 0 if path.endswith("output_projection.weight") else 1
            assert value.shape[along] == WIDTH
            torch.testing.assert_close(value.norm(dim=along), torch.ones(value.shape[1 - along]).double())
    stream = module.hidden(TOKENS)
    torch.testing.assert_close(stream.norm(dim=-1), torch.ones(TOKENS.shape).double())


def test_scales_start_as_the_paper_has_them():
    module = arch_dsl.compile(tiny())
    root = WIDTH**-0.5
    starts = {"attention.query.learned_scale.learned": (root, 1), "attention.join.step": (root, 0.05)}
    starts |= {"ffn.linear.learned_scale.learned": (1, 1), "ffn.join.step": (root, 0.05)}
    starts |= {"ffn.preactivation.learned_scale.learned": (1, WIDTH**0.5)}
    for path, (start, value) in starts.items():
        learned = module.get_submodule(f"block.1.{path}")
        torch.testing.assert_close(learned.weight, torch.full_like(learned.weight, start))
        torch.testing.assert_close(learned(), torch.full_like(learned.weight, value))


def test_decoding_token_by_token_gives_the_logits_of_the_whole():
    module = arch_dsl.compile(tiny()).double()
    randomize(module)
    call = Call(state=State())
    parts = torch.cat([module(token, call) for token in TOKENS.split(1, 1)], 1)
    torch.testing.assert_close(parts, module(TOKENS), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("size", "parameters"), [("0.5b", 468_491_520), ("1b", 1_026_177_280)])
def test_parameters_are_those_computed_by_hand(size: str, parameters: int):
    """Tables of 32000 tokens in and out and a scale for each; per layer four maps of attention, three of the
    feed-forward, two step sizes and s_qk of d_model, s_u and s_v of 4 d_model."""
    layers, d = {"0.5b": (24, 1024), "1b": (36, 1280)}[size]
    by_hand = 2 * 32000 * d + 32000 + layers * (4 * d * d + 3 * 4 * d * d + 2 * d + d + 2 * 4 * d)
    assert arch_dsl.cost(arch_dsl.resolve(zoo.load("ngpt", size)), tokens=1).parameters == by_hand == parameters
