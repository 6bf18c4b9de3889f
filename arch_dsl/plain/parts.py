"""Known values taken apart: `value.name`, `value[index]`, and what Python's functions and containers give of them."""

from __future__ import annotations

import ast
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

from torch import Tensor, nn

from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.plain.frame import Frame, call, children, evaluate
from archlab.arch_dsl.plain.trees import Unexportable, child_of, is_numbers, literal, unwritable
from archlab.arch_dsl.plain.values import UNKNOWN, Above, CallRecord, Each, Items, Method, Part, Stream, Table, Val


@evaluate.register
def _attribute(node: ast.Attribute, frame: Frame) -> Val:
    return attribute(frame, frame.eval(node.value), node.attr)


def attribute(frame: Frame, value: Val, name: str, default: Val | None = None) -> Val:
    """`value.name`."""
    known = value.known
    if isinstance(known, nn.Module):
        return _of_module(frame, value, name, default)
    if isinstance(known, CallRecord):
        return _of_call(value, name)
    if isinstance(known, Above):
        kinds = type(known.owner.known).__mro__
        kind = next(kind for kind in kinds[kinds.index(known.kind) + 1 :] if name in vars(kind))
        return Val(known=Method(vars(kind)[name], known.owner))
    if isinstance(known, Items | Table | Stream):
        return Val(known=Part(value, name))
    if isinstance(known, Each):
        raise unwritable(ast.Attribute(frame.lift(value), name), "a part of any one of several modules")
    if value.dynamic:
        return Val(ast.Attribute(frame.lift(value), name, ast.Load()))
    if default is not None and not hasattr(known, name):
        return default
    return frame.object(getattr(known, name))


def _of_module(frame: Frame, value: Val, name: str, default: Val | None) -> Val:
    module, path = value.known, value.expr
    assert path is not None
    place = child_of(path, name)
    for table in (module._parameters, module._buffers):
        if name in table:
            return Val(known=None) if table[name] is None else Val(place)
    if name in module._modules:
        return children(value)[name]
    if name == "training":
        return Val(place)
    if name in vars(module):
        found = vars(module)[name]
        return Val(place, found) if is_numbers(found) else frame.object(found)
    static = inspect.getattr_static(type(module), name, UNKNOWN)
    if isinstance(static, types.FunctionType):
        return Val(known=Method(static, value))
    if isinstance(static, property) and isinstance(static.fget, types.FunctionType):
        return frame.call(Val(known=Method(static.fget, value)), [], {})
    if static is UNKNOWN and default is not None:
        return default
    return frame.object(getattr(module, name))


_ABSENT = ("positions", "padding", "state", "held", "watch")  # what a call has for decoding and for who watches


def _of_call(record: Val, name: str) -> Val:
    static = inspect.getattr_static(Call, name, None)
    if isinstance(static, types.FunctionType):
        return Val(known=Method(static, record))
    if name in _ABSENT:
        return Val(known=None)
    assert record.expr is not None
    default = Call.__dataclass_fields__[name].default
    return Val(ast.Attribute(record.expr, name, ast.Load()), optional=default is None)


@evaluate.register
def _subscript(node: ast.Subscript, frame: Frame) -> Val:
    value, index = frame.eval(node.value), frame.eval(node.slice)
    if isinstance(value.known, Table) and index.plain:
        return value.known.values[index.data]
    if isinstance(value.known, nn.ModuleDict) and index.plain:
        return children(value)[index.data]
    if isinstance(value.known, nn.ModuleList) and isinstance(index.known, slice):
        if not len(value.known[index.known]):
            return Val(known=Items([]))
        # known as all the layers, so that loops over some call these as loops over others do
        return Val(ast.Subscript(frame.lift(value), literal(index.known), ast.Load()), value.known)
    parts = None if isinstance(value.known, str | dict) else frame.items(value)
    if parts is not None and index.plain:
        chosen = parts[index.data]
        return Val(known=Items(chosen)) if isinstance(chosen, list) else chosen
    if value.plain and index.plain:
        return frame.object(value.data[index.data])
    return Val(ast.Subscript(frame.lift(value), frame.lift(index), ast.Load()))


@evaluate.register
def _slice(node: ast.Slice, frame: Frame) -> Val:
    parts = [None if part is None else frame.eval(part) for part in (node.lower, node.upper, node.step)]
    if all(part is None or (part.plain and part.expr is None) for part in parts):
        return Val(known=slice(*(None if part is None else part.data for part in parts)))
    return Val(ast.Slice(*(None if part is None else frame.lift(part) for part in parts)))


# Calls of Python's own functions and containers


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
    joined = _of_items(lambda *items: Val(known=Stream([*itertools.chain.from_iterable(items)])))
    return joined(frame, [frame.settled(value) for value in args])


def _of_items(function: Callable[..., Val | None]) -> Known:
    """The call of a function that takes the items of its arguments: None if only the run knows these."""

    def found(frame: Frame, args: list[Val]) -> Val | None:
        items = [frame.items(value) for value in args]
        return None if any(each is None for each in items) else function(*items)

    return found


def _list(*items: list[Val]) -> Val:
    return Val(known=Items([*itertools.chain.from_iterable(items)]))


def _over_truths(reduction: Callable[[Iterable[Any]], bool], items: list[Val]) -> Val | None:
    truths = [item.truth for item in items]
    return None if None in truths else Val(known=reduction(truths))


def _sum(frame: Frame, args: list[Val]) -> Val | None:
    items = frame.items(args[0])
    if items is None or all(item.plain for item in items):
        return None
    first, *rest = (frame.lift(term) for term in (*args[1:], *items))
    return Val(reduce(lambda total, term: ast.BinOp(total, ast.Add(), term), rest, first))


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
    any: _of_items(lambda items: _over_truths(any, items)),
    all: _of_items(lambda items: _over_truths(all, items)),
    sum: _sum,
    len: _of_items(lambda items: Val(known=len(items))),
    isinstance: _isinstance,
    getattr: lambda frame, args: attribute(frame, args[0], args[1].data, args[2] if len(args) > 2 else None),
}
