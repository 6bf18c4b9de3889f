"""The numbers that the methods of a class read from `self`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from torch import nn

from archlab.arch_dsl.plain.trees import child_of, is_numbers, load


class Constants(ast.NodeTransformer):
    """Tells `note` of each number's module, attribute and value, and brings those of inlined parts to their owner.

    A part of which no class is written, a `container`, was inlined: `self.norm.eps` becomes `self.norm_eps`.
    """

    def __init__(
        self, module: nn.Module, container: Callable[[nn.Module], bool], note: Callable[[nn.Module, str, Any], None]
    ) -> None:
        self.module, self.container, self.note = module, container, note

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        steps = _steps(node)
        if steps is None:
            return self.generic_visit(node)
        module = outer = self.module
        inlined: list[str] = []
        for index, step in enumerate(steps):
            child = module._modules.get(step)
            if child is None:
                value = vars(module).get(step)
                if not is_numbers(value):
                    break
                attribute = "_".join([*inlined, step])
                self.note(outer, attribute, value)
                return _path([*steps[: index - len(inlined)], attribute])
            if self.container(child):
                inlined.append(step)
            else:
                inlined, outer = [], child
            module = child
        return node


def _steps(node: ast.expr) -> list[str] | None:
    """The path from self: ["scores", "sinks", "logits"]."""
    steps: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.insert(0, node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.insert(0, str(node.slice.value))
            node = node.value
        else:
            return None
    return steps if node.id == "self" else None


def _path(steps: list[str]) -> ast.expr:
    found: ast.expr = load("self")
    for step in steps:
        found = child_of(found, step)
    return found
