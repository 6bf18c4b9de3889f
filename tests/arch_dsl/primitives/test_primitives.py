"""Norms, positions, feed-forwards, joins and tables against independent implementations and written-out formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl import Call
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Branch, Join, Norm, Position, Primitive, Rotary
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import TARGETS, TOKENS, build, load, randomize, whole_model

D, T = 12, 7
torch_close = torch.testing.assert_close


def made(family: type[Primitive], data: Any, **place: Any) -> nn.Module:
    """A primitive's module in float64 with random parameters, at a place `[batch, time, D]` unless told otherwise."""
    facts: dict[str, Any] = {"d_model": D, "n_layers": 2, "vocab": 19, "max_positions": 10, "std": 0.1}
    facts |= {"residual_std": 0.1, "width": D, "hidden": D, "backend": "reference"} | place
    module = parse(family, data).build(BuildContext(**facts)).double()
    randomize(module)
    return module


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def x() -> Tensor:
    return 1.5 * torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.3


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rmsnorm_is_torchs(x, eps):
    module = made(Norm, {"type": "rmsnorm", "eps": eps})
    theirs = nn.RMSNorm(D, eps=eps, dtype=torch.float64)
    theirs.load_state_dict(module.state_dict())
    assert_close(module(x, Call()), theirs(x))
    assert_close(module(x, Call()), formulas.rmsnorm(x, module.weight, eps))


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_layernorm_is_torchs(x, eps, bias):
    module = made(Norm, {"type": "layernorm", "eps": eps, "bias": bias})
    theirs = nn.LayerNorm(D, eps=eps, bias=bias, dtype=torch.float64)
    theirs.load_state_dict(module.state_dict())
    assert_close(module(x, Call()), theirs(x))
    centred = x - x.mean(-1, keepdim=True)
    formula = centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt() * module.weight
    assert_close(module(x, Call()), formula + module.bias if bias else formula)


@pytest.mark.parametrize(
    ("data", "weight"), [({"type": "rmsnorm"}, 1.0), ({"type": "layernorm"}, 1.0)], ids=["rmsnorm", "layernorm"]
)
def test_norms_start_at_weight_one_and_bias_zero(data, weight):
    module = made(Norm, data)
    for name, value in module.named_parameters():
        assert value.initializer(torch.empty(3), torch.Generator()).tolist() == (
            [weight] * 3 if name == "weight" else [0.0] * 3
        )


def test_learned_positions_add_the_rows_of_a_table(x):
    module = made(Position, "learned")
    assert module.table.shape == (10, D)
    for t in range(T):
        assert_close(module(x, Call())[:, t], x[:, t] + module.table[t])
    chosen = torch.tensor([9, 3, 0, 1, 1, 8, 2])
    for t, row in enumerate(chosen.tolist()):
        assert_close(module(x, Call(chosen))[:, t], x[:, t] + module.table[row])


