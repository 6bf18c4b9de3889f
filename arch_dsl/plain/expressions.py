"""Expressions: those of known values have a value now, all others are written down."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

from archlab.arch_dsl.language.formula import FUNCTIONS
from archlab.arch_dsl.plain.frame import Frame, evaluate, write
from archlab.arch_dsl.plain.statements import store
from archlab.arch_dsl.plain.trees import Unexportable, is_numbers, literal, load, name, stored, torch_name, unwritable
from archlab.arch_dsl.plain.values import OPERATORS, UNKNOWN, Items, Table, Val


@evaluate.register
def _constant(node: ast.Constant, frame: Frame) -> Val:
    return Val(known=node.value)


@evaluate.register
def _name(node: ast.Name, frame: Frame) -> Val:
    if node.id in frame.env:
        return frame.env[node.id]
    if node.id in frame.outer:
        return frame.object(frame.outer[node.id])
    raise unwritable(node, "a name without a meaning")


# Lists, tuples and mappings


@evaluate.register
def _sequence(node: ast.List | ast.Tuple, frame: Frame) -> Val:
    return Val(known=Items(spread(frame, node.elts), tuple=isinstance(node, ast.Tuple)))


def spread(frame: Frame, nodes: Sequence[ast.expr]) -> list[Val]:
    """The values of expressions, and those in what has a star."""
    found = []
    values = frame.in_order([node.value if isinstance(node, ast.Starred) else node for node in nodes])
    for node, value in zip(nodes, values, strict=True):
        items = frame.items(value) if isinstance(node, ast.Starred) else [value]
        found += [Val(ast.Starred(frame.lift(value), ast.Load()))] if items is None else items
    return found


@evaluate.register
def _mapping(node: ast.Dict, frame: Frame) -> Val:
    found: dict[Any, Val] = {}
    for key, item in zip(node.keys, node.values, strict=True):
        value = frame.eval(item)
        if key is None:
            raise unwritable(node, "this mapping")
        found[frame.eval(key).data] = value
    return Val(known=Table(found))


@write.register
def _written_items(known: Items, frame: Frame) -> ast.expr:
    parts = [frame.lift(item) for item in known.values]
    return ast.Tuple(parts, ast.Load()) if known.tuple else ast.List(parts, ast.Load())


@write.register
def _written_table(known: Table, frame: Frame) -> ast.expr:
    keys: list[ast.expr | None] = [literal(key) for key in known.values]
    return ast.Dict(keys, [frame.lift(item) for item in known.values.values()])


# Arithmetic and logic


@evaluate.register
def _binary(node: ast.BinOp, frame: Frame) -> Val:
    values = frame.in_order([node.left, node.right])
    return _operation(frame, node.op, values, lambda left, right: ast.BinOp(left, node.op, right))


@evaluate.register
def _unary(node: ast.UnaryOp, frame: Frame) -> Val:
    value = frame.eval(node.operand)
    if isinstance(node.op, ast.Not) and value.truth is not None:
        return Val(known=not value.truth)
    return _operation(frame, node.op, [value], lambda operand: ast.UnaryOp(node.op, operand))


def _operation(frame: Frame, op: ast.AST, values: list[Val], join: Callable[..., ast.expr]) -> Val:
    result = UNKNOWN
    if all(value.plain for value in values):
        result = OPERATORS[type(op)](*(value.data for value in values))
        if all(value.expr is None for value in values) or not is_numbers(result):
            return Val(known=result)
    return Val(join(*map(frame.lift, values)), result)


@evaluate.register
def _comparison(node: ast.Compare, frame: Frame) -> Val:
    values = frame.in_order([node.left, *node.comparators])
    if isinstance(node.ops[0], ast.Is | ast.IsNot) and len(values) == 2:
        for one, other in (values, reversed(values)):
            if one.known is None and not other.optional:
                return Val(known=(other.known is None) == isinstance(node.ops[0], ast.Is))
    if all(value.plain for value in values):
        plain = [value.data for value in values]
        pairs = zip(node.ops, plain, plain[1:], strict=False)
        return Val(known=all(OPERATORS[type(op)](a, b) for op, a, b in pairs))
    parts = [frame.lift(value) for value in values]
    return Val(ast.Compare(parts[0], node.ops, parts[1:]))


@evaluate.register
def _logic(node: ast.BoolOp, frame: Frame) -> Val:
    stops = isinstance(node.op, ast.Or)
    left: list[Val] = []
    value = Val(known=not stops)
    for item in node.values:
        value = frame.eval(item)
        if value.truth is None:
            left.append(value)
        elif value.truth == stops:
            if isinstance(value.known, bool):
                return value
            left.append(value)
            break
    if len(left) < 2:
        return left[0] if left else value
    return Val(ast.BoolOp(node.op, [frame.lift(item) for item in left]))


@evaluate.register
def _choice(node: ast.IfExp, frame: Frame) -> Val:
    test = frame.eval(node.test)
    if test.truth is not None:
        return frame.eval(node.body if test.truth else node.orelse)
    with frame.body.quiet():
        body, other = frame.eval(node.body), frame.eval(node.orelse)
    return Val(ast.IfExp(*map(frame.lift, (test, body, other))), optional=body.nullable or other.nullable)


@evaluate.register
def _text(node: ast.JoinedStr, frame: Frame) -> Val:
    """A text with known parts, as the name of one of several attributes is."""
    parts = [frame.eval(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
    special = any(isinstance(n, ast.FormattedValue) and (n.format_spec or n.conversion > 0) for n in node.values)
    if special or not all(part.plain for part in parts):
        raise unwritable(node, "a text that only the run knows")
    return Val(known="".join(str(part.data) for part in parts))


# Comprehensions: over known items they are unrolled, over anything else they stay

Element = TypeVar("Element")


@evaluate.register
def _comprehension(node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Val:
    found = _unrolled(frame, node.generators, lambda: frame.settled(frame.eval(node.elt)))
    return _kept(node, frame) if found is None else Val(known=Items(found))


@evaluate.register
def _mapping_comprehension(node: ast.DictComp, frame: Frame) -> Val:
    found = _unrolled(
        frame, node.generators, lambda: (frame.eval(node.key).data, frame.settled(frame.eval(node.value)))
    )
    if found is None:
        raise unwritable(node, "a mapping with unknown keys")
    return Val(known=Table(dict(found)))


def _unrolled(frame: Frame, loops: Sequence[ast.comprehension], element: Callable[[], Element]) -> list[Element] | None:
    """The elements of a comprehension, or None if only the run knows how many there are."""
    if not loops:
        return [element()]
    items = frame.items(frame.eval(loops[0].iter))
    if items is None:
        return None
    before, found = dict(frame.env), []
    try:
        for item in items:
            store(frame, loops[0].target, item)
            chosen = _chosen(frame, loops[0].ifs)
            inner = _unrolled(frame, loops[1:], element) if chosen else []
            if chosen is None or inner is None:
                return None
            found += inner
    finally:
        frame.env = before
    return found


def _chosen(frame: Frame, tests: Sequence[ast.expr]) -> bool | None:
    """Whether all tests hold, or None if only the run can say."""
    for test in tests:
        if not (truth := frame.eval(test).truth):
            return truth
    return True


def _kept(node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Val:
    """A comprehension as it stands."""
    before, loops = dict(frame.env), []
    with frame.body.quiet():
        for loop in node.generators:
            over = frame.lift(frame.eval(loop.iter))
            frame.env.update({name: Val(load(name)) for name in stored(loop.target)})
            tests = [frame.lift(frame.eval(test)) for test in loop.ifs]
            loops.append(ast.comprehension(loop.target, over, tests, 0))
        element = frame.lift(frame.eval(node.elt))
    frame.env = before
    return Val(type(node)(element, loops))


@write.register
def _written_function(known: FunctionType, frame: Frame) -> ast.expr:
    formula = getattr(known, "formula", None)
    if formula is None:
        return literal(known)
    tree = _Formula(frame).visit(ast.parse(formula, mode="eval")).body
    arguments = ast.arguments([], [ast.arg("x", name("Tensor"))], None, [], [], None, [])
    return load(frame.program.add(ast.FunctionDef("activation", arguments, [ast.Return(tree)], [], name("Tensor"))))


class _Formula(ast.NodeTransformer):
    """A formula in x as Python: functions by their names in torch, or written out, whole numbers as the floats that
    they are."""

    def __init__(self, frame: Frame) -> None:
        self.program = frame.program

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "x":
            return node
        function = FUNCTIONS[node.id]
        return name(torch_name(function) or self.program.add(_definition(function)))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = ast.unparse(node.func)
        arguments = [self.visit(argument) for argument in node.args]
        if called not in ("min", "max"):
            return ast.Call(self.visit(node.func), arguments, [])
        bound = ast.keyword({"min": "max", "max": "min"}[called], arguments[1])
        return ast.Call(name("torch.clamp"), arguments[:1], [bound])

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(float(node.value))  # type: ignore[arg-type]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        sign = ast.Constant(-1.0 if isinstance(node.op, ast.USub) else 1.0)
        return ast.BinOp(sign, ast.Mult(), self.visit(node.operand))


def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    """One of our activations as its source says it, without its docstring. Raises Unexportable."""
    node = ast.parse(inspect.getsource(function)).body[0]
    if not isinstance(node, ast.FunctionDef):
        raise Unexportable(f"{function.__name__} is not written as a function of its own")
    node.body = node.body[1:]
    return node
