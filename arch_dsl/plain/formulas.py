"""Activations that were given as a formula: functions of the file."""

from __future__ import annotations

import ast
from types import FunctionType

from archlab.arch_dsl.language.formula import FUNCTIONS
from archlab.arch_dsl.plain.frame import Frame, write
from archlab.arch_dsl.plain.trees import Unexportable, literal, load, name, torch_name


@write.register
def _written(known: FunctionType, frame: Frame) -> ast.expr:
    formula = getattr(known, "formula", None)
    if formula is None:
        return literal(known)
    tree = _Formula().visit(ast.parse(formula, mode="eval")).body
    arguments = ast.arguments([], [ast.arg("x", name("Tensor"))], None, [], [], None, [])
    return load(frame.program.add(ast.FunctionDef("activation", arguments, [ast.Return(tree)], [], name("Tensor"))))


class _Formula(ast.NodeTransformer):
    """A formula in x as Python: functions by their names in torch, whole numbers as the floats that they are."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "x":
            return node
        found = torch_name(FUNCTIONS[node.id])
        if found is None:
            raise Unexportable(f"{node.id} is no function of torch")
        return name(found)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(float(node.value))  # type: ignore[arg-type]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        sign = ast.Constant(-1.0 if isinstance(node.op, ast.USub) else 1.0)
        return ast.BinOp(sign, ast.Mult(), self.visit(node.operand))