@pytest.mark.parametrize("theta", [10_000.0, 50.0])
def test_sinusoidal_positions_follow_the_formula(x, theta):
    module = made(Position, {"type": "sinusoidal", "theta": theta})
    for call, positions in ((Call(), range(T)), (Call(torch.arange(3, 3 + T)), range(3, 3 + T))):
        added = module(x, call) - x
        for t, position in enumerate(positions):
            for i in range(D // 2):
                angle = position * theta ** (-2 * i / D)
                assert added[0, t, i].item() == pytest.approx(math.sin(angle), abs=1e-5)
                assert added[0, t, i + D // 2].item() == pytest.approx(math.cos(angle), abs=1e-5)


@pytest.mark.parametrize("theta", [10_000.0, 100.0])
@pytest.mark.parametrize(("fraction", "dims"), [(1.0, D), (0.5, 6), (1 / 3, 4)], ids=["whole", "half", "third"])
def test_rope_turns_pairs_of_channels(theta, fraction, dims):
    module = made(Rotary, {"type": "rope", "theta": theta, "fraction": fraction}, heads=3)
    x = torch.randn(2, T, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_close(module(x, Call()), formulas.rope(x, theta, dims), 1e-5)
    assert_close(module(x, Call(torch.arange(4, 4 + T))), formulas.rope(x, theta, dims, first=4), 1e-5)
    assert_close(module(x, Call())[..., dims:], x[..., dims:])
    assert_close(module(x, Call()).norm(dim=-1), x.norm(dim=-1), 1e-6)


def test_rope_is_that_of_llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=3 * D, num_attention_heads=3, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    q, k = (torch.randn(2, T, 3, D, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
    positions = torch.tensor([0, 1, 2, 5, 17, 60, 100])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.expand(2, -1))
    theirs = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    module = made(Rotary, {"type": "rope", "theta": 500.0}, heads=3).float()
    for ours, other in zip((q, k), theirs, strict=True):
        assert_close(module(ours, Call(positions)).transpose(1, 2), other, 1e-5)


@pytest.mark.parametrize("positional", ["rope", "alibi"])
def test_relative_positions_do_not_see_a_shift_of_all(positional):
    attention = {"heads": 4, "kv_heads": 2, "positional": positional}
    module = build(load({"d_model": 16, "n_layers": 2, "block": {"attention": attention}}))
    assert_close(module(TOKENS), module(TOKENS, Call(torch.arange(12) + 50)), 1e-4)
    assert (module(TOKENS) - module(TOKENS, Call(2 * torch.arange(12)))).abs().max() > 1e-2


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("activation", formulas.ACTIVATIONS)
def test_mlp_follows_the_formula(x, activation, bias):
    module = made(Branch, {"type": "mlp", "width": 20, "activation": activation, "bias": bias})
    hidden = formulas.ACTIVATIONS[activation](_linear(x, module.input_projection))
    assert_close(module(x, Call()), x + _linear(hidden, module.output_projection))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("activation", formulas.ACTIVATIONS)
def test_glu_follows_the_formula(x, activation, bias):
    module = made(Branch, {"type": "glu", "width": 20, "activation": activation, "bias": bias})
    gate = formulas.ACTIVATIONS[activation](_linear(x, module.gate_projection))
    hidden = gate * _linear(x, module.input_projection)
    assert_close(module(x, Call()), x + _linear(hidden, module.output_projection))


def _linear(x: Tensor, layer: nn.Module) -> Tensor:
    y = torch.einsum("bti,oi->bto", x, layer.weight)
    return y if layer.bias is None else y + layer.bias


def test_sites_of_a_feed_forward_act_in_order(x):
    sites = {"pre": ["rmsnorm"], "inner": ["layernorm"], "post": ["rmsnorm", {"type": "gate", "activation": "silu"}]}
    module = made(Branch, {"type": "mlp", "width": 20, "activation": "relu", **sites})
    read = formulas.rmsnorm(x, module.pre.rmsnorm.weight, 1e-6)
    inner = _layernorm(_linear(read, module.input_projection).clamp(min=0), module.inner.layernorm)
    update = formulas.rmsnorm(_linear(inner, module.output_projection), module.post.rmsnorm.weight, 1e-6)
    gate = formulas.ACTIVATIONS["silu"](_linear(read, module.post.gate.projection))
    assert_close(module(x, Call()), x + update * gate)


def _layernorm(x: Tensor, layer: nn.Module) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def test_add_adds(x):
    update = x.flip(1)
    assert_close(made(Join, "add")(x, update, Call()), x + update)


def test_add_norm_norms_the_sum(x):
    update = x.flip(1)
    module = made(Join, {"type": "add_norm", "norm": "layernorm"})
    assert_close(module(x, update, Call()), _layernorm(x + update, module.norm))


def test_parallel_sums_updates_that_read_the_same_stream(x):
    group = {
        "pre": ["rmsnorm"],
        "post": ["layernorm"],
        "mlp": {"width": 20, "activation": "relu", "pre": ["layernorm"]},
        "glu": {"width": 16},
    }
    module = made(Branch, {"type": "parallel", **group})
    read = formulas.rmsnorm(x, module.pre.rmsnorm.weight, 1e-6)
    mlp, glu = module.members["mlp"], module.members["glu"]
    first = _linear(
        _linear(_layernorm(read, mlp.pre.layernorm), mlp.input_projection).clamp(min=0), mlp.output_projection
    )
    gate = formulas.ACTIVATIONS["silu"](_linear(read, glu.gate_projection))
    second = _linear(gate * _linear(read, glu.input_projection), glu.output_projection)
    assert_close(module(x, Call()), x + _layernorm(first + second, module.post.layernorm))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_come_from_the_tied_table_or_an_own_one(tied, bias):
    module = build(load({**whole_model(), "unembedding": {"tied": tied, "bias": bias}}))
    table = module.embedding if tied else module.unembedding.weight
    expected = torch.einsum("btd,vd->btv", module.hidden(TOKENS), table)
    assert_close(module(TOKENS), expected + module.bias if bias else expected)
    assert ("unembedding.weight" in dict(module.named_parameters())) is not tied


def test_loss_is_cross_entropy_whole_and_in_chunks(monkeypatch):
    module = build(load(whole_model()))
    targets = TARGETS.clone()
    targets[0, 3] = targets[1, 5] = -100
    every = -module(TOKENS).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    wholes = [module.loss(TOKENS, targets), module.loss(TOKENS, targets, reduction="none")]
    gradient = torch.autograd.grad(wholes[0], module.embedding)[0]
    assert_close(wholes[0], every.sum() / 22)
    assert_close(wholes[1], every)
    monkeypatch.setattr(arch_dsl.model.model, "LOSS_CHUNK", 19 * 5)  # 5 rows at a time, the last chunk shorter
    assert_close(module.loss(TOKENS, targets), wholes[0])
    assert_close(module.loss(TOKENS, targets, reduction="none"), wholes[1])
    assert_close(torch.autograd.grad(module.loss(TOKENS, targets), module.embedding)[0], gradient)


@pytest.mark.parametrize("rows", [100, 5], ids=["whole", "in chunks"])
def test_z_loss_is_the_mean_square_of_log_z_beside_the_same_cross_entropy(monkeypatch, rows):
    module = build(load(whole_model()))
    targets = TARGETS.clone()
    targets[0, 3] = targets[1, 5] = -100
    squares = module(TOKENS).logsumexp(-1).square() * (targets != -100)
    monkeypatch.setattr(arch_dsl.model.model, "LOSS_CHUNK", 19 * rows)
    call = Call()
    both, alone = module.loss(TOKENS, targets, call, z_loss=0.1), module.loss(TOKENS, targets)
    assert_close(both, alone)
    assert_close(call.losses["z_loss"], 0.1 * squares.sum() / 22)
    assert not call.losses["z_loss"].requires_grad, "or its gradient, which the loss has, would count twice"
    weighed = [torch.autograd.grad(loss, module.embedding)[0] for loss in (both, alone, squares.sum())]
    assert_close(weighed[0], weighed[1] + weighed[2] * 0.1 / 22)
