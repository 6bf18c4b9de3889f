"""Parts of values: `value.name` and `value[index]`."""

from __future__ import annotations

import ast
import inspect
import types

from torch import nn

from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.plain.frame import Frame, children, evaluate
from archlab.arch_dsl.plain.trees import child_of, is_numbers, unwritable
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
