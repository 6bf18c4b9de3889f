"""A written function made readable: what is used once stands where it is used, and names lose their numbers."""

from __future__ import annotations

import ast
from collections.abc import Collection

from archlab.arch_dsl.plain.body import Body
from archlab.arch_dsl.plain.fold import fold
from archlab.arch_dsl.plain.trees import blocks, heads, names_in, target_of, unpacked


def tidy(body: Body, parameters: Collection[str]) -> tuple[list[ast.stmt], set[str]]:
    """The statements of a function with these parameters, and the names that they read."""
    fold(body)
    statements = body.lists[0]
    names = _names(statements, body, parameters)
    whole = ast.Module(statements, [])
    for node in ast.walk(whole):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    _drop_echoes(statements)
    read = set(names_in(whole))
    for name in (name for node in ast.walk(whole) for name in unpacked(node) if name.id not in read):
        name.id = f"_{name.id}"
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
            if isinstance(statement, ast.For):
                start = clock
                walk(statement.body)
                clock += 2
                for item in {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}:
                    first[item] = min(first.get(item, start), start)
                    last[item] = clock
                continue
            for head in heads(statement):
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
            for inner in blocks(statement):
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
        for inner in blocks(statement):
            _drop_echoes(inner)
        target = target_of(statement)
        if target is not None and isinstance(statement.value, ast.Name) and statement.value.id == target:  # type: ignore[attr-defined]
            statements.remove(statement)
