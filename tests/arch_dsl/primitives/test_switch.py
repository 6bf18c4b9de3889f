"""Switch heads against SwitchHead's sums written as loops, and against the gate that a single expert is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl.conformance.effects import build_as_for_a_gpu
from archlab.arch_dsl.conformance.properties import costs_are_exact, holds_what_its_cost_says, reads_in_pieces
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext, Call
from archlab.arch_dsl.parts.families import Branch
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import TOKENS, Case, build, load, randomize
from tests.arch_dsl.specs import assert_plain_agrees

D, T, HEADS = 16, 5, 4


def branch(backend: str = "reference", **fields: Any) -> nn.Module:
    """A branch in float64 with random parameters."""
    facts: dict[str, Any] = {"d_model": D, "n_layers": 4, "vocab": 19, "max_positions": 12, "std": 0.1}
    ctx = BuildContext(**facts, residual_std=0.1, width=D, hidden=D, backend=backend)
    module = parse(Branch, {"type": "attention", "heads": HEADS, **fields}).build(ctx).double()
    randomize(module)
    return module


def model(**fields: Any) -> arch_dsl.Model:
    attention = {"type": "attention", "heads": HEADS, "pre": ["rmsnorm"], **fields}
    return load({"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": 12, "block": {"attention": attention}})


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def chosen(logits: Tensor, top_k: int, routing: str) -> dict[int, Tensor]:
    """The best experts of one head for one token, and their weights."""
    best = sorted(range(len(logits)), key=lambda e: -logits[e].item())[:top_k]
    if routing == "sigmoid":
        return {e: formulas.sigmoid(logits[e]) for e in best}
    total = sum(logits[e].exp() for e in best)
    return {e: logits[e].exp() / total for e in best}


def by_hand(module: nn.Module, x: Tensor, kv_heads: int, switch: list[dict[str, Any]]) -> Tensor:
    """arXiv:2312.07987, section 2: every head, token and expert by itself."""
    items = {name: (item, "_".join(item["of"])) for item in switch for name in item["of"]}
    heads = {"query": HEADS, "key": kv_heads, "value": kv_heads, "output": HEADS}

    def weights(name: str, row: int, t: int, head: int) -> dict[int, Tensor]:
        if name not in items:
            return {0: torch.ones((), dtype=x.dtype)}
        item, path = items[name]
        router = module.switch[path].projection.weight.reshape(heads[name], item["experts"], D)
        return chosen(router[head] @ x[row, t], item["top_k"], item.get("routing", "sigmoid"))

    def mapped(name: str) -> Tensor:
        """Queries, keys or values `[2, T, heads, D / HEADS]`."""
        experts = items[name][0]["experts"] if name in items else 1
        weight = getattr(module, f"{name}_projection").weight.reshape(heads[name], experts, -1, D)
        rows = []
        for row in range(2):
            for t in range(T):
                for head in range(heads[name]):
                    found = weights(name, row, t, head)
                    rows.append(sum(s * (weight[head, e] @ x[row, t]) for e, s in found.items()))
        return torch.stack(rows).reshape(2, T, heads[name], -1)

    q, k, v = (mapped(name) for name in ("query", "key", "value"))
    out = formulas.attend(q, k, v)
    experts = items["output"][0]["experts"] if "output" in items else 1
    weight = module.output_projection.weight.reshape(D, HEADS, experts, -1)
    result = x.clone()
    for row in range(2):
        for t in range(T):
            for head in range(HEADS):
                for e, s in weights("output", row, t, head).items():
                    result[row, t] = result[row, t] + s * (weight[:, head, e] @ out[row, t, head])
    return result


ROPE: dict[str, Any] = {"query": ["rope"], "key": ["rope"]}
FORMS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "values": (4, [{"of": ["value"], "experts": 4, "top_k": 2}]),
    "all_values_grouped": (2, [{"of": ["value"], "experts": 3, "top_k": 3}]),
    "keys_and_values": (2, [{"of": ["key", "value"], "experts": 3, "top_k": 3}]),
    "some_keys_and_values": (1, [{"of": ["key", "value"], "experts": 5, "top_k": 2}]),
    "paper": (
        4,
        [{"of": ["value"], "experts": 3, "top_k": 2}, {"of": ["output"], "experts": 4, "top_k": 2}],
    ),
    "whole_output": (2, [{"of": ["output"], "experts": 3, "top_k": 3, "routing": "softmax"}]),
    "one_of_several": (2, [{"of": ["query", "output"], "experts": 3, "top_k": 1}]),
    "all_alike": (4, [{"of": ["query", "key", "value", "output"], "experts": 3, "top_k": 2, "routing": "softmax"}]),
}


@pytest.mark.parametrize("name", FORMS)
def test_follows_the_sums_of_the_paper_with_its_gradients(x: Tensor, name: str):
    kv_heads, switch = FORMS[name]
    module = branch(kv_heads=kv_heads, switch=switch)
    expected = by_hand(module, x, kv_heads, switch)
    pull = torch.randn(expected.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad((expected * pull).sum(), [*module.parameters()])
    for other in (module, branch("auto", kv_heads=kv_heads, switch=switch)):
        found = other(x, Call())
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        own = torch.autograd.grad((found * pull).sum(), [*other.parameters()])
        for (path, _), mine, theirs in zip(other.named_parameters(), own, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11, msg=path)


def test_one_expert_of_one_is_a_headwise_gate_of_the_values(x: Tensor):
    """Row 6 of table 6 of arXiv:2505.06708 is row 11 of its table 1."""
    gated = branch(kv_heads=2, value=[{"type": "gate", "granularity": "headwise"}], **ROPE)
    switched = branch(kv_heads=2, switch=[{"of": "value", "experts": 1, "top_k": 1}], **ROPE)
    moved = {"value.gate.projection.weight": "switch.value.projection.weight"}
    switched.load_state_dict({moved.get(name, name): value for name, value in gated.state_dict().items()})
    torch.testing.assert_close(switched(x, Call()), gated(x, Call()), atol=1e-14, rtol=1e-14)
    starts = [
        arch_dsl.compile(model(**fields), seed=3).block[0].attention.value_projection.weight
        for fields in ({}, {"switch": {"experts": 1, "top_k": 1}})
    ]
    assert torch.equal(*starts)


CASES = {
    "window": {"switch": [{"of": ["key", "value"]}, {"of": "output"}], "mask": {"type": "window", "size": 4}},
    "sites": {"switch": [{"of": "value"}, {"of": "output", "experts": 3, "top_k": 3}], "value": ["gate", "shift"],
              "sdpa": ["rmsnorm", "gate"], "scores": ["forget_gate"], "post": ["gate"]},
    "same_choice": {"switch": [{"of": True, "experts": 3}], "memory": 2},
    "differential": {"type": "differential_attention", "heads": 2, "switch": [{"of": "query"}, {"of": "value"}]},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decodes_counts_and_is_written_beside_other_parts(name: str):
    own = model(**{"kv_heads": CASES[name].get("heads", HEADS), **ROPE, **CASES[name]})
    case = Case(name, own, ("attention",), plain=False)
    assert [holds(case) for holds in (costs_are_exact, reads_in_pieces, holds_what_its_cost_says)] == ["", "", ""]
    assert_plain_agrees(own)


def test_maps_are_one_product_where_launches_cost():
    """But for those of which tokens choose experts, which get the branch's input as it is."""
    group = {
        "parallel": {
            "pre": ["rmsnorm"],
            "attention": {"heads": HEADS, "switch": [{"of": "value"}, {"of": "key", "experts": 2, "top_k": 2}]},
            "mlp": {"width": 8},
        }
    }
    own = load({"d_model": D, "n_layers": 1, "vocab": 19, "max_positions": 12, "block": group})
    torch.testing.assert_close(build_as_for_a_gpu(own)(TOKENS), build(own)(TOKENS), atol=1e-11, rtol=1e-11)


def test_counts_what_a_token_meets():
    """A head of the values has 8 experts, of which each token meets 2."""
    plain, switched = model(kv_heads=2), model(kv_heads=2, switch={"experts": 8, "top_k": 2})
    before, after = (arch_dsl.cost(each, 10) for each in (plain, switched))
    one, router = D * 2 * 4, D * 2 * 8
    assert after.parameters - before.parameters == 2 * (7 * one + router)
    assert after.active - before.active == 2 * (one + router)
    assert after.flops_model - before.flops_model == 2 * 10 * 2 * (one + router)


def test_narrow_precision_chooses_by_wide_logits(x: Tensor):
    own = arch_dsl.compile(model(switch=[{"of": "value"}, {"of": "output"}], kv_heads=2)).eval()
    exact = own(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = own(TOKENS)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), exact, atol=2e-2, rtol=2e-2)
