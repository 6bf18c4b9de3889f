"""A function and the values of its parameters: what is known before one is put into the other."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Self

from torch import nn

from archlab.arch_dsl.plain.frame import Frame
from archlab.arch_dsl.plain.trees import Unexportable
from archlab.arch_dsl.plain.values import Above, CallRecord, Items, Stream, Table, Val


@dataclass
class Application:
    """`values` by parameter in their order, with defaults; those in `named` were given by name; `kind` is the class of
    a method."""

    function: FunctionType
    values: dict[str, Val]
    named: Collection[str]
    kind: type | None

    @classmethod
    def of(
        cls,
        frame: Frame,
        function: FunctionType,
        args: Sequence[Val],
        keywords: dict[str, Val],
        kind: type | None = None,
    ) -> Self:
        """A call of a function in a frame."""
        signature = inspect.signature(function)
        given = signature.bind(*args, **keywords).arguments
        values = {}
        for key, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                values[key] = Val(known=Items(list(given.get(key, ())), tuple=True))
            elif parameter.kind is parameter.VAR_KEYWORD:
                values[key] = Val(known=Table(dict(given.get(key, {}))))
            else:
                values[key] = given[key] if key in given else frame.object(parameter.default)
        return cls(function, values, keywords.keys(), kind)

    @property
    def structural(self) -> bool:
        """Whether an argument has no place at run time."""
        return any(_is_structural(value) for value in self.values.values())

    @property
    def signature(self) -> str:
        """What a method is specialised for, but for its module."""
        return repr([(key, _specialised_for(value)) for key, value in self.values.items() if key != "self"])

    @property
    def source(self) -> ast.FunctionDef:
        """The syntax tree of the function. Raises Unexportable."""
        return _source(self.function)

    @property
    def outer(self) -> dict[str, Any]:
        """What the function's free names mean."""
        function = self.function
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return {**vars(builtins), **function.__globals__, **{key: cell.cell_contents for key, cell in cells}}

    def call(self, frame: Frame, target: ast.expr, parameters: Sequence[str], optional: bool) -> Val:
        """The call at run time, by the name or path that the function has there, with the parameters that it kept."""
        args = [frame.lift(self.values[key]) for key in parameters if key not in self.named]
        keywords = [ast.keyword(key, frame.lift(self.values[key])) for key in parameters if key in self.named]
        return Val(ast.Call(target, args, keywords), optional=optional)


def _is_structural(value: Val) -> bool:
    return isinstance(value.known, Stream | Above) or (isinstance(value.known, Items | Table) and not value.plain)


def _specialised_for(value: Val) -> object:
    if value.dynamic or isinstance(value.known, CallRecord | nn.Module):
        return "at run time", value.optional
    return value.data if value.plain else type(value.known).__name__


@cache
def _source(function: FunctionType) -> ast.FunctionDef:
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError) as error:
        raise Unexportable(f"the source of {function.__qualname__} cannot be read: {error}") from error
    if not isinstance(node, ast.FunctionDef):
        raise Unexportable(f"{function.__qualname__} is not written as a function of its own")
    return node
