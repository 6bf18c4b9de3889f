"""Attention whose weights are no softmax, against the papers' formulas in float64, pair by pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch, Weights
from archlab.arch_dsl.parts.watching import KINDS, Sight, Watch
from tests.arch_dsl.conformance import Case, load, randomize
from tests.arch_dsl.specs import assert_decodes, assert_keeps, assert_plain_agrees, attention_case

D, T, HEADS, POSITIONS = 12, 7, 4, 20
Visible = Callable[[int, int, int], bool]  # of a row, a query and a key


def branch(**fields: Any) -> nn.Module:
    """An attention branch in float64 with random parameters."""
    data = {"type": "attention", "heads": HEADS, **fields}
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": POSITIONS, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, backend="reference")
    module = parse(Branch, data).build(ctx).double()
    randomize(module, std=1.0)
    return module


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def causal(row: int, i: int, j: int) -> bool:
    return j <= i


def sigmoid(bias: float) -> Callable[[list[Tensor], list[int], int], dict[int, Tensor]]:
    """arXiv:2409.04431, section 2: the weight of each key."""
    return lambda logits, seen, i: {j: 1 / (1 + (-(s + bias)).exp()) for s, j in zip(logits, seen, strict=True)}


def stick(own: bool) -> Callable[[list[Tensor], list[int], int], dict[int, Tensor]]:
    """arXiv:2410.17980, section 2: b_ij prod (1 - b_il) over j < l < i; key -1 gets what is left."""

    def weights(logits: list[Tensor], seen: list[int], i: int) -> dict[int, Tensor]:
        shares = {j: 1 / (1 + (-s).exp()) for s, j in zip(logits, seen, strict=True) if own or j < i}
        found, left = {}, torch.tensor(1.0, dtype=torch.float64)
        for j in sorted(shares, reverse=True):
            found[j], left = shares[j] * left, left * (1 - shares[j])
        return found | {-1: left}

    return weights


def by_hand(
    module: nn.Module, x: Tensor, weigh: Any, visible: Visible = causal, cap: float | None = None, slopes: Any = None
) -> Tensor:
    """x plus the update, a pair at a time."""
    head_dim = module.head_dim
    names = ("query", "key", "value")
    q, k, v = (getattr(module, f"{name}_projection")(x).unflatten(-1, (-1, head_dim)) for name in names)
    group = q.shape[2] // k.shape[2]
    rows = []
    for row, i, head in itertools.product(range(2), range(T), range(HEADS)):
        seen = [j for j in range(T) if visible(row, i, j)]
        logits = [(q[row, i, head] * k[row, j, head // group]).sum() / math.sqrt(head_dim) for j in seen]
        if cap is not None:
            logits = [cap * (s / cap).tanh() for s in logits]
        if slopes is not None:
            logits = [s - slopes[head] * abs(i - j) for s, j in zip(logits, seen, strict=True)]
        found = weigh(logits, seen, i)
        left = found.pop(-1, None)
        out = sum((a * v[row, j, head // group] for j, a in found.items()), torch.zeros(head_dim, dtype=x.dtype))
        kind = getattr(module.weights, "remainder", "none")
        if kind != "none":
            out = out + left * (v[row, i, head // group] if kind == "value" else module.weights.vectors[head])
        rows.append(out)
    heads = torch.stack(rows).unflatten(0, (2, T, HEADS)).flatten(2)
    return x + module.output_projection(heads)


LEARNED = {"type": "stick_breaking", "remainder": "learned"}
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "sigmoid": ({"weights": "sigmoid"}, sigmoid(-math.log(POSITIONS))),
    "sigmoid of a bias": ({"weights": {"type": "sigmoid", "bias": -1.5}, "kv_heads": 2}, sigmoid(-1.5)),
    "stick": ({"weights": "stick_breaking"}, stick(own=False)),
    "stick with its own token": ({"weights": {"type": "stick_breaking", "own": True}, "kv_heads": 2}, stick(own=True)),
    "stick and the own value": (
        {"weights": {"type": "stick_breaking", "remainder": "value"}, "kv_heads": 2},
        stick(own=False),
    ),
    "stick and a vector": ({"weights": {**LEARNED, "own": True}, "kv_heads": 1}, stick(own=True)),
}


@pytest.mark.parametrize("name", FORMS)
def test_follows_the_formula_and_its_gradients(x: Tensor, name: str):
    fields, weigh = FORMS[name]
    module = branch(**fields)
    given, again = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, expected = module(given, Call()), by_hand(module, again, weigh)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    parameters = list(module.parameters())
    mine = torch.autograd.grad(ours.square().sum(), [given, *parameters])
    theirs = torch.autograd.grad(expected.square().sum(), [again, *parameters])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2]])
PADDING = torch.tensor([[True, True, False, False, False, False, False], [False] * T])
SURROUNDINGS: dict[str, tuple[dict[str, Any], dict[str, Any], Call]] = {
    "window": ({"mask": {"type": "window", "size": 3}}, {"visible": lambda row, i, j: i - 3 < j <= i}, Call()),
    "strided": (
        {"mask": {"type": "strided", "stride": 3, "size": 2}},
        {"visible": lambda row, i, j: j <= i and (i - j < 2 or (i - j) % 3 == 0)},
        Call(),
    ),
    "documents": (
        {"mask": {"type": "causal", "documents": True}},
        {"visible": lambda row, i, j: j <= i and bool(DOCUMENTS[row, i] == DOCUMENTS[row, j])},
        Call(documents=DOCUMENTS),
    ),
    "padding": (
        {},
        {"visible": lambda row, i, j: j <= i and (i == j or not bool(PADDING[row, j]))},
        Call(padding=PADDING),
    ),
    "cap and alibi": (
        {"scores": [{"type": "softcap", "cap": 0.8}, "alibi"]},
        {"cap": 0.8, "slopes": [2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)]},
        Call(),
    ),
}


@pytest.mark.parametrize("kind", ["sigmoid", "stick_breaking"])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_masks_and_scores_are_those_of_attention(x: Tensor, name: str, kind: str):
    fields, how, call = SURROUNDINGS[name]
    module = branch(weights=kind, kv_heads=2, **fields)
    weigh = stick(own=False) if kind == "stick_breaking" else sigmoid(-math.log(3 if name == "window" else POSITIONS))
    torch.testing.assert_close(module(x, call), by_hand(module, x, weigh, **how), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        ("full", lambda row, i, j: True),
        ("prefix", lambda row, i, j: j <= i or max(i, j) < (3, 5)[row]),
    ],
)
def test_sigmoid_reads_ahead_where_its_mask_does(x: Tensor, mask: str, visible: Visible):
    module = branch(weights={"type": "sigmoid", "bias": -2.0}, mask=mask)
    call = Call(prefix=torch.tensor([3, 5]) if mask == "prefix" else None)
    expected = by_hand(module, x, sigmoid(-2.0), visible)
    torch.testing.assert_close(module(x, call), expected, atol=1e-12, rtol=1e-12)


def test_sigmoid_starts_near_what_a_softmax_of_equal_logits_gives():
    """With n keys and logits of 0 each weight is 1 / (n + 1)."""
    spec = parse(Weights, "sigmoid")
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": POSITIONS, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D)
    assert spec.build(ctx).read(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)).item() == pytest.approx(1 / 21)


def test_a_stick_of_large_logits_stays_whole():
    """In float32, with logits up to 300 in magnitude, weights and what is left sum to 1, and no gradient is lost."""
    own = {"type": "stick_breaking", "own": True, "remainder": "value"}
    module = parse(Weights, own).build(None)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(1, 3, 200, 200, generator=generator) * 100).clamp(-300, 300)
    hidden = torch.where(torch.ones(200, 200).tril().bool(), 0.0, float("-inf"))
    logits.requires_grad_()
    out = module.read(logits + hidden, torch.ones(1, 3, 200, 1))
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-4, rtol=0)
    weighted = module.read(logits + hidden, torch.randn(1, 3, 200, 5, generator=generator))
    (gradient,) = torch.autograd.grad(weighted.sum(), logits)
    assert gradient.isfinite().all()


def test_the_matrix_form_of_the_authors_is_the_same():
    """log sigmoid(s) plus the log sigmoid(-s) of what is between, by a product with a triangle; 1 - sum is left."""
    generator = torch.Generator().manual_seed(3)
    s = torch.randn(1, 2, 40, 40, dtype=torch.float64, generator=generator) * 3
    v = torch.randn(1, 2, 40, 5, dtype=torch.float64, generator=generator)
    hidden = torch.ones(40, 40).triu().bool()
    take = torch.nn.functional.logsigmoid(s).masked_fill(hidden, -1e5)
    leave = torch.nn.functional.logsigmoid(-s).masked_fill(hidden, 0)
    weights = (take + leave @ torch.ones(40, 40, dtype=torch.float64).tril(-1)).exp()
    expected = weights @ v + (1 - weights.sum(-1, keepdim=True)) * v
    module = parse(Weights, {"type": "stick_breaking", "remainder": "value"}).build(None)
    ours = module.read(s.masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf")), v)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


MORE: dict[str, dict[str, Any]] = {
    "sigmoid in a window": {
        "weights": "sigmoid", "mask": {"type": "window", "size": 4}, "kv_heads": 2,
        "scores": [{"type": "softcap", "cap": 2.0}, "alibi"],
    },
    "sigmoid with memory": {"weights": "sigmoid", "memory": 3, "kv_heads": 1, "scores": ["forget_gate"]},
    "stick with memory": {"weights": {"type": "stick_breaking", "remainder": "value"}, "memory": 3, "kv_heads": 2},
    "stick in a window": {
        "weights": LEARNED, "mask": {"type": "window", "size": 4}, "kv_heads": 2, "query": ["rope"], "key": ["rope"],
        "scores": ["forget_gate"], "sdpa": ["rmsnorm", "gate"],
    },
    "queries of positions": {"weights": "stick_breaking", "queries": "positions", "scores": ["transformer_xl"]},
    "latent": {
        "type": "latent_attention", "kv_latent": 6, "rotary_dim": 4, "value_dim": 5, "weights": LEARNED, "kv_heads": 2,
    },
    "latent sigmoid": {"type": "latent_attention", "kv_latent": 6, "weights": "sigmoid", "value": ["gate"]},
    "strided": {"weights": "stick_breaking", "mask": {"type": "strided", "stride": 3}},
}  # fmt: skip


def case(name: str) -> Case:
    return attention_case(name, **MORE[name])


@pytest.mark.parametrize("name", MORE)
def test_decoding_reads_in_pieces_as_at_once_and_holds_what_its_cost_says(name: str):
    assert_decodes(case(name))


@pytest.mark.parametrize("name", MORE)
def test_activations_are_what_autograd_keeps(name: str):
    assert_keeps(case(name).model)


WRITTEN = ("sigmoid with memory", "strided")  # the others are among the slow tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in WRITTEN else [pytest.mark.slow]) for name in MORE]
)
def test_is_written_as_plain_pytorch(name: str):
    assert_plain_agrees(case(name).model)


def test_says_that_no_kernel_computes_it():
    choices = arch_dsl.compile(case("strided").model).choices
    told = {choice.implementation: choice.reason for choice in choices if choice.op == "attention"}
    assert told == {"torch": "stick_breaking weights: plain products of all pairs, no kernel has them"}


def test_who_watches_sees_outputs_and_no_probabilities():
    seen: list[Sight] = []
    module = arch_dsl.compile(case("strided").model).double()
    module.hidden(torch.arange(12)[None], Call(watch=Watch(frozenset(KINDS), seen.append)))
    kinds = {sight.kind for sight in seen}
    assert "heads" in kinds
    assert "attention" not in kinds


def test_a_softmax_is_no_part_of_the_identity():
    plain = {"type": "attention", "heads": HEADS}
    sizes = {"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12}
    said, unsaid = (load({**sizes, "block": {"attention": each}}) for each in ({**plain, "weights": "softmax"}, plain))
    assert arch_dsl.identity(said) == arch_dsl.identity(unsaid)
    assert "weights" not in str(arch_dsl.canonical(unsaid))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": ({"scores": ["sinks"]}, "scores.0: sinks is a logit of a softmax, and the weights are sigmoid"),
    "prune": (
        {"scores": [{"type": "forget_gate", "prune": 0.1}]},
        "scores.0.prune: bounds weights of a softmax, and the weights are sigmoid",
    ),
    "two softmaxes": ({"type": "differential_attention"}, "'weights' is not a key of differential_attention"),
    "another sequence": ({"type": "cross_attention"}, "'weights' is not a key of cross_attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_needs_a_softmax(name: str):
    fields, message = REFUSED[name]
    attention = {"type": "attention", "heads": 4, "weights": "sigmoid", **fields}
    with pytest.raises(SpecError, match=message):
        load({"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12, "block": {"attention": attention}})


def test_the_plain_softmax_is_that_of_the_kernels(x: Tensor):
    """What a copy of `softmax` begins with."""
    module = branch(kv_heads=2, mask={"type": "window", "size": 3}, scores=["alibi"])
    own = branch(kv_heads=2, mask={"type": "window", "size": 3}, scores=["alibi"], weights="sigmoid")
    own.load_state_dict(module.state_dict())
    own.weights = parse(Weights, "softmax").build(None)
    torch.testing.assert_close(own(x, Call()), module(x, Call()), atol=1e-12, rtol=1e-12)
