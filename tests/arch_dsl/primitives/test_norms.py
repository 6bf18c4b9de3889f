"""Norms, scales and joins against written-out formulas, torch, and the models that use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab.arch_dsl import Call
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Carry, Join, Norm, Scale
from tests.arch_dsl import formulas
from tests.arch_dsl.primitives.test_primitives import assert_close, made

B, T, H, D = 2, 7, 3, 12
HEADS = {"heads": H}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return 1.5 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3


@pytest.fixture
def x() -> Tensor:
    return drawn(B, T, D)


@pytest.fixture
def heads() -> Tensor:
    """`[batch, time, heads, head_dim]`."""
    return drawn(B, T, H, D)


def starts(family: Any, data: Any, **place: Any) -> dict[str, list[float]]:
    """The distinct initial values of each parameter."""
    found = {}
    for name, value in made(family, data, **place).named_parameters():
        found[name] = value.initializer(torch.empty(value.shape), torch.Generator()).unique().tolist()
    return found


def layernorm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm_without_weight_only_normalises(x, kind):
    fields = {"weight": False} if kind == "rmsnorm" else {"weight": False, "bias": False}
    module = made(Norm, {"type": kind, **fields})
    assert list(module.parameters()) == []
    expected = formulas.rmsnorm(x, torch.ones(D), 1e-6) if kind == "rmsnorm" else layernorm(x, 1e-5)
    assert_close(module(x, Call()), expected)


def test_layernorm_may_have_a_bias_alone(x):
    module = made(Norm, {"type": "layernorm", "weight": False})
    assert_close(module(x, Call()), layernorm(x, 1e-5) + module.bias)


def test_rmsnorm_with_unit_offset_is_gemmas(x):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    module = made(Norm, {"type": "rmsnorm", "unit_offset": True})
    theirs = GemmaRMSNorm(D, eps=1e-6).double()
    assert starts(Norm, {"type": "rmsnorm", "unit_offset": True}) == {"weight": [0.0]}
    theirs.load_state_dict(module.state_dict())
    assert_close(module(x, Call()), theirs(x), 1e-6)  # theirs computes in float32


def test_norms_over_all_heads_are_olmo2s(heads):
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    module = made(Norm, {"type": "rmsnorm", "over": "heads"}, **HEADS)
    theirs = Olmo2RMSNorm(H * D, eps=1e-6).double()
    theirs.load_state_dict(module.state_dict())
    assert_close(module(heads, Call()).flatten(-2), theirs(heads.flatten(-2)), 1e-6)


def test_layernorm_over_all_heads_is_torchs(heads):
    module = made(Norm, {"type": "layernorm", "over": "heads"}, **HEADS)
    theirs = nn.LayerNorm(H * D, dtype=torch.float64)
    theirs.load_state_dict(module.state_dict())
    assert_close(module(heads, Call()).flatten(-2), theirs(heads.flatten(-2)))


def test_rmsnorm_per_head_has_weights_of_its_own_for_every_head(heads):
    for offset in (False, True):
        module = made(Norm, {"type": "rmsnorm", "per_head": True, "unit_offset": offset}, **HEADS)
        assert module.weight.shape == (H, D)
        for head in range(H):
            expected = formulas.rmsnorm(heads[:, :, head], module.weight[head] + offset, 1e-6)
            assert_close(module(heads, Call())[:, :, head], expected)


def test_groupnorm_is_torchs_with_a_group_per_head(heads):
    module = made(Norm, "groupnorm", **HEADS)
    theirs = nn.GroupNorm(H, H * D, dtype=torch.float64)
    theirs.load_state_dict({name: value.flatten() for name, value in module.state_dict().items()})
    assert_close(module(heads, Call()), theirs(heads.reshape(B * T, H * D)).view_as(heads))


def test_weights_of_norms_are_never_decayed():
    for data in ("rmsnorm", "groupnorm", {"type": "dynamic_tanh", "per_head": True}):
        module = made(Norm, data, **HEADS)
        assert all(value.ndim < 2 or value.decay is False for value in module.parameters())


def test_per_head_norm_keeps_the_dtype_of_a_narrow_tensor(heads):
    for data in ({"type": "rmsnorm", "per_head": True}, "groupnorm", "l2", "scalenorm", "dynamic_tanh"):
        module = made(Norm, data, **HEADS)
        narrow = heads.bfloat16()
        exact = module(narrow.double(), Call())
        module = module.float()
        assert module(narrow, Call()).dtype == torch.bfloat16
        torch.testing.assert_close(module(narrow, Call()).double(), exact, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_l2_is_length_one(x, heads, eps):
    module = made(Norm, {"type": "l2", "eps": eps})
    assert_close(module(x, Call()), x / ((x * x).sum(-1, keepdim=True) + eps).sqrt())
    if eps < 1e-3:
        assert_close(module(x, Call()), nn.functional.normalize(x, dim=-1), 1e-6)
    over = made(Norm, {"type": "l2", "eps": eps, "over": "heads"}, **HEADS)
    flat = heads.flatten(-2)
    assert_close(over(heads, Call()).flatten(-2), flat / ((flat**2).sum(-1, keepdim=True) + eps).sqrt())


def test_scalenorm_is_one_learned_length(x, heads):
    module = made(Norm, "scalenorm")
    assert [value.numel() for value in module.parameters()] == [1]
    assert_close(module(x, Call()), module.length * x / x.norm(dim=-1, keepdim=True), 1e-6)
    assert starts(Norm, "scalenorm") == {"length": [pytest.approx(D**0.5)]}
    over = {"type": "scalenorm", "over": "heads"}
    assert starts(Norm, over, **HEADS) == {"length": [pytest.approx((H * D) ** 0.5)]}
    module = made(Norm, over, **HEADS)
    assert_close(module(heads, Call()), module.length * heads / heads.norm(dim=(-2, -1), keepdim=True), 1e-6)


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no-weight"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_dynamic_tanh_follows_the_formula(x, heads, weight, bias):
    data = {"type": "dynamic_tanh", "alpha": 0.7, "weight": weight, "bias": bias}
    own = {"weight": [1.0]} if weight else {}
    own |= {"bias": [0.0]} if bias else {}
    assert starts(Norm, data) == {"alpha": [pytest.approx(0.7)], **own}
    for tensor, per_head in ((x, False), (heads, True)):
        module = made(Norm, {**data, "per_head": per_head}, **HEADS)
        expected = 1 - 2 / ((2 * module.alpha * tensor).exp() + 1)
        expected = expected * module.weight if weight else expected
        assert_close(module(tensor, Call()), expected + module.bias if bias else expected)


def test_scale_multiplies_by_a_number_and_a_power_of_the_width(x):
    assert_close(made(Scale, {"type": "scale", "by": -2.5})(x, Call()), -2.5 * x)
    assert_close(made(Scale, {"type": "scale", "width_power": 0.5})(x, Call()), x * D**0.5)
    assert_close(made(Scale, {"type": "scale", "by": 3, "width_power": -1})(x, Call()), 3 * x / D)


def test_clamp_keeps_what_is_within_its_bounds_and_the_gradient_there(x):
    given = x.clone().requires_grad_()
    found = made(Scale, {"type": "clamp", "function": "clamp(x, -0.5, 0.5)"})(given, Call())
    assert_close(found, torch.where(x > 0.5, 0.5, torch.where(x < -0.5, -0.5, x)))
    found.sum().backward()
    assert torch.equal(given.grad, (x.abs() <= 0.5).to(x.dtype))
    assert parse(Scale, {"type": "clamp"}) == parse(Scale, {"type": "feature_map", "function": "clamp(x, -8.0, 8)"})


def test_depth_scale_divides_by_the_root_of_the_layers_number(x):
    for depth in (0, 1, 8):
        assert_close(made(Scale, "depth_scale", depth=depth)(x, Call()), x / (depth + 1) ** 0.5)


def test_softcap_bounds_and_is_a_scale_and_a_score(x):
    module = made(Scale, {"type": "softcap", "cap": 2.0})
    assert_close(module(x, Call()), 2 * (1 - 2 / ((x).exp() + 1)))
    assert module(1e3 * x, Call()).abs().max() <= 2
    assert Scale.members["softcap"] is parse(Scale, {"type": "softcap", "cap": 2.0}).__class__


def test_weighted_join_weighs_both(x):
    update = drawn(B, T, D, seed=2)
    assert_close(made(Join, {"type": "weighted", "stream": 0.8, "update": -3})(x, update, Call()), 0.8 * x - 3 * update)


def test_highway_mixes_by_a_gate_of_the_stream(x):
    update = drawn(B, T, D, seed=2)
    module = made(Join, "highway")
    gate = formulas.sigmoid(torch.einsum("bti,oi->bto", x, module.gate.weight) + module.gate.bias)
    assert_close(module(x, update, Call()), update * gate + x * (1 - gate))
    assert starts(Join, {"type": "highway", "start": -2.5})["gate.bias"] == [-2.5]


@pytest.mark.parametrize("n_layers", [1, 9])
def test_deepnorm_weighs_the_stream_by_the_models_depth(x, n_layers):
    update = drawn(B, T, D, seed=2)
    module = made(Join, {"type": "deepnorm", "norm": "layernorm"}, n_layers=n_layers)
    expected = layernorm((2 * n_layers) ** 0.25 * x + update, 1e-5) * module.norm.weight + module.norm.bias
    assert_close(module(x, update, Call()), expected)


def test_residual_dual_ends_with_both_streams(x):
    first, second = (made(Join, {"type": "residual_dual", "norm": "layernorm"}) for _ in range(2))
    end = made(Carry, {"type": "dual", "norm": "rmsnorm"})
    updates, call = [drawn(B, T, D, seed=seed) for seed in (2, 3)], Call()
    stream = second(first(x, updates[0], call), updates[1], call)
    scale = torch.stack([first.norm.weight, first.norm.bias])
    inner = layernorm(x + updates[0], 1e-5) * scale[0] + scale[1]
    inner = layernorm(inner + updates[1], 1e-5) * second.norm.weight + second.norm.bias
    assert_close(stream, inner)
    assert_close(end(stream, call), inner + formulas.rmsnorm(x + updates[0] + updates[1], end.norm.weight, 1e-6))


@pytest.mark.parametrize("join", ["add_norm", "deepnorm", "residual_dual"])
def test_norm_of_a_join_may_be_shared_by_all_layers(join):
    spec = parse(Join, {"type": join, "norm": {"type": "rmsnorm", "share": "stack"}})
    place = BuildContext(d_model=D, n_layers=2, vocab=9, max_positions=9, std=0.1, residual_std=0.1, width=D, hidden=D)
    modules = [spec.build(place.at(f"block.{depth}.attention.join", depth=depth)) for depth in (0, 1)]
    assert modules[0].norm is modules[1].norm
    fresh = BuildContext(d_model=D, n_layers=2, vocab=9, max_positions=9, std=0.1, residual_std=0.1, width=D, hidden=D)
    costs = [spec.cost(fresh.at(f"block.{depth}.attention", depth=depth), 5).parameters for depth in (0, 1)]
    assert costs == [D, 0]
