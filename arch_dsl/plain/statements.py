"""Statements: those that the run alone decides are written down, all others happen now."""

from __future__ import annotations

import ast

from torch import nn

from archlab.arch_dsl.plain.body import NotInline
from archlab.arch_dsl.plain.frame import WRITTEN, Frame, Returned, run
from archlab.arch_dsl.plain.trees import clone, literal, load, stored, text, unwritable
from archlab.arch_dsl.plain.values import UNKNOWN, CallRecord, Each, Items, Val


@run.register
def _nothing(node: ast.Pass | ast.Assert, frame: Frame) -> None:
    """A check is one of shapes, which are those of this very model."""


@run.register
def _expression(node: ast.Expr, frame: Frame) -> None:
    if isinstance(node.value, ast.Constant):
        return
    value = frame.eval(node.value)
    if value.dynamic:
        frame.body.emit(ast.Expr(frame.lift(value)))


@run.register
def _return(node: ast.Return, frame: Frame) -> Val:
    value = Val(known=None) if node.value is None else frame.eval(node.value)
    if frame.inline:
        if frame.region:
            raise NotInline
        return value
    frame.body.optional |= value.nullable
    frame.body.emit(ast.Return(frame.lift(value)))
    return WRITTEN


@run.register
def _if(node: ast.If, frame: Frame) -> Returned:
    test = frame.eval(node.test)
    if test.truth is not None:
        return frame.block(node.body if test.truth else node.orelse)
    if not node.orelse and all(isinstance(item, ast.Raise) for item in node.body):
        return None  # a check of shapes, which are those of this very model
    frame.pin(stored(*node.body, *node.orelse))
    before, live, written = frame.env, [], []
    for branch in (node.body, node.orelse):
        frame.env = dict(before)
        with frame.branch() as statements:
            end = frame.block(branch)
        written.append(statements)
        if end is None:
            live.append(frame.env)
    frame.body.emit(ast.If(frame.lift(test), written[0] or [ast.Pass()], written[1]))
    if not live:
        return WRITTEN
    frame.env = live[0]
    for name in frame.pins:
        if found := [env[name] for env in live if name in env]:
            frame.env[name] = Val(found[0].expr, optional=any(item.optional for item in found))
    return None


@run.register
def _for(node: ast.For, frame: Frame) -> Returned:
    over = frame.eval(node.iter)
    if isinstance(over.known, nn.ModuleList):
        _in_rounds(node, frame, frame.lift(over), Each(list(over.known)))
        return None
    if isinstance(over.known, range) and _goes_through_layers(node, frame):
        _in_rounds(node, frame, literal(over.known), UNKNOWN)
        return None
    items = frame.items(over)
    if items is None:
        _over_unknown(node, frame, frame.lift(over))
        return None
    for item in items:
        store(frame, node.target, item)
        if (result := frame.block(node.body)) is not None:
            return result
    return None


def _in_rounds(node: ast.For, frame: Frame, over: ast.expr, item: object) -> None:
    """A loop over modules or numbers, written as one; what is known of each of them is `item`."""
    assert isinstance(node.target, ast.Name)
    own = frame.body.pin(node.target.id)
    frame.pin([name for name in stored(*node.body) if name in frame.env])
    frame.env[node.target.id] = Val(load(own), item)
    with frame.branch() as written:
        if frame.block(node.body) is not None:
            raise unwritable(node, "a return inside the loop over layers")
    frame.body.emit(ast.For(ast.Name(own, ast.Store()), over, written, []))


def _goes_through_layers(node: ast.For, frame: Frame) -> bool:
    """Whether each round of a loop is one through layers of this module."""
    inner = [item.iter for item in node.body if isinstance(item, ast.For)]
    places = [item for item in inner if isinstance(item, ast.Subscript) and text(item).startswith("self.")]
    return any(isinstance(frame.eval(item).known, nn.ModuleList) for item in places)


def _over_unknown(node: ast.For, frame: Frame, over: ast.expr) -> None:
    """A loop over something unknown, written as one."""
    frame.pin([*stored(node.target, *node.body), *(name for name in _grown(node.body) if name in frame.env)])
    target = clone(node.target)
    for item in ast.walk(target):
        if isinstance(item, ast.Name):
            frame.env[item.id] = Val(load(frame.pins[item.id]))
            item.id = frame.pins[item.id]
    with frame.branch() as written:
        frame.block(node.body)
    frame.body.emit(ast.For(target, over, written or [ast.Pass()], []))


