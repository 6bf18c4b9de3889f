"""All functions and methods of the file: what a call becomes, and which functions it needs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from arch_dsl.context import Call
from arch_dsl.formula import FUNCTIONS
from arch_dsl.layers import Linear
from arch_dsl.plain.body import Body, NotInline
from arch_dsl.plain.evaluate import Evaluator, Part, child_of, definition, variables
from arch_dsl.plain.tidy import tidy
from arch_dsl.plain.values import (
    Above,
    CallRecord,
    Closure,
    Each,
    Items,
    Method,
    Stream,
    Table,
    Unexportable,
    Val,
    is_numbers,
    name,
    plain_value,
    size,
    text,
    torch_name,
    trivial,
)

SMALL = 8  # an expression of so many parts stands where it is used
Function = types.FunctionType


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
            return _structure(frame, known, args)
        if isinstance(known, Each):
            return self._call_each(frame, function, args, keywords)
        if isinstance(known, nn.Module):
            if isinstance(known, Linear) or type(known).__module__.startswith("torch."):
                return _residual(frame, frame.lift(function), args, keywords)
            forward = inspect.getattr_static(type(known), "forward")
            return self.call_method(frame, Method(forward, function), args, keywords)
        if known is Call:
            return Val(name("Call()"), CallRecord())
        if not function.dynamic and (special := _SPECIAL.get(known)) is not None:
            found = special(frame, args, keywords)
            if found is not None:
                return found
        bound = known if isinstance(known, types.MethodType) else None
        if bound is not None and isinstance(bound.__func__, Function):
            known, args = bound.__func__, [Val(known=bound.__self__), *args]
        plain = all(value.plain for value in (*args, *keywords.values()))
        if isinstance(known, Function) and not _foreign(known):
            return self._call_function(frame, known, args, keywords, plain)
        if not function.dynamic and plain and not _of_torch(known):
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
        bound = _bound(frame, function, args, keywords)
        must = any(_structural(value) for value in bound.values())
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
            bound = _bound(frame, function, [owner, *args], keywords)
            found = self._inline(frame, function, bound, None, always=True)
            assert found is not None
            return found
        if function.__module__.startswith("torch."):
            return _of_container(frame, owner, function.__name__, args, keywords)
        bound = _bound(frame, function, [owner, *args], keywords)
        own = module is frame.body.owner
        must = any(_structural(value) for value in bound.values())
        stateless = not [*module.parameters(), *module.buffers(), *module.children()]
        kind = _kind(module, function)
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
                bound = _bound(frame, forward, [Val(function.expr, module), *args], keywords)
                if again:
                    self.entries.pop((id(module), "forward"), None)
                entries.append(self.entry(module, forward, bound, _kind(module, forward), kept if again else []))
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
                found = _only_value(found, body.lists[-1], start)
            fits = always or _small(found, len(body.lists[-1]) - start, without)
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
        env = {parameter: _inside(parameter, value, owner) for parameter, value in bound.items()}
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
        written += [ast.arg(parameter, _annotation(source, parameter, bound[parameter])) for parameter in parameters]
        arguments = ast.arguments([], written, None, [], [], None, [])
        summary = ast.get_docstring(source)
        lines: list[ast.stmt] = [ast.Expr(ast.Constant(summary.split("\n\n")[0]))] if summary else []
        returns = source.returns if body.optional else _certain(source.returns)
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
        signature = repr([(parameter, _static(value)) for parameter, value in bound.items() if parameter != "self"])
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


def _bound(frame: Evaluator, function: Function, args: list[Val], keywords: dict[str, Val]) -> dict[str, Val]:
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


def _kind(module: nn.Module, function: Function) -> type:
    """The class that defines a method."""
    return next(kind for kind in type(module).__mro__ if function in vars(kind).values())


def _structural(value: Val) -> bool:
    """Whether it has no place at run time."""
    if isinstance(value.known, Items | Table):
        return not value.plain
    return isinstance(value.known, Stream | Closure | Above)


def _static(value: Val) -> object:
    """What a function was specialised for in this argument."""
    if value.dynamic or isinstance(value.known, CallRecord | nn.Module):
        return "at run time", value.optional
    return plain_value(value) if value.plain else type(value.known).__name__


def _inside(parameter: str, value: Val, owner: nn.Module | None) -> Val:
    """An argument as the function sees it: by its name if it is needed at run time."""
    place = ast.Name(parameter, ast.Load())
    if value.dynamic or isinstance(value.known, CallRecord):
        return Val(place, value.known, value.optional)
    if value.expr is not None and is_numbers(value.known):
        return Val(place, value.known)
    if isinstance(value.known, nn.Module) and value.known is not owner:
        raise Unexportable(f"a {type(value.known).__name__} is an argument of a function")
    return value if isinstance(value.known, nn.Module) else Val(None, value.known)


def _own_path(owner: Val, stateless: bool) -> str | None:
    return text(owner.expr) if stateless and owner.expr is not None else None


def _small(found: Val, statements: int, without: str | None) -> bool:
    """Whether a result may stand in the caller's function."""
    if not found.dynamic and found.expr is None:
        return True
    assert found.expr is not None
    if statements or (size(found.expr) > SMALL and not trivial(found.expr) and not _passes_on(found.expr)):
        return False
    return without is None or without not in text(found.expr)


def _only_value(found: Val, statements: list[ast.stmt], start: int) -> Val:
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


def _annotation(source: ast.FunctionDef, parameter: str, value: Val) -> ast.expr | None:
    every = [*source.args.posonlyargs, *source.args.args, *source.args.kwonlyargs]
    found = next((item.annotation for item in every if item.arg == parameter), None)
    return found if value.optional else _certain(found)


def _certain(annotation: ast.expr | None) -> ast.expr | None:
    """`Tensor | None` of what is never None."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.right, ast.Constant):
        return annotation.left
    return annotation


def _foreign(function: Function) -> bool:
    """Whether a function is torch's or Python's, and so stays a call by name."""
    home = function.__module__.split(".")[0]
    return home == "torch" or home in sys.stdlib_module_names


def _of_torch(known: Any) -> bool:
    home = getattr(known, "__module__", None) or type(getattr(known, "__self__", None)).__module__
    return str(home).split(".")[0] == "torch" or (torch_name(known) or "").startswith(("torch.", "F.", "nn."))


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


def _structure(frame: Evaluator, method: Part, args: list[Val]) -> Val:
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


_SPECIAL: dict[Any, Special] = {
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
