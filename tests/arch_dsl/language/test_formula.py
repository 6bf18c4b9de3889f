"""Formulas in x: what they compute, one spelling each, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language.formula import function_of, normal_form
from archlab.kernels import ACTIVATIONS

X = torch.linspace(-3, 3, 41, dtype=torch.float64)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x * sigmoid(1.702 * x)", X * torch.sigmoid(1.702 * X)),
        ("2*sigmoid( x )", 2 * torch.sigmoid(X)),
        ("-x + 3", 3 - X),
        ("x**3 / 4 - .5", X**3 / 4 - 0.5),
        ("+tanh(exp(-abs(x)))", torch.tanh(torch.exp(-X.abs()))),
        ("relu(x)**2", torch.relu(X) ** 2),
        ("x * tanh(softplus(x))", F.mish(X)),
        ("min(6, x + 3) * max(x, -1)", torch.clamp(X + 3, max=6) * torch.clamp(X, min=-1)),
        ("clamp(x, -1, 2 / 3)", torch.clamp(X, -1, 2 / 3)),
        ("max(x, x**2)", torch.maximum(X, X**2)),
        ("ns_sigmoid(x)", 0.5 + 0.5 * torch.sigmoid(X)),
        ("where(x > 1, x**2, -x)", torch.where(X > 1, X**2, -X)),
        ("where(0 >= x, 0, min(x, 2))", X.clamp(0, 2)),
        ("where(abs(x) < 0.5, 0, x) + where(x * x <= 1, x, 2)", X * (X.abs() >= 0.5) + torch.where(X**2 <= 1, X, 2)),
    ],
)
def test_a_formula_computes_what_it_says(text: str, expected: torch.Tensor):
    torch.testing.assert_close(function_of(text)(X), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_formula_that_is_an_activation_is_that_activation(name: str):
    assert normal_form(f" {name}( x )") == name
    torch.testing.assert_close(function_of(name)(X), ACTIVATIONS[name](X))


def test_one_spelling_has_one_identity():
    def model(activation: str) -> arch_dsl.Model:
        ffn = {"type": "mlp", "activation": activation}
        return arch_dsl.resolve(arch_dsl.load({"d_model": 8, "n_layers": 1, "vocab": 5, "block": {"ffn": ffn}}))

    assert arch_dsl.identity(model("x*sigmoid( x )")) == arch_dsl.identity(model("x * sigmoid(x)"))
    assert arch_dsl.identity(model("silu(x)")) == arch_dsl.identity(model("silu"))
    assert arch_dsl.identity(model("2.0 * tanh(x)**3.")) == arch_dsl.identity(model("2*tanh(x)**3"))
    assert arch_dsl.identity(model("min(6, x)")) == arch_dsl.identity(model("min(x, 6.0)"))
    assert arch_dsl.identity(model("where(0 < x, x, 0.0)")) == arch_dsl.identity(model("where(x > 0, x, 0)"))
    assert arch_dsl.identity(model("x * sigmoid(2 * x)")) != arch_dsl.identity(model("x * sigmoid(x)"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__import__('os').system('true')", "is not among numbers, x"),
        ("x.__class__", "is not among numbers, x"),
        ("eval(x)", "'eval' is not a function here"),
        ("log(x)", "'log' is not a function here; did you mean 'log1p'?"),
        ("where(x, 0)", "where takes three arguments"),
        ("where(x, x, 0)", "where begins with one comparison"),
        ("where(0 < x < 1, x, 0)", "where begins with one comparison"),
        ("where(x == 1, x, 0)", "where begins with one comparison"),
        ("where(1 > 0, x, 0)", "where compares two numbers"),
        ("where(x > 0, 1, 0) + x", "where needs a part with x"),
        ("where(x > 1, 7e4, x)", "where is given 70000"),
        ("where(x > y, x, 0)", "'y' is not x"),
        ("x * (x > 0)", "'x > 0' is true or false, and no number; it may be the first part of where"),
        ("max(x)", "max takes two arguments"),
        ("clamp(x, 1)", "clamp takes three arguments"),
        ("clamp(2, x, 3)", "takes a part with x and two numbers"),
        ("clamp(x, 3, 2)", "clamp has 3 as its lower bound, and 2 as its upper"),
        ("min(x, 7e4)", "min is given 70000, and float16 ends at 65504"),
        ("x + min(1, 2)", "min needs an argument with x"),
        ("x * sigmoid(1.7 * y)", "'y' is not x"),
        ("x ^ 2", "a power is written \\*\\*"),
        ("y * x", "'y' is not x"),
        ("1 + 2", "it does not contain x"),
        ("sigmoid(2) * x", "sigmoid needs an argument with x"),
        ("x ** x", "a power needs a number as its exponent"),
        ("x if x else 1", "is not among numbers, x"),
        ("[x for x in x]", "is not among numbers, x"),
        ("lambda x: x", "is not among numbers, x"),
        ("x * (", "was never closed"),
        ("x + 1e999", "is not among numbers, x"),
        ("x +" * 100 + " x", "at most 200"),
        ("+".join(["x"] * 80), "once it is written out; at most 200"),
        ("sigmoid(x, x)", "sigmoid takes one argument"),
        ("x + 1 / 0", "divides by zero"),
        ("x / (1 - 1)", "divides by zero"),
        ("x * 10 ** 400", "is no number"),
        ("(2 - 3) ** 0.5 * x", "is no finite number"),
        ("x + 1e200 * 1e200", "is no finite number"),
    ],
)
def test_what_is_no_formula_is_refused_with_the_reason(text: str, reason: str):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        normal_form(text)
    ffn = {"type": "mlp", "activation": text}
    with pytest.raises(SpecError, match=r"block\.ffn\.activation: .* is no formula in x"):
        arch_dsl.load({"d_model": 8, "n_layers": 1, "block": {"ffn": ffn}})
