"""How tensors came about while a model was built: buffers and initial values as expressions."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from archlab.arch_dsl.plain.trees import Unexportable, clone, literal, name, torch_name
from archlab.arch_dsl.plain.values import OPERATORS

_BINARY = {"div": ast.Div(), "matmul": ast.MatMult()} | {
    function.__name__: kind() for kind, function in OPERATORS.items() if issubclass(kind, ast.operator)
}


class Recorder(TorchFunctionMode):
    """Writes down the expression of every tensor that torch makes while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[Tensor, ast.expr | None]] = {}  # with the tensor, so that its id is not used again

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}  # parameters; all else is small and may be looked at
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._made[id(result)] = (result, self._written(func, args, kwargs or {}))
        return result

    def expression(self, value: Tensor) -> ast.expr:
        """The expression of a tensor. Raises Unexportable."""
        found = self._made.get(id(value), (value, None))[1]
        if found is None:
            raise Unexportable("a buffer is computed in a way that is not seen")
        return clone(found)

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ast.expr | None:
        try:
            parts = [self._argument(item) for item in args]
            named = [ast.keyword(key, self._argument(item)) for key, item in kwargs.items() if key != "device"]
        except Unexportable:
            return None
        return _operation(func, parts, named)

    def _argument(self, value: Any) -> ast.expr:
        if isinstance(value, Tensor):
            return self.expression(value)
        if isinstance(value, list | tuple):
            parts = [self._argument(item) for item in value]
            return ast.Tuple(parts, ast.Load()) if isinstance(value, tuple) else ast.List(parts, ast.Load())
        return literal(value)


def _operation(func: Any, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr | None:
    """A call as people write it: an operator, a method, a function."""
    own = getattr(func, "__name__", "")
    short = own.strip("_")
    described = isinstance(func, types.MethodDescriptorType | types.WrapperDescriptorType)
    method = described or getattr(func, "__qualname__", "").partition(".")[0] in ("Tensor", "TensorBase")
    if method and not keywords:
        if short in _BINARY and len(args) == 2:
            return ast.BinOp(args[0], _BINARY[short], args[1])
        if short[:1] == "r" and short[1:] in _BINARY and own.startswith("__") and len(args) == 2:
            return ast.BinOp(args[1], _BINARY[short[1:]], args[0])
        if short == "neg":
            return ast.UnaryOp(ast.USub(), args[0])
        if own == "__getitem__":
            return ast.Subscript(args[0], args[1], ast.Load())
    if method and args and not own.startswith("__"):
        return ast.Call(ast.Attribute(args[0], own, ast.Load()), args[1:], keywords)
    dotted = torch_name(func)
    return ast.Call(name(dotted), args, keywords) if dotted else None


class _Drawn:
    """Stands for a parameter while its initial distribution is asked: remembers the methods that are called."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.calls = tuple(shape), []  # type: ignore[var-annotated]

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> _Drawn:
            plain = tuple(item.tolist() if isinstance(item, Tensor) else item for item in args)
            self.calls.append((method, plain, {key: item for key, item in kwargs.items() if key != "generator"}))
            return self

        return call


Start = tuple[str, tuple[Any, ...], dict[str, Any]]


def drawn(value: torch.nn.Parameter) -> list[Start]:
    """How a parameter starts: methods of a tensor that fill it one after another, and their arguments."""
    start = _Drawn(value.shape)
    initializer = getattr(value, "initializer", None)
    if initializer is None:
        raise Unexportable(
            "a parameter has no initial distribution; make it with archlab.arch_dsl.parts.layers.parameter"
        )
    try:
        initializer(start, None)
    except TypeError as error:
        raise Unexportable(f"a parameter's initial values are no calls of a tensor's methods: {error}") from error
    return start.calls


def drawn_once(value: torch.nn.Parameter) -> Start:
    """How a parameter starts that one method fills."""
    calls = drawn(value)
    if len(calls) != 1:
        raise Unexportable("a parameter's initial values are not one call of a tensor's method")
    return calls[0]


def initial(shape: ast.expr, value: torch.nn.Parameter) -> ast.expr:
    """The expression of a parameter's initial values, its shape given as an expression."""
    (method, args, _), *more = drawn(value)
    sizes = shape.elts if isinstance(shape, ast.Tuple) else [shape]
    if not more and method == "fill_" and args in ((1.0,), (0.0,)):
        return ast.Call(name("torch.ones" if args == (1.0,) else "torch.zeros"), sizes, [])
    if not more and method == "fill_":
        return ast.Call(name("torch.full"), [ast.Tuple(list(sizes), ast.Load()), literal(args[0])], [])
    if not more and method == "copy_":
        return ast.Call(name("torch.tensor"), [literal(args[0])], [])
    found: ast.expr = ast.Call(name("torch.empty"), sizes, [])
    for method, args, kwargs in drawn(value):
        keywords = [ast.keyword(key, literal(item)) for key, item in kwargs.items()]
        found = ast.Call(ast.Attribute(found, method, ast.Load()), [literal(item) for item in args], keywords)
    return found
