"""Calls of Python's own functions and containers whose result is known when the file is written."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from arch_dsl.plain.evaluate import Evaluator, Part
from arch_dsl.plain.values import (
    Items,
    Stream,
    Table,
    Unexportable,
    Val,
    plain_value,
)


def call_of_container(frame: Evaluator, method: Part, args: list[Val]) -> Val:
    """A method of a list, dict or iterator that is known."""
    known = method.value.known
    if isinstance(known, Items) and method.name == "append":
        known.values.append(frame.settled(args[0]))
        return Val(known=None)
    if isinstance(known, Items) and method.name == "extend":
        known.values += frame.items(args[0]) or []
        return Val(known=None)
    if isinstance(known, Table):
        if method.name == "items":
            pairs = [[Val(known=key), item] for key, item in known.values.items()]
            return Val(known=Items([Val(known=Items(pair, tuple=True)) for pair in pairs]))
        if method.name == "values":
            return Val(known=Items(list(known.values.values())))
        if method.name == "get":
            return known.values.get(plain_value(args[0]), args[1] if len(args) > 1 else Val(known=None))
    raise Unexportable(f"`{method.name}` of a {type(known).__name__.lower()} has no form in a plain file")


Special = Callable[[Evaluator, list[Val], dict[str, Val]], Val | None]


def _all_items(frame: Evaluator, args: Sequence[Val]) -> list[list[Val]] | None:
    found = [frame.items(value) for value in args]
    return None if any(item is None for item in found) else found  # type: ignore[return-value]


def _next(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    known = args[0].known
    if isinstance(known, Items):
        known = Stream(known.values)
    if not isinstance(known, Stream):
        return None
    if known.taken == len(known.values):
        return args[1] if len(args) > 1 else None
    known.taken += 1
    return known.values[known.taken - 1]


def _iter(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    if isinstance(args[0].known, Stream):
        return args[0]
    items = frame.items(frame.settled(args[0]))
    return None if items is None else Val(known=Stream(list(items)))


def _list(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = _all_items(frame, args)
    return None if items is None else Val(known=Items([*itertools.chain.from_iterable(items)]))


def _zip(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = _all_items(frame, args)
    if items is None:
        return None
    return Val(known=Items([Val(known=Items(list(row), tuple=True)) for row in zip(*items, strict=False)]))


def _enumerate(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = frame.items(args[0])
    if items is None:
        return None
    start = plain_value(args[1]) if len(args) > 1 else 0
    rows = [Val(known=Items([Val(known=number), item], tuple=True)) for number, item in enumerate(items, start)]
    return Val(known=Items(rows))


def _chain(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = _all_items(frame, [frame.settled(value) for value in args])
    return None if items is None else Val(known=Stream([*itertools.chain.from_iterable(items)]))


def _sum(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = frame.items(args[0])
    if items is None or all(item.plain for item in items):
        return None
    terms = [*args[1:], *items]
    total = frame.lift(terms[0])
    for term in terms[1:]:
        total = ast.BinOp(total, ast.Add(), frame.lift(term))
    return Val(total)


def _len(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    known = args[0].known
    if isinstance(known, Items | Table | Stream):
        return Val(known=len(known.values))
    return Val(known=len(known)) if isinstance(known, nn.ModuleList | nn.ModuleDict) else None


def _isinstance(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    if args[0].dynamic and args[1].known is Tensor and not args[0].optional:
        return Val(known=True)
    known = args[0].known
    if isinstance(known, Items):
        known = () if known.tuple else []
    return None if args[0].dynamic else Val(known=isinstance(known, plain_value(args[1])))


def _getattr(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    return frame.attribute(args[0], plain_value(args[1]), args[2] if len(args) > 2 else None)


def _any(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = frame.items(args[0])
    truths = [frame.truth(item) for item in items or [Val()]]
    return None if None in truths else Val(known=any(truths))


def _all(frame: Evaluator, args: list[Val], keywords: dict[str, Val]) -> Val | None:
    items = frame.items(args[0])
    truths = [frame.truth(item) for item in items or [Val()]]
    return None if None in truths else Val(known=all(truths))


BUILTINS: dict[Any, Special] = {
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
