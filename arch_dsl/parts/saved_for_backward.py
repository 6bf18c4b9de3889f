"""What the forward pass keeps of an activation for the backward pass, to count the memory of training."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from archlab.arch_dsl.language.formula import ARGUMENTS, has_x, normal_form

# Per function which tensors its derivative is made of: its input (i), its result (r), one in between (o).
_KEPT = {
    "sigmoid": "r",
    "tanh": "r",
    "ns_sigmoid": "o",
    "identity": "",
    "relu": "r",
    "relu2": "o",
    "exp": "r",
    "sqrt": "r",
    "softsign": "io",
}


@functools.cache
def kept_of(activation: str) -> tuple[int, bool]:
    """How many tensors of its argument's size an activation keeps beside its result, and whether it keeps the result.

    A formula keeps what each of its operations keeps; x is one tensor wherever it stands.
    """
    tree = ast.parse(activation if activation.isidentifier() else normal_form(activation), mode="eval").body
    if isinstance(tree, ast.Name):
        tree = ast.Call(tree, [ast.Name("x")], [])
    kept: set[object] = set()
    for node in ast.walk(tree):
        kept |= _kept(node)
    return len(kept - {tree}), tree in kept


def by_periods(kept: Callable[[int], int], tokens: int, period: int) -> int:
    """`kept(tokens)` of a recurrence in chunks, which divide a period; beyond three of these it grows in proportion."""
    if not tokens:
        return 0
    if tokens <= 3 * period:
        return kept(tokens)
    two, three = (kept(count * period - -tokens % period) for count in (2, 3))
    return two + (three - two) * (-(-tokens // period) - 2)


def kept_by(call: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], fixed: str = "") -> int:
    """How many elements of four bytes a call keeps for the backward pass, each storage once; nothing is computed.

    Its arguments are tensors of these shapes in float32, which have gradients but for the one named `fixed`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    found: dict[int, int] = {}
    alive = []

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        found.setdefault(storage._cdata, storage.nbytes())
        alive.append(storage)  # or its address might be used again
        return value

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call(**{name: torch.empty(shape, requires_grad=name != fixed) for name, shape in shapes.items()})
    return sum(found.values()) // 4


def _kept(node: ast.AST) -> set[object]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "where":
            return {_value(node.args[0])}  # which elements, a byte each, counted as a number
        if node.func.id in ARGUMENTS:
            return {_value(argument) for argument in node.args if has_x(argument)}
        tensors = {"i": _value(node.args[0]), "r": node, "o": (node, "between")}
        return {tensors[letter] for letter in _KEPT.get(node.func.id, "i")}
    if not isinstance(node, ast.BinOp) or not has_x(node.right):
        return {_value(node.left)} if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) else set()
    if isinstance(node.op, ast.Mult) and not has_x(node.left):
        return set()
    if isinstance(node.op, ast.Mult | ast.Div):
        left = _value(node.left) if has_x(node.left) else (node, "reciprocal")
        return {left, _value(node.right)} if has_x(node.left) else {left}
    return set()


def _value(node: ast.AST) -> object:
    return "x" if isinstance(node, ast.Name) else node
