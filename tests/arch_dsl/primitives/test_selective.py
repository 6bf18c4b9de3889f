"""Selective attention against the paper's formula, and what it cannot stand beside."""

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
from archlab.arch_dsl.parts.context import BuildContext, Call, State
from archlab.arch_dsl.parts.families import Branch
from tests.arch_dsl.conformance import TOKENS, Case, build, load, randomize
from tests.arch_dsl.specs import assert_decodes, assert_keeps, assert_plain_agrees, attention_case

D, T, HEADS = 12, 8, 4


def branch(**fields: Any) -> nn.Module:
    """An attention branch in float64 with random parameters."""
    data = {"type": "attention", "heads": HEADS, "kv_heads": 2, "scores": ["selective"], **fields}
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": 20, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, backend="reference")
    module = parse(Branch, data).build(ctx).double()
    randomize(module, std=1.0)
    return module


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def by_hand(
    module: nn.Module, x: Tensor, visible: Callable[[int, int, int], bool], first: Callable[[int, int], bool]
) -> Tensor:
    """arXiv:2410.02703, section 3: x plus the update, a pair at a time. `first(row, j)`: a token that none selects."""
    head_dim = module.head_dim
    names = ("query", "key", "value")
    q, k, v = (getattr(module, f"{name}_projection")(x).unflatten(-1, (-1, head_dim)) for name in names)
    out = torch.zeros(2, T, HEADS, head_dim, dtype=x.dtype)
    for row in range(2):
        masked = [torch.zeros((), dtype=x.dtype) for _ in range(T)]  # what queries so far have selected
        for i in range(T):
            seen = [j for j in range(T) if visible(row, i, j)]
            logits = torch.stack([q[row, i] @ k[row, j].T / math.sqrt(head_dim) for j in seen])  # [keys, heads, kv]
            for head in range(HEADS):
                own = logits[:, head, head // 2] - torch.stack([masked[j] for j in seen])
                out[row, i, head] = own.softmax(0) @ v[row, seen, head // 2]
            for at, j in enumerate(seen):
                if j != i and not first(row, j):
                    masked[j] = masked[j] + logits[at, 0, 0].relu()
    return x + module.output_projection(out.flatten(2))


def test_follows_the_formula_and_its_gradients(x: Tensor):
    module = branch()
    given, again = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = module(given, Call())
    expected = by_hand(module, again, lambda row, i, j: j <= i, lambda row, j: j == 0)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    parameters = list(module.parameters())
    mine = torch.autograd.grad(ours.square().sum(), [given, *parameters])
    theirs = torch.autograd.grad(expected.square().sum(), [again, *parameters])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    plain = branch(scores=[])
    plain.load_state_dict(module.state_dict())
    assert (plain(x, Call()) - ours).abs().max() > 1e-2


def test_follows_the_pseudo_code_of_the_paper(x: Tensor):
    """Relu of head 0's logits, no first column, no diagonal, a row later, summed over rows."""
    module = branch(kv_heads=HEADS)
    names = ("query", "key", "value")
    q, k, v = (getattr(module, f"{name}_projection")(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in names)
    logits = (q @ k.mT / math.sqrt(module.head_dim)).masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    s = logits[:, 0].relu() * (1 - torch.eye(T, dtype=x.dtype))
    s[..., 0] = 0
    s = s.roll(1, -2)
    s[:, 0] = 0
    out = (logits - s.cumsum(-2)[:, None]).softmax(-1) @ v
    expected = x + module.output_projection(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, Call()), expected, atol=1e-12, rtol=1e-12)


DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 2, 2]])
PADDING = torch.tensor([[True, True, False, False, False, False, True, False], [False] * T])
SURROUNDINGS: dict[str, tuple[dict[str, Any], Any, Any, Call]] = {
    "window": (
        {"mask": {"type": "window", "size": 4}},
        lambda row, i, j: i - 4 < j <= i,
        lambda row, j: j == 0,
        Call(),
    ),
    "documents": (
        {"mask": {"type": "causal", "documents": True}},
        lambda row, i, j: j <= i and bool(DOCUMENTS[row, i] == DOCUMENTS[row, j]),
        lambda row, j: j == 0 or bool(DOCUMENTS[row, j] != DOCUMENTS[row, j - 1]),
        Call(documents=DOCUMENTS),
    ),
    "padding": (
        {},
        lambda row, i, j: i == j or (j < i and not bool(PADDING[row, i]) and not bool(PADDING[row, j])),
        lambda row, j: j == (2, 0)[row],
        Call(padding=PADDING),
    ),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_selects_within_what_can_be_read(x: Tensor, name: str):
    """Padding selects nothing, and begins no text; what it reads itself is of no account."""
    fields, visible, first, call = SURROUNDINGS[name]
    module = branch(**fields)
    real = torch.ones(2, T, dtype=torch.bool) if call.padding is None else ~PADDING
    ours, expected = module(x, call)[real], by_hand(module, x, visible, first)[real]
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


MORE: dict[str, dict[str, Any]] = {
    "rotated": {"query": ["rope"], "key": ["rope"], "kv_heads": 2},
    "window": {"mask": {"type": "window", "size": 4}, "kv_heads": 1},
    "beside others": {"scores": [{"type": "softcap", "cap": 2.0}, "alibi", "selective", "forget_gate", "sinks"]},
    "memory": {"memory": 3, "kv_heads": 2},
    "documents": {"mask": {"type": "causal", "documents": True}},
    "sigmoid": {"weights": "sigmoid", "kv_heads": 2},
    "stick": {"weights": "stick_breaking", "mask": {"type": "window", "size": 5}},
    "latent": {"type": "latent_attention", "kv_latent": 6, "rotary_dim": 4},
    "differential": {"type": "differential_attention", "heads": 2},
}


def case(name: str) -> Case:
    return attention_case(name, **{"scores": ["selective"], **MORE[name]})


@pytest.mark.parametrize("name", MORE)
def test_decoding_reads_in_pieces_as_at_once_and_holds_what_its_cost_says(name: str):
    assert_decodes(case(name))


@pytest.mark.parametrize("name", MORE)
def test_activations_are_what_autograd_keeps(name: str):
    assert_keeps(case(name).model)


WRITTEN = ("memory", "documents")  # the others are among the slow tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in WRITTEN else [pytest.mark.slow]) for name in MORE]
)
def test_is_written_as_plain_pytorch(name: str):
    assert_plain_agrees(case(name).model)


