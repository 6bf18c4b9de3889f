"""The lightning indexer against the report's equations, what it trains, and what it cannot stand beside."""

from __future__ import annotations

import itertools
import math
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
INDEXER: dict[str, Any] = {"type": "lightning_indexer", "heads": 2, "head_dim": 4, "top": 3}
DENSE: dict[str, Any] = {"type": "lightning_indexer", "heads": 2, "head_dim": 4}


def branch(indexer: dict[str, Any], **fields: Any) -> nn.Module:
    """An attention branch in float64 with random parameters."""
    data = {"type": "attention", "heads": HEADS, "kv_heads": 2, "scores": [indexer], **fields}
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": 20, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, path="block.0.attention", backend="reference")
    module = parse(Branch, data).build(ctx).double()
    randomize(module, std=1.0)
    return module


def indexer_of(module: nn.Module) -> Any:
    return module.scores.biases["lightning_indexer"]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def by_hand(module: nn.Module, x: Tensor, top: int, padding: Tensor, window: int = T) -> tuple[Tensor, Tensor]:
    """The report of DeepSeek-V3.2-Exp, eq. 1 to 4, a query at a time: x plus the update, and the indexer's loss."""
    own, head_dim = indexer_of(module), module.head_dim
    names = ("query", "key", "value")
    q, k, v = (getattr(module, f"{name}_projection")(x).unflatten(-1, (-1, head_dim)) for name in names)
    out, losses = torch.zeros(2, T, HEADS, head_dim, dtype=x.dtype), []
    for row, t in itertools.product(range(2), range(T)):
        seen = [s for s in range(t + 1) if s == t or (s > t - window and not padding[row, s])]
        here = x[row].detach()
        index = torch.stack([_index(own, here[t], here[s]) for s in seen])
        best = sorted(range(len(seen)), key=lambda at: -index[at].item())[:top]  # of equal ones the first
        read = [seen[at] for at in best]
        shares = []
        for head in range(HEADS):
            weights = (k[row, read, head // 2] @ q[row, t, head] / math.sqrt(head_dim)).softmax(0)
            out[row, t, head] = weights @ v[row, read, head // 2]
            shares.append(weights.detach())
        p = torch.stack(shares).sum(0)
        p = p / p.sum()
        if not padding[row, t]:
            losses.append((p * (p.log() - index[best].log_softmax(0))).sum())
    return x + module.output_projection(out.flatten(2)), torch.stack(losses).mean()


def _index(own: Any, query: Tensor, key: Tensor) -> Tensor:
    """Eq. 1, with the factors of the authors' code."""
    total = torch.zeros((), dtype=query.dtype)
    for head, weight in enumerate(own.weight_projection.weight @ query):
        q = own.query_projection.weight[4 * head : 4 * head + 4] @ query
        total = total + weight / math.sqrt(2) * (q @ (own.key_projection.weight @ key) / math.sqrt(4)).relu()
    return total


NONE = torch.zeros(2, T, dtype=torch.bool)
PADDING = torch.tensor([[True, True, False, False, False, False, True, False], [False] * T])
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], int, Tensor, int]] = {
    "chosen": (INDEXER, {}, 3, NONE, T),
    "warm-up": (DENSE, {}, T, NONE, T),
    "window": (INDEXER, {"mask": {"type": "window", "size": 5}}, 3, NONE, 5),
    "padding": (INDEXER, {}, 3, PADDING, T),
}


@pytest.mark.parametrize("name", FORMS)
def test_follows_the_equations_and_their_gradients(x: Tensor, name: str):
    indexer, fields, top, padding, window = FORMS[name]
    module = branch(indexer, **fields)
    given, again = x.clone().requires_grad_(), x.clone().requires_grad_()
    call = Call(padding=padding if padding.any() else None)
    ours = module(given, call)
    expected, wanted = by_hand(module, again, top, padding, window)
    (loss,) = call.losses.values()
    torch.testing.assert_close(ours[~padding], expected[~padding], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(loss, wanted, atol=1e-12, rtol=1e-12)
    parameters = list(module.parameters())
    mine = torch.autograd.grad(ours[~padding].square().sum() + loss, [given, *parameters])
    theirs = torch.autograd.grad(expected[~padding].square().sum() + wanted, [again, *parameters])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_its_loss_trains_it_alone_and_the_loss_of_tokens_all_others(x: Tensor):
    module, call = branch(INDEXER), Call()
    out = module(x.requires_grad_(), call)
    own, names = dict(indexer_of(module).named_parameters()), dict(module.named_parameters())
    others = [value for name, value in names.items() if "lightning_indexer" not in name]
    (loss,) = call.losses.values()
    of_loss = torch.autograd.grad(loss, [x, *others, *own.values()], retain_graph=True, allow_unused=True)
    of_tokens = torch.autograd.grad(out.square().sum(), [x, *others, *own.values()], allow_unused=True)
    count = len(own)
    assert all(grad is None for grad in of_loss[:-count]) and all(grad is not None for grad in of_loss[-count:])
    assert all(grad is not None for grad in of_tokens[:-count]) and all(grad is None for grad in of_tokens[-count:])


def test_warm_up_reads_all_keys(x: Tensor):
    module, plain = branch(DENSE), branch(DENSE, scores=[])
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if "scores" not in name})
    torch.testing.assert_close(module(x, Call()), plain(x, Call()), atol=1e-12, rtol=1e-12)
    assert (branch(INDEXER)(x, Call()) - plain(x, Call())).abs().max() > 1e-2


