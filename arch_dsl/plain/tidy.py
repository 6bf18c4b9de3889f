"""A written function made readable: what is used once stands where it is used, and names lose their numbers."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection
from typing import Any

from arch_dsl.plain.body import Body
from arch_dsl.plain.values import clone, names_in, text

WIDTH = 110  # an expression is folded into its place up to so many characters


def tidy(body: Body, parameters: Collection[str]) -> tuple[list[ast.stmt], set[str]]:
    """The statements of a function with these parameters, and the names that they read."""
    statements = body.lists[0]
    changed = True
    while changed:
        changed = _fold(statements, body, statements)
    names = _names(statements, body, parameters)
    whole = ast.Module(statements, [])
    for node in ast.walk(whole):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    _drop_echoes(statements)
    read = set(names_in(whole))
    for name in (name for node in ast.walk(whole) for name in _unpacked(node) if name.id not in read):
        name.id = f"_{name.id}"
    return statements, read


def _inner(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements inside a statement."""
    if isinstance(statement, ast.If | ast.For):
        return [statement.body, statement.orelse]
    return [statement.body] if isinstance(statement, ast.With) else []


def _target(statement: ast.stmt) -> str | None:
    """The name that a simple assignment sets."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _unpacked(statement: ast.AST) -> list[ast.Name]:
    """The names that an assignment to several sets."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return []
    return [item for item in statement.targets[0].elts if isinstance(item, ast.Name)]


def _fold(statements: list[ast.stmt], body: Body, whole: list[ast.stmt]) -> bool:
    """Folds one assignment, or drops one that nothing reads; False if there is none left."""
    uses = Counter(names_in(ast.Module(whole, [])))
    for index, statement in reversed(list(enumerate(statements))):
        if any(_fold(inner, body, whole) for inner in _inner(statement)):
            return True
        target = _target(statement)
        several = [name.id for name in _unpacked(statement)]
        unread = several and not any(uses[name] or name in body.pinned for name in several)
        if unread and isinstance(statement.value, ast.Attribute):  # type: ignore[attr-defined]
            del statements[index]  # a shape of which nothing is read
            return True
        if target is None or target in body.pinned:
            continue
        assert isinstance(statement, ast.Assign)
        if not uses[target]:
            del statements[index]
            return True
        following = statements[index + 1] if index + 1 < len(statements) else None
        at_once = isinstance(following, ast.Return) and isinstance(following.value, ast.Name)
        if (
            uses[target] == 1
            and (target in body.soft or at_once)
            and _place(statements, index, target, statement.value)
        ):
            del statements[index]
            return True
    return False


def _place(statements: list[ast.stmt], index: int, target: str, value: ast.expr) -> bool:
    """Puts an expression where its name is read further down in the same list, if that is short and no computation
    changes places with another: the order of gradients' sums is that of computations."""
    computes = _computes(value)
    for later in range(index + 1, len(statements)):
        statement = statements[later]
        heads = _heads(statement)
        if target in {name for head in heads for name in names_in(head)}:
            replaced = _Replace(target, value)
            trial = [replaced.visit(clone(head)) for head in heads]
            short = all(len(text(head)) <= WIDTH for head in trial) or isinstance(value, ast.Name)
            if not replaced.safe or not short or (computes and any(_computed_before(head, target) for head in heads)):
                return False
            statements[later] = _Replace(target, value).visit(statement)
            return True
        if _acts(statement) or _inner(statement) or (computes and _computes(statement)):
            return False
    return False


_VIEWS = ("unflatten", "flatten", "transpose", "view", "view_as", "expand", "movedim", "unsqueeze", "squeeze", "split")


def _computes(node: ast.AST) -> bool:
    """Whether there is more in a tree than names, views and shapes."""
    if isinstance(node, ast.Call):
        view = isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS
        if not view:
            return True
    elif isinstance(node, ast.BinOp | ast.Compare):
        return True
    return any(_computes(child) for child in ast.iter_child_nodes(node))


