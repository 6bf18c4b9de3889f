"""What is carried from the previous token and from the first layer, against the papers' formulas written out."""

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from tests.arch_dsl.conformance import TOKENS, build


def model(value: list, n_layers: int = 3, **more) -> dict:
    attention = {"heads": 4, "kv_heads": 2, "pre": ["rmsnorm"], "value": value, **more}
    return {"d_model": 16, "n_layers": n_layers, "vocab": 19, "max_positions": 12, "block": {"attention": attention}}


def test_a_shift_mixes_with_the_token_before_by_a_share_of_each_head():
    spec = arch_dsl.load(model(["shift"], key=["shift"]))
    attention = build(arch_dsl.resolve(spec)).block[0].attention
    x, h = torch.randn(2, 7, 2, 4, dtype=torch.float64), torch.randn(2, 7, 16, dtype=torch.float64)
    got = attention.key.shift(x, arch_dsl.Call(), attention.key.shift.projection(h))
    weight = attention.key.shift.projection.weight
    for b, t, head in torch.cartesian_prod(torch.arange(2), torch.arange(7), torch.arange(2)).tolist():
        a = 1 / (1 + torch.exp(-(weight[head] * h[b, t]).sum()))
        before = x[b, t - 1, head] if t else torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(got[b, t, head], a * before + (1 - a) * x[b, t, head])


@pytest.mark.parametrize("weight", [None, 0.3])
def test_a_value_residual_mixes_with_the_values_of_the_first_layer(weight):
    seen = []
    module = build(arch_dsl.resolve(arch_dsl.load(model([{"type": "value_residual", "weight": weight}]))))
    for layer in module.block:
        layer.attention.value.register_forward_hook(lambda site, args, out: seen.append((args[0], out)))
    module(TOKENS)
    (first, out), *others = seen
    assert torch.equal(first, out)
    for layer, (own, out) in zip(module.block[1:], others, strict=True):
        a, b = layer.attention.value.value_residual.mix if weight is None else (1 - weight, weight)
        torch.testing.assert_close(out, a * own + b * first)
    assert sum(name.endswith("mix") for name, _ in module.named_parameters()) == (2 if weight is None else 0)


def test_a_value_residual_starts_between_the_two_layers():
    module = arch_dsl.compile(arch_dsl.load(model(["value_residual"])))
    assert module.block[1].attention.value.value_residual.mix.tolist() == [0.5, 0.5]


def test_two_branches_carry_their_own_values():
    data = model(["value_residual"])
    data["block"]["attention_2"] = {**data["block"]["attention"], "kv_heads": 4}
    assert build(arch_dsl.resolve(arch_dsl.load(data)))(TOKENS).isfinite().all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model(["value_residual"], n_layers=1), "needs a second layer to carry values to"),
        (model([], key=["value_residual"]), "carries values; it stands at value"),
        (model([], key=["value_embedding"]), "embeds tokens as values; it stands at value"),
        ({**model(["value_embedding"]), "prompt": 2}, "prompt: is no token, and a value_embedding looks tokens up"),
        (model([], pre=["shift"]), "shifts queries, keys or values, and this site has none"),
    ],
)
def test_a_carry_where_it_makes_no_sense_is_refused(data: dict, message: str):
    with pytest.raises(SpecError, match=message):
        arch_dsl.resolve(arch_dsl.load(data))


@pytest.mark.parametrize("share", ["none", "stack"])
def test_a_value_embedding_adds_what_a_table_has_for_the_token(share):
    module = build(arch_dsl.resolve(arch_dsl.load(model([{"type": "value_embedding", "share": share}]))))
    seen = []
    for layer in module.block:
        layer.attention.value.register_forward_hook(lambda site, args, out: seen.append((args[0], out)))
    module(TOKENS)
    for layer, (own, out) in zip(module.block, seen, strict=True):
        item = layer.attention.value.value_embedding
        for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(TOKENS.shape[1])).tolist():
            found = item.table[TOKENS[b, t]].reshape(2, 4)
            torch.testing.assert_close(out[b, t], item.own * own[b, t] + item.embedded * found)
    assert sum(name.endswith("table") for name, _ in module.named_parameters()) == (1 if share == "stack" else 3)
    started = arch_dsl.compile(arch_dsl.load(model(["value_embedding"]))).block[0].attention.value.value_embedding
    assert (started.own.item(), started.embedded.item()) == (0.5, 0.5)


def test_a_value_embedding_of_a_source_is_refused():
    attention = {"heads": 4}
    cross = {**attention, "value": ["value_embedding"]}
    sizes = {"d_model": 16, "vocab": 19, "max_positions": 12}
    encoder = {"n_layers": 1, "block": {"attention": {**attention, "mask": "full"}}}
    decoder = {"n_layers": 1, "block": {"attention": attention, "cross_attention": cross}}
    message = "decoder.block.cross_attention.value.0: value_embedding looks up the tokens of this stack"
    with pytest.raises(SpecError, match=message):
        arch_dsl.resolve(arch_dsl.load({**sizes, "encoder": encoder, "decoder": decoder}))
