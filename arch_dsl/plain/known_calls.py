"""Calls of Python's own functions and containers whose result is known when the file is written."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from archlab.arch_dsl.plain.frame import Frame, call
from archlab.arch_dsl.plain.parts import attribute
from archlab.arch_dsl.plain.trees import Unexportable
from archlab.arch_dsl.plain.values import Items, Part, Stream, Table, Val

# The value of a call, or None if only the run knows it.
Known = Callable[[Frame, list[Val], dict[str, Val]], Val | None]


@call.register
def _of_part(method: Part, frame: Frame, function: Val, args: list[Val], keywords: dict[str, Val]) -> Val:
    """A method of a list or dict that is known."""
    known = method.value.known
    if isinstance(known, Items) and method.name == "append":
        known.values.append(frame.settled(args[0]))
        return Val(known=None)
    if isinstance(known, Table) and method.name == "items":
        return _rows([Val(known=key), item] for key, item in known.values.items())
    kind = {Items: "list", Table: "dict"}.get(type(known), "iterator")
    raise Unexportable(f"`{method.name}` of a {kind} has no form in a plain file")


def _rows(rows: Iterable[Sequence[Val]]) -> Val:
    """A list of tuples."""
    return Val(known=Items([Val(known=Items(list(row), tuple=True)) for row in rows]))


def _all_items(frame: Frame, args: Sequence[Val]) -> list[list[Val]] | None:
    found = [frame.items(value) for value in args]
    return None if any(item is None for item in found) else found  # type: ignore[return-value]


def _next(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    known = args[0].known
    if not isinstance(known, Stream):
        return None
    if known.taken == len(known.values):
        return args[1] if len(args) > 1 else None
    known.taken += 1
    return known.values[known.taken - 1]


def _iter(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    if isinstance(args[0].known, Stream):
        return args[0]
    items = frame.items(frame.settled(args[0]))
    return None if items is None else Val(known=Stream(list(items)))


def _list(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = _all_items(frame, args)
    return None if items is None else Val(known=Items([*itertools.chain.from_iterable(items)]))


def _chain(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = _all_items(frame, [frame.settled(value) for value in args])
    return None if items is None else Val(known=Stream([*itertools.chain.from_iterable(items)]))


def _zip(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = _all_items(frame, args)
    return None if items is None else _rows(zip(*items, strict=False))


def _enumerate(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = frame.items(args[0])
    return None if items is None else _rows([Val(known=number), item] for number, item in enumerate(items))


def _sum(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = frame.items(args[0])
    if items is None or all(item.plain for item in items):
        return None
    terms = [*args[1:], *items]
    total = frame.lift(terms[0])
    for term in terms[1:]:
        total = ast.BinOp(total, ast.Add(), frame.lift(term))
    return Val(total)


def _len(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    known = args[0].known
    if isinstance(known, Items | Table):
        return Val(known=len(known.values))
    return Val(known=len(known)) if isinstance(known, nn.ModuleList | nn.ModuleDict) else None


def _isinstance(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    value, kind = args[0], args[1].known
    if value.dynamic:
        return Val(known=True) if kind is Tensor and not value.optional else None
    known = value.known
    if isinstance(known, Items):
        known = () if known.tuple else []
    return Val(known=isinstance(known, args[1].data))


def _getattr(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    return attribute(frame, args[0], args[1].data, args[2] if len(args) > 2 else None)


def _any(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    truths = _truths(frame, args[0])
    return None if None in truths else Val(known=any(truths))


def _all(frame: Frame, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    truths = _truths(frame, args[0])
    return None if None in truths else Val(known=all(truths))


def _truths(frame: Frame, value: Val) -> list[bool | None]:
    """What its items count as; None for what only the run knows."""
    items = frame.items(value)
    return [None] if items is None else [item.truth for item in items]


KNOWN: dict[Any, Known] = {
    next: _next,
    iter: _iter,
    list: _list,
    tuple: _list,
    zip: _zip,
    enumerate: _enumerate,
    itertools.chain: _chain,
    sum: _sum,
    len: _len,
    isinstance: _isinstance,
    getattr: _getattr,
    any: _any,
    all: _all,
}
