"""A function and the values of its parameters, and where it goes: in place of its call, or into the file."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any, Self

from torch import nn

from archlab.arch_dsl.plain.body import Body, NotInline
from archlab.arch_dsl.plain.frame import Frame
from archlab.arch_dsl.plain.program import Program, Written
from archlab.arch_dsl.plain.tidy import tidy
from archlab.arch_dsl.plain.trees import Unexportable, is_numbers, load, size, target_of, text, trivial
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
        cls, frame: Frame, function: FunctionType, args: list[Val], keywords: dict[str, Val], kind: type | None = None
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
        values = [value for value in self.values.values() if isinstance(value.known, Stream | Above | Items | Table)]
        return not all(value.plain for value in values)

    @property
    def signature(self) -> str:
        """What a method is specialised for, but for its module."""
        return repr([(key, _specialised_for(value)) for key, value in self.values.items() if key != "self"])

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


def _specialised_for(value: Val) -> object:
    if value.dynamic or isinstance(value.known, CallRecord | nn.Module):
        return "at run time", value.optional
    return value.data if value.plain else type(value.known).__name__


@cache
def _source(function: FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function. Raises Unexportable."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError) as error:
        raise Unexportable(f"the source of {function.__qualname__} cannot be read: {error}") from error
    if not isinstance(node, ast.FunctionDef):
        raise Unexportable(f"{function.__qualname__} is not written as a function of its own")
    return node


# In place of the call

SMALL = 8  # an expression of so many parts stands where it is used


def inline(frame: Frame, applied: Application, *, always: bool, without: str | None = None) -> Val | None:
    """The result of a function whose statements go into the caller's, or None if it needs to be a function.

    That is if it has run-time control flow around its returns, or, unless `always`, if more of it is left than one
    small expression or if that reads `without`.
    """
    body = frame.body
    length = len(body.lists[-1])
    streams = [value.known for value in applied.values.values() if isinstance(value.known, Stream)]
    taken, written = [stream.taken for stream in streams], frame.program.written()
    try:
        found = _result(frame, applied, always, without)
    except NotInline:
        found = None
    if found is None:  # what was written, into the caller's statements and for it, is taken back
        del body.lists[-1][length:]
        frame.program.take_back(written)
        for stream, before in zip(streams, taken, strict=True):
            stream.taken = before
    return found


def _result(frame: Frame, applied: Application, always: bool, without: str | None) -> Val | None:
    body = frame.body
    inner = Frame(frame.program, body, {}, applied.outer, inline=True, kind=applied.kind)
    for parameter, value in applied.values.items():
        inner.env[parameter] = value if body.silent else inner.named(parameter, value)
    start = len(body.lists[-1])
    found = inner.block(_source(applied.function).body) or Val(known=None)
    if always:
        return found
    found = _only_value(found, body.lists[-1], start)
    if found.expr is None and not found.dynamic:
        return found
    assert found.expr is not None
    large = size(found.expr) > SMALL and not trivial(found.expr) and not _passes_on(found.expr)
    if large or len(body.lists[-1]) > start or (without is not None and without in text(found.expr)):
        return None
    return found


def _only_value(found: Val, statements: list[ast.stmt], start: int) -> Val:
    """The value of the one statement since `start`, if it is what was found."""
    last = statements[-1] if len(statements) == start + 1 else None
    own = found.expr.id if isinstance(found.expr, ast.Name) and found.dynamic else ""
    if isinstance(last, ast.Assign) and target_of(last) == own:
        statements.pop()
        return Val(last.value, optional=found.optional)
    return found


def _passes_on(expr: ast.expr) -> bool:
    """Whether an expression is one call whose arguments nothing is computed for."""
    inner = (item for part in ast.iter_child_nodes(expr) for item in ast.walk(part))
    return isinstance(expr, ast.Call) and not any(isinstance(item, ast.Call | ast.BinOp | ast.IfExp) for item in inner)


# A function or method of the file


def call_function(frame: Frame, applied: Application) -> Val:
    """The call of a function of the file."""
    written = _specialised(frame.program, applied, None)
    return applied.call(frame, load(frame.program.add(written.node)), written.parameters, written.optional)


def call_helper(frame: Frame, applied: Application) -> Val:
    """The call of a method by another of the same module."""
    owner = frame.body.owner
    assert owner is not None
    written = _specialised(frame.program, applied, owner)
    node = written.node
    before = frame.program.helpers[id(owner)].setdefault(node.name, node)
    if text(before) != text(node):
        raise Unexportable(f"{applied.function.__qualname__} is used in two ways")
    return applied.call(frame, ast.Attribute(load("self"), node.name, ast.Load()), written.parameters, written.optional)


def entry(program: Program, module: nn.Module, applied: Application, kept: Sequence[str] = ()) -> Written:
    """The method of a module's class that others call, once written. It has parameters that it reads or that are
    `kept`."""
    module = program.twin(module)
    methods = program.entries[id(module)]
    signature = applied.signature
    found = methods.get(applied.function.__name__)
    if found is None:
        inside = replace(applied, values={**applied.values, "self": Val(load("self"), module)})
        found = _specialised(program, inside, module, kept)
        found.signature = signature
        if not methods:
            found.node.name = "forward"  # what a class is first asked for
        methods[applied.function.__name__] = found
    if found.signature != signature:
        raise Unexportable(f"{applied.function.__qualname__} of one module is called in two ways")
    return found


def _specialised(program: Program, applied: Application, owner: nn.Module | None, kept: Sequence[str] = ()) -> Written:
    body = Body(owner)
    env = {parameter: _seen_inside(parameter, value, owner) for parameter, value in applied.values.items()}
    source = _source(applied.function)
    result = Frame(program, body, dict(env), applied.outer, inline=False, kind=applied.kind).block(source.body)
    statements, used = tidy(body, env)
    if result is None and any(isinstance(item, ast.Return) for item in ast.walk(ast.Module(statements, []))):
        body.optional = True
    left = {*used, *kept} - {"self"}
    parameters = [key for key, value in env.items() if key in left and value.expr is not None]
    written = [ast.arg("self")] if owner is not None else []
    written += [ast.arg(key, _annotation(source, key, applied.values[key])) for key in parameters]
    arguments = ast.arguments([], written, None, [], [], None, [])
    words = ast.get_docstring(source)
    summary: list[ast.stmt] = [ast.Expr(ast.Constant(words.split("\n\n")[0]))] if words else []
    returns = source.returns if body.optional else _never_none(source.returns)
    node = ast.FunctionDef(applied.function.__name__, arguments, [*summary, *statements], [], returns)
    return Written(node, parameters, body.optional)


def _seen_inside(parameter: str, value: Val, owner: nn.Module | None) -> Val:
    """An argument as the function sees it: by its name if it is needed at run time."""
    if value.dynamic or isinstance(value.known, CallRecord):
        return Val(load(parameter), value.known, value.optional)
    if value.expr is not None and is_numbers(value.known):
        return Val(load(parameter), value.known)
    if isinstance(value.known, nn.Module):
        if value.known is not owner:
            raise Unexportable(f"a {type(value.known).__name__} is an argument of a function")
        return value
    return Val(None, value.known)


def _annotation(source: ast.FunctionDef, parameter: str, value: Val) -> ast.expr | None:
    """What the source says of a parameter, without the None that this value never is."""
    every = [*source.args.posonlyargs, *source.args.args, *source.args.kwonlyargs]
    found = next((item.annotation for item in every if item.arg == parameter), None)
    return found if value.optional else _never_none(found)


def _never_none(annotation: ast.expr | None) -> ast.expr | None:
    """`Tensor | None` of what is never None."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.right, ast.Constant):
        return annotation.left
    return annotation
