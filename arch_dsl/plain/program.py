"""All functions and methods of the file: what a call becomes, and which functions it needs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from arch_dsl.context import Call
from arch_dsl.formula import FUNCTIONS
from arch_dsl.layers import Linear
from arch_dsl.plain.body import Body, NotInline
from arch_dsl.plain.evaluate import Evaluator, Part, child_of, definition, variables
from arch_dsl.plain.functions import (
    Function,
    annotation_of,
    arguments_of,
    class_of,
    is_foreign,
    is_of_torch,
    is_structural,
    never_none,
    only_value,
    seen_inside,
    specialised_for,
    stands_in_place,
)
from arch_dsl.plain.known_calls import BUILTINS, call_of_container
from arch_dsl.plain.tidy import tidy
from arch_dsl.plain.values import (
    CallRecord,
    Closure,
    Each,
    Items,
    Method,
    Stream,
    Unexportable,
    Val,
    name,
    plain_value,
    text,
    torch_name,
)


@dataclasses.dataclass
class Entry:
    """A method of a module's class as it is written: `parameters` are those that are left."""

    node: ast.FunctionDef
    parameters: list[str]
    optional: bool
    signature: str


class Program:
    """What is written so far. `entries` are the methods of each module by (its id, name)."""

    def __init__(self) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.entries: dict[tuple[int, str], Entry] = {}
        self.helpers: dict[int, dict[str, ast.FunctionDef]] = {}
        self.modules: dict[int, nn.Module] = {}
        self.twins: dict[int, nn.Module] = {}  # a part of a layer to that of the first layer equal to it
        self._texts: dict[str, str] = {}
        self._values: dict[Any, str] = {}
        self._paths: dict[int, dict[int, str]] = {}

    # What a call becomes

    def call(self, frame: Evaluator, function: Val, args: list[Val], keywords: dict[str, Val]) -> Val:
        """The value of a call."""
        known = function.known
        if isinstance(known, Method):
            return self.call_method(frame, known, args, keywords)
        if isinstance(known, Closure):
            return self._call_closure(frame, known, args, keywords)
        if isinstance(known, Part):
            return call_of_container(frame, known, args)
        if isinstance(known, Each):
            return self._call_each(frame, function, args, keywords)
        if isinstance(known, nn.Module):
            if isinstance(known, Linear) or type(known).__module__.startswith("torch."):
                return _residual(frame, frame.lift(function), args, keywords)
            forward = inspect.getattr_static(type(known), "forward")
            return self.call_method(frame, Method(forward, function), args, keywords)
        if known is Call:
            return Val(name("Call()"), CallRecord())
        if not function.dynamic and (special := BUILTINS.get(known)) is not None:
            found = special(frame, args, keywords)
            if found is not None:
                return found
        bound = known if isinstance(known, types.MethodType) else None
        if bound is not None and isinstance(bound.__func__, Function):
            known, args = bound.__func__, [Val(known=bound.__self__), *args]
        plain = all(value.plain for value in (*args, *keywords.values()))
        if isinstance(known, Function) and not is_foreign(known):
            return self._call_function(frame, known, args, keywords, plain)
        if not function.dynamic and plain and not is_of_torch(known):
            values = [plain_value(value) for value in args]
            return frame.object(known(*values, **{key: plain_value(item) for key, item in keywords.items()}))
        return _residual(frame, frame.lift(function), args, keywords)

    def _call_function(
        self, frame: Evaluator, function: Function, args: list[Val], keywords: dict[str, Val], plain: bool
    ) -> Val:
        if hasattr(function, "formula"):
            return _residual(frame, ast.Name(self.function_value(function), ast.Load()), args, keywords)
        if plain:
            result = function(*map(plain_value, args), **{key: plain_value(item) for key, item in keywords.items()})
            if not isinstance(result, Tensor):
                return frame.object(result)
        bound = arguments_of(frame, function, args, keywords)
        must = any(is_structural(value) for value in bound.values())
        found = self._inline(frame, function, bound, None, always=must)
        if found is not None:
            return found
        return self._outline(frame, function, bound, keywords)

    def call_method(self, frame: Evaluator, method: Method, args: list[Val], keywords: dict[str, Val]) -> Val:
        """A call of a module's method, or of the call record's."""
        function, owner = method.function, method.owner
        module = owner.known
        if isinstance(module, CallRecord):
            if function.__name__ in ("fresh", "layer"):
                return owner
            bound = arguments_of(frame, function, [owner, *args], keywords)
            found = self._inline(frame, function, bound, None, always=True)
            assert found is not None
            return found
        if function.__module__.startswith("torch."):
            return _of_container(frame, owner, function.__name__, args, keywords)
        bound = arguments_of(frame, function, [owner, *args], keywords)
        own = module is frame.body.owner
        must = any(is_structural(value) for value in bound.values())
        stateless = not [*module.parameters(), *module.buffers(), *module.children()]
        kind = class_of(module, function)
        if own or must or stateless or function.__name__ != "forward":
            found = self._inline(frame, function, bound, kind, always=own or must, without=_own_path(owner, stateless))
            if found is not None:
                return found
            if must:
                raise Unexportable(f"{kind.__name__}.{function.__name__} has run-time control flow around static parts")
            if own:
                return self._own_method(frame, function, bound, kind, keywords)
        entry = self.entry(module, function, bound, kind)
        path = ast.Attribute(frame.lift(owner), entry.node.name, ast.Load())
        target = frame.lift(owner) if entry.node.name == "forward" else path
        return self._written_call(frame, target, entry.parameters, bound, keywords, entry.optional)

    def _call_each(self, frame: Evaluator, function: Val, args: list[Val], keywords: dict[str, Val]) -> Val:
        assert isinstance(function.known, Each)
        entries: list[Entry] = []
        kept: list[str] = []
        modules = list({id(twin): twin for twin in (self.twins.get(id(m), m) for m in function.known.modules)}.values())
        for again in (False, True):
            entries = []
            for module in modules:
                forward = inspect.getattr_static(type(module), "forward")
                bound = arguments_of(frame, forward, [Val(function.expr, module), *args], keywords)
                if again:
                    self.entries.pop((id(module), "forward"), None)
                entries.append(self.entry(module, forward, bound, class_of(module, forward), kept if again else []))
            order = [parameter for parameter in bound if any(parameter in entry.parameters for entry in entries)]
            if all(entry.parameters == order for entry in entries):
                break
            kept = order
        optional = any(entry.optional for entry in entries)
        return self._written_call(frame, frame.lift(function), order, bound, keywords, optional)

    def _call_closure(self, frame: Evaluator, closure: Closure, args: list[Val], keywords: dict[str, Val]) -> Val:
        inner = Evaluator(self, frame.body, dict(closure.frame.env), closure.frame.outer, inline=True)
        for parameter, value in zip(closure.node.args.args, args, strict=False):
            inner.bind(parameter.arg, value)
        for key, value in keywords.items():
            inner.bind(key, value)
        if isinstance(closure.node, ast.Lambda):
            return inner.eval(closure.node.body)
        return inner.block(closure.node.body) or Val(known=None)

    # Functions of their own

    def evaluator(self, body: Body, env: dict[str, Val], outer: dict[str, Any], *, inline: bool) -> Evaluator:
        """An evaluator of this program."""
        return Evaluator(self, body, env, outer, inline=inline)

    def _inline(
        self,
        frame: Evaluator,
        function: Function,
        bound: dict[str, Val],
        kind: type | None,
        *,
        always: bool,
        without: str | None = None,
    ) -> Val | None:
        """The result of a function whose statements go into the caller's, or None if it needs to be a function."""
        body = frame.body
        depth, length, silent = len(body.lists), len(body.lists[-1]), body.silent
        streams = [(value.known, value.known.taken) for value in bound.values() if isinstance(value.known, Stream)]
        inner = Evaluator(self, body, {}, variables(function), inline=True, kind=kind)
        try:
            for parameter, value in bound.items():
                inner.env[parameter] = value if body.silent else inner.named(parameter, value)
            start = len(body.lists[-1])
            found = inner.block(definition(function).body) or Val(known=None)
            if not always:
                found = only_value(found, body.lists[-1], start)
            fits = always or stands_in_place(found, len(body.lists[-1]) - start, without)
        except NotInline:
            fits = False
        if fits:
            return found
        # It needs to be a function: what was written into the caller's statements is taken back.
        del body.lists[depth:], body.lists[-1][length:]
        body.silent = silent
        for stream, taken in streams:
            stream.taken = taken
        return None

    def _specialised(
        self, function: Function, bound: dict[str, Val], owner: nn.Module | None, kind: type | None, kept: Sequence[str]
    ) -> tuple[ast.FunctionDef, list[str], bool]:
        """A function with what is known about its arguments worked in, its parameters, and whether it may give None."""
        body = Body(owner)
        env = {parameter: seen_inside(parameter, value, owner) for parameter, value in bound.items()}
        source = definition(function)
        result = Evaluator(self, body, env, variables(function), inline=False, kind=kind).block(source.body)
        statements, used = tidy(body, bound)
        if result is None and any(isinstance(item, ast.Return) for item in ast.walk(ast.Module(statements, []))):
            body.optional = True
        parameters = [
            parameter
            for parameter, value in bound.items()
            if parameter != "self" and (parameter in used or parameter in kept) and env[parameter].expr is not None
        ]
        written = [ast.arg("self")] if owner is not None else []
        written += [ast.arg(parameter, annotation_of(source, parameter, bound[parameter])) for parameter in parameters]
        arguments = ast.arguments([], written, None, [], [], None, [])
        summary = ast.get_docstring(source)
        lines: list[ast.stmt] = [ast.Expr(ast.Constant(summary.split("\n\n")[0]))] if summary else []
        returns = source.returns if body.optional else never_none(source.returns)
        node = ast.FunctionDef(function.__name__, arguments, [*lines, *statements], [], returns)
        return node, parameters, body.optional

    def _outline(self, frame: Evaluator, function: Function, bound: dict[str, Val], keywords: Mapping[str, Val]) -> Val:
        node, parameters, optional = self._specialised(function, bound, None, None, ())
        target = ast.Name(self._written(node), ast.Load())
        return self._written_call(frame, target, parameters, bound, keywords, optional)

    def _own_method(
        self, frame: Evaluator, function: Function, bound: dict[str, Val], kind: type, keywords: Mapping[str, Val]
    ) -> Val:
        owner = frame.body.owner
        assert owner is not None
        node, parameters, optional = self._specialised(function, bound, owner, kind, ())
        methods = self.helpers.setdefault(id(owner), {})
        if node.name in methods and text(methods[node.name]) != text(node):
            raise Unexportable(f"{kind.__name__}.{node.name} is used in two ways")
        methods[node.name] = node
        target = ast.Attribute(ast.Name("self", ast.Load()), node.name, ast.Load())
        return self._written_call(frame, target, parameters, bound, keywords, optional)

    def entry(
        self, module: nn.Module, function: Function, bound: dict[str, Val], kind: type, kept: Sequence[str] = ()
    ) -> Entry:
        """The method of a module's class that the file has."""
        module = self.twins.get(id(module), module)
        key = (id(module), function.__name__)
        signature = repr(
            [(parameter, specialised_for(value)) for parameter, value in bound.items() if parameter != "self"]
        )
        found = self.entries.get(key)
        if found is None:
            inside = {**bound, "self": Val(ast.Name("self", ast.Load()), module)}
            node, parameters, optional = self._specialised(function, inside, module, kind, kept)
            if not any(owner == id(module) for owner, _ in self.entries):
                node.name = "forward"  # what a class is first asked for
            found = self.entries[key] = Entry(node, parameters, optional, signature)
            self.modules[id(module)] = module
        if found.signature != signature:
            raise Unexportable(f"{kind.__name__}.{function.__name__} of one module is called in two ways")
        return found

    def _written(self, node: ast.FunctionDef) -> str:
        """The name of a function in the file; equal functions are one."""
        key = text(node)
        if key not in self._texts:
            own = node.name.lstrip("_")
            names = itertools.chain([own], (f"{own}_{number}" for number in itertools.count(2)))
            self._texts[key] = node.name = next(item for item in names if item not in self.functions)
            self.functions[node.name] = node
        return self._texts[key]

    def function_value(self, function: Function) -> str:
        """The name of a function that is handed on as a value."""
        formula = getattr(function, "formula", None)
        if formula is not None:
            tree = _Formula().visit(ast.parse(formula, mode="eval")).body
            arguments = ast.arguments([], [ast.arg("x", name("Tensor"))], None, [], [], None, [])
            return self._written(ast.FunctionDef("activation", arguments, [ast.Return(tree)], [], name("Tensor")))
        bound = {item: Val(ast.Name(item, ast.Load())) for item in inspect.signature(function).parameters}
        return self._written(self._specialised(function, bound, None, None, list(bound))[0])

    def _written_call(
        self,
        frame: Evaluator,
        target: ast.expr,
        parameters: Sequence[str],
        bound: Mapping[str, Val],
        keywords: Mapping[str, Val],
        optional: bool,
    ) -> Val:
        args = [frame.lift(bound[item]) for item in parameters if item not in keywords]
        named = [ast.keyword(item, frame.lift(bound[item])) for item in parameters if item in keywords]
        if list(parameters) != [
            *(p for p in parameters if p not in keywords),
            *(p for p in parameters if p in keywords),
        ]:
            args, named = [], [ast.keyword(item, frame.lift(bound[item])) for item in parameters]
        return Val(ast.Call(target, args, named), optional=optional)

    # Places

    def path(self, body: Body, module: nn.Module) -> ast.expr:
        """How a method reaches a module."""
        if body.owner is None:
            raise Unexportable(f"a {type(module).__name__} takes part in a function, which has no modules")
        paths = self._paths.setdefault(id(body.owner), {id(item): key for key, item in body.owner.named_modules()})
        if id(module) not in paths:
            raise Unexportable(f"a {type(module).__name__} takes part in a module that it is no part of")
        found: ast.expr = ast.Name("self", ast.Load())
        for step in filter(None, paths[id(module)].split(".")):
            found = child_of(found, step)
        return found

    def of_call(self, value: Val, attribute: str) -> Val:
        """A field or a method of the call record."""
        static = inspect.getattr_static(Call, attribute, None)
        if isinstance(static, Function):
            return Val(known=Method(static, value))
        if attribute in ("positions", "padding", "state", "held", "watch"):
            return Val(known=None)
        assert value.expr is not None
        field = next(item for item in dataclasses.fields(Call) if item.name == attribute)
        return Val(ast.Attribute(value.expr, attribute, ast.Load()), optional=field.default is None)


