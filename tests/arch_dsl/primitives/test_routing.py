"""Which experts a token gets, by loops in float64: a bias of the choice, groups, capacity, expert choice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.compiler.modules import stored
from archlab.arch_dsl.compiler.shapes import shapes_of, stored_shapes
from archlab.arch_dsl.parts.context import Call, State
from archlab.arch_dsl.parts.layers import after_step
from tests.arch_dsl.primitives.test_moe import branch, hidden, model

BIAS = "block.1.ffn.correction.bias"


def of_expert(moe: Any, expert: int, x: Tensor) -> Tensor:
    """What an expert makes of a vector."""
    gate, value, out = (
        moe.experts.get_submodule(f"{name}_projection").weight[expert] for name in ("gate", "input", "output")
    )
    return out @ (nn.functional.silu(gate @ x) * (value @ x))  # type: ignore[no-any-return]


def scores_of(moe: Any, x: Tensor) -> Tensor:
    """Scores `[experts]` of a vector."""
    logits = moe.router.weight @ x
    return logits.softmax(-1) if moe.routing == "softmax" else logits.sigmoid()


def choice(moe: Any, scores: Tensor, groups: int, best: int, summed: int) -> list[int]:
    """The experts of a token, the best first, by its scores."""
    ranked = scores.detach() + (0 if moe.correction is None else moe.correction.bias)
    size = len(ranked) // groups
    of_group = [ranked[g * size : (g + 1) * size].sort(descending=True).values[:summed].sum() for g in range(groups)]
    opened = sorted(range(groups), key=lambda group: -of_group[group])[:best]
    open_experts = [expert for expert in range(len(ranked)) if expert // size in opened]
    return sorted(open_experts, key=lambda expert: -ranked[expert])[: moe.top_k]


def by_tokens(moe: Any, x: Tensor, groups: int = 1, best: int = 1, summed: int = 1, most: int = 10**6) -> Tensor:
    """The routed update of sequences `[batch, time, d_model]`, token by token."""
    rows = []
    for sequence in x:
        seen = [0] * len(moe.router.weight)
        for token in sequence:
            scores = scores_of(moe, token)
            experts = choice(moe, scores, groups, best, summed)
            total = scores[experts].sum() if moe.normalize else 1.0
            update = torch.zeros_like(token)
            for expert in experts:
                seen[expert] += 1
                if seen[expert] <= most:
                    update = update + moe.scale * scores[expert] / total * of_expert(moe, expert, token)
            rows.append(update)
    return torch.stack(rows).view_as(x)


def by_experts(moe: Any, x: Tensor) -> Tensor:
    """The same where each expert takes its best tokens of a sequence."""
    count, time = len(moe.router.weight), x.shape[1]
    out = []
    for sequence in x:
        scores = torch.stack([scores_of(moe, token) for token in sequence])
        rows = [torch.zeros_like(token) for token in sequence]
        for expert in range(count):
            order = sorted(range(time), key=lambda t, e=expert: -scores[t, e])  # type: ignore[misc]
            for t in order[: math.ceil(time * moe.top_k / count)]:
                rows[t] = rows[t] + moe.scale * scores[t, expert] * of_expert(moe, expert, sequence[t])
        out.append(torch.stack(rows))
    return torch.stack(out)


def assert_same(moe: Any, found: Tensor, wanted: Tensor, x: Tensor) -> None:
    """That outputs and gradients agree."""
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    values = [x, moe.router.weight, moe.experts.gate_projection.weight, moe.experts.output_projection.weight]
    dout = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for mine, theirs in zip(*(torch.autograd.grad(out, values, dout) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("routing", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [{}, {"groups": 3, "group_top_k": 2, "group_score": "top2"}], ids=str)
def test_a_bias_changes_the_choice_and_not_the_weights(routing: str, groups: dict[str, Any]):
    moe = branch(experts=6, routing=routing, balance="bias", scale=1.5, **groups)
    x = hidden().requires_grad_()
    plain = moe.routed(x, Call())
    moe.correction.bias.copy_(torch.tensor([0.3, -0.4, 0.1, -0.2, 0.5, 0.0]))
    found = moe.routed(x, Call())
    assert not torch.allclose(plain, found)
    assert_same(moe, found, by_tokens(moe, x, *((3, 2, 2) if groups else ())), x)


@pytest.mark.parametrize(("score", "summed"), [("max", 1), ("top2", 2)])
def test_a_token_chooses_within_its_best_groups(score: str, summed: int):
    moe = branch(experts=8, top_k=3, groups=4, group_top_k=2, group_score=score)
    x = hidden().requires_grad_()
    assert_same(moe, moe.routed(x, Call()), by_tokens(moe, x, 4, 2, summed), x)
    free = branch(experts=8, top_k=3)
    assert not torch.allclose(free.routed(x, Call()), moe.routed(x, Call()))


@pytest.mark.parametrize("most", [4, 7])
def test_an_expert_with_a_capacity_serves_the_first_tokens_of_a_sequence_while_training(most: int):
    moe = branch(capacity=5 * most / (16 * 2) - 0.01)  # of 16 tokens
    x, call = hidden().requires_grad_(), Call()
    assert_same(moe, moe.routed(x, call), by_tokens(moe, x, most=most), x)
    assert 0 < call.measures["block.1.ffn.dropped"] < 1
    rows = by_tokens(moe, x, most=most)
    assert_same(moe.eval(), moe.routed(x, call), by_tokens(moe, x), x)
    assert call.measures["block.1.ffn.dropped"] == 0 and not torch.allclose(rows, moe.routed(x, Call()))


def test_what_is_dropped_is_counted_without_padding():
    moe, padding = branch(capacity=0.7), torch.arange(16).expand(3, 16) >= 9
    padded = Call(padding=padding)
    most = math.ceil(0.7 * 16 * 2 / 5)
    served = by_tokens(moe, hidden()[:, :9], most=most)
    torch.testing.assert_close(moe.routed(hidden(), padded)[:, :9], served)
    seen = torch.zeros(3, 5)
    left = 0
    for row, sequence in enumerate(hidden()[:, :9]):
        for token in sequence:
            for expert in choice(moe, scores_of(moe, token), 1, 1, 1):
                seen[row, expert] += 1
                left += int(seen[row, expert] > most)
    assert left and padded.measures["block.1.ffn.dropped"] == pytest.approx(left / (3 * 9 * 2))


@pytest.mark.parametrize("routing", ["softmax", "sigmoid"])
def test_experts_take_the_tokens_that_score_highest_for_them(routing: str):
    moe = branch(choice="expert", normalize=False, routing=routing, scale=0.7)
    x, call = hidden().requires_grad_(), Call()
    assert_same(moe, moe.by_experts(x, call), by_experts(moe, x), x)
    taken = math.ceil(16 * 2 / 5)
    torch.testing.assert_close(call.measures["block.1.ffn.load"], torch.full((5,), taken / 32, dtype=torch.float64))
    scores = torch.stack([scores_of(moe, token) for token in x.flatten(0, 1)]).view(3, 16, 5)
    got = torch.zeros(3, 16).scatter_add(1, scores.mT.topk(taken).indices.flatten(1), torch.ones(3, 5 * taken))
    assert call.measures["block.1.ffn.dropped"] == pytest.approx(float((got == 0).double().mean()))


def test_experts_take_no_padding():
    moe = branch(choice="expert", normalize=False)
    padding = torch.arange(16).expand(3, 16) >= 14
    found = moe.by_experts(hidden(), Call(padding=padding))
    other = hidden()
    other[:, 14:] += 1
    assert torch.equal(found[:, :14], moe.by_experts(other, Call(padding=padding))[:, :14])
    assert not found[:, 14:].any()


def test_experts_that_choose_do_not_decode():
    module = arch_dsl.compile(model({"type": "moe", "width": 8, "choice": "expert", "normalize": False}))
    tokens = torch.arange(6)[None]
    with pytest.raises(ValueError, match="a choice of tokens by experts looks ahead"):
        module(tokens, Call(state=State()))


def test_a_step_moves_the_bias_towards_experts_with_little_load():
    module = arch_dsl.compile(
        model({"type": "moe", "width": 8, "experts": 4, "balance": {"type": "bias", "rate": 0.2}})
    )
    bias = module.block[1].ffn.correction.bias
    counts = torch.tensor([5, 1, 2, 0])  # the mean is 2
    after_step(module, {"block.1.ffn.assigned": counts})
    torch.testing.assert_close(bias, torch.tensor([-0.2, 0.2, 0.0, 0.2]))
    after_step(module, {"block.1.ffn.assigned": counts.flip(0)})
    torch.testing.assert_close(bias, torch.tensor([0.0, 0.2, 0.2, 0.0]))


def test_assignments_are_counted_without_padding_whatever_the_parts():
    moe, padding = branch(balance="bias"), torch.arange(16) >= torch.tensor([[16], [9], [3]])
    whole = Call(padding=padding)
    moe.routed(hidden(), whole)
    counts = whole.measures["block.1.ffn.assigned"]
    assert counts.dtype == torch.int64 and counts.sum() == 2 * (16 + 9 + 3)
    parts = [Call(padding=rows) for rows in padding.split([1, 2])]
    for rows, call in zip(hidden().split([1, 2]), parts, strict=True):
        moe.routed(rows, call)
    assert torch.equal(sum(call.measures["block.1.ffn.assigned"] for call in parts), counts)  # type: ignore[arg-type]


def test_balancing_evens_out_a_lopsided_router():
    moe = branch(experts=4, top_k=1, normalize=False, routing="sigmoid", balance={"type": "bias", "rate": 0.001})
    with torch.no_grad():
        moe.router.weight.mul_(0.05)
    x = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    loads = []
    for _ in range(60):
        call = Call()
        moe.routed(x, call)
        loads.append(float(call.measures["block.1.ffn.load"].max()))
        after_step(moe, call.measures)
    assert loads[0] > 0.4 and loads[-1] < 0.27


def test_the_loss_beside_a_bias_is_that_of_its_member():
    loss = {"type": "switch", "over": "sequence", "coefficient": 0.3}
    calls = [Call(), Call(), Call()]
    for call, balance in zip(calls, (loss, {"type": "bias", "auxiliary": loss}, "bias"), strict=True):
        branch(balance=balance).routed(hidden(), call)
    name = "block.1.ffn.balance"
    assert torch.equal(calls[0].losses[name], calls[1].losses[name]) and calls[2].losses == {}


def test_the_bias_is_no_parameter_but_part_of_checkpoints():
    spec = model({"type": "moe", "width": 8, "experts": 4, "balance": "bias"})
    module = arch_dsl.compile(spec)
    assert BIAS in module.state_dict() and BIAS not in dict(module.named_parameters())
    assert stored_shapes(spec) == {**shapes_of(spec), BIAS: (4,)}
    assert stored(module).keys() == stored_shapes(spec).keys()
    switch = model({"type": "moe", "width": 8, "experts": 4, "balance": "switch"})
    assert arch_dsl.cost(switch).parameters == arch_dsl.cost(spec).parameters


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"groups": 3}, "groups", "8 experts cannot be divided into 3 equal groups"),
        ({"groups": 4}, "group_top_k", "is missing: of how many of the 4 groups may a token choose experts"),
        ({"groups": 4, "group_top_k": 4}, "group_top_k", "4 of 4 groups limits nothing"),
        ({"groups": 4, "group_top_k": 2}, "group_top_k", "2 groups limit nothing: the best 2 experts"),
        ({"groups": 4, "group_top_k": 1, "top_k": 3}, "group_top_k", "1 groups have 2 experts, of which 3 cannot"),
        ({"groups": 8, "group_top_k": 3, "group_score": "top2"}, "group_score", "sums more experts than the 1 of"),
        ({"group_score": "top2"}, "group_score", "is about groups of experts, and there is one"),
        ({"group_top_k": 2}, "group_top_k", "is about groups of experts, and there is one"),
        ({"capacity": 4.0}, "capacity", "4 drops nothing: every expert has room for all tokens"),
        ({"choice": "expert"}, "normalize", "divides by the sum over what a token chose"),
        ({"choice": "expert", "normalize": False, "balance": "bias"}, "balance", "has nothing to even out"),
        ({"choice": "expert", "normalize": False, "capacity": 0.5}, "capacity", "has nothing to even out"),
        ({"choice": "expert", "normalize": False, "top_k": 8}, "choice", "has nothing to choose: all 8 experts"),
        ({"choice": "expert", "normalize": False, "groups": 2}, "groups", "is for tokens that choose their experts"),
        ({"balance": {"type": "bias", "auxiliary": "bias"}}, "balance.auxiliary", "is a loss beside the bias"),
        ({"balance": {"type": "bias", "rate": 0}}, "balance.rate", "must be greater than 0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], field: str, said: str):
    with pytest.raises(SpecError) as caught:
        model({"type": "moe", "width": 8, **fields})
    assert any(f"ffn.{field}" in problem.path and said in problem.message for problem in caught.value.problems)
