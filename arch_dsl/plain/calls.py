"""What a call becomes: its result, the statements of the function in place, or a call in the written file."""

from __future__ import annotations

import ast
import inspect
import sys
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.plain.application import Application, call_function, call_helper, entry, inline
from archlab.arch_dsl.plain.expressions import spread
from archlab.arch_dsl.plain.frame import Frame, call, children, evaluate
from archlab.arch_dsl.plain.parts import KNOWN
from archlab.arch_dsl.plain.trees import Unexportable, name, text, torch_name, unwritable
from archlab.arch_dsl.plain.values import Above, CallRecord, Each, Items, Method, Table, Val

Keywords = dict[str, Val]


@evaluate.register
def _call(node: ast.Call, frame: Frame) -> Val:
    if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
        assert frame.kind is not None
        return Val(known=Above(frame.kind, frame.env["self"]))
    function, *values = spread(frame, [node.func, *node.args, *(item.value for item in node.keywords)])
    count = len(values) - len(node.keywords)
    keywords: Keywords = {}
    for item, value in zip(node.keywords, values[count:], strict=True):
        if item.arg is not None:
            keywords[item.arg] = value
        elif isinstance(value.known, Table):
            keywords |= value.known.values
        else:
            raise unwritable(node, "this call")
    return frame.call(function, values[:count], keywords)


@call.register(object)
def _of_object(known: Any, frame: Frame, function: Val, args: list[Val], keywords: Keywords) -> Val:
    """Of Python's functions those of known values happen now, as do others of known data; the rest is written."""
    if known is Call:
        return Val(name("Call()"), CallRecord())
    if not function.dynamic:
        special = KNOWN.get(known)
        if special is not None and (found := special(frame, args)) is not None:
            return found
        if not _is_of_torch(known) and _plain(args, keywords):
            return frame.object(_result(known, args, keywords))
    return _written(frame, frame.lift(function), args, keywords)


@call.register
def _of_function(known: FunctionType, frame: Frame, function: Val, args: list[Val], keywords: Keywords) -> Val:
    home = known.__module__.split(".")[0]
    if home == "torch" or home in sys.stdlib_module_names:
        return _of_object(known, frame, function, args, keywords)
    if hasattr(known, "formula"):
        return _written(frame, frame.lift(function), args, keywords)
    if _plain(args, keywords):
        result = _result(known, args, keywords)
        if not isinstance(result, Tensor):
            return frame.object(result)
    applied = Application.of(frame, known, args, keywords)
    found = inline(frame, applied, always=applied.structural)
    return call_function(frame, applied) if found is None else found


@call.register
def _of_bound(known: MethodType, frame: Frame, function: Val, args: list[Val], keywords: Keywords) -> Val:
    return frame.call(Val(known=known.__func__), [Val(known=known.__self__), *args], keywords)


@call.register
def _of_module(known: nn.Module, frame: Frame, function: Val, args: list[Val], keywords: Keywords) -> Val:
    if isinstance(known, Linear) or type(known).__module__.startswith("torch."):
        return _written(frame, frame.lift(function), args, keywords)
    forward = inspect.getattr_static(type(known), "forward")
    return frame.call(Val(known=Method(forward, function)), args, keywords)


@call.register
def _of_method(known: Method, frame: Frame, function: Val, args: list[Val], keywords: Keywords) -> Val:
    owner, module = known.owner, known.owner.known
    if isinstance(module, CallRecord):
        return _of_record(known, frame, args, keywords)
    if known.function.__module__.startswith("torch."):
        return _of_container(known, frame, args)
    applied = Application.of(frame, known.function, [owner, *args], keywords, _class_of(module, known.function))
    own, must = module is frame.body.owner, applied.structural
    stateless = not [*module.parameters(), *module.buffers(), *module.children()]
    if own or must or stateless or known.function.__name__ != "forward":
        without = text(owner.expr) if stateless and owner.expr is not None else None
        if (found := inline(frame, applied, always=own or must, without=without)) is not None:
            return found
        if must:
            raise Unexportable(f"{known.function.__qualname__} has run-time control flow around static parts")
        if own:
            return call_helper(frame, applied)
    method = entry(frame.program, module, applied)
    target = frame.lift(owner)
    if method.node.name != "forward":
        target = ast.Attribute(target, method.node.name, ast.Load())
    return applied.call(frame, target, method.parameters, method.optional)


def _of_record(method: Method, frame: Frame, args: list[Val], keywords: Keywords) -> Val:
    """A method of the call record: nothing is decoded and nobody watches, so every layer sees the same one."""
    if method.function.__name__ in ("fresh", "layer"):
        return method.owner
    found = inline(frame, Application.of(frame, method.function, [method.owner, *args], keywords), always=True)
    assert found is not None
    return found


def _of_container(method: Method, frame: Frame, args: list[Val]) -> Val:
    """A method that every torch module has."""
    parts, called = children(method.owner), method.function.__name__
    if called in ("children", "values"):
        return Val(known=Items(list(parts.values())))
    if called in ("named_children", "items"):
        return Val(known=Items([Val(known=Items([Val(known=key), part], tuple=True)) for key, part in parts.items()]))
    if called == "get_submodule" and args[0].plain:
        found = method.owner
        for step in args[0].data.split("."):
            found = children(found)[step]
        return found
    raise Unexportable(f"`{called}` of a module has no form in a plain file")


@call.register
def _of_each(known: Each, frame: Frame, function: Val, args: list[Val], keywords: Keywords) -> Val:
    """Modules that one call stands for take the same parameters."""
    modules = list({id(twin): twin for twin in map(frame.program.twin, known.modules)}.values())
    applied = []
    for module in modules:
        forward = inspect.getattr_static(type(module), "forward")
        values = [Val(function.expr, module), *args]
        applied.append(Application.of(frame, forward, values, keywords, _class_of(module, forward)))
    methods = [entry(frame.program, *pair) for pair in zip(modules, applied, strict=True)]
    order = [key for key in applied[-1].values if any(key in method.parameters for method in methods)]
    if any(method.parameters != order for method in methods):
        for number, (module, one) in enumerate(zip(modules, applied, strict=True)):
            del frame.program.entries[id(module)]["forward"]
            methods[number] = entry(frame.program, module, one, order)
    return applied[-1].call(frame, frame.lift(function), order, any(method.optional for method in methods))


def _class_of(module: nn.Module, function: FunctionType) -> type:
    """The class that defines a method or a property."""
    kinds = type(module).__mro__
    return next(kind for kind in kinds if function in (getattr(item, "fget", item) for item in vars(kind).values()))


def _plain(args: list[Val], keywords: Keywords) -> bool:
    return all(value.plain for value in (*args, *keywords.values()))


def _result(known: Any, args: list[Val], keywords: Keywords) -> Any:
    """What a call of plain values gives."""
    return known(*(value.data for value in args), **{key: value.data for key, value in keywords.items()})


def _written(frame: Frame, target: ast.expr, args: list[Val], keywords: Keywords) -> Val:
    """A call that happens at run time."""
    if text(target).startswith("F."):
        while args and args[-1].known is None:
            args = args[:-1]
    named = [ast.keyword(key, frame.lift(value)) for key, value in keywords.items()]
    maybe = isinstance(target, ast.Attribute) and target.attr == "get"
    return Val(ast.Call(target, [frame.lift(value) for value in args], named), optional=maybe)


def _is_of_torch(known: Any) -> bool:
    home = getattr(known, "__module__", None) or type(getattr(known, "__self__", None)).__module__
    return str(home).split(".")[0] == "torch" or (torch_name(known) or "").startswith(("torch.", "F.", "nn."))
