"""Assignments: what a name, a tuple or a place holds from then on."""

from __future__ import annotations

import ast

from archlab.arch_dsl.plain.frame import Frame, run
from archlab.arch_dsl.plain.trees import clone, load, unwritable
from archlab.arch_dsl.plain.values import CallRecord, Items, Val


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
    elif not _told(frame, target):
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


def _told(frame: Frame, target: ast.Subscript) -> bool:
    """Whether this is a loss or a measure that a node leaves in the call, for a trainer that a file lacks."""
    holder = target.value
    if not isinstance(holder, ast.Attribute) or holder.attr not in ("losses", "measures"):
        return False
    return isinstance(frame.eval(holder.value).known, CallRecord)


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
