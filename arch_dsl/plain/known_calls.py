"""Calls of Python's own functions and containers whose result is known when the file is written."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

from torch import Tensor, nn

from archlab.arch_dsl.plain.frame import Frame, call
from archlab.arch_dsl.plain.parts import attribute
from archlab.arch_dsl.plain.trees import Unexportable
from archlab.arch_dsl.plain.values import Items, Part, Stream, Table, Val

# The value of a call, or None if only the run knows it.
Known = Callable[[Frame, list[Val]], Val | None]


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


def _next(frame: Frame, args: list[Val]) -> Val | None:
    known = args[0].known
    if not isinstance(known, Stream):
        return None
    if known.taken == len(known.values):
        return args[1] if len(args) > 1 else None
    known.taken += 1
    return known.values[known.taken - 1]


def _iter(frame: Frame, args: list[Val]) -> Val | None:
    if isinstance(args[0].known, Stream):
        return args[0]
    return _chain(frame, args)


def _chain(frame: Frame, args: list[Val]) -> Val | None:
    return _of_items(_stream)(frame, [frame.settled(value) for value in args])


def _of_items(function: Callable[..., Val | None]) -> Known:
    """The call of a function that takes the items of its arguments: None if only the run knows these."""

    def found(frame: Frame, args: list[Val]) -> Val | None:
        items = [frame.items(value) for value in args]
        return None if any(each is None for each in items) else function(*items)

    return found


def _stream(*items: list[Val]) -> Val:
    return Val(known=Stream([*itertools.chain.from_iterable(items)]))


def _list(*items: list[Val]) -> Val:
    return Val(known=Items([*itertools.chain.from_iterable(items)]))


def _any(items: list[Val]) -> Val | None:
    truths = [item.truth for item in items]
    return None if None in truths else Val(known=any(truths))


def _all(items: list[Val]) -> Val | None:
    truths = [item.truth for item in items]
    return None if None in truths else Val(known=all(truths))


def _sum(frame: Frame, args: list[Val]) -> Val | None:
    items = frame.items(args[0])
    if items is None or all(item.plain for item in items):
        return None
    first, *rest = (frame.lift(term) for term in (*args[1:], *items))
    return Val(reduce(lambda total, term: ast.BinOp(total, ast.Add(), term), rest, first))


def _len(frame: Frame, args: list[Val]) -> Val | None:
    known = args[0].known
    if isinstance(known, Items | Table):
        return Val(known=len(known.values))
    return Val(known=len(known)) if isinstance(known, nn.ModuleList | nn.ModuleDict) else None


def _isinstance(frame: Frame, args: list[Val]) -> Val | None:
    value, kind = args[0], args[1].known
    if value.dynamic:
        return Val(known=True) if kind is Tensor and not value.optional else None
    known = value.known
    if isinstance(known, Items):
        known = () if known.tuple else []
    return Val(known=isinstance(known, args[1].data))


KNOWN: dict[Any, Known] = {
    next: _next,
    iter: _iter,
    itertools.chain: _chain,
    list: _of_items(_list),
    tuple: _of_items(_list),
    zip: _of_items(lambda *items: _rows(zip(*items, strict=False))),
    enumerate: _of_items(lambda items: _rows([Val(known=at), item] for at, item in enumerate(items))),
    any: _of_items(_any),
    all: _of_items(_all),
    sum: _sum,
    len: _len,
    isinstance: _isinstance,
    getattr: lambda frame, args: attribute(frame, args[0], args[1].data, args[2] if len(args) > 2 else None),
}
