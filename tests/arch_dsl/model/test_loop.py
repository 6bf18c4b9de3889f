"""Looped layers against the same layers one after another, written out and as a deeper model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab import arch_dsl
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.compiler.generation import generate
from archlab.arch_dsl.inspection.slots import slots
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.parts.watching import Sight, Watch
from tests.arch_dsl.conformance import TARGETS, TOKENS, build, load

BLOCK: dict[str, Any] = {
    "attention": {"heads": 4, "kv_heads": 2, "pre": ["rmsnorm"], "query": ["rope"], "key": ["rope"]},
    "ffn": {"type": "mlp", "width": 24, "pre": ["rmsnorm"]},
}


def model(n_layers: int, loop: Any = None, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": 16, "n_layers": n_layers, "vocab": 19, "max_positions": 12}
    return {**sizes, "block": BLOCK, "final": ["rmsnorm"], "loop": loop, **more}


def places(n_layers: int, turns: int, prelude: int, coda: int) -> list[int]:
    """Which layer stands at each place of the model without a loop."""
    layers = list(range(n_layers))
    return layers[:prelude] + turns * layers[prelude : n_layers - coda] + layers[n_layers - coda :]


@pytest.mark.parametrize(
    ("n_layers", "turns", "prelude", "coda"), [(2, 3, 0, 0), (1, 4, 0, 0), (4, 2, 1, 1), (3, 3, 0, 2)]
)
@pytest.mark.parametrize("streams", [None, {"type": "manifold", "n": 2, "dynamic": False, "iterations": 2}])
def test_a_loop_is_a_deeper_model_whose_layers_are_alike(
    n_layers: int, turns: int, prelude: int, coda: int, streams: Any
):
    loop, order = {"turns": turns, "prelude": prelude, "coda": coda}, places(n_layers, turns, prelude, coda)
    looped, deep = load(model(n_layers, loop, streams=streams)), load(model(len(order), streams=streams))
    one, many = build(looped), build(deep)
    ours, theirs = dict(one.named_parameters()), dict(many.named_parameters())
    owners = {f"block.{place}.": f"block.{layer}." for place, layer in enumerate(order)}
    same = {name: _renamed(name, owners) for name in theirs}
    with torch.no_grad():
        for name, value in theirs.items():
            value.copy_(ours[same[name]])
    torch.testing.assert_close(one(TOKENS), many(TOKENS), rtol=1e-12, atol=1e-12)
    for module in (one, many):
        module.loss(TOKENS, TARGETS).backward()
    for name, value in ours.items():
        found = sum(theirs[other].grad for other in theirs if same[other] == name)
        torch.testing.assert_close(value.grad, found, rtol=1e-9, atol=1e-12, msg=name)
    mine, unrolled = arch_dsl.cost(looped, 12), arch_dsl.cost(deep, 12)
    for name in ("flops_matmul", "flops_model", "activations", "cache"):
        assert getattr(mine, name) == getattr(unrolled, name), name
    assert mine.parameters == sum(value.numel() for value in ours.values()) < unrolled.parameters


def _renamed(name: str, owners: dict[str, str]) -> str:
    for other, owner in owners.items():
        if name.startswith(other):
            return owner + name.removeprefix(other)
    return name


@pytest.mark.parametrize("inject", ["concat", "sum"])
@pytest.mark.parametrize("n", [0, 3])
def test_what_entered_the_loop_is_injected_before_each_turn(inject: str, n: int):
    """s_i = R(e, s_(i-1)) of arXiv:2502.05171, section 3, from s_0 = 0."""
    loop = {"turns": 3, "prelude": 1, "coda": 1, "inject": inject}
    module: Any = build(load(model(4, loop, **({"streams": {"type": "hyper", "n": n}} if n else {}))))
    call, blocks = Call(), module.block
    stream = module.embedded(TOKENS)
    entered = blocks[0](torch.stack([stream] * n, 2) if n else stream, call)
    state = 0 * entered
    for _ in range(3):
        if inject == "concat":  # the adapter reads first the state, then what entered
            own, others = module.loop.inject.projection.weight.split(16, 1)
            state = state @ own.T + entered @ others.T
        else:
            state = state + entered
        state = blocks[2](blocks[1](state, call), call)
    last = blocks[3](state, call)
    expected = module.logits(module.final(last.sum(2) if n else last, call, iter(())))
    torch.testing.assert_close(module(TOKENS), expected, rtol=1e-11, atol=1e-11)


LOOP = {"turns": 3, "prelude": 1, "coda": 1, "inject": "concat"}


def test_decoding_holds_what_each_turn_read():
    module = build(load(model(4, LOOP)))
    state = State()
    pieces = [module(TOKENS[:, t : t + 1], Call(state=state)) for t in range(TOKENS.shape[1])]
    torch.testing.assert_close(torch.cat(pieces, 1), module(TOKENS), rtol=1e-10, atol=1e-10)
    held = sorted(name for name, values in state.layers.items() if values)
    assert held == [f"block.{place}" for place in range(1 + 3 * 2 + 1)]
    continued, tokens = generate(module, TOKENS[:, :5], 7), TOKENS[:, :5]
    for _ in range(7):
        tokens = torch.cat([tokens, module(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(continued, tokens)


def test_who_watches_is_told_of_each_turn_as_of_layers_of_their_own():
    seen: list[Sight] = []
    module = build(load(model(4, LOOP)))
    module(TOKENS, Call(watch=Watch(frozenset({"stream"}), seen.append)))
    assert [sight.layer for sight in seen] == list(range(8))


def test_recomputing_layers_changes_no_bit():
    def gradients(recompute: bool) -> list[Tensor | None]:
        module: Any = build(load(model(4, LOOP))).train()
        module.recompute = recompute
        module.loss(TOKENS, TARGETS).backward()
        return [value.grad for value in module.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(gradients(True), gradients(False), strict=True))  # type: ignore[arg-type]


def test_maps_back_to_the_stream_start_as_those_of_so_many_layers_as_a_token_passes():
    looped, deep = (arch_dsl.load(model(*sizes)) for sizes in ((3, {"turns": 4, "prelude": 1}), (9, None)))
    assert [spec.place(spec.context(), "").residual_std for spec in (looped, deep)] == [
        pytest.approx((2 / (5 * 16)) ** 0.5 / 18**0.5)
    ] * 2


@pytest.mark.parametrize(
    ("change", "loop"),
    [
        ({"loop": 4}, {"turns": 4}),
        ({"loop.turns": 5}, {**LOOP, "turns": 5}),
        ({"loop.inject": "sum"}, {**LOOP, "inject": "sum"}),
        ({"loop.inject": "none"}, {"turns": 3, "prelude": 1, "coda": 1}),
        ({"loop": None}, None),
    ],
)
def test_patches_change_it(change: dict[str, Any], loop: Any):
    assert arch_dsl.patch(arch_dsl.load(model(4, LOOP)), change) == arch_dsl.load(model(4, loop))


def test_a_loop_is_one_slot_between_two_models():
    plain, looped, longer = (load(model(4, loop)) for loop in (None, LOOP, {**LOOP, "turns": 4}))
    for before, after in ((plain, looped), (looped, plain), (looped, longer)):
        (slot,) = slots(before, after)
        assert slot.name == "loop"


def test_without_one_a_model_keeps_its_identity():
    assert "loop" not in arch_dsl.dump(load(model(2)))
    assert arch_dsl.identity(load(model(2))) == arch_dsl.identity(load({**model(2), "loop": None}))


def test_an_encoder_and_a_decoder_can_each_have_one():
    stack = {"n_layers": 2, "block": {**BLOCK, "cross_attention": {"heads": 4, "kv_heads": 2}}, "loop": 2}
    encoder = {
        "n_layers": 1,
        "block": {"attention": {"heads": 4, "mask": "full"}},
        "loop": {"turns": 3, "inject": "sum"},
    }
    spec = load({"d_model": 16, "vocab": 19, "max_positions": 12, "encoder": encoder, "decoder": stack})
    module, call = build(spec), Call(source_tokens=TOKENS)
    held = dataclasses.replace(call, state=State())
    pieces = [module(TOKENS[:, t : t + 1], held) for t in range(TOKENS.shape[1])]
    torch.testing.assert_close(torch.cat(pieces, 1), module(TOKENS, call), rtol=1e-10, atol=1e-10)
    found = sum(value.numel() for value in module.parameters())
    assert arch_dsl.cost(spec, 12).parameters == found


REFUSED = {
    "moe": ({"block": {"ffn": {"type": "moe", "width": 12}}}, "loop: ffn is moe, which tells its load"),
    "values": ({"block": {"attention": {"heads": 4, "value": ["value_residual"]}}}, "is value_residual, which takes"),
    "keys": (
        {"block": {"attention": {"heads": 4}}, "overrides": {"1": {"block.attention.kv": "earlier"}}},
        "loop: attention.kv takes keys and values of an earlier layer",
    ),
    "deepnorm": ({"block": {"mlp": {"join": "deepnorm"}}}, "loop: mlp.join is deepnorm, which has a factor"),
    "skips": ({"skips": ["x0_mix"]}, "loop: stands beside skips"),
    "predict": ({"predict": "parallel"}, "loop: stands beside predict"),
    "no layer": ({"loop": {"turns": 2, "prelude": 2, "coda": 1}}, "prelude 2 and coda 1 leave none of the 3 layers"),
    "one turn": ({"loop": 1}, "loop.turns: must be at least 2, found 1"),
    "a word": ({"loop": "twice"}, "loop.turns: must be an integer, found 'twice'"),
}


@pytest.mark.parametrize(("more", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_loop_cannot_have_is_refused(more: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        load({**model(3, 2), **more})
