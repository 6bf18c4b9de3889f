"""What is known of a value while its program is written: an expression that gives it at run time, itself, or both."""

from __future__ import annotations

import ast
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

UNKNOWN: Any = object()  # the absence of a known value
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@dataclass
class Val:
    """`expr` computes it in the written file; `known` is the value itself, or UNKNOWN; `optional` if it may be None."""

    expr: ast.expr | None = None
    known: Any = UNKNOWN
    optional: bool = False

    @property
    def dynamic(self) -> bool:
        """Whether only the run can say what it is."""
        return self.known is UNKNOWN

    @property
    def nullable(self) -> bool:
        """Whether it may be None, or is."""
        return self.optional or self.known is None

    @property
    def plain(self) -> bool:
        """Whether all of it is known Python data, which code can be run on now."""
        if isinstance(self.known, Items):
            return all(item.plain for item in self.known.values)
        if isinstance(self.known, Table):
            return all(item.plain for item in self.known.values.values())
        return not self.dynamic and not isinstance(self.known, Symbolic | nn.Module)

    @property
    def data(self) -> Any:
        """The Python data of a plain value."""
        if isinstance(self.known, Items):
            items = [item.data for item in self.known.values]
            return tuple(items) if self.known.tuple else items
        if isinstance(self.known, Table):
            return {key: item.data for key, item in self.known.values.items()}
        return self.known

    @property
    def truth(self) -> bool | None:
        """Whether it counts as true, or None if only the run can say."""
        if self.dynamic:
            return None
        if isinstance(self.known, Items | Table):
            return bool(self.known.values)
        return isinstance(self.known, Symbolic | nn.Module) or bool(self.known)


class Symbolic:
    """Known structure whose parts may be unknown; it has no place at run time."""


@dataclass
class Items(Symbolic):
    """A list or tuple of values."""

    values: list[Val]
    tuple: bool = False


@dataclass
class Table(Symbolic):
    """A dict with known keys."""

    values: dict[Any, Val]


@dataclass
class Stream(Symbolic):
    """An iterator over values."""

    values: list[Val]
    taken: int = 0


@dataclass
class Part(Symbolic):
    """A method of a known structure: `items.append`, `table.items`."""

    value: Val
    name: str


@dataclass
class Method(Symbolic):
    """A function bound to a module or to the call record."""

    function: types.FunctionType
    owner: Val


@dataclass
class Above(Symbolic):
    """`super()` inside a method of `kind`."""

    kind: type
    owner: Val


@dataclass
class Each(Symbolic):
    """Any one of some modules: the variable of a loop over layers."""

    modules: list[nn.Module]


@dataclass
class CallRecord(Symbolic):
    """The record of one forward call: positions count from 0, the rest is known at run time."""
