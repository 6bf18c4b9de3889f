"""Mamba, Mamba-3, RWKV-4, RWKV-7, xLSTM and token shift: padding, counts of papers, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import SpecError, zoo
from archlab.arch_dsl.parts.context import Call
from tests.arch_dsl.conformance import LENGTH, TOKENS, build, load

BLOCKS: dict[str, dict[str, Any]] = {
    "mamba": {"mamba": {}},
    "selective_scan": {"selective_scan": {"key": ["rmsnorm"]}},
    "rwkv4": {"rwkv4": {}, "channel_mix": {}},
    "rwkv7": {"rwkv7": {"head_dim": 8}},
    "mamba3": {"mamba3": {"head_dim": 8, "value_dim": 8}},
    "mlstm": {"mlstm": {"heads": 2}},
    "slstm": {"slstm": {"heads": 2}},
    "token_shift": {"mlp": {"pre": ["rmsnorm", "token_shift"]}},
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def model_of(name: str) -> arch_dsl.Model:
    norm = {} if name == "token_shift" else {"norm": "rmsnorm"}
    return load({"d_model": 16, "n_layers": 2, "vocab": 19, "max_positions": 2 * LENGTH, "block": norm | BLOCKS[name]})


@every_block
def test_padding_at_the_start_changes_nothing(name: str):
    module = build(model_of(name))
    padded = torch.cat([TOKENS[:, :3], TOKENS], 1)
    padding = torch.arange(LENGTH + 3).expand(2, -1) < 3
    torch.testing.assert_close(module(padded, Call(padding=padding))[:, 3:], module(TOKENS), rtol=1e-9, atol=1e-9)


@every_block
def test_nothing_reads_padding_wherever_it_stands(name: str):
    module = build(model_of(name))
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, 4:6] = padding[1, 0] = True
    other = TOKENS.masked_fill(padding, 7)
    before, after = module(TOKENS, Call(padding=padding)), module(other, Call(padding=padding))
    assert torch.equal(before[~padding], after[~padding])
    assert not torch.equal(before[padding], after[padding])


def test_token_shift_is_its_formula_and_starts_in_the_middle():
    model = load({"d_model": 16, "n_layers": 1, "vocab": 19, "block": {"mlp": {"pre": ["token_shift"]}}})
    shift = arch_dsl.compile(model).block[0].mlp.pre.token_shift
    x = torch.randn(2, 5, 16)
    before = torch.cat([torch.zeros(2, 1, 16), x[:, :-1]], 1)
    torch.testing.assert_close(shift(x, Call()), (x + before) / 2)
    with torch.no_grad():
        shift.mix.copy_(torch.linspace(-1, 2, 16))
    torch.testing.assert_close(shift(x, Call()), shift.mix * x + (1 - shift.mix) * before)


def test_token_shift_keeps_documents_apart_where_the_branch_does():
    attention = {"heads": 2, "mask": {"type": "causal", "documents": True}, "key": ["token_shift"]}
    module = build(load({"d_model": 16, "n_layers": 1, "vocab": 19, "block": {"attention": attention}}))
    documents = (torch.arange(LENGTH) >= 5).long().expand(2, -1)
    together = module(TOKENS, Call(documents=documents))
    torch.testing.assert_close(together[:, 5:], module(TOKENS[:, 5:]), rtol=1e-9, atol=1e-9)


# arXiv:2305.13048, the table of architectures: parameters, and FLOPs of a forward pass per token
RWKV = {
    "169m": (1.693e8, 2.613e8),
    "430m": (4.304e8, 7.573e8),
    "1.5b": (1.515e9, 2.823e9),
    "3b": (2.985e9, 5.710e9),
    "7b": (7.393e9, 1.437e10),
    "14b": (1.415e10, 2.778e10),
}


@pytest.mark.parametrize("size", RWKV)
def test_sizes_and_flops_are_those_of_rwkv(size: str):
    model = arch_dsl.resolve(zoo.load("rwkv4", size))
    cost = arch_dsl.cost(model, 1024)
    wide, deep, words = model.d_model, model.n_layers, model.vocab
    assert cost.parameters == 2 * words * wide + 13 * wide**2 * deep + wide * (11 * deep + 4)  # its formula
    parameters, flops = RWKV[size]
    assert float(f"{cost.parameters:.3e}") == parameters
    assert float(f"{cost.figures(1024)['flops_per_token']:.3e}") == flops


def test_decoding_holds_the_same_however_much_was_read():
    mamba, rwkv = (arch_dsl.resolve(zoo.load(name, "tiny")) for name in ("mamba", "rwkv4"))
    for tokens in (8, 64, 512):
        assert arch_dsl.cost(mamba, tokens).cache == 2 * (64 * 16 + 3 * 64)  # the state and the last inputs of the conv
        assert arch_dsl.cost(rwkv, tokens).cache == 2 * (2 * 32 + 2 * 32)  # mean and weight, two last inputs


def test_a_mamba_layer_costs_what_its_parts_do():
    model = arch_dsl.resolve(zoo.load("mamba", "130m"))
    layer = arch_dsl.cost(model, 2048).children["stack"].children["layer (x24)"].children["mamba"]
    wide, inner, state, rank = 768, 1536, 16, 48
    maps = 3 * wide * inner + inner * (2 * state + rank) + rank * inner  # values, gate, output; B, C, dt
    assert layer.parameters == maps + inner * (1 + 4 + 1 + state + 1) + wide  # dt's bias, conv, A, D; the norm
    assert layer.flops_matmul == 2048 * (2 * maps + 2 * inner * state)
    assert layer.flops_model == 2048 * (2 * maps + 5 * inner * state)


@pytest.mark.parametrize(
    ("branch", "said"),
    [
        ({"type": "mamba", "dt_max": 1e-4}, "block.branch.dt_max: must be at least dt_min 0.001, found 0.0001"),
        ({"type": "mamba", "sdpa": [{"type": "gate", "granularity": "headwise"}]}, "a headwise gate needs heads"),
        ({"type": "mamba", "state": 0}, "state: must be at least 1"),
        ({"type": "rwkv4", "inner": ["shift"]}, "'shift' is not a norm or gate or scale"),
        ({"type": "rwkv4", "zero": ["query"]}, "receptance, key, value, output"),
        ({"type": "channel_mix", "width": -1}, "width: must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(branch: dict[str, Any], said: str):
    with pytest.raises(SpecError) as caught:
        load({"d_model": 16, "n_layers": 1, "vocab": 19, "block": {"branch": branch}})
    assert said in str(caught.value)
