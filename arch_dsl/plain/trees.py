"""Syntax trees: made of names and of Python objects, searched, printed and copied."""

from __future__ import annotations

import ast
import builtins
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import nn

Tree = TypeVar("Tree")


class Unexportable(ValueError):
    """Something in a forward pass that cannot be written down as plain PyTorch."""


def unwritable(node: ast.AST, what: str) -> Unexportable:
    """The error for a part of a program that is not written down."""
    return Unexportable(f"{what} has no form in a plain file: {text(node)}")


def load(own: str) -> ast.Name:
    """A name that is read."""
    return ast.Name(own, ast.Load())


def name(dotted: str) -> ast.expr:
    """The expression that a dotted name is."""
    return ast.parse(dotted, mode="eval").body


def child_of(path: ast.expr, step: str) -> ast.expr:
    """The child of a module, by attribute or by number."""
    if step.isdigit():
        return ast.Subscript(path, ast.Constant(int(step)), ast.Load())
    return ast.Attribute(path, step, ast.Load())


def from_self(steps: Iterable[str]) -> ast.expr:
    """What these steps from `self` lead to."""
    return reduce(child_of, steps, name("self"))


def is_number(value: Any) -> bool:
    """An int or float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_numbers(value: Any) -> bool:
    """A number or a tuple of them."""
    return is_number(value) or (isinstance(value, tuple) and bool(value) and all(is_number(item) for item in value))


def literal(value: Any) -> ast.expr:
    """The expression of a constant. Raises Unexportable."""
    if isinstance(value, float) and not math.isfinite(value):
        return name(f'float("{value}")')
    if is_number(value) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    if value is None or value is Ellipsis or isinstance(value, bool | int | float | str):
        return ast.Constant(value)
    if isinstance(value, tuple | list):
        kind = ast.Tuple if isinstance(value, tuple) else ast.List
        return kind([literal(item) for item in value], ast.Load())
    if isinstance(value, range):
        assert (value.start, value.step) == (0, 1)
        return ast.Call(name("range"), [literal(value.stop)], [])
    if isinstance(value, slice):
        return ast.Slice(*(None if part is None else literal(part) for part in (value.start, value.stop, value.step)))
    dotted = torch_name(value)
    if dotted is None:
        raise Unexportable(f"{value!r} has no form in a file")
    return name(dotted)


def torch_name(value: Any) -> str | None:
    """The dotted name of something of torch, math or the builtins, or None."""
    if isinstance(value, torch.dtype):
        return str(value)
    own = getattr(value, "__name__", None)
    if not isinstance(own, str):
        return None
    for module, prefix in ((torch, "torch"), (torch.nn.functional, "F"), (nn, "nn"), (math, "math")):
        if getattr(module, own, None) is value:
            return f"{prefix}.{own}"
    for public, item in vars(torch.nn.functional).items():
        if item is value:
            return f"F.{public}"
    if getattr(builtins, own, None) is value:
        return own
    home = getattr(value, "__module__", None) or ""
    if home.split(".")[0] in ("torch", "math"):
        return f"{home}.{getattr(value, '__qualname__', own)}"
    return None


def trivial(expr: ast.expr) -> bool:
    """Whether an expression may be repeated: a name, an attribute of one, a constant."""
    if isinstance(expr, ast.Attribute):
        return trivial(expr.value)
    if isinstance(expr, ast.UnaryOp):
        return isinstance(expr.operand, ast.Constant)
    return isinstance(expr, ast.Name | ast.Constant)


def names_in(node: ast.AST) -> Iterator[str]:
    """Every name that is read in a tree, as often as it is."""
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load):
            yield item.id


def numbered(own: str, between: str = "_") -> Iterator[str]:
    """A name, and the same with numbers, for whoever looks for one that is free: x, x_2, x_3, …"""
    yield own
    yield from (f"{own}{between}{number}" for number in itertools.count(2))


def rename(tree: ast.AST, names: Mapping[str, str]) -> None:
    """Changes the names in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)


def stored(*nodes: ast.AST) -> list[str]:
    """The names that statements assign."""
    found = [n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys(found))


def blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements inside a statement."""
    if isinstance(statement, ast.If | ast.For):
        return [statement.body, statement.orelse]
    return [statement.body] if isinstance(statement, ast.With) else []


def heads(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a statement that are evaluated when it is reached."""
    if isinstance(statement, ast.If):
        return [statement.test]
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, ast.With):
        return [item.context_expr for item in statement.items]
    return [statement]


def target_of(statement: ast.stmt) -> str | None:
    """The name that a simple assignment sets."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def unpacked(statement: ast.AST) -> list[ast.Name]:
    """The names that an assignment to several sets."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return []
    return [item for item in statement.targets[0].elts if isinstance(item, ast.Name)]


def size(node: ast.AST) -> int:
    """How many operations, names and constants an expression has."""
    return sum(isinstance(item, ast.expr) for item in ast.walk(node))


def text(node: ast.AST) -> str:
    """The source of a tree."""
    return ast.unparse(ast.fix_missing_locations(node))


def clone(node: Tree) -> Tree:
    """A copy of a tree, but for its places in a file."""
    copied: Any = node
    if isinstance(node, ast.AST):
        copied = type(node)(**{field: clone(getattr(node, field, None)) for field in node._fields})
    elif isinstance(node, list):
        copied = [clone(item) for item in node]
    return copied  # type: ignore[no-any-return]