def _computed_before(node: ast.AST, target: str) -> bool:
    """Whether something is computed before a name is read, in the order of evaluation."""
    reached, found = False, False

    def visit(item: ast.AST) -> None:
        nonlocal reached, found
        if reached:
            return
        if isinstance(item, ast.Name) and item.id == target:
            reached = True
            return
        children = list(ast.iter_child_nodes(item))
        if isinstance(item, ast.Assign):
            children = [item.value, *item.targets]
        for child in children:
            visit(child)
        if not reached and isinstance(item, ast.Call | ast.BinOp | ast.Compare):
            found |= _computes(ast.Expr(item)) and not _only_view(item)

    visit(node)
    return found


def _only_view(item: ast.AST) -> bool:
    return isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr in _VIEWS


def _heads(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a statement that are evaluated when it is reached."""
    if isinstance(statement, ast.If):
        return [statement.test]
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, ast.With):
        return [item.context_expr for item in statement.items]
    return [statement]


def _acts(statement: ast.stmt) -> bool:
    """Whether a statement does more than name a value."""
    return not isinstance(statement, ast.Assign) or any(
        not isinstance(target, ast.Name | ast.Tuple) for target in statement.targets
    )


class _Replace(ast.NodeTransformer):
    """Puts an expression in the place of a name; not `safe` where that would be evaluated more than once."""

    def __init__(self, target: str, value: ast.expr) -> None:
        self.target, self.value, self.safe, self.repeated = target, value, True, 0

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != self.target or not isinstance(node.ctx, ast.Load):
            return node
        self.safe &= not self.repeated
        return clone(self.value)

    def _inside(self, node: Any) -> Any:
        self.repeated += 1
        self.generic_visit(node)
        self.repeated -= 1
        return node

    visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_Lambda = _inside


def _names(statements: list[ast.stmt], body: Body, parameters: Collection[str]) -> dict[str, str]:
    """A readable name for every numbered one, such that no value is overwritten while it is needed, and no function."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    clock = 0

    def note(node: ast.AST, at: int) -> None:
        for item in ast.walk(node):
            if isinstance(item, ast.Name):
                first.setdefault(item.id, at)
                last[item.id] = at

    def walk(items: list[ast.stmt]) -> None:
        nonlocal clock
        for statement in items:
            clock += 2
            if isinstance(statement, ast.For):
                start = clock
                walk(statement.body)
                clock += 2
                for item in {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}:
                    first[item] = min(first.get(item, start), start)
                    last[item] = clock
                continue
            for head in _heads(statement):
                if isinstance(statement, ast.Assign):
                    note(statement.value, clock)
                    for target in statement.targets:
                        note(target, clock + 1 if isinstance(target, ast.Name | ast.Tuple) else clock)
                else:
                    note(head, clock)
            if isinstance(statement, ast.With):
                for entered in statement.items:
                    if entered.optional_vars is not None:
                        note(entered.optional_vars, clock)
            for inner in _inner(statement):
                walk(inner)

    walk(statements)
    taken: dict[str, list[tuple[int, int]]] = {}
    for name in first:
        if name not in body.bases:
            taken.setdefault(name, []).append((-1, last[name] if name in parameters else clock + 2))
    chosen: dict[str, str] = {}
    for name in sorted((item for item in first if item in body.bases), key=lambda item: first[item]):
        span = (first[name], last[name])
        base, number = body.bases[name], 1
        while True:
            candidate = base if number == 1 else f"{base}_{number}"
            if all(span[0] > other[1] or span[1] < other[0] for other in taken.get(candidate, [])):
                break
            number += 1
        taken.setdefault(candidate, []).append(span)
        chosen[name] = candidate
    return chosen


def _drop_echoes(statements: list[ast.stmt]) -> None:
    """`x = x` says nothing."""
    for statement in list(statements):
        for inner in _inner(statement):
            _drop_echoes(inner)
        target = _target(statement)
        if target is not None and isinstance(statement.value, ast.Name) and statement.value.id == target:  # type: ignore[attr-defined]
            statements.remove(statement)
