"""Whether a function's result stands in its caller, in place of a call."""

from __future__ import annotations

import ast

from archlab.arch_dsl.plain.application import Application
from archlab.arch_dsl.plain.body import NotInline
from archlab.arch_dsl.plain.frame import Frame
from archlab.arch_dsl.plain.trees import size, text, trivial
from archlab.arch_dsl.plain.values import Stream, Val

SMALL = 8  # an expression of so many parts stands where it is used


def inline(frame: Frame, applied: Application, *, always: bool, without: str | None = None) -> Val | None:
    """The result of a function whose statements go into the caller's, or None if it needs to be a function.

    That is if it has run-time control flow around its returns, or, unless `always`, if more of it is left than one
    small expression or if that reads `without`.
    """
    body = frame.body
    depth, length, silent = len(body.lists), len(body.lists[-1]), body.silent
    streams = [value.known for value in applied.values.values() if isinstance(value.known, Stream)]
    taken = [stream.taken for stream in streams]
    try:
        found = _result(frame, applied, always, without)
    except NotInline:
        found = None
    if found is None:  # what was written into the caller's statements is taken back
        del body.lists[depth:], body.lists[-1][length:]
        body.silent = silent
        for stream, before in zip(streams, taken, strict=True):
            stream.taken = before
    return found


def _result(frame: Frame, applied: Application, always: bool, without: str | None) -> Val | None:
    body = frame.body
    inner = Frame(frame.program, body, {}, applied.outer, inline=True, kind=applied.kind)
    for parameter, value in applied.values.items():
        inner.env[parameter] = value if body.silent else inner.named(parameter, value)
    start = len(body.lists[-1])
    found = inner.block(applied.source.body) or Val(known=None)
    if always:
        return found
    found = _only_value(found, body.lists[-1], start)
    return found if _stands_in_place(found, len(body.lists[-1]) - start, without) else None


def _only_value(found: Val, statements: list[ast.stmt], start: int) -> Val:
    """The value of the one statement since `start`, if it is what was found."""
    last = statements[-1] if len(statements) == start + 1 else None
    if isinstance(last, ast.Assign) and isinstance(found.expr, ast.Name) and found.dynamic:
        target = last.targets[0]
        if isinstance(target, ast.Name) and target.id == found.expr.id:
            statements.pop()
            return Val(last.value, optional=found.optional)
    return found


def _stands_in_place(found: Val, statements: int, without: str | None) -> bool:
    if not found.dynamic and found.expr is None:
        return True
    assert found.expr is not None
    if statements or (size(found.expr) > SMALL and not trivial(found.expr) and not _passes_on(found.expr)):
        return False
    return without is None or without not in text(found.expr)


def _passes_on(expr: ast.expr) -> bool:
    """Whether an expression is one call whose arguments nothing is computed for."""
    inner = (item for part in ast.iter_child_nodes(expr) for item in ast.walk(part))
    return isinstance(expr, ast.Call) and not any(isinstance(item, ast.Call | ast.BinOp | ast.IfExp) for item in inner)
