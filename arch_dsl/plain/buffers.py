"""Buffers of a module as the statements that compute them, with what repeats in them computed once."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from archlab.arch_dsl.plain.template import Holes, Template
from archlab.arch_dsl.plain.trace import Recorder
from archlab.arch_dsl.plain.trees import load, name, names_in, text

LONG = 90  # characters of an expression that is written in steps


def buffers(module: nn.Module, recorder: Recorder) -> Iterator[Template]:
    """The statements, one after another."""
    found = {key: recorder.expression(value) for key, value in module.named_buffers(recurse=False)}
    for key, expression in _in_steps(found):
        holes = Holes(key)
        code = text(holes.visit(expression))
        if key in found:
            temporary = ", persistent=False" if key in module._non_persistent_buffers_set else ""
            yield Template(f'self.register_buffer("{key}", {code}{temporary})', holes.numbers)
        else:
            yield Template(f"{key} = {code}", holes.numbers)


def _in_steps(found: dict[str, ast.expr]) -> list[tuple[str, ast.expr]]:
    """Expressions by name, and before them by other names what they share or have as a part, if they are long."""
    pending = dict(found)
    for number in itertools.count(1):
        part = _next_part(list(pending.values()))
        if part is None:
            break
        step = "table" if number == 1 else f"table_{number}"
        pending = {key: _Replaced(part, step).visit(expression) for key, expression in pending.items()}
        pending[step] = name(part)
    ordered: list[tuple[str, ast.expr]] = []
    while pending:
        ready = {key: item for key, item in pending.items() if not any(each in pending for each in names_in(item))}
        ordered += sorted(ready.items(), key=lambda pair: pair[0] in found)
        pending = {key: item for key, item in pending.items() if key not in ready}
    steps = [key for key, _ in ordered if key not in found]
    names = {key: "table" if key == steps[-1] else f"part_{index}" for index, key in enumerate(steps, 1)}
    return [(names.get(key, key), _Renamed(names).visit(item)) for key, item in ordered]


def _next_part(expressions: list[ast.expr]) -> str | None:
    """The longest part that is worth a step of its own: it repeats, or it is of a long expression."""
    counts = Counter(part for expression in expressions for part in _parts(expression))
    chosen = [part for part, count in counts.items() if count > 1 and len(part) > 20]
    longest = max(map(text, expressions), key=len, default="")
    if not chosen and len(longest) > LONG:
        chosen = [part for part in _parts(name(longest)) if 20 < len(part) < 70]
    return max(chosen, key=len, default=None)


def _parts(expression: ast.expr) -> list[str]:
    return [text(node) for node in ast.walk(expression) if isinstance(node, ast.Call | ast.BinOp)]


class _Renamed(ast.NodeTransformer):
    """Changes names."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return load(self.names.get(node.id, node.id))


class _Replaced(ast.NodeTransformer):
    """Puts a name in the place of an expression."""

    def __init__(self, target: str, step: str) -> None:
        self.target, self.step = target, step

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Call | ast.BinOp) and text(node) == self.target:
            return load(self.step)
        return super().generic_visit(node)