def test_decoding_holds_a_number_for_each_key():
    plain, own = case("rotated").model, case("rotated").model
    plain = arch_dsl.patch(plain, {"block.attention.scores": []})
    assert arch_dsl.cost(own, 10).cache == arch_dsl.cost(plain, 10).cache + 2 * 10
    assert arch_dsl.cost(own).parameters == arch_dsl.cost(plain).parameters


@pytest.mark.parametrize("name", ["rotated", "window"])
def test_decoding_begins_a_text_after_its_padding(name: str):
    """Rows that are filled up at their start decode as if alone."""
    module = build(case(name).model)
    padding = torch.arange(12) < torch.tensor([[0], [5]])
    state, alone = State(), State()
    found = []
    for start, end in itertools.pairwise((0, 3, 4, 9, 12)):
        call = Call(padding=padding[:, start:end] if start < 9 else None, state=state)
        found.append(module(TOKENS[:, start:end], call))
    whole = module(TOKENS[1:, 5:], Call(state=alone, positions=torch.arange(5, 12)))
    torch.testing.assert_close(torch.cat(found, 1)[1:, 5:], whole, atol=1e-10, rtol=1e-10)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"mask": "full"}, "scores.0: masks keys for later queries, and the mask reads ahead"),
    "prefix": ({"mask": "prefix"}, "scores.0: masks keys for later queries, and the mask reads ahead"),
    "strided": (
        {"mask": {"type": "strided", "stride": 3}},
        "scores.0: selective has all later queries read a key, and strided shows it to some of them alone",
    ),
    "another sequence": (
        {"type": "cross_attention"},
        "scores.0: selective sees positions within one sequence, and cross_attention reads another one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_masks_that_do_not_hide_for_good(name: str):
    fields, message = REFUSED[name]
    attention = {"type": "attention", "heads": 4, "scores": ["selective"], **fields}
    with pytest.raises(SpecError, match=message):
        load({"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12, "block": {"attention": attention}})
