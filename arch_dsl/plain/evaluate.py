"""Runs a function on values that are partly known, and writes down what is left of it.

What was decided when the model was built (which items a site holds, whether a weight is there, which activation) is
known, so the tests and loops over it vanish; what tensors do remains as straight-line code.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from arch_dsl.plain.body import Body, NotInline
from arch_dsl.plain.values import (
    UNKNOWN,
    Above,
    CallRecord,
    Closure,
    Each,
    Items,
    Method,
    Stream,
    Symbolic,
    Table,
    Unexportable,
    Val,
    clone,
    is_numbers,
    literal,
    plain_value,
    text,
    torch_name,
    trivial,
)

if TYPE_CHECKING:
    from arch_dsl.plain.program import Program

Returned = Val | None
WRITTEN = Val(known=Symbolic())  # a block whose end was written down as `return`

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@cache
def definition(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function. Raises Unexportable if its source is gone."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(source).body[0]
    except (OSError, SyntaxError) as error:
        raise Unexportable(f"the source of {function.__qualname__} cannot be read: {error}") from error
    if not isinstance(node, ast.FunctionDef):
        raise Unexportable(f"{function.__qualname__} is not written as a function of its own")
    return node


def variables(function: types.FunctionType) -> dict[str, Any]:
    """What a function's free names mean."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**vars(builtins), **function.__globals__, **{name: cell.cell_contents for name, cell in cells}}


def stored(*nodes: ast.AST) -> list[str]:
    """The names that statements assign."""
    found = [n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys(found))


def grown(*nodes: ast.AST) -> list[str]:
    """The names of lists that statements append to."""
    calls = [n.func for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call)]
    lists = [c.value for c in calls if isinstance(c, ast.Attribute) and c.attr in ("append", "extend")]
    return list(dict.fromkeys(item.id for item in lists if isinstance(item, ast.Name)))


