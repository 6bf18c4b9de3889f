"""Code with holes for numbers: two modules of one class have the same code and may have other numbers."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from archlab.arch_dsl.plain.trace import Recorder
from archlab.arch_dsl.plain.trees import is_number, literal, load, name, names_in, rename, text

_HOLE = re.compile(r"\*?_hole_(\d+)_")


def hole(number: int) -> str:
    """The place of a number."""
    return f"_hole_{number}_"


@dataclass
class Template:
    """`code` has a hole for each of `numbers`, which have a label each; `attribute` is what it gives its value to."""

    code: str
    numbers: list[tuple[str, Any]]
    attribute: str = ""

    def filled(self) -> str:
        """The code with its numbers."""
        return self.put([text(literal(value)) for _, value in self.numbers])

    def put(self, parts: Sequence[str]) -> str:
        """The code with these texts in its holes; a tuple in a hole with a star is its items."""

        def part(match: re.Match[str]) -> str:
            found = parts[int(match[1])]
            if not match[0].startswith("*"):
                return found
            return found[1:-1].rstrip(",") if found.startswith("(") else f"*{found}"

        return _HOLE.sub(part, self.code)

    def moved(self, by: int) -> str:
        """The code with holes that count from a later number."""
        return self.put([hole(number + by) for number in range(len(self.numbers))])


class Holes(ast.NodeTransformer):
    """Takes the numbers out of an expression."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.numbers: list[tuple[str, Any]] = []

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not is_number(node.value):
            return node
        self.numbers.append((f"{self.label}_{len(self.numbers)}", node.value))
        return load(hole(len(self.numbers) - 1))


# Buffers

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
    for _, item in ordered:
        rename(item, names)
    return [(names.get(key, key), item) for key, item in ordered]


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


class _Replaced(ast.NodeTransformer):
    """Puts a name in the place of an expression."""

    def __init__(self, target: str, step: str) -> None:
        self.target, self.step = target, step

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Call | ast.BinOp) and text(node) == self.target:
            return load(self.step)
        return super().generic_visit(node)
