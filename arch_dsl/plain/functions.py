"""What is known of a function that is called: its arguments, whose it is, and whether its result stands in place."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from typing import Any

from torch import nn

from arch_dsl.plain.evaluate import Evaluator
from arch_dsl.plain.values import (
    Above,
    CallRecord,
    Closure,
    Items,
    Stream,
    Table,
    Unexportable,
    Val,
    is_numbers,
    plain_value,
    size,
    text,
    torch_name,
    trivial,
)

SMALL = 8  # an expression of so many parts stands where it is used
Function = types.FunctionType


def arguments_of(frame: Evaluator, function: Function, args: list[Val], keywords: dict[str, Val]) -> dict[str, Val]:
    """Values by parameter, in the order of parameters, defaults filled in."""
    signature = inspect.signature(function)
    given = signature.bind(*args, **keywords).arguments
    found = {}
    for key, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found[key] = Val(known=Items(list(given.get(key, ())), tuple=True))
        elif parameter.kind is parameter.VAR_KEYWORD:
            found[key] = Val(known=Table(dict(given.get(key, {}))))
        else:
            found[key] = given[key] if key in given else frame.object(parameter.default)
    return found


def class_of(module: nn.Module, function: Function) -> type:
    """The class that defines a method."""
    return next(kind for kind in type(module).__mro__ if function in vars(kind).values())


def is_structural(value: Val) -> bool:
    """Whether it has no place at run time."""
    if isinstance(value.known, Items | Table):
        return not value.plain
    return isinstance(value.known, Stream | Closure | Above)


def specialised_for(value: Val) -> object:
    """What a function was specialised for in this argument."""
    if value.dynamic or isinstance(value.known, CallRecord | nn.Module):
        return "at run time", value.optional
    return plain_value(value) if value.plain else type(value.known).__name__


def seen_inside(parameter: str, value: Val, owner: nn.Module | None) -> Val:
    """An argument as the function sees it: by its name if it is needed at run time."""
    place = ast.Name(parameter, ast.Load())
    if value.dynamic or isinstance(value.known, CallRecord):
        return Val(place, value.known, value.optional)
    if value.expr is not None and is_numbers(value.known):
        return Val(place, value.known)
    if isinstance(value.known, nn.Module) and value.known is not owner:
        raise Unexportable(f"a {type(value.known).__name__} is an argument of a function")
    return value if isinstance(value.known, nn.Module) else Val(None, value.known)


def stands_in_place(found: Val, statements: int, without: str | None) -> bool:
    """Whether a result may stand in the caller's function."""
    if not found.dynamic and found.expr is None:
        return True
    assert found.expr is not None
    if statements or (size(found.expr) > SMALL and not trivial(found.expr) and not _passes_on(found.expr)):
        return False
    return without is None or without not in text(found.expr)


def only_value(found: Val, statements: list[ast.stmt], start: int) -> Val:
    """The value of the one statement since `start`, if it is what was found."""
    last = statements[-1] if len(statements) == start + 1 else None
    if isinstance(last, ast.Assign) and isinstance(found.expr, ast.Name) and found.dynamic:
        target = last.targets[0]
        if isinstance(target, ast.Name) and target.id == found.expr.id:
            statements.pop()
            return Val(last.value, optional=found.optional)
    return found


def _passes_on(expr: ast.expr) -> bool:
    """Whether an expression is one call whose arguments nothing is computed for."""
    inner = (item for part in ast.iter_child_nodes(expr) for item in ast.walk(part))
    return isinstance(expr, ast.Call) and not any(isinstance(item, ast.Call | ast.BinOp | ast.IfExp) for item in inner)


def annotation_of(source: ast.FunctionDef, parameter: str, value: Val) -> ast.expr | None:
    """What the source says of a parameter, without the None that this value never is."""
    every = [*source.args.posonlyargs, *source.args.args, *source.args.kwonlyargs]
    found = next((item.annotation for item in every if item.arg == parameter), None)
    return found if value.optional else never_none(found)


def never_none(annotation: ast.expr | None) -> ast.expr | None:
    """`Tensor | None` of what is never None."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.right, ast.Constant):
        return annotation.left
    return annotation


def is_foreign(function: Function) -> bool:
    """Whether a function is torch's or Python's, and so stays a call by name."""
    home = function.__module__.split(".")[0]
    return home == "torch" or home in sys.stdlib_module_names


def is_of_torch(known: Any) -> bool:
    """Whether a value that is called is torch's."""
    home = getattr(known, "__module__", None) or type(getattr(known, "__self__", None)).__module__
    return str(home).split(".")[0] == "torch" or (torch_name(known) or "").startswith(("torch.", "F.", "nn."))
