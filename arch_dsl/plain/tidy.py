"""A written function made readable: what is used once stands where it is used, and names lose their numbers."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import Any

from archlab.arch_dsl.plain.body import Body
from archlab.arch_dsl.plain.trees import blocks, clone, heads, names_in, numbered, rename, target_of, text, unpacked


def tidy(body: Body, parameters: Collection[str]) -> tuple[list[ast.stmt], set[str]]:
    """The statements of a function with these parameters, and the names that they read."""
    fold(body)
    statements = body.lists[0]
    names = _names(statements, body, parameters)
    whole = ast.Module(statements, [])
    rename(whole, names)
    _drop_echoes(statements)
    read = set(names_in(whole))
    for name in (name for node in ast.walk(whole) for name in unpacked(node) if name.id not in read):
        name.id = f"_{name.id}"
    for node in ast.walk(whole):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id not in read:
            node.target.id = "_"
    return statements, read


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
            start = clock
            if isinstance(statement, ast.Assign):
                note(statement.value, clock)
                for target in statement.targets:
                    note(target, clock + 1 if isinstance(target, ast.Name | ast.Tuple) else clock)
            elif not isinstance(statement, ast.For):
                for head in heads(statement):
                    note(head, clock)
            for inner in blocks(statement):
                walk(inner)
            if isinstance(statement, ast.For):  # keeps all that it reads and sets from its start to its end
                clock += 2
                for item in {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}:
                    first[item] = min(first.get(item, start), start)
                    last[item] = clock

    walk(statements)
    taken: dict[str, list[tuple[int, int]]] = {}
    for name in first:
        if name not in body.bases:
            taken.setdefault(name, []).append((-1, last[name] if name in parameters else clock + 2))
    chosen: dict[str, str] = {}
    for name in sorted((item for item in first if item in body.bases), key=lambda item: first[item]):
        span = first[name], last[name]
        own = next(
            own
            for own in numbered(body.bases[name])
            if all(span[0] > end or span[1] < start for start, end in taken.get(own, []))
        )
        taken.setdefault(own, []).append(span)
        chosen[name] = own
    return chosen


def _drop_echoes(statements: list[ast.stmt]) -> None:
    """`x = x` says nothing."""
    for statement in list(statements):
        for inner in blocks(statement):
            _drop_echoes(inner)
        target = target_of(statement)
        if target is not None and isinstance(statement.value, ast.Name) and statement.value.id == target:  # type: ignore[attr-defined]
            statements.remove(statement)


# Folding: what is used once, and was not named by whoever wrote it, stands where it is used

WIDTH = 110  # an expression is folded into its place up to so many characters


def fold(body: Body) -> None:
    """Folds every assignment that can be, and drops those that nothing reads."""
    while _fold_one(body.lists[0], body):
        pass


def _fold_one(statements: list[ast.stmt], body: Body) -> bool:
    """Folds or drops one assignment; False if there is none left."""
    uses = Counter(names_in(ast.Module(body.lists[0], [])))
    for index, statement in reversed(list(enumerate(statements))):
        if any(_fold_one(inner, body) for inner in blocks(statement)):
            return True
        if isinstance(statement, ast.If) and not statement.body and not statement.orelse:
            del statements[index]  # all that it did was for a loss in training
            return True
        target = target_of(statement)
        several = [name.id for name in unpacked(statement)]
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
        read = heads(statement)
        if target in {name for head in read for name in names_in(head)}:
            replaced = _Replace(target, value)
            trial = [replaced.visit(clone(head)) for head in read]
            short = all(len(text(head)) <= WIDTH for head in trial) or isinstance(value, ast.Name)
            if not replaced.safe or not short or (computes and any(_computed_before(head, target) for head in read)):
                return False
            statements[later] = _Replace(target, value).visit(statement)
            return True
        if _acts(statement) or blocks(statement) or (computes and _computes(statement)):
            return False
    return False


_VIEWS = ("unflatten", "flatten", "transpose", "view", "view_as", "expand", "movedim", "unsqueeze", "squeeze", "split")


def _is_operation(node: ast.AST) -> bool:
    view = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS
    return isinstance(node, ast.Call | ast.BinOp | ast.Compare) and not view


def _computes(node: ast.AST) -> bool:
    """Whether there is more in a tree than names, views and shapes."""
    return any(map(_is_operation, ast.walk(node)))


def _computed_before(node: ast.AST, target: str) -> bool:
    """Whether something is computed before a name is read."""
    before = takewhile(lambda item: not isinstance(item, ast.Name) or item.id != target, _in_order(node))
    return any(map(_is_operation, before))


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree in the order of evaluation."""
    for child in [node.value, *node.targets] if isinstance(node, ast.Assign) else ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


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