def _grown(statements: list[ast.stmt]) -> list[str]:
    """The names of lists that statements append to."""
    calls = [n.func for statement in statements for n in ast.walk(statement) if isinstance(n, ast.Call)]
    lists = [c.value for c in calls if isinstance(c, ast.Attribute) and c.attr in ("append", "extend")]
    return list(dict.fromkeys(item.id for item in lists if isinstance(item, ast.Name)))


@run.register
def _with(node: ast.With, frame: Frame) -> Returned:
    if any(item.optional_vars is not None for item in node.items):
        raise unwritable(node, "a name for a context")
    entered = [ast.withitem(frame.lift(frame.eval(item.context_expr)), None) for item in node.items]
    with frame.branch() as written:
        result = frame.block(node.body)
    frame.body.emit(ast.With(entered, written or [ast.Pass()]))
    return result


# Assignments: what a name, a tuple or a place holds from then on


@run.register
def _assign(node: ast.Assign, frame: Frame) -> None:
    before = len(frame.body.bases)
    value = frame.eval(node.value)
    for target in node.targets:
        _rename(frame, value, target, before)
        store(frame, target, value)


@run.register
def _annotated(node: ast.AnnAssign, frame: Frame) -> None:
    if node.value is not None:
        store(frame, node.target, frame.eval(node.value))


@run.register
def _augmented(node: ast.AugAssign, frame: Frame) -> None:
    read = clone(node.target)
    read.ctx = ast.Load()
    store(frame, node.target, frame.eval(ast.BinOp(read, node.op, node.value)))


def store(frame: Frame, target: ast.expr, value: Val) -> None:
    """Puts a value where a target says. Raises Unexportable."""
    if isinstance(target, ast.Name):
        frame.bind(target.id, value)
    elif isinstance(target, ast.Tuple):
        _unpack(frame, target, value)
    elif not isinstance(target, ast.Subscript):
        raise unwritable(target, "this assignment")
    elif not _is_report(frame, target):
        holder, key = frame.lift(frame.eval(target.value)), frame.lift(frame.eval(target.slice))
        frame.body.emit(ast.Assign([ast.Subscript(holder, key, ast.Store())], frame.lift(value)))


def _unpack(frame: Frame, target: ast.Tuple, value: Val) -> None:
    items = frame.items(value)
    if items is not None:
        for part, item in zip(target.elts, items, strict=True):
            store(frame, part, item)
        return
    places: list[ast.expr] = []
    for part in target.elts:
        if not isinstance(part, ast.Name):
            raise unwritable(target, "this assignment")
        own = frame.pins.get(part.id) or frame.body.fresh(part.id)
        frame.env[part.id] = Val(load(own))
        places.append(ast.Name(own, ast.Store()))
    frame.body.emit(ast.Assign([ast.Tuple(places, ast.Store())], frame.lift(value)))


def _is_report(frame: Frame, target: ast.Subscript) -> bool:
    """Whether this is a loss or a measure that a node leaves in the call, for a trainer that a file lacks."""
    holder = target.value
    return (
        isinstance(holder, ast.Attribute)
        and holder.attr in ("losses", "measures")
        and isinstance(frame.eval(holder.value).known, CallRecord)
    )


def _rename(frame: Frame, value: Val, target: ast.expr, before: int) -> None:
    """What an inlined function called its result takes the name that its caller gives it."""
    if isinstance(target, ast.Tuple) and isinstance(value.known, Items):
        for item, part in zip(value.known.values, target.elts, strict=False):
            _rename(frame, item, part, before)
    if not isinstance(value.expr, ast.Name) or not isinstance(target, ast.Name) or target.id in frame.pins:
        return
    own, body = value.expr.id, frame.body
    if own in body.soft and own not in body.pinned and int(own.rpartition("__")[2]) >= before:
        body.bases[own] = target.id
        body.temporary.discard(own)
        if not frame.inline:
            body.soft.discard(own)
