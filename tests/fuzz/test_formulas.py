"""A text as an activation is a formula in x, which computes as many numbers as it is given, or is refused. Nothing else
is executed."""

from __future__ import annotations

import ast
import builtins
import keyword
import threading
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.language.formula import FUNCTIONS, function_of, normal_form
from archlab.kernels import ACTIVATIONS
from tests.fuzz.fuzz_kit import EXTREMES, bounded_work, examples, texts, tried

MOST_CALLS = 1_000_000
"""Function calls that one formula may take."""
X = torch.linspace(-3, 3, 7)
_NUMBERS = [
    "0",
    "1",
    "-1",
    "2.0",
    ".5",
    "1e3",
    "1e308",
    "1e-320",
    "1e999",
    "9**9",
    "0x10",
    "1_0",
    "1j",
    "0.1",
    "9" * 60,
    "1.",
]
_NAMES = [
    "y",
    "self",
    "__import__",
    "os",
    "open",
    "print",
    "torch",
    "True",
    "None",
    "x2",
    "X",
    "\U0001d431",
    *dir(builtins)[-20:],
]

_numbers = st.one_of(st.sampled_from(_NUMBERS), st.floats().map(repr), st.integers(-(10**6), 10**6).map(str))
_leaves = st.one_of(st.just("x"), st.just("x"), _numbers)


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Formulas of formulas, as the grammar makes them."""
    return st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " * "]), inner).map("".join),
        st.tuples(st.sampled_from(["({})", "-{}", "+{}", "({})**2", "({})**-1", "({})**.5"]), inner).map(
            lambda each: each[0].format(each[1])
        ),
        st.tuples(inner, _numbers).map("({0[0]})**{0[1]}".format),
        st.tuples(st.sampled_from(sorted(FUNCTIONS)), inner).map("{0[0]}({0[1]})".format),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map("{0[0]}({0[1]}, {0[2]})".format),
        st.tuples(inner, _numbers, _numbers).map("clamp({0[0]}, {0[1]}, {0[2]})".format),
        st.tuples(inner, st.sampled_from([">", "<", ">=", "<="]), inner, inner, inner).map(
            "where({0[0]} {0[1]} {0[2]}, {0[3]}, {0[4]})".format
        ),
    )


def _wrong(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """What Python would execute, and a formula is not."""
    forms = [
        "{0}.real", "{0}[0]", "{0} if {0} else {1}", "lambda x: {0}", "[{0} for x in {1}]", "{0}({1})", "{0}, {1}",
        "f'{{{0}}}'", "{0} < {1}", "{0} and {1}", "not {0}", "~{0}", "{0} // {1}", "{0} % {1}", "{0} @ {1}", "{0}**{1}",
        "(x := {0})", "await {0}", "*{0}", "{0} << {1}", "{0} ^ {1}", "sigmoid(x={0})", "sigmoid({0}, {1})",
        "{0} {1}", "exec('{0}')", "().__class__", "{0}; {1}", "{0}\n{1}", "# {0}", "'{0}' * {1}", "yield {0}",
    ]  # fmt: skip
    return st.tuples(st.sampled_from(forms), inner, inner).map(lambda each: each[0].format(each[1], each[2]))


formulas = st.recursive(_leaves, _deeper, max_leaves=12)
nearly = st.recursive(
    st.one_of(_leaves, st.sampled_from([*_NAMES, *keyword.kwlist])),
    lambda each: _deeper(each) | _wrong(each),
    max_leaves=8,
)
anything = st.one_of(texts, st.sampled_from([e for e in EXTREMES if isinstance(e, str)]))


def evaluated(text: str) -> torch.Tensor | None:
    """What a text computes of X; None for one that is refused, which a model says as well, with its path."""
    try:
        spelled = text if text in ACTIVATIONS else normal_form(text)
        assert spelled in ACTIVATIONS or normal_form(spelled) == spelled
        found = function_of(text)(X)
    except ValueError as error:
        assert type(error) is ValueError and str(error)
        with pytest.raises(SpecError) as caught:
            arch_dsl.load(model_with(text))
        assert [problem.path for problem in caught.value.problems] == ["block.ffn.activation"]
        tried(refused=True)
        return None
    assert found.shape == X.shape and found.dtype == X.dtype
    tried(refused=False)
    return found


def model_with(activation: Any) -> dict[str, Any]:
    """A small model with an activation."""
    return {"d_model": 8, "n_layers": 1, "vocab": 5, "block": {"ffn": {"type": "mlp", "activation": activation}}}


@examples(250)
@given(text=formulas)
@example("9**9**9**9*x")
@example("x**9**9**9")
@example("(9**9)**99999*x")
@example("+".join(["x"] * 100))
@example("silu")
@example("where(x>0, x, -x)")
def test_a_formula_computes_a_number_for_each_or_is_refused(text: str) -> None:
    with bounded_work(MOST_CALLS):
        evaluated(text)


@examples(250)
@given(text=nearly)
@example("__import__('os').system('true') * x")
@example("[x for x in x]")
@example("x.__class__.__mro__")
def test_nothing_but_a_formula_is_evaluated(text: str) -> None:
    called: list[str] = []
    mine = threading.get_ident()  # a server of another test may open what it likes

    def noting(name: str) -> Any:
        kept = getattr(builtins, name)

        def noted(*values: Any, **named: Any) -> Any:
            return called.append(name) if threading.get_ident() == mine else kept(*values, **named)

        return noted

    with pytest.MonkeyPatch.context() as patched:
        for name in ("eval", "exec", "open"):
            patched.setattr(builtins, name, noting(name))
        with bounded_work(MOST_CALLS):
            found = evaluated(text)
    assert not called
    if found is not None:
        names = {node.id for node in ast.walk(ast.parse(normal_form(text))) if isinstance(node, ast.Name)}
        assert names <= {"x", *FUNCTIONS}


@examples(150)
@given(text=anything)
def test_any_text_is_a_formula_or_refused(text: str) -> None:
    with bounded_work(MOST_CALLS):
        evaluated(text)
