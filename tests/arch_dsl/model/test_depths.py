"""Mixture of depths against the formula with masks in place of chosen tokens, and against itself token by token."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from archlab import arch_dsl, kernels
from archlab.arch_dsl import Call, SpecError
from archlab.arch_dsl.compiler.generation import generate
from archlab.arch_dsl.inspection.slots import slots
from archlab.arch_dsl.inspection.text_tree import tree
from archlab.arch_dsl.model.depths import Depths
from archlab.arch_dsl.parts.context import State
from archlab.arch_dsl.plain import Unexportable, to_python
from archlab.arch_dsl.tree.block import Branches
from tests.arch_dsl.conformance import TARGETS, TOKENS, build, load

BLOCK: dict[str, Any] = {
    "attention": {"heads": 4, "kv_heads": 2, "pre": ["rmsnorm"], "query": ["rope"], "key": ["rope"]},
    "ffn": {"type": "mlp", "width": 24, "pre": ["rmsnorm"]},
}
BATCH, TIME = TOKENS.shape
PADDING = torch.arange(TIME) >= torch.tensor([[TIME], [7]])


def model(depths: Any, n_layers: int = 2, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": 16, "n_layers": n_layers, "vocab": 19, "max_positions": TIME}
    return {**sizes, "block": BLOCK, "final": ["rmsnorm"], "depths": depths, **more}


# The formula. Nothing is gathered: all tokens are computed, and those that are not chosen are masked.


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """x `[batch, time, heads, 4]` by the positions 0, 1, 2, …, whose angles are numbers in float32."""
    turns = torch.arange(TIME)[:, None] * 10000 ** -torch.tensor([0.0, 0.5])
    cos, sin = turns.cos()[:, None].to(x.dtype), turns.sin()[:, None].to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def layer(p: dict[str, Tensor], x: Tensor, chosen: Tensor, window: int) -> Tensor:
    """What attention and feed-forward add to the tokens, each of which reads the last `window` chosen ones."""
    heads = {"query": 4, "key": 2, "value": 2}
    read = rms(x, p["attention.pre.rmsnorm.weight"])
    q, k, v = ((read @ p[f"attention.{n}_projection.weight"].T).unflatten(-1, (h, 4)) for n, h in heads.items())
    q, k, v = rotated(q), rotated(k).repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    rank = chosen.long().cumsum(1)  # the number of a token among the chosen
    back = rank[:, :, None] - rank[:, None, :]
    seen = chosen[:, None, :] & (torch.ones(TIME, TIME).tril() > 0) & (back < window) | torch.eye(TIME).bool()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    mixed = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    first = mixed @ p["attention.output_projection.weight"].T
    hidden = F.gelu(rms(x + first, p["ffn.pre.rmsnorm.weight"]) @ p["ffn.input_projection.weight"].T)
    return first + hidden @ p["ffn.output_projection.weight"].T


def formula(module: Any, spec: Depths, training: bool, window: int) -> tuple[Tensor, Tensor]:
    """Logits, and the sum of the losses of routers."""
    p = dict(module.named_parameters())
    x, lost = p["embedding"][TOKENS], torch.zeros((), dtype=torch.float64)
    everyone = torch.ones(BATCH, TIME).bool()
    for depth in range(2):
        own = {name.removeprefix(f"block.{depth}."): value for name, value in p.items()}
        if depth == 0:
            x = x + layer(own, x, everyone, window)
            continue
        r = (x @ own["depths.router.weight"].T).squeeze(-1)
        logits = r
        if spec.predictor:
            hidden = x.detach() @ own["depths.hidden.weight"].T + own["depths.hidden.bias"]
            logits = (F.silu(hidden) @ own["depths.output.weight"].T + own["depths.output.bias"]).squeeze(-1)
        count = -(-int(TIME * spec.capacity * 100) // 100)
        least = r.detach().sort(-1, descending=True).values[:, count - 1 : count]
        best = r >= least
        if training:
            wanted = best.double()
            entropy = -(wanted * logits.sigmoid().log() + (1 - wanted) * (1 - logits.sigmoid()).log())
            lost = lost + spec.coefficient * entropy.mean()
        chosen = best if training else logits > 0
        x = torch.where(chosen[..., None], x + r[..., None] * layer(own, x, chosen, window), x)
    return rms(x, p["final.rmsnorm.weight"]) @ p["embedding"].T, lost


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("depths", [{"capacity": 0.25}, {"capacity": 0.55, "predictor": 6, "coefficient": 0.5}])
@pytest.mark.parametrize("window", [None, 2])
def test_it_is_the_formula(training: bool, depths: dict[str, Any], window: int | None):
    block = BLOCK
    if window:
        block = {**BLOCK, "attention": {**BLOCK["attention"], "mask": {"type": "window", "size": window}}}
    spec = load(model(depths, block=block))
    one, other = build(spec).train(training), build(spec)
    call = Call()
    logits = one(TOKENS, call)
    expected, lost = formula(other, spec.depths, training, window or TIME)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    ours = sum(call.losses.values(), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(ours, lost, rtol=1e-9, atol=1e-9)
    for given, loss in ((logits, ours), (expected, lost)):
        (F.cross_entropy(given.flatten(0, 1), TARGETS.flatten()) + loss).backward()
    theirs = dict(other.named_parameters())
    for name, value in one.named_parameters():
        if training or name.startswith("block.1.depths.router") or "depths" not in name:  # which evaluation only asks
            torch.testing.assert_close(value.grad, theirs[name].grad, rtol=1e-8, atol=1e-10, msg=name)


# What a layer sees of a sequence is the chosen tokens alone, whatever its branches are.


BLOCKS: dict[str, dict[str, Any]] = {
    "attention": BLOCK,
    "latent attention": {"attention": {"type": "mla", "heads": 4, "kv_latent": 8, "rotary_dim": 4}},
    "sliding window": {"attention": {"heads": 4, "positional": "rope", "mask": {"type": "window", "size": 3}}},
    "gated delta net": {"attention": {"type": "gated_delta_net", "heads": 2}},
    "short convolution": {"attention": {"heads": 4, "key": [{"type": "short_conv"}]}},
    "experts": {"attention": {"heads": 4}, "ffn": {"type": "moe", "width": 12, "experts": 4}},
    "parallel": {"parallel": {"pre": ["rmsnorm"], "attention": {"heads": 4}, "mlp": {"width": 24}}},
    "post-norm": {"attention": {"heads": 4, "join": "add_norm"}, "mlp": {"width": 24, "join": "add_norm"}},
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_layer_reads_the_chosen_tokens_at_their_positions(block: dict[str, Any]):
    module: Any = build(load(model({"capacity": 0.5, "layers": "0:"}, block=block)))
    chooses = module.block[1]
    stream = torch.randn(BATCH, TIME, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = chooses(stream, Call())
    weights, logits = chooses.depths(stream)
    for row in range(BATCH):
        at = (logits[row] > 0).nonzero().flatten()
        assert 0 < len(at) < TIME
        read, given = stream[row : row + 1, at], Call(positions=at)
        made = read
        for name, branch in chooses.named_children():
            made = made if name == "depths" else branch(made, given)
        expected = stream[row].clone()
        expected[at] += weights[row, at, None] * (made - read)[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("predictor", [None, 6])
def test_evaluation_is_causal_and_decoding_computes_the_same(block: dict[str, Any], predictor: int | None):
    module = build(load(model({"capacity": 0.5, "predictor": predictor}, n_layers=4, block=block)))
    whole, state = module(TOKENS), State()
    pieces = [module(piece, Call(state=state)) for piece in TOKENS.split([4, 1, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-9)
    for t in (1, 6, TIME - 1):
        other = TOKENS.clone()
        other[:, t] = 17
        torch.testing.assert_close(module(other)[:, :t], whole[:, :t], rtol=1e-11, atol=1e-11)


def test_training_looks_at_later_tokens():
    module, earlier = build(load(model(0.25))).train(), []
    for t in range(1, TIME):
        other = TOKENS.clone()
        other[:, t] = 17
        earlier.append(torch.allclose(module(other)[:, :t], module(TOKENS)[:, :t]))
    assert not all(earlier)


def test_decoding_holds_keys_of_chosen_tokens_alone():
    module: Any = build(load(model({"capacity": 0.5, "layers": "1"})))
    state, tokens = State(), torch.arange(3 * TIME).view(3, TIME) % 19
    module(tokens, Call(state=state))
    stream = module.block[0](module.embedded(tokens), Call())
    chosen = (module.block[1].depths(stream)[1] > 0).sum(1)
    assert len(set(chosen.tolist())) > 1  # each sequence has its own number
    for row, count in enumerate(chosen.tolist()):
        held = _pytree.tree_leaves(state.layers["block.1"][f"block.1.{row}"])
        assert sum(value.numel() for value in held) == count * 2 * 2 * 4
    continued, tokens = generate(module, TOKENS[:, :5], 7), TOKENS[:, :5]
    for _ in range(7):
        tokens = torch.cat([tokens, module(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(continued, tokens)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("sign", [1, -1])
def test_where_all_or_no_tokens_are_chosen_all_is_finite(mask: str, sign: int):
    block = {"attention": {"heads": 4, "mask": mask}}
    module: Any = build(load(model({"capacity": 0.5, "layers": "1", "predictor": 4}, block=block)))
    chooses = module.block[1]
    with torch.no_grad():
        chooses.depths.output.weight.zero_()
        chooses.depths.output.bias.fill_(sign)
    stream = module.block[0](module.embedded(TOKENS), Call())
    found = chooses(stream, Call())
    plain = build(load(model(None, block=block))).block[1]  # type: ignore[index]
    assert isinstance(plain, Branches)
    plain.load_state_dict(chooses.state_dict(), strict=False)
    expected = stream + (plain(stream, Call()) - stream) * chooses.depths(stream)[0][..., None]
    torch.testing.assert_close(found, expected if sign > 0 else stream, rtol=1e-10, atol=1e-10)
    module(TOKENS).sum().backward()
    assert all(value.grad is None or value.grad.isfinite().all() for value in module.parameters())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_padding_is_never_chosen(training: bool):
    """Seven tokens and padding: in training so many are chosen as of the whole length, in evaluation as without it."""
    module: Any = build(load(model(0.25))).train(training)
    call, other = Call(padding=PADDING), TOKENS.clone()
    other[1, 7:] = 17
    found = module(TOKENS, call)
    torch.testing.assert_close(module(other, Call(padding=PADDING))[1, :7], found[1, :7], rtol=1e-10, atol=1e-10)
    if not training:
        torch.testing.assert_close(found[1, :7], module(TOKENS[1:, :7])[0], rtol=1e-10, atol=1e-10)


def test_documents_are_kept_apart_among_the_chosen():
    block = {"attention": {"heads": 4, "mask": {"type": "causal", "documents": True}}}
    module: Any = build(load(model({"capacity": 0.5, "layers": "0:"}, block=block)))
    documents = (torch.arange(TIME) >= 5).long().expand(BATCH, -1)
    found = module(TOKENS, Call(documents=documents))
    torch.testing.assert_close(found[:, 5:], module(TOKENS[:, 5:]), rtol=1e-10, atol=1e-10)


def test_recomputing_layers_changes_no_bit():
    def gradients(recompute: bool) -> list[Tensor]:
        module: Any = build(load(model({"capacity": 0.25, "predictor": 6}))).train()
        module.recompute = recompute
        call = Call()
        (module.loss(TOKENS, TARGETS, call) + sum(call.losses.values())).backward()
        return [value.grad for value in module.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(gradients(True), gradients(False), strict=True))


def test_a_token_that_passes_by_costs_nothing_in_the_branches():
    every, none = ({"capacity": 0.25, "layers": layers} for layers in ("0:", "1"))
    spec = load(model(every, max_positions=200))
    plain, found = (arch_dsl.cost(load(model(None)), tokens) for tokens in (50, 200))
    short, router = plain.children["stack"], arch_dsl.cost(spec, 200).children["stack"]
    for name in ("flops_matmul", "flops_model"):
        assert getattr(router, name) == getattr(short, name) + 2 * 2 * 200 * 16, name
    assert router.cache == short.cache == 2 * 50 * 16
    assert router.activations == short.activations + 2 * (200 * (16 + 2) + 50 * (16 + 1))
    mixed = arch_dsl.cost(load(model(none, max_positions=200)), 200).children["stack"]
    assert mixed.cache == found.children["stack"].cache / 2 + short.cache / 2


def test_measures_say_how_many_tokens_choose_themselves():
    call, module = Call(), build(load(model(0.25)))
    module(TOKENS, call)
    assert set(call.measures) == {"block.1.depths.chosen"} and not call.losses
    module.train()(TOKENS, call)
    assert set(call.losses) == {"block.1.depths"}
    agreed = call.measures["block.1.depths.agreement"] * BATCH * TIME
    assert agreed == pytest.approx(round(float(agreed)), abs=1e-4) and 0 < agreed < BATCH * TIME


@pytest.mark.parametrize(
    ("change", "depths"),
    [
        ({"depths": 0.5}, 0.5),
        ({"depths.capacity": 0.5}, 0.5),
        ({"depths.layers": "2:"}, {"capacity": 0.25, "layers": "2:"}),
        ({"depths.layers": 1}, {"capacity": 0.25, "layers": "1"}),
        ({"depths.predictor": 8}, {"capacity": 0.25, "predictor": 8}),
        ({"depths": None}, None),
    ],
)
def test_patches_change_it(change: dict[str, Any], depths: Any):
    assert arch_dsl.patch(arch_dsl.load(model(0.25, 4)), change) == arch_dsl.load(model(depths, 4))


def test_it_is_one_slot_between_two_models():
    plain, chosen, more = (load(model(depths)) for depths in (None, 0.25, 0.5))
    for before, after in ((plain, chosen), (chosen, plain), (chosen, more)):
        (slot,) = slots(before, after)
        assert slot.name == "depths"


def test_without_it_a_model_keeps_its_identity():
    assert "depths" not in arch_dsl.dump(load(model(None)))


def test_an_encoder_and_a_decoder_can_each_have_it():
    stack = {"n_layers": 2, "block": {**BLOCK, "cross_attention": {"heads": 4, "kv_heads": 2}}, "depths": 0.5}
    encoder = {"n_layers": 2, "block": {"attention": {"heads": 4, "mask": "full"}}, "depths": 0.5}
    spec = load({"d_model": 16, "vocab": 19, "max_positions": TIME, "encoder": encoder, "decoder": stack})
    module, call = build(spec), Call(source_tokens=TOKENS, source_padding=PADDING)
    held = dataclasses.replace(call, state=State())
    pieces = [module(TOKENS[:, t : t + 1], held) for t in range(TIME)]
    torch.testing.assert_close(torch.cat(pieces, 1), module(TOKENS, call), rtol=1e-9, atol=1e-9)


def test_rotations_by_rows_run_without_the_kernel_that_has_one_table():
    choices = arch_dsl.kernel_choices(load(model({"capacity": 0.5, "layers": "1"})), kernels.Device.parse("sm_90"))
    found = {choice.path: choice.implementation for choice in choices if choice.op == "rotary"}
    sites = ("query", "key")
    assert found == {
        f"block.{depth}.attention.{site}.rope": name for depth, name in enumerate(("triton", "torch")) for site in sites
    }


def test_a_learned_prompt_is_chosen_from_too():
    module = build(load(model(0.5, prompt=3, max_positions=TIME + 3)))
    state = State()
    pieces = [module(piece, Call(state=state)) for piece in TOKENS.split([4, 1, 7], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), module(TOKENS), rtol=1e-9, atol=1e-9)


def test_the_table_of_a_model_has_a_line_for_the_router():
    lines = [line for line in tree(load(model(0.5))) if line.name == "depths"]
    assert [(line.what, line.cost.parameters) for line in lines] == [("{capacity: 0.5}", 0), ("router", 16)]


def test_a_plain_file_is_refused():
    with pytest.raises(Unexportable, match="a model with depths"):
        to_python(load(model(0.5)))


REFUSED = {
    "values": ({"block": {"attention": {"heads": 4, "value": ["value_residual"]}}}, "is value_residual, which takes"),
    "keys": (
        {"block": {"attention": {"heads": 4}}, "overrides": {"1": {"block.attention.kv": "earlier"}}},
        "depths: attention takes what an earlier layer has",
    ),
    "tokens": ({"block": {"per_layer_embedding": {"width": 4}}}, "is per_layer_embedding, which looks up all tokens"),
    "bias": ({"block": {"attention": {"heads": 4, "scores": ["alibi"]}}}, "is alibi, a bias of the logits"),
    "prefix": ({"block": {"attention": {"heads": 4, "mask": "prefix"}}}, "is prefix, which counts the tokens"),
    "shared": ({"block": {"attention": {"heads": 4, "share": "stack"}}}, "attention is shared with layers that"),
    "loop": ({"loop": 2}, "depths: stands beside loop, which applies"),
    "streams": ({"streams": "hyper"}, "depths: stands beside streams, which have"),
    "name": ({"block": {"depths": {"type": "mlp"}}}, "block.depths: is the name of the router"),
    "no layer": ({"depths": {"capacity": 0.5, "layers": "7"}}, "depths.layers: '7' names no layer of 3"),
    "no number": ({"depths": {"capacity": 0.5, "layers": "odd"}}, "depths.layers: 'odd' names no layers; write"),
    "all tokens": ({"depths": 1}, "depths.capacity: must be less than 1, found 1"),
}


@pytest.mark.parametrize(("more", "message"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_have_is_refused(more: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        load({**model(0.5, 3), **more})
