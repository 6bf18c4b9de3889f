"""Comprehensions: over known items they are unrolled, over anything else they stay."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import TypeVar

from archlab.arch_dsl.plain.assignments import store
from archlab.arch_dsl.plain.frame import Frame, evaluate
from archlab.arch_dsl.plain.trees import load, stored, unwritable
from archlab.arch_dsl.plain.values import Items, Table, Val

Element = TypeVar("Element")


@evaluate.register
def _list(node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Val:
    found = _unrolled(frame, node.generators, lambda: frame.settled(frame.eval(node.elt)))
    return _kept(node, frame) if found is None else Val(known=Items(found))


@evaluate.register
def _mapping(node: ast.DictComp, frame: Frame) -> Val:
    found = _unrolled(
        frame, node.generators, lambda: (frame.eval(node.key).data, frame.settled(frame.eval(node.value)))
    )
    if found is None:
        raise unwritable(node, "a mapping with unknown keys")
    return Val(known=Table(dict(found)))


def _unrolled(frame: Frame, loops: Sequence[ast.comprehension], element: Callable[[], Element]) -> list[Element] | None:
    """The elements of a comprehension, or None if only the run knows how many there are."""
    if not loops:
        return [element()]
    items = frame.items(frame.eval(loops[0].iter))
    if items is None:
        return None
    before, found = dict(frame.env), []
    try:
        for item in items:
            store(frame, loops[0].target, item)
            chosen = _chosen(frame, loops[0].ifs)
            inner = _unrolled(frame, loops[1:], element) if chosen else []
            if chosen is None or inner is None:
                return None
            found += inner
    finally:
        frame.env = before
    return found


def _chosen(frame: Frame, tests: Sequence[ast.expr]) -> bool | None:
    """Whether all tests hold, or None if only the run can say."""
    for test in tests:
        if not (truth := frame.eval(test).truth):
            return truth
    return True


def _kept(node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Val:
    """A comprehension as it stands."""
    before, loops = dict(frame.env), []
    with frame.body.quiet():
        for loop in node.generators:
            over = frame.lift(frame.eval(loop.iter))
            frame.env.update({name: Val(load(name)) for name in stored(loop.target)})
            tests = [frame.lift(frame.eval(test)) for test in loop.ifs]
            loops.append(ast.comprehension(loop.target, over, tests, 0))
        element = frame.lift(frame.eval(node.elt))
    frame.env = before
    return Val(type(node)(element, loops))
