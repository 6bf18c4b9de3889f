"""Functions and methods of the file: with what is known of their arguments worked in, and with the parameters left."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from torch import nn

from archlab.arch_dsl.plain.application import Application
from archlab.arch_dsl.plain.body import Body
from archlab.arch_dsl.plain.frame import Frame
from archlab.arch_dsl.plain.program import Program, Written
from archlab.arch_dsl.plain.tidy import tidy
from archlab.arch_dsl.plain.trees import Unexportable, is_numbers, load, text
from archlab.arch_dsl.plain.values import CallRecord, Val


def function(frame: Frame, applied: Application) -> Val:
    """The call of a function of the file."""
    written = _specialised(frame.program, applied, None)
    return applied.call(frame, load(frame.program.add(written.node)), written.parameters, written.optional)


def helper(frame: Frame, applied: Application) -> Val:
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
        inside = Application(
            applied.function, {**applied.values, "self": Val(load("self"), module)}, applied.named, applied.kind
        )
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
    source = applied.source
    result = Frame(program, body, dict(env), applied.outer, inline=False, kind=applied.kind).block(source.body)
    statements, used = tidy(body, env)
    if result is None and any(isinstance(item, ast.Return) for item in ast.walk(ast.Module(statements, []))):
        body.optional = True
    parameters = [
        parameter
        for parameter, value in env.items()
        if parameter != "self" and (parameter in used or parameter in kept) and value.expr is not None
    ]
    written = [ast.arg("self")] if owner is not None else []
    written += [
        ast.arg(parameter, _annotation(source, parameter, applied.values[parameter])) for parameter in parameters
    ]
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