class _Formula(ast.NodeTransformer):
    """A formula in x as Python: functions by their names in torch, whole numbers as the floats that they are."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "x":
            return node
        found = torch_name(FUNCTIONS[node.id])
        if found is None:
            raise Unexportable(f"{node.id} is no function of torch")
        return name(found)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(float(node.value))  # type: ignore[arg-type]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        sign = ast.Constant(-1.0 if isinstance(node.op, ast.USub) else 1.0)
        return ast.BinOp(sign, ast.Mult(), self.visit(node.operand))


def _residual(frame: Evaluator, target: ast.expr, args: list[Val], keywords: dict[str, Val]) -> Val:
    """A call that happens at run time."""
    if text(target).startswith("F."):
        while args and args[-1].known is None:
            args = args[:-1]
    named = [ast.keyword(key, frame.lift(value)) for key, value in keywords.items()]
    maybe = isinstance(target, ast.Attribute) and target.attr == "get"
    return Val(ast.Call(target, [frame.lift(value) for value in args], named), optional=maybe)


def _own_path(owner: Val, stateless: bool) -> str | None:
    return text(owner.expr) if stateless and owner.expr is not None else None


def _of_container(frame: Evaluator, owner: Val, method: str, args: list[Val], keywords: dict[str, Val]) -> Val:
    """A method that every torch module has."""
    module = owner.known
    children = {key: frame.attribute(owner, key) for key in module._modules}
    if method in ("children", "values"):
        return Val(known=Items(list(children.values())))
    if method in ("named_children", "items"):
        return Val(known=Items([Val(known=Items([Val(known=k), v], tuple=True)) for k, v in children.items()]))
    if method == "keys":
        return Val(known=Items([Val(known=key) for key in children]))
    if method == "get_submodule" and args[0].plain:
        found = owner
        for step in plain_value(args[0]).split("."):
            found = frame.attribute(found, step)
        return found
    return _residual(frame, ast.Attribute(frame.lift(owner), method, ast.Load()), args, keywords)
