"""Mixtures of experts by their formulas: routing, losses, precision, initial values, costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from archlab import arch_dsl
from archlab.arch_dsl import Model
from archlab.arch_dsl.conformance.effects import randomize
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.primitives.balance import Switch

TOKENS = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(2))
MOE = {"type": "moe", "experts": 5, "top_k": 2, "width": 24}


def written(ffn: dict[str, Any], **more: Any) -> Model:
    """A model of two layers, the second of which has experts."""
    block = {"norm": "rmsnorm", "attention": {"heads": 4}, "ffn": {"type": "swiglu", "width": 40}}
    data = {"d_model": 32, "n_layers": 2, "vocab": 50, "max_positions": 16, "block": block, "init": {"std": 0.02}}
    return arch_dsl.load({**data, "overrides": {"1::2": {"block.ffn": ffn}}, **more})


def model(ffn: dict[str, Any]) -> Model:
    """The same, resolved."""
    return arch_dsl.resolve(written(ffn))


def branch(**fields: Any) -> Any:
    """The branch of experts alone, in float64 with random parameters."""
    module = arch_dsl.compile(model({**MOE, **fields}), backend="reference").double()
    randomize(module)
    return module.block[1].ffn


def hidden() -> Tensor:
    """What the experts are given: 3 sequences of 16 tokens."""
    return torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def mixture(moe: Any, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen."""
    logits = x @ moe.router.weight.T + (0 if moe.router.bias is None else moe.router.bias)
    scores = logits.softmax(-1) if moe.routing == "softmax" else logits.sigmoid()
    rank = scores.argsort(-1, descending=True).argsort(-1)
    weights = torch.where(rank < moe.top_k, scores, 0.0)
    if moe.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    e, weights = moe.experts, moe.scale * weights
    given = weights[..., None] * x.unsqueeze(-2) if moe.first else x.unsqueeze(-2)
    gate, value = (
        torch.einsum("bted,ewd->btew", given.expand(*weights.shape, -1), e.get_submodule(f"{n}_projection").weight)
        for n in ("gate", "input")
    )
    each = torch.einsum("btew,edw->bted", nn.functional.silu(gate) * value, e.output_projection.weight)
    return each.sum(-2) if moe.first else (weights[..., None] * each).sum(-2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 1, "normalize": False},
        {"top_k": 3, "normalize": False, "scale": 2.5, "router_bias": True},
        {"top_k": 5},
        {"routing": "sigmoid"},
        {"routing": "sigmoid", "normalize": False},
        {"top_k": 1, "routing": "sigmoid", "normalize": False, "weigh": "inputs"},
        {"top_k": 3, "scale": 2.5, "weigh": "inputs"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_output_is_the_weighted_sum_of_the_chosen_experts(fields: dict[str, Any], backend: str):
    moe = branch(**fields)
    x = hidden().requires_grad_()
    if backend == "torch":
        chosen = arch_dsl.compile(model({**MOE, **fields}), backend="torch").double().block[1].ffn
        chosen.load_state_dict(moe.state_dict())
        moe = chosen
    found, wanted = moe.routed(x, Call()), mixture(moe, x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    values = [x, moe.router.weight, moe.experts.gate_projection.weight, moe.experts.output_projection.weight]
    dout = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    pairs = zip(*(torch.autograd.grad(out, values, dout) for out in (found, wanted)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_softmax_over_the_chosen_is_the_normalised_softmax():
    moe, x = branch(), hidden()
    logits = moe.logits(x.flatten(0, 1))
    best, _ = logits.topk(2)
    chosen, _ = logits.softmax(-1).topk(2)
    torch.testing.assert_close(best.softmax(-1), chosen / chosen.sum(-1, keepdim=True))


def told(moe: Any, call: Call | None = None) -> Call:
    """What a branch leaves in a call."""
    call = call or Call()
    moe.routed(hidden(), call)
    return call


def test_balance_is_that_of_switch_transformers():
    moe = branch(top_k=1, normalize=False, balance={"type": "switch", "coefficient": 0.3})
    probabilities = moe.logits(hidden().flatten(0, 1)).softmax(-1)
    f = torch.stack([(probabilities.argmax(-1) == e).double().mean() for e in range(5)])
    wanted = 0.3 * 5 * (f * probabilities.mean(0)).sum()
    call = told(moe)
    torch.testing.assert_close(call.losses["block.1.ffn.balance"], wanted)
    torch.testing.assert_close(call.measures["block.1.ffn.load"], f)


def test_an_even_router_has_the_loss_of_its_coefficient():
    assigned = torch.full((2, 10, 5), 0.2)
    for over in ("batch", "global_batch", "sequence"):
        assert Switch(coefficient=0.7, over=over).loss(assigned, assigned, None, None) == pytest.approx(0.7)


def test_balance_over_sequences_is_the_mean_of_theirs():
    x = hidden()
    each = []
    for over, parts in (("sequence", [x]), ("batch", x.split(1))):
        moe = branch(balance={"type": "switch", "over": over})
        calls = [Call() for _ in parts]
        for part, call in zip(parts, calls, strict=True):
            moe.routed(part, call)
        each.append(torch.stack([call.losses["block.1.ffn.balance"] for call in calls]).mean())
    torch.testing.assert_close(*each)


def test_global_balance_takes_the_load_of_all_micro_batches_so_far():
    moe, x = branch(balance={"type": "switch", "coefficient": 1.0, "over": "global_batch"}), hidden()
    whole = Call()
    moe.routed(x, whole)
    earlier: dict[str, Tensor] = {}
    for part in x.split(1):
        call = Call(earlier=earlier)
        moe.routed(part, call)
        load, probability = call.measures["block.1.ffn.load"], moe.logits(part[0]).softmax(-1).mean(0)
        earlier = {name: earlier.get(name, 0) + value for name, value in call.measures.items()}
        parts = earlier["block.1.ffn.load"] / earlier["block.1.ffn.load"].sum()
        torch.testing.assert_close(call.losses["block.1.ffn.balance"], 5 * (parts * probability).sum())
        assert not torch.allclose(load, whole.measures["block.1.ffn.load"])
    torch.testing.assert_close(parts, whole.measures["block.1.ffn.load"])


def test_z_loss_and_entropy_are_those_of_the_logits():
    moe = branch(z_loss=0.2)
    logits, call = moe.logits(hidden().flatten(0, 1)), told(moe)
    torch.testing.assert_close(call.losses["block.1.ffn.z_loss"], 0.2 * logits.logsumexp(-1).square().mean())
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    torch.testing.assert_close(call.measures["block.1.ffn.entropy"], entropy)
    assert call.measures["block.1.ffn.dropped"] == 0


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_padding_is_no_part_of_losses_and_measures(over: str):
    moe = branch(z_loss=0.2, balance={"type": "switch", "over": over})
    x = hidden()
    padding = torch.arange(16).expand(3, 16) >= 9
    short, padded = Call(), Call(padding=padding)
    moe.routed(x[:, :9], short)
    moe.routed(x, padded)
    for name in ("losses", "measures"):
        for key, value in getattr(short, name).items():
            torch.testing.assert_close(getattr(padded, name)[key], value)


def test_computing_a_layer_again_changes_no_loss_and_no_gradient():
    found = []
    for again in (False, True):
        moe, call, x = branch(balance="switch", z_loss=0.1), Call(), hidden().requires_grad_()
        out = checkpoint(moe.routed, x, call, use_reentrant=False) if again else moe.routed(x, call)
        losses = torch.stack([value for _, value in sorted(call.losses.items())])
        (out.sum() + losses.sum()).backward()
        found.append((losses.detach(), x.grad, moe.router.weight.grad))
        assert [value.item() for _, value in sorted(call.losses.items())] == losses.tolist()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_losses_of_a_compiled_model_reach_its_call():
    module = arch_dsl.compile(model({**MOE, "balance": "switch", "z_loss": 0.1}))
    plain, captured = Call(), Call()
    module(TOKENS, plain)
    torch._dynamo.reset()
    torch.compile(module, fullgraph=True, backend="aot_eager")(TOKENS, captured)
    assert captured.losses.keys() == plain.losses.keys() == {"block.1.ffn.balance", "block.1.ffn.z_loss"}
    for name, value in plain.losses.items():
        torch.testing.assert_close(captured.losses[name], value)


def test_the_router_stays_in_float32_under_autocast():
    module = arch_dsl.compile(model(MOE), dtype=torch.bfloat16)
    moe, x = module.block[1].ffn, hidden().float()
    wanted = moe.logits(x.flatten(0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        found = moe.logits(x.flatten(0, 1))
        rows = moe.routed(x, Call())
        assert module(TOKENS).isfinite().all()
    assert torch.equal(found, wanted) and rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), moe.routed(x, Call()), rtol=0.1, atol=1e-5)


def test_sigmoids_that_are_all_zero_choose_nothing_and_spoil_nothing():
    fields = {"routing": "sigmoid", "router_bias": True, "balance": {"type": "switch"}}
    module, call = arch_dsl.compile(model({**MOE, **fields})), Call()
    with torch.no_grad():
        module.block[1].ffn.router.bias.fill_(-120.0)
    (module.loss(TOKENS, TOKENS, call) + sum(call.losses.values())).backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in module.parameters())


def test_more_experts_leave_the_initial_values_of_the_others():
    few, many = (dict(arch_dsl.compile(model({**MOE, "experts": n}), seed=3).named_parameters()) for n in (4, 8))
    names = [name for name in few if "experts" in name]
    assert len(names) == 3
    for name in names:
        assert torch.equal(few[name], many[name][:4])
        assert not torch.equal(few[name][0], few[name][1])


def test_active_parameters_are_those_that_a_token_meets():
    dense, sparse = (arch_dsl.cost(model(ffn)) for ffn in ({"type": "swiglu", "width": 48}, MOE))
    assert sparse.active == dense.parameters + 32 * 5  # two experts of width 24, and the router
    assert sparse.parameters == sparse.active + 3 * (3 * 32 * 24)
    assert dense.active == dense.parameters
    assert sparse.flops_model == dense.flops_model + 2 * 1024 * 32 * 5
    shared = arch_dsl.cost(model({**MOE, "shared": 10, "shared_gate": True, "bias": True}))
    biases = 2 * (2 * 24 + 32) + 2 * 10 + 32
    assert shared.active == sparse.active + 3 * 32 * 10 + 32 + biases
    stack = shared.children["stack"]
    assert [part.active == part.parameters for part in stack.children.values()] == [True, False]


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "peri", "deepnorm"])
def test_experts_of_every_other_layer_are_normed_like_the_rest(placement: str):
    patched = arch_dsl.patch(written(MOE, n_layers=4), {"block.norm.placement": placement})
    layers = arch_dsl.resolve(patched).layers()
    assert [layer["ffn"].type for layer in layers] == ["glu", "moe", "glu", "moe"]
    norms = [(layer["ffn"].pre, layer["ffn"].post, layer["ffn"].join) for layer in layers]
    assert norms == [norms[0]] * 4


def test_biases_of_experts_do_not_decay():
    module = arch_dsl.compile(model({**MOE, "bias": True, "router_bias": True}))
    found = {name: getattr(value, "decay", value.ndim >= 2) for name, value in module.named_parameters()}
    moe = {name: decays for name, decays in found.items() if ".1.ffn." in name}
    assert {name for name, decays in moe.items() if decays} == {name for name in moe if name.endswith("weight")} - {
        "block.1.ffn.pre.rmsnorm.weight"
    }
