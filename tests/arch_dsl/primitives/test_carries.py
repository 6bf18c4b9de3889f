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
        (model([], pre=["shift"]), "shifts queries, keys or values, and this site has none"),
    ],
)
def test_a_carry_where_it_makes_no_sense_is_refused(data: dict, message: str):
    with pytest.raises(SpecError, match=message):
        arch_dsl.resolve(arch_dsl.load(data))
