"""Code with holes for numbers: two modules of one class have the same code and may have other numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.plain.trees import is_number, literal, load, text

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