MORE: dict[str, dict[str, Any]] = {
    "rotated": {"query": ["rope"], "key": ["rope"], "kv_heads": 2},
    "window": {"mask": {"type": "window", "size": 4}, "kv_heads": 1},
    "beside others": {"scores": [{"type": "softcap", "cap": 2.0}, "alibi", INDEXER, "sinks"]},
    "memory": {"memory": 3, "kv_heads": 2},
    "documents": {"mask": {"type": "causal", "documents": True}},
    "sigmoid": {"weights": "sigmoid", "kv_heads": 2},
    "latent": {"type": "latent_attention", "kv_latent": 6, "rotary_dim": 4},
    "of the latent": {
        "type": "latent_attention",
        "kv_latent": 6,
        "query_latent": 5,
        "scores": [{**INDEXER, "queries": "latent", "query": ["rope"], "key": ["layernorm", "rope"]}],
    },
    "differential": {"type": "differential_attention", "heads": 2},
}


def case(name: str) -> Case:
    return attention_case(name, **{"scores": [INDEXER], **MORE[name]})


@pytest.mark.parametrize("name", MORE)
def test_decoding_reads_in_pieces_as_at_once_and_holds_what_its_cost_says(name: str):
    assert_decodes(case(name))


@pytest.mark.parametrize("name", MORE)
def test_activations_are_what_autograd_keeps(name: str):
    assert_keeps(case(name).model)


WRITTEN = ("memory", "of the latent")  # the others are among the slow tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in WRITTEN else [pytest.mark.slow]) for name in MORE]
)
def test_is_written_as_plain_pytorch(name: str):
    assert_plain_agrees(case(name).model)


def test_flops_count_the_pairs_that_are_read_and_those_of_the_indexer():
    model, tokens = case("rotated").model, 10
    plain = arch_dsl.patch(model, {"block.attention.scores": []})
    whole, read = 55, 3 + 8 * 3  # queries 0 and 1 read 1 and 2 keys, eight more read 3
    more = arch_dsl.cost(model, tokens).flops_model - arch_dsl.cost(plain, tokens).flops_model
    maps = 2 * tokens * 16 * (8 + 4 + 2)
    assert more == 2 * (maps + whole * 2 * 2 * (4 + 1) - (whole - read) * 2 * 16 * 2)
    assert arch_dsl.cost(model, tokens).cache == arch_dsl.cost(plain, tokens).cache + 2 * tokens * 4


def test_decoding_begins_a_text_after_its_padding():
    """Rows that are filled up at their start decode as if alone."""
    module = build(case("window").model)
    padding = torch.arange(12) < torch.tensor([[0], [5]])
    state, alone = State(), State()
    found = []
    for start, end in itertools.pairwise((0, 3, 4, 9, 12)):
        call = Call(padding=padding[:, start:end] if start < 9 else None, state=state)
        found.append(module(TOKENS[:, start:end], call))
    whole = module(TOKENS[1:, 5:], Call(state=alone, positions=torch.arange(5, 12)))
    torch.testing.assert_close(torch.cat(found, 1)[1:, 5:], whole, atol=1e-10, rtol=1e-10)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"mask": "full"}, "scores.0: chooses among earlier keys, and the mask reads ahead"),
    "strided": (
        {"mask": {"type": "strided", "stride": 3}},
        "scores.0: lightning_indexer has all later queries read a key, and strided shows it to some of them alone",
    ),
    "another sequence": (
        {"type": "cross_attention"},
        "scores.0: lightning_indexer sees positions within one sequence, and cross_attention reads another one",
    ),
    "no latent": (
        {"scores": [{**INDEXER, "queries": "latent"}]},
        "scores.0.queries: come from the latent of queries, and there is none; give query_latent",
    ),
    "shared": (
        {"scores": [{**INDEXER, "share": "stack"}]},
        "scores.0.share: lets layers share an indexer, whose loss is told of each; leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_makes_no_sense(name: str):
    fields, message = REFUSED[name]
    attention = {"type": "attention", "heads": 4, "scores": [INDEXER], **fields}
    with pytest.raises(SpecError, match=message):
        load({"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 12, "block": {"attention": attention}})


def test_it_scores_in_float32_under_autocast(x: Tensor) -> None:
    """Rounded scores are often equal, and of equal ones the first keys would be read."""
    module = branch(INDEXER).float()
    hidden = x.float()
    with torch.autocast("cpu", torch.bfloat16):
        index = indexer_of(module).index(hidden, Call())
    assert index.dtype == torch.float32
    assert not torch.equal(index, index.bfloat16().float())


def test_the_loss_of_an_indexer_is_left_out_where_nothing_is_trained(x: Tensor) -> None:
    module, call = branch(INDEXER), Call()
    with torch.no_grad():
        module(x, call)
    assert not call.losses
