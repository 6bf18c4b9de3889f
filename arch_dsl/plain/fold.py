"""Folding: what is used once, and was not named by whoever wrote it, stands where it is used."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

from archlab.arch_dsl.plain.body import Body
from archlab.arch_dsl.plain.trees import blocks, clone, heads, names_in, target_of, text, unpacked

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
