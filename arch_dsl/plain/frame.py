"""One call of one function, run on values that are partly known.

What was decided when the model was built (which items a site holds, whether a weight is there, which activation) is
known, so tests and loops over it vanish; what tensors do remains as straight-line code. What an expression is, what a
statement does, what a call gives and how a value is written need one another. They are four tables by type, which the
files around this one fill: `evaluate`, `run`, `call` and `write`.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

from torch import Tensor, nn

from archlab.arch_dsl.plain.body import Body
from archlab.arch_dsl.plain.program import Program
from archlab.arch_dsl.plain.trees import Unexportable, child_of, clone, is_numbers, literal, load, trivial, unwritable
from archlab.arch_dsl.plain.values import Items, Stream, Symbolic, Table, Val

Returned = Val | None
WRITTEN = Val(known=Symbolic())  # a block whose end was written down as `return`


@singledispatch
def evaluate(node: ast.AST, frame: Frame) -> Val:
    """The value of an expression. Raises Unexportable."""
    raise unwritable(node, f"a {type(node).__name__} expression")


@singledispatch
def run(node: ast.AST, frame: Frame) -> Returned:
    """What a statement returns, or None if the next one is run. Raises Unexportable."""
    raise unwritable(node, f"a {type(node).__name__} statement")


@singledispatch
def call(known: object, frame: Frame, function: Val, args: list[Val], keywords: dict[str, Val]) -> Val:
    """The value of a call of `function`, of which `known` is known."""
    raise NotImplementedError


@singledispatch
def write(known: object, frame: Frame) -> ast.expr:
    """The expression of something known. Raises Unexportable."""
    return literal(known)


@dataclass
class Frame:
    """`inline` means that its statements go into the caller's function; `kind` is the class whose method this is."""

    program: Program
    body: Body
    env: dict[str, Val]
    outer: dict[str, Any]
    inline: bool
    kind: type | None = None
    pins: dict[str, str] = field(default_factory=dict)
    region: int = 0  # how many branches and loops at run time we are in

    # The tables

    def block(self, statements: Sequence[ast.stmt]) -> Returned:
        """Runs statements up to a return."""
        for statement in statements:
            if (result := run(statement, self)) is not None:
                return result
        return None

    def eval(self, node: ast.expr) -> Val:
        """The value of an expression."""
        return evaluate(node, self)

    def call(self, function: Val, args: list[Val], keywords: dict[str, Val]) -> Val:
        """The value of a call."""
        return call(function.known, self, function, args, keywords)

    def lift(self, value: Val) -> ast.expr:
        """The expression that computes a value in the written file."""
        return write(value.known, self) if value.expr is None else clone(value.expr)

    # Values

    def object(self, known: Any) -> Val:
        """The value of a Python object."""
        if isinstance(known, nn.Module):
            return Val(self.body.path(known), known)
        if isinstance(known, Tensor):
            raise Unexportable("a tensor that is no parameter and no buffer takes part in a forward pass")
        if isinstance(known, list | tuple) and any(isinstance(item, nn.Module | list | tuple) for item in known):
            return Val(known=Items([self.object(item) for item in known], isinstance(known, tuple)))
        return Val(known=known)

    def items(self, value: Val) -> list[Val] | None:
        """The parts of a value that is known to be made of parts, or None."""
        known = value.known
        if isinstance(known, Items):
            return known.values
        if isinstance(known, Table):
            return [Val(known=key) for key in known.values]
        if isinstance(known, Stream):
            rest = known.values[known.taken :]
            known.taken = len(known.values)
            return rest
        if isinstance(known, nn.ModuleList | nn.Sequential):
            return list(children(value).values())
        if isinstance(known, nn.ModuleDict):
            return [Val(known=key) for key in known]
        if isinstance(known, list | tuple | range | dict | set | frozenset | types.GeneratorType):
            return [self.object(item) for item in known]
        return None

    def in_order(self, nodes: Sequence[ast.expr]) -> list[Val]:
        """The values of expressions that are evaluated one after another, even where a later one needs statements."""
        found: list[Val] = []
        for node in nodes:
            before = len(self.body.lists[-1])
            value = self.eval(node)
            if len(self.body.lists[-1]) > before:
                found = [self._once(item, before) for item in found]
            found.append(value)
        return found

    def _once(self, value: Val, place: int | None = None) -> Val:
        """A value that is computed once, at a place among the statements, by default after all."""
        if not value.dynamic or value.expr is None or trivial(value.expr) or self.body.silent:
            return value
        own = self.body.assign(_hint(value.expr), self.lift(value), soft=True, place=place)
        self.body.temporary.add(own.id)
        return Val(own, optional=value.optional)

    # Names

    def bind(self, name: str, value: Val) -> None:
        """Gives a value a name: in the written function if it is computed there."""
        if name not in self.pins:
            self.env[name] = self.named(name, value)
            return
        self.body.emit(ast.Assign([ast.Name(self.pins[name], ast.Store())], self.lift(value)))
        self.env[name] = Val(load(self.pins[name]), optional=value.nullable)

    def named(self, name: str, value: Val) -> Val:
        """The value under a name of the written function, if it needs one."""
        if isinstance(value.known, Symbolic | nn.Module):
            return self.settled(value)
        if value.expr is None or (not value.dynamic and not is_numbers(value.known)):
            return value
        again = isinstance(value.expr, ast.Name) and value.expr.id in self.body.temporary | self.body.pinned
        if trivial(value.expr) and not again:
            return value
        own = self.body.assign(name, self.lift(value), soft=self.inline)
        return Val(own, value.known, value.optional)

    def settled(self, value: Val) -> Val:
        """A structure whose computed parts have names, so that none is computed twice."""
        if isinstance(value.known, Items):
            return Val(value.expr, Items([self.settled(item) for item in value.known.values], value.known.tuple))
        if isinstance(value.known, Table):
            return Val(value.expr, Table({key: self.settled(item) for key, item in value.known.values.items()}))
        return self._once(value)

    def pin(self, names: Sequence[str]) -> None:
        """Gives names that are assigned under run-time control one place each."""
        for name in names:
            if name in self.pins:
                continue
            self.pins[name] = self.body.pin(name)
            if name in self.env:
                self.bind(name, self.env[name])

    @contextmanager
    def branch(self) -> Iterator[list[ast.stmt]]:
        """Collects the statements of a branch or loop at run time."""
        self.region += 1
        with self.body.nested() as written:
            yield written
        self.region -= 1


def children(value: Val) -> dict[str, Val]:
    """The parts of a module by name."""
    assert value.expr is not None
    found, by_name = value.known._modules.items(), isinstance(value.known, nn.ModuleDict)
    places = {key: ast.Subscript(value.expr, ast.Constant(key), ast.Load()) for key, _ in found if key.isdigit()}
    paths = {key: places[key] if by_name and key in places else child_of(value.expr, key) for key, _ in found}
    return {key: Val(known=None) if child is None else Val(paths[key], child) for key, child in found}


def _hint(expr: ast.expr) -> str:
    """A name for what an expression computes."""
    while isinstance(expr, ast.Call | ast.Subscript):
        expr = expr.func if isinstance(expr, ast.Call) else expr.value
    if isinstance(expr, ast.Attribute):
        if expr.attr == "projection" and isinstance(expr.value, ast.Attribute):
            expr = expr.value
        return expr.attr.removesuffix("_projection")
    return expr.id.partition("__")[0] if isinstance(expr, ast.Name) else "part"
