"""A formula in x as an activation: a whitelist of operations is read into torch functions; nothing is evaluated."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archlab.arch_dsl.language.errors import unknown
from archlab.kernels.activations import ACTIVATIONS

Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **ACTIVATIONS,
    "abs": torch.abs,
    "exp": torch.exp,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "min": lambda a, b: torch.clamp(a, max=b),
    "max": lambda a, b: torch.clamp(a, min=b),
    "clamp": torch.clamp,
    "where": torch.where,
}
ARGUMENTS = {"min": 2, "max": 2, "clamp": 3, "where": 3}
"""Of functions that take more than one; `clamp(x, low, high)`, `where(x > 0, a, b)`."""
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}
_TURNED: dict[type, type[ast.cmpop]] = {ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.LtE, ast.LtE: ast.GtE}
_LONGEST = 200  # characters
_LARGEST = torch.finfo(torch.float16).max


@lru_cache(1024)
def normal_form(text: str) -> str:
    """One spelling of a formula; `silu(x)` is the activation `silu`. Raises ValueError for what is not allowed."""
    if len(text) > _LONGEST:
        raise ValueError(f"it has {len(text)} characters; at most {_LONGEST}")
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of what is refused below
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(getattr(error, "msg", None) or str(error) or "it cannot be read") from error
    _compiled(tree)
    if not has_x(tree):
        raise ValueError("it does not contain x")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value.is_integer():
            node.value = int(node.value) if node.value < 2**53 else node.value  # 2.0 is spelt 2
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("min", "max") and not has_x(node.args[0]):
            node.args.reverse()  # min(6, x) is spelt min(x, 6)
        if isinstance(node, ast.Compare) and not has_x(node.left):
            node.left, node.comparators = node.comparators[0], [node.left]  # 0 < x is spelt x > 0
            node.ops = [_TURNED[type(node.ops[0])]()]
    spelled = ast.unparse(tree)
    if len(spelled) > _LONGEST:  # which could not be read again
        raise ValueError(f"it has {len(spelled)} characters once it is written out; at most {_LONGEST}")
    return next((name for name in ACTIVATIONS if spelled == f"{name}(x)"), spelled)


def function_of(activation: str) -> Function:
    """The torch function of an activation's name or formula. Raises ValueError."""
    name = activation if activation in ACTIVATIONS else normal_form(activation)
    return ACTIVATIONS[name] if name in ACTIVATIONS else formula(name)


@lru_cache(1024)
def formula(text: str) -> Function:
    """The function of a formula's normal form; its text is kept in `formula`."""
    evaluate = _compiled(ast.parse(text, mode="eval").body)

    def apply(x: Tensor) -> Tensor:
        result: Tensor = evaluate(x)
        return result

    apply.formula = text  # type: ignore[attr-defined]
    return apply


def _compiled(node: ast.AST) -> Callable[[Any], Any]:
    """A closure for every node of the tree. Raises ValueError for what is not on the list."""
    if isinstance(node, ast.Name) and node.id == "x":
        return lambda x: x
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and math.isfinite(node.value):  # type: ignore[arg-type]
        value = float(node.value)  # type: ignore[arg-type]
        return lambda x: value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner, sign = _compiled(node.operand), -1.0 if isinstance(node.op, ast.USub) else 1.0
        return lambda x: sign * inner(x)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        combine, left, right = _BINARY[type(node.op)], _compiled(node.left), _compiled(node.right)
        if isinstance(node.op, ast.Pow) and not isinstance(node.right, ast.Constant):
            raise ValueError("a power needs a number as its exponent")
        if isinstance(node.op, ast.Div) and not has_x(node.right) and right(None) == 0:
            raise ValueError("divides by zero")
        if not has_x(node):
            value = _number(node, lambda: combine(left(None), right(None)))
            return lambda x: value
        return lambda x: combine(left(x), right(x))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in FUNCTIONS:
            raise ValueError(unknown(node.func.id, "function here", FUNCTIONS))
        return _called(node, node.func.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise ValueError("a power is written **")
    if isinstance(node, ast.Compare):
        raise ValueError(f"'{ast.unparse(node)}' is true or false, and no number; it may be the first part of where")
    if isinstance(node, ast.Name):
        raise ValueError(f"'{node.id}' is not x")
    raise ValueError(f"'{ast.unparse(node)}' is not among numbers, x, + - * / **, and functions")


def _called(node: ast.Call, name: str) -> Callable[[Any], Any]:
    """The closure of a function of what is in its brackets."""
    takes = ARGUMENTS.get(name, 1)
    if node.keywords or len(node.args) != takes:
        raise ValueError(f"{name} takes {('one argument', 'two arguments', 'three arguments')[takes - 1]}")
    if name == "where":
        return _chosen(*node.args)
    function, arguments = FUNCTIONS[name], [_compiled(argument) for argument in node.args]
    if not any(map(has_x, node.args)):
        raise ValueError(f"{name} needs an argument with x")
    if name == "clamp":
        if not has_x(node.args[0]) or any(map(has_x, node.args[1:])):
            raise ValueError("clamp(x, low, high) takes a part with x and two numbers")
        low, high = (bound(None) for bound in arguments[1:])
        if low > high:
            raise ValueError(f"clamp has {low:g} as its lower bound, and {high:g} as its upper")
    _bounded(name, node.args, arguments)
    if name in ("min", "max") and not has_x(node.args[0]):
        arguments.reverse()
    return lambda x: function(*(argument(x) for argument in arguments))


def _chosen(test: ast.AST, *parts: ast.AST) -> Callable[[Any], Any]:
    """The closure of `where(test, one, other)`: one where the test holds of an element, the other elsewhere."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in _COMPARISONS:
        raise ValueError("where begins with one comparison by > < >= or <=, as in where(x > 0, x, 0)")
    compare, sides = _COMPARISONS[type(test.ops[0])], (test.left, test.comparators[0])
    left, right, one, other = (_compiled(each) for each in (*sides, *parts))
    if not any(map(has_x, sides)):
        raise ValueError("where compares two numbers, so that it always takes the same part")
    if not any(map(has_x, parts)):
        raise ValueError("where needs a part with x: two numbers have no gradient")
    _bounded("where", (*sides, *parts), (left, right, one, other))
    return lambda x: torch.where(compare(left(x), right(x)), one(x), other(x))


def _bounded(name: str, parts: Sequence[ast.AST], computed: Sequence[Callable[[Any], Any]]) -> None:
    """Refuses numbers in the brackets of a function that float16 does not have."""
    for part, compute in zip(parts, computed, strict=True):
        if not has_x(part) and abs(bound := compute(None)) > _LARGEST:
            raise ValueError(f"{name} is given {bound:g}, and float16 ends at {_LARGEST:g}")


def _number(node: ast.AST, compute: Callable[[], Any]) -> float:
    """What a node without x comes to. Raises ValueError where that is no finite number."""
    try:
        value = compute()
    except ArithmeticError as error:
        raise ValueError(f"'{ast.unparse(node)}' is no number: {error.args[-1]}") from error
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"'{ast.unparse(node)}' is no finite number")
    return value


def has_x(tree: ast.AST) -> bool:
    """Whether x stands in a part of a formula."""
    return any(isinstance(node, ast.Name) and node.id == "x" for node in ast.walk(tree))
