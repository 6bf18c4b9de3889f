"""The call record in a file: the fields that something reads, and how the model makes it."""

from __future__ import annotations

import ast
import dataclasses

from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.plain.program import Program
from archlab.arch_dsl.plain.trees import name

_TAKEN = ("documents", "prefix")  # what the model is given of it, beside the tokens


def fields_read(program: Program) -> set[str]:
    """The fields of the call record that something reads."""
    read = (item for node in program.nodes() for item in ast.walk(node) if isinstance(item, ast.Attribute))
    return {item.attr for item in read if isinstance(item.value, ast.Name) and item.value.id == "call"}


def record(fields: set[str]) -> str:
    """The class with these fields."""
    rows = []
    for item in dataclasses.fields(Call):
        if item.name in fields:
            annotation = str(item.type).replace("torch.Tensor", "Tensor")
            default = "None" if item.default is None else "field(default_factory=dict)"
            rows.append(f"    {item.name}: {annotation} = {default}")
    body = "\n".join(rows)
    return f'@dataclass\nclass Call:\n    """What the layers of one forward pass know besides the stream."""\n\n{body}'


def make_record(node: ast.FunctionDef, fields: set[str]) -> None:
    """Has the model itself take what the call record holds, and make the record."""
    taken = [field for field in _TAKEN if field in fields]
    node.args.args = [item for item in node.args.args if item.arg != "call"]
    node.args.args += [ast.arg(field, name("Tensor | None")) for field in taken]
    node.args.defaults = [ast.Constant(None) for _ in taken]
    made = f"call = Call({', '.join(f'{field}={field}' for field in taken)})"
    node.body.insert(1 if ast.get_docstring(node) else 0, ast.parse(made).body[0])