class Evaluator:
    """One call of one function. `inline` means that its statements go into the caller's function."""

    def __init__(
        self,
        program: Program,
        body: Body,
        env: dict[str, Val],
        outer: dict[str, Any],
        *,
        inline: bool,
        kind: type | None = None,
    ) -> None:
        self.program, self.body, self.env, self.outer = program, body, env, outer
        self.inline, self.kind = inline, kind
        self.pins: dict[str, str] = {}
        self.region = 0

    # Statements

    def block(self, statements: Sequence[ast.stmt]) -> Returned:
        """Runs statements up to a return."""
        for statement in statements:
            run = getattr(self, f"do_{type(statement).__name__}", None)
            if run is None:
                self.fail(statement, f"a {type(statement).__name__} statement")
            elif (result := run(statement)) is not None:
                return result  # type: ignore[no-any-return]
        return None

    def fail(self, node: ast.AST, what: str) -> Any:
        raise Unexportable(f"{what} has no form in a plain file: {text(node)}")

    def do_Pass(self, node: ast.Pass) -> None: ...

    def do_Assert(self, node: ast.Assert) -> None: ...

    def do_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.env[node.name] = Val(known=Closure(node, self))

    def do_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        value = self.eval(node.value)
        if value.dynamic:
            self.body.emit(ast.Expr(self.lift(value)))

    def do_Return(self, node: ast.Return) -> Val:
        value = Val(known=None) if node.value is None else self.eval(node.value)
        if self.inline:
            if self.region:
                raise NotInline
            return value
        self.body.optional |= value.optional or value.known is None
        self.body.emit(ast.Return(self.lift(value)))
        return WRITTEN

    def do_Raise(self, node: ast.Raise) -> Val:
        if not self.region or node.exc is None:
            self.fail(node, "an error that is always raised")
        assert isinstance(node.exc, ast.Call)
        words = [self.lift(self.eval(item)) for item in node.exc.args]
        self.body.emit(ast.Raise(ast.Call(node.exc.func, words, [])))
        return WRITTEN

    def do_Assign(self, node: ast.Assign) -> None:
        before = len(self.body.bases)
        value = self.eval(node.value)
        for target in node.targets:
            self._rename(value, target, before)
            self.store(target, value)

    def _rename(self, value: Val, target: ast.expr, before: int) -> None:
        """What an inlined function called its result takes the name that its caller gives it."""
        if isinstance(target, ast.Tuple) and isinstance(value.known, Items):
            for item, part in zip(value.known.values, target.elts, strict=False):
                self._rename(item, part, before)
        if not isinstance(value.expr, ast.Name) or not isinstance(target, ast.Name) or target.id in self.pins:
            return
        own = value.expr.id
        if own in self.body.soft and own not in self.body.pinned and int(own.rpartition("__")[2]) >= before:
            self.body.bases[own] = target.id
            self.body.temporary.discard(own)
            if not self.inline:
                self.body.soft.discard(own)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.store(node.target, self.eval(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        read = clone(node.target)
        read.ctx = ast.Load()
        self.store(node.target, self.eval(ast.BinOp(read, node.op, node.value)))

    def do_If(self, node: ast.If) -> Returned:
        test = self.eval(node.test)
        if (truth := self.truth(test)) is not None:
            return self.block(node.body if truth else node.orelse)
        if not node.orelse and all(isinstance(item, ast.Raise) for item in node.body):
            return None  # a check of shapes, which are those of this very model
        self.pin(stored(*node.body, *node.orelse))
        before, ends, envs, lists = self.env, [], [], []
        self.region += 1
        for branch in (node.body, node.orelse):
            self.env = dict(before)
            with self.body.nested() as written:
                ends.append(self.block(branch))
            envs.append(self.env)
            lists.append(written)
        self.region -= 1
        self.body.emit(ast.If(self.lift(test), lists[0] or [ast.Pass()], lists[1]))
        live = [env for env, end in zip(envs, ends, strict=True) if end is None]
        if not live:
            return WRITTEN
        self.env = live[0]
        for name in self.pins:
            found = [env[name] for env in live if name in env]
            if found:
                self.env[name] = Val(found[0].expr, optional=any(item.optional for item in found))
        return None

    def do_For(self, node: ast.For) -> Returned:
        over = self.eval(node.iter)
        if isinstance(over.known, nn.ModuleList):
            self._loop_over_layers(node, over)
            return None
        items = self.items(over)
        if items is None:
            self._loop(node, self.lift(over))
            return None
        for item in items:
            self.store(node.target, item)
            if (result := self.block(node.body)) is not None:
                return result
        return None

    def _loop_over_layers(self, node: ast.For, over: Val) -> None:
        assert isinstance(node.target, ast.Name)
        layer = self.body.fresh(node.target.id)
        self.body.pinned.add(layer)
        self.pin([name for name in stored(*node.body) if name in self.env])
        self.env[node.target.id] = Val(ast.Name(layer, ast.Load()), Each(list(over.known)))
        self.region += 1
        with self.body.nested() as written:
            if self.block(node.body) is not None:
                self.fail(node, "a return inside the loop over layers")
        self.region -= 1
        self.body.emit(ast.For(ast.Name(layer, ast.Store()), self.lift(over), written, []))

    def _loop(self, node: ast.For, over: ast.expr) -> None:
        self.pin([*stored(node.target, *node.body), *(name for name in grown(*node.body) if name in self.env)])
        for name in stored(node.target):
            self.env[name] = Val(ast.Name(self.pins[name], ast.Load()))
        target = clone(node.target)
        for item in ast.walk(target):
            if isinstance(item, ast.Name):
                item.id = self.pins[item.id]
        self.region += 1
        with self.body.nested() as written:
            self.block(node.body)
        self.region -= 1
        self.body.emit(ast.For(target, over, written or [ast.Pass()], []))

    def do_With(self, node: ast.With) -> Returned:
        entered = []
        for item in node.items:
            name = None
            if item.optional_vars is not None:
                assert isinstance(item.optional_vars, ast.Name)
                own = self.body.fresh(item.optional_vars.id)
                self.body.pinned.add(own)
                name = ast.Name(own, ast.Store())
            entered.append(ast.withitem(self.lift(self.eval(item.context_expr)), name))
            if name is not None:
                self.env[item.optional_vars.id] = Val(ast.Name(name.id, ast.Load()))  # type: ignore[union-attr]
        self.region += 1
        with self.body.nested() as written:
            result = self.block(node.body)
        self.region -= 1
        self.body.emit(ast.With(entered, written or [ast.Pass()]))
        return result

    def pin(self, names: list[str]) -> None:
        """Gives names that are assigned under run-time control one place each."""
        for name in names:
            if name in self.pins:
                continue
            self.pins[name] = own = self.body.fresh(name)
            self.body.pinned.add(own)
            if name in self.env:
                old = self.env[name]
                self.body.emit(ast.Assign([ast.Name(own, ast.Store())], self.lift(old)))
                self.env[name] = Val(ast.Name(own, ast.Load()), optional=old.optional or old.known is None)

    def store(self, target: ast.expr, value: Val) -> None:
        """An assignment."""
        if isinstance(target, ast.Name):
            self.bind(target.id, value)
        elif isinstance(target, ast.Tuple):
            items = self.items(value)
            if items is not None:
                for part, item in zip(target.elts, items, strict=True):
                    self.store(part, item)
                return
            own = []
            for part in target.elts:
                if not isinstance(part, ast.Name):
                    self.fail(target, "this assignment")
                assert isinstance(part, ast.Name)
                own.append(self.pins.get(part.id) or self.body.fresh(part.id))
                self.env[part.id] = Val(ast.Name(own[-1], ast.Load()))
            places: list[ast.expr] = [ast.Name(item, ast.Store()) for item in own]
            self.body.emit(ast.Assign([ast.Tuple(places, ast.Store())], self.lift(value)))
        elif not self._told(target):
            self.body.emit(ast.Assign([self._place(target)], self.lift(value)))

    def _told(self, target: ast.expr) -> bool:
        """Whether this is a loss or a measure that a node leaves in the call, for a trainer that a file lacks."""
        holder = target.value if isinstance(target, ast.Subscript) else None
        if not isinstance(holder, ast.Attribute) or holder.attr not in ("losses", "measures"):
            return False
        return isinstance(self.eval(holder.value).known, CallRecord)

    def _place(self, target: ast.expr) -> ast.expr:
        if isinstance(target, ast.Subscript):
            return ast.Subscript(self.lift(self.eval(target.value)), self.lift(self.eval(target.slice)), ast.Store())
        if isinstance(target, ast.Attribute):
            return ast.Attribute(self.lift(self.eval(target.value)), target.attr, ast.Store())
        return self.fail(target, "this assignment")  # type: ignore[no-any-return]

    def bind(self, name: str, value: Val) -> None:
        """Gives a value a name: in the written function if it is computed there."""
        if name in self.pins:
            place = ast.Name(self.pins[name], ast.Store())
            self.body.emit(ast.Assign([place], self.lift(value)))
            self.env[name] = Val(ast.Name(place.id, ast.Load()), optional=value.optional or value.known is None)
            return
        self.env[name] = self.named(name, value)

    def named(self, name: str, value: Val) -> Val:
        """The value under a name of the written function, if it needs one."""
        if isinstance(value.known, Symbolic | nn.Module):
            return self.settled(value)
        if value.expr is None or (not value.dynamic and not is_numbers(value.known)):
            return value
        again = isinstance(value.expr, ast.Name) and value.expr.id in self.body.temporary | self.body.pinned
        if trivial(value.expr) and not again:
            return value
        own = self.body.assign(name, self.lift(value), soft=self.inline)
        return Val(own, value.known, value.optional)

    def settled(self, value: Val) -> Val:
        """A structure whose computed parts have names, so that none is computed twice."""
        if isinstance(value.known, Items):
            return Val(value.expr, Items([self.settled(item) for item in value.known.values], value.known.tuple))
        if isinstance(value.known, Table):
            return Val(value.expr, Table({key: self.settled(item) for key, item in value.known.values.items()}))
        if value.dynamic and value.expr is not None and not trivial(value.expr) and not self.body.silent:
            own = self.body.assign(_hint(value.expr), self.lift(value), soft=True)
            self.body.temporary.add(own.id)
            return Val(own, optional=value.optional)
        return value

    # Expressions

    def eval(self, node: ast.expr) -> Val:
        """The value of an expression."""
        run = getattr(self, f"eval_{type(node).__name__}", None)
        if run is None:
            self.fail(node, f"a {type(node).__name__} expression")
        return run(node)  # type: ignore[no-any-return, misc]

    def lift(self, value: Val) -> ast.expr:
        """The expression that computes a value in the written file."""
        if value.expr is not None:
            return clone(value.expr)
        known = value.known
        if isinstance(known, Items):
            parts = [self.lift(item) for item in known.values]
            return ast.Tuple(parts, ast.Load()) if known.tuple else ast.List(parts, ast.Load())
        if isinstance(known, Table):
            keys: list[ast.expr | None] = [literal(key) for key in known.values]
            return ast.Dict(keys, [self.lift(item) for item in known.values.values()])
        if isinstance(known, Closure) and isinstance(known.node, ast.Lambda):
            return self._lambda(known)
        if isinstance(known, types.FunctionType) and torch_name(known) is None:
            return ast.Name(self.program.function_value(known), ast.Load())
        return literal(known)

    def _lambda(self, closure: Closure) -> ast.expr:
        assert isinstance(closure.node, ast.Lambda)
        inner = self.program.evaluator(self.body, dict(closure.frame.env), closure.frame.outer, inline=True)
        names = [item.arg for item in closure.node.args.args]
        inner.env.update({name: Val(ast.Name(name, ast.Load())) for name in names})
        with self.body.quiet():
            return ast.Lambda(closure.node.args, inner.lift(inner.eval(closure.node.body)))

    def truth(self, value: Val) -> bool | None:
        """Whether a value counts as true, or None if only the run can say."""
        if value.dynamic:
            return None
        if isinstance(value.known, Items | Table):
            return bool(value.known.values)
        if isinstance(value.known, Symbolic | nn.Module):
            return True
        return bool(value.known)

    def items(self, value: Val) -> list[Val] | None:
        """The parts of a value that is known to be made of parts, or None."""
        known = value.known
        if isinstance(known, Items):
            return known.values
        if isinstance(known, Table):
            return [Val(known=key) for key in known.values]
        if isinstance(known, Stream):
            rest = known.values[known.taken :]
            known.taken = len(known.values)
            return rest
        if isinstance(known, nn.ModuleList | nn.Sequential):
            return [self.attribute(value, name) for name, _ in known.named_children()]
        if isinstance(known, nn.ModuleDict):
            return [Val(known=name) for name in known]
        if isinstance(known, list | tuple | range | dict | set | frozenset | types.GeneratorType):
            return [self.object(item) for item in known]
        return None

    def object(self, known: Any) -> Val:
        """The value of a Python object."""
        if isinstance(known, nn.Module):
            return Val(self.program.path(self.body, known), known)
        if isinstance(known, Tensor):
            raise Unexportable("a tensor that is no parameter and no buffer takes part in a forward pass")
        if isinstance(known, list | tuple) and any(isinstance(item, nn.Module | list | tuple) for item in known):
            return Val(known=Items([self.object(item) for item in known], isinstance(known, tuple)))
        return Val(known=known)

    def eval_Constant(self, node: ast.Constant) -> Val:
        return Val(known=node.value)

    def eval_Name(self, node: ast.Name) -> Val:
        if node.id in self.env:
            return self.env[node.id]
        if node.id in self.outer:
            return self.object(self.outer[node.id])
        return self.fail(node, "a name without a meaning")  # type: ignore[no-any-return]

    def eval_Attribute(self, node: ast.Attribute) -> Val:
        return self.attribute(self.eval(node.value), node.attr)

    def attribute(self, value: Val, name: str, default: Val | None = None) -> Val:
        """`value.name`."""
        known = value.known
        if isinstance(known, nn.Module):
            return self._of_module(value, name, default)
        if isinstance(known, CallRecord):
            return self.program.of_call(value, name)
        if isinstance(known, Above):
            for kind in type(known.owner.known).__mro__[type(known.owner.known).__mro__.index(known.kind) + 1 :]:
                if name in vars(kind):
                    return Val(known=Method(vars(kind)[name], known.owner))
        if isinstance(known, Items | Table | Stream):
            return Val(known=Part(value, name))
        if isinstance(known, Each):
            parts = [getattr(module, name) for module in known.modules]
            if all(is_numbers(part) or isinstance(part, str | bool | None) for part in parts) and len(set(parts)) == 1:
                return Val(known=parts[0])
            assert value.expr is not None
            return Val(ast.Attribute(value.expr, name, ast.Load()), Each(parts))
        if not value.dynamic:
            if not hasattr(known, name) and default is not None:
                return default
            return self.object(getattr(known, name))
        return Val(ast.Attribute(self.lift(value), name, ast.Load()))

    def _of_module(self, value: Val, name: str, default: Val | None) -> Val:
        module, path = value.known, value.expr
        assert path is not None
        place = child_of(path, name)
        for table in (module._parameters, module._buffers):
            if name in table:
                return Val(known=None) if table[name] is None else Val(place)
        if name in module._modules:
            child = module._modules[name]
            return Val(known=None) if child is None else Val(place, child)
        if name == "training":
            return Val(place)
        if name in vars(module):
            found = vars(module)[name]
            if is_numbers(found):
                return Val(place, found)
            return self.object(found)
        static = inspect.getattr_static(type(module), name, UNKNOWN)
        if isinstance(static, types.FunctionType):
            return Val(known=Method(static, value))
        if isinstance(static, staticmethod):
            return Val(known=static.__func__)
        if isinstance(static, property) and isinstance(static.fget, types.FunctionType):
            return self.program.call_method(self, Method(static.fget, value), [], {})
        if static is UNKNOWN and default is not None:
            return default
        return self.object(getattr(module, name))

    def in_order(self, nodes: Sequence[ast.expr]) -> list[Val]:
        """The values of expressions that are evaluated one after another, even where a later one needs statements."""
        found: list[Val] = []
        for node in nodes:
            before = len(self.body.lists[-1])
            value = self.eval(node)
            if len(self.body.lists[-1]) > before:
                found = [self._kept(item, before) for item in found]
            found.append(value)
        return found

    def _kept(self, value: Val, place: int) -> Val:
        """A value that is computed before what was written since."""
        if not value.dynamic or value.expr is None or trivial(value.expr) or self.body.silent:
            return value
        own = self.body.fresh(_hint(value.expr))
        self.body.soft.add(own)
        self.body.temporary.add(own)
        self.body.lists[-1].insert(place, ast.Assign([ast.Name(own, ast.Store())], self.lift(value)))
        return Val(ast.Name(own, ast.Load()), optional=value.optional)

    def eval_Tuple(self, node: ast.Tuple) -> Val:
        return Val(known=Items(self._parts(node.elts), tuple=True))

    def eval_List(self, node: ast.List) -> Val:
        return Val(known=Items(self._parts(node.elts)))

    def _parts(self, nodes: Sequence[ast.expr]) -> list[Val]:
        found = []
        values = self.in_order([node.value if isinstance(node, ast.Starred) else node for node in nodes])
        for node, value in zip(nodes, values, strict=True):
            if isinstance(node, ast.Starred):
                items = self.items(value)
                if items is None:
                    found.append(Val(ast.Starred(self.lift(value), ast.Load())))
                else:
                    found += items
            else:
                found.append(value)
        return found

    def eval_Dict(self, node: ast.Dict) -> Val:
        found: dict[Any, Val] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.eval(item)
            if key is not None:
                found[plain_value(self.eval(key))] = value
            elif isinstance(value.known, Table):
                found |= value.known.values
            else:
                self.fail(node, "this mapping")
        return Val(known=Table(found))

    def eval_Subscript(self, node: ast.Subscript) -> Val:
        value, index = self.eval(node.value), self.eval(node.slice)
        if isinstance(value.known, Table) and index.plain:
            return value.known.values[plain_value(index)]
        if isinstance(value.known, nn.ModuleList | nn.ModuleDict) and index.plain:
            key = plain_value(index)
            return self.attribute(value, str(key % len(value.known) if isinstance(key, int) else key))
        parts = None if isinstance(value.known, str | dict) else self.items(value)
        if parts is not None and index.plain:
            chosen = parts[plain_value(index)]
            return Val(known=Items(chosen)) if isinstance(chosen, list) else chosen
        if value.plain and index.plain:
            return self.object(plain_value(value)[plain_value(index)])
        return Val(ast.Subscript(self.lift(value), self.lift(index), ast.Load()))

    def eval_Slice(self, node: ast.Slice) -> Val:
        parts = [None if part is None else self.eval(part) for part in (node.lower, node.upper, node.step)]
        if all(part is None or (part.plain and part.expr is None) for part in parts):
            return Val(known=slice(*(None if part is None else plain_value(part) for part in parts)))
        return Val(ast.Slice(*(None if part is None else self.lift(part) for part in parts)))

    def eval_BinOp(self, node: ast.BinOp) -> Val:
        left, right = self.in_order([node.left, node.right])
        if isinstance(node.op, ast.Add) and isinstance(left.known, Items) and isinstance(right.known, Items):
            return Val(known=Items(left.known.values + right.known.values, left.known.tuple))
        return self._operation(node.op, [left, right], lambda parts: ast.BinOp(parts[0], node.op, parts[1]))

    def eval_UnaryOp(self, node: ast.UnaryOp) -> Val:
        value = self.eval(node.operand)
        if isinstance(node.op, ast.Not) and (truth := self.truth(value)) is not None:
            return Val(known=not truth)
        return self._operation(node.op, [value], lambda parts: ast.UnaryOp(node.op, parts[0]))

    def _operation(self, op: ast.AST, values: list[Val], write: Callable[[list[ast.expr]], ast.expr]) -> Val:
        if all(value.plain for value in values):
            result = _OPERATORS[type(op)](*(plain_value(value) for value in values))
            if all(value.expr is None for value in values) or not is_numbers(result):
                return Val(known=result)
            return Val(write([self.lift(value) for value in values]), result)
        return Val(write([self.lift(value) for value in values]))

    def eval_Compare(self, node: ast.Compare) -> Val:
        values = self.in_order([node.left, *node.comparators])
        if len(values) == 2 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return self._sameness(node, *values)
        if len(values) == 2 and isinstance(values[1].known, Table) and values[0].plain:
            return Val(known=_OPERATORS[type(node.ops[0])](plain_value(values[0]), values[1].known.values))
        if all(value.plain for value in values):
            plain = [plain_value(value) for value in values]
            pairs = zip(node.ops, plain, plain[1:], strict=False)
            return Val(known=all(_OPERATORS[type(op)](a, b) for op, a, b in pairs))
        parts = [self.lift(value) for value in values]
        return Val(ast.Compare(parts[0], node.ops, parts[1:]))

    def _sameness(self, node: ast.Compare, left: Val, right: Val) -> Val:
        same = isinstance(node.ops[0], ast.Is)
        for one, other in ((left, right), (right, left)):
            if one.known is None and not other.optional:
                return Val(known=(other.known is None) == same)
        if not left.dynamic and not right.dynamic:
            return Val(known=(left.known is right.known) == same)
        return Val(ast.Compare(self.lift(left), node.ops, [self.lift(right)]))

    def eval_BoolOp(self, node: ast.BoolOp) -> Val:
        stops = isinstance(node.op, ast.Or)
        left: list[Val] = []
        value = Val(known=not stops)
        for item in node.values:
            value = self.eval(item)
            truth = self.truth(value)
            if truth is None:
                left.append(value)
            elif truth == stops:
                if isinstance(value.known, bool):
                    return value
                left.append(value)
                break
        if not left or len(left) == 1:
            return left[0] if left else value
        return Val(ast.BoolOp(node.op, [self.lift(item) for item in left]))

    def eval_IfExp(self, node: ast.IfExp) -> Val:
        test = self.eval(node.test)
        if (truth := self.truth(test)) is not None:
            return self.eval(node.body if truth else node.orelse)
        with self.body.quiet():
            body, other = self.eval(node.body), self.eval(node.orelse)
        optional = any(item.optional or item.known is None for item in (body, other))
        return Val(ast.IfExp(self.lift(test), self.lift(body), self.lift(other)), optional=optional)

    def eval_Lambda(self, node: ast.Lambda) -> Val:
        return Val(known=Closure(node, self))

    def eval_JoinedStr(self, node: ast.JoinedStr) -> Val:
        parts: list[ast.expr] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.eval(part.value)
                parts.append(ast.FormattedValue(self.lift(value), part.conversion, part.format_spec))
                if value.plain:
                    parts[-1] = ast.Constant(format(plain_value(value), ""))
            else:
                parts.append(part)
        if all(isinstance(part, ast.Constant) for part in parts):
            return Val(known="".join(part.value for part in parts))  # type: ignore[attr-defined]
        return Val(ast.JoinedStr(parts))

    def eval_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> Val:
        found = list(self._each(node.generators, lambda: self.settled(self.eval(node.elt))) or ())
        if found and found[0] is None:
            return self._unknown_loop(node)
        return Val(known=Items([item for item in found if item is not None]))

    eval_GeneratorExp = eval_ListComp

    def eval_DictComp(self, node: ast.DictComp) -> Val:
        found = list(self._each(node.generators, lambda: (self.eval(node.key), self.settled(self.eval(node.value)))))
        if found and found[0] is None:
            self.fail(node, "a mapping with unknown keys")
        return Val(known=Table({plain_value(key): value for key, value in found}))

    def _each(self, generators: list[ast.comprehension], element: Callable[[], Any]) -> Iterator[Any]:
        """The elements of a comprehension; None alone if it runs over something unknown."""
        if not generators:
            yield element()
            return
        first = generators[0]
        items = self.items(self.eval(first.iter))
        if items is None:
            yield None
            return
        before = dict(self.env)
        for item in items:
            self.store(first.target, item)
            if all(self.truth(self.eval(test)) for test in first.ifs):
                yield from self._each(generators[1:], element)
        self.env = before

    def _unknown_loop(self, node: ast.ListComp | ast.GeneratorExp) -> Val:
        """A comprehension over something unknown, kept as one."""
        before, loops = dict(self.env), []
        with self.body.quiet():
            for loop in node.generators:
                over = self.lift(self.eval(loop.iter))
                for name in stored(loop.target):
                    self.env[name] = Val(ast.Name(name, ast.Load()))
                tests = [self.lift(self.eval(test)) for test in loop.ifs]
                loops.append(ast.comprehension(loop.target, over, tests, 0))
            element = self.lift(self.eval(node.elt))
        self.env = before
        return Val(type(node)(element, loops))

    def eval_Call(self, node: ast.Call) -> Val:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            assert self.kind is not None
            return Val(known=Above(self.kind, self.env["self"]))
        starred = any(isinstance(item, ast.Starred) for item in node.args)
        if starred:
            function, args = self.eval(node.func), self._parts(node.args)
            rest = self.in_order([item.value for item in node.keywords])
        else:
            values = self.in_order([node.func, *node.args, *(item.value for item in node.keywords)])
            function, args, rest = values[0], values[1 : 1 + len(node.args)], values[1 + len(node.args) :]
        keywords: dict[str, Val] = {}
        for item, value in zip(node.keywords, rest, strict=True):
            if item.arg is not None:
                keywords[item.arg] = value
            elif isinstance(value.known, Table):
                keywords |= value.known.values
            else:
                self.fail(node, "this call")
        return self.program.call(self, function, args, keywords)


class Part(Symbolic):
    """A method of a known structure: `items.append`, `table.items`."""

    def __init__(self, value: Val, name: str) -> None:
        self.value, self.name = value, name


def child_of(path: ast.expr, name: str) -> ast.expr:
    """The child of a module, by attribute or by number."""
    if name.isdigit():
        return ast.Subscript(path, ast.Constant(int(name)), ast.Load())
    return ast.Attribute(path, name, ast.Load())


def _hint(expr: ast.expr) -> str:
    """A name for what an expression computes."""
    while isinstance(expr, ast.Call | ast.Subscript):
        expr = expr.func if isinstance(expr, ast.Call) else expr.value
    if isinstance(expr, ast.Attribute):
        if expr.attr == "projection" and isinstance(expr.value, ast.Attribute):
            expr = expr.value
        return expr.attr.removesuffix("_projection")
    return expr.id.partition("__")[0] if isinstance(expr, ast.Name) else "part"
