"""Rotary encodings against transformers, x-transformers and written-out formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions
from x_transformers.x_transformers import RotaryEmbedding
from x_transformers.x_transformers import apply_rotary_pos_emb as x_transformers_rotary

from archlab import arch_dsl
from archlab.arch_dsl import Call
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.parts.context import BuildContext
from archlab.arch_dsl.parts.families import Rotary
from tests.arch_dsl import formulas
from tests.arch_dsl.conformance import TOKENS, build, load

D, T, HEADS = 16, 9, 2
POSITIONS = torch.tensor([0, 1, 2, 5, 17, 60, 100, 101, 205])


def made(data: Any, **place: Any) -> nn.Module:
    facts: dict[str, Any] = {"d_model": HEADS * D, "n_layers": 1, "vocab": 19, "max_positions": 12, "std": 0.1}
    facts |= {"residual_std": 0.1, "width": D, "hidden": HEADS * D, "heads": HEADS, "site": "query"} | place
    return parse(Rotary, data).build(BuildContext(**facts))


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[batch, time, heads, head_dim]`"""
    return torch.randn(2, T, HEADS, D, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_interleaved_pairs_are_those_of_gpt_j(fraction):
    x, dims = drawn(1), int(fraction * D)
    sin, cos = create_sinusoidal_positions(3000, dims)[POSITIONS].expand(2, -1, -1).chunk(2, -1)
    theirs = torch.cat([apply_rotary_pos_emb(x[..., :dims], sin, cos), x[..., dims:]], -1)
    module = made({"type": "rope", "pairs": "interleaved", "fraction": fraction})
    assert_close(module(x, Call(POSITIONS)), theirs)


def test_pairs_differ_by_the_order_of_channels_alone():
    x = drawn(2)
    order = torch.arange(D).view(2, -1).T.flatten()  # 0, D/2, 1, D/2 + 1, …
    half, interleaved = (
        made({"type": "rope", "pairs": pairs})(y, Call()) for pairs, y in (("half", x), ("interleaved", x[..., order]))
    )
    assert_close(half[..., order], interleaved, 0)


SCALINGS = {
    "linear": ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (
        {"type": "dynamic_ntk", "factor": 3.0, "original": 64},
        {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 64},
    ),
    "yarn": (
        {"type": "yarn", "factor": 8.0, "original": 256},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    ),
    "yarn-fields": (
        {"type": "yarn", "factor": 32.0, "original": 4096, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}
        | {"attention_factor": 1.7},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 20.0}
        | {"beta_slow": 2.0, "truncate": False, "attention_factor": 1.7},
    ),
    "llama3": (
        {"type": "llama3", "factor": 8.0, "original": 256},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama3-fields": (
        {"type": "llama3", "factor": 32.0, "original": 8192, "low": 2.0, "high": 3.0},
        {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
        | {"low_freq_factor": 2.0, "high_freq_factor": 3.0},
    ),
}


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
@pytest.mark.parametrize(("ours", "theirs"), SCALINGS.values(), ids=SCALINGS)
def test_scaling_is_that_of_transformers(ours, theirs, theta):
    config = LlamaConfig(
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        rope_parameters={**theirs, "rope_theta": theta},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"), seq_len=206)
    spec = parse(Rotary, {"type": "rope", "theta": theta, "scaling": ours})
    assert_close(spec.scaling.frequencies(theta, D, POSITIONS), expected, 1e-6)
    assert spec.scaling.magnitude() == pytest.approx(factor)
    x = drawn(3)
    angles = POSITIONS[:, None, None] * expected
    cos, sin = angles.cos() * factor, angles.sin() * factor
    a, b = x.chunk(2, -1)
    module = made({"type": "rope", "theta": theta, "scaling": ours})
    assert_close(
        module(x, Call(POSITIONS)), torch.cat([a * cos - b * sin, a * sin + b * cos], -1), 1e-4
    )  # angles of 205 in float32


def test_dynamic_scaling_waits_for_the_original_length():
    scaling = {"type": "dynamic_ntk", "factor": 3.0, "original": T}
    plain, scaled = made("rope"), made({"type": "rope", "scaling": scaling})
    x = drawn(4)
    assert_close(scaled(x, Call()), plain(x, Call()), 0)
    assert (scaled(x, Call(POSITIONS)) - plain(x, Call(POSITIONS))).abs().max() > 0.1


def test_ntk_moves_the_slowest_channel_as_far_as_interpolation():
    scaled, plain = ({"type": "rope", "scaling": s} for s in ({"type": "ntk", "factor": 4.0}, None))
    x = drawn(5, torch.float64)
    moved = formulas.rope(x, 10_000.0 * 4.0 ** (D / (D - 2)), D)
    assert_close(made(scaled)(x, Call()), moved)
    slow, fast = (
        parse(Rotary, data).scaling for data in (scaled, {"type": "rope", "scaling": {"type": "linear", "factor": 4.0}})
    )
    both = [item.frequencies(10_000.0, D, POSITIONS) for item in (slow, fast)]
    assert_close(both[0][-1], both[1][-1], 1e-6)
    assert both[0][0] == 1.0 and made(plain)(x, Call()).shape == x.shape


@pytest.mark.parametrize("theta", [10_000.0, 50.0])
def test_xpos_follows_the_formula(theta):
    q, k = drawn(6, torch.float64), drawn(7, torch.float64)
    data = {"type": "xpos", "theta": theta, "scale_base": 8.0}
    turned = [made(data, site=site)(x, Call()) for site, x in (("query", q), ("key", k))]
    logits = torch.einsum("bihd,bjhd->bhij", *turned)
    for i in range(T):
        for j in range(i + 1):
            expected = torch.zeros(2, HEADS, dtype=torch.float64)
            for c in range(D // 2):
                pairs = [torch.complex(x[:, t, :, 2 * c], x[:, t, :, 2 * c + 1]) for x, t in ((q, i), (k, j))]
                angle = (i - j) * theta ** (-2 * c / D)
                decay = ((2 * c / D + 0.4) / 1.4) ** ((i - j) / 8.0)
                expected += (pairs[0] * pairs[1].conj() * complex(math.cos(angle), math.sin(angle))).real * decay
            assert_close(logits[:, :, i, j], expected)


def test_xpos_is_that_of_x_transformers():
    q, k = drawn(8), drawn(9)
    angles, scale = RotaryEmbedding(D, use_xpos=True, scale_base=8)(torch.arange(T))
    ours = [made({"type": "xpos", "scale_base": 8.0}, site=s)(x, Call()) for s, x in (("query", q), ("key", k))]
    heads = [(q.transpose(1, 2), scale), (k.transpose(1, 2), 1 / scale)]
    theirs = [x_transformers_rotary(x, angles, factor).transpose(1, 2) for x, factor in heads]
    assert_close(torch.einsum("bihd,bjhd->bhij", *ours), torch.einsum("bihd,bjhd->bhij", *theirs))


@pytest.mark.parametrize(
    "data",
    [
        "rope",
        {"type": "rope", "pairs": "interleaved"},
        {"type": "rope", "scaling": {"type": "ntk", "factor": 2.0}},
        "xpos",
    ],
    ids=["half", "interleaved", "ntk", "xpos"],
)
def test_angles_keep_their_precision_in_bfloat16(data):
    far = torch.arange(9) + 50_000
    module = made(data, max_positions=None)
    x = drawn(10).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        turned = module(x, Call(far))
    assert turned.dtype == torch.bfloat16
    exact = module(x.float(), Call(far))
    assert (turned.float() - exact).norm() / exact.norm() < 5e-3


@pytest.mark.parametrize(
    "positional", ["xpos", {"type": "rope", "scaling": {"type": "llama3", "factor": 8, "original": 99}}]
)
def test_relative_positions_do_not_see_a_shift_of_all(positional):
    attention = {"heads": 4, "kv_heads": 2, "positional": positional}
    module = build(load({"d_model": 16, "n_layers": 2, "block": {"attention": attention}}))
    assert_close(module(TOKENS), module(TOKENS, Call(torch.arange(12) + 50)), 1e-4)
    assert (module(TOKENS) - module(TOKENS, Call(2 * torch.arange(12)))).abs().max() > 1e-2


def test_learned_positions_stand_behind_an_offset():
    module = build(
        load(
            {
                "d_model": 16,
                "n_layers": 1,
                "block": {"ffn": {"type": "mlp"}},
                "embed": [{"type": "learned", "offset": 2}],
            }
        )
    )
    table = module.embed.learned.table
    assert table.shape == (14, 16)
    x, site = torch.zeros(2, 12, 16, dtype=torch.float64), module.embed.learned
    assert_close(site(x, Call()), table[2:].expand(2, -1, -1), 0)
    assert_close(site(x, Call(torch.arange(12).flip(0))), table[2:].flip(0).expand(2, -1, -1), 0)


def test_defaults_of_added_fields_are_no_part_of_the_identity():
    plain, written = (
        {"d_model": 16, "n_layers": 1, "vocab": 9, "block": {"attention": {"heads": 2, "positional": p}}}
        for p in ("rope", {"type": "rope", "pairs": "half", "scaling": None})
    )
    assert arch_dsl.identity(arch_dsl.load(plain)) == arch_dsl.identity(arch_dsl.load(written))
