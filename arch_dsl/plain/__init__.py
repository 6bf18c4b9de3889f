"""A model as one file of plain PyTorch that nothing of this repository is needed for.

The model is built without data, its forward pass is run on what is known of it (evaluate.py, program.py), and what is
left is written down: functions, classes (classes.py), and the construction of this very model.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections.abc import Iterator

from torch import nn

from arch_dsl.context import Call
from arch_dsl.identity import dump, identity
from arch_dsl.model import DecoderModel, Model, cost, resolve
from arch_dsl.modules import Decoder, LanguageModel
from arch_dsl.plain.classes import Classes, Group, summary
from arch_dsl.plain.layout import WIDTH, lines, source
from arch_dsl.plain.program import Program
from arch_dsl.plain.trace import Recorder
from arch_dsl.plain.twins import twins
from arch_dsl.plain.values import CallRecord, Unexportable, Val, clone, name

__all__ = ["Unexportable", "to_python"]

_LINEAR = '''def linear(inputs: int, outputs: int, std: float, bias: float | None = None) -> nn.Linear:
    """A linear map whose weights start from N(0, std^2), and whose bias, if it has one, starts at a number."""
    module = nn.Linear(inputs, outputs, bias=bias is not None)
    nn.init.normal_(module.weight, std=std)
    if bias is not None:
        nn.init.constant_(module.bias, bias)
    return module'''

_LINEAR_EACH = (
    _LINEAR.replace("bias: float | None", "bias: float | tuple[float, ...] | None")
    .replace("whose bias, if it has one, starts at a number", "whose bias starts at a number, or at one per output")
    .replace("nn.init.constant_(module.bias, bias)", "module.bias.data.copy_(torch.tensor(bias))")
)


def to_python(spec: Model, title: str = "") -> str:
    """The source of a Python file with a class `Model` that computes what the compiled model does.

    Its logits and gradients equal those of `compile(spec, backend="reference")`, and so do its names of parameters. It
    needs torch alone. Raises Unexportable for a primitive whose forward pass cannot be written down.
    """
    spec = resolve(spec)
    if not isinstance(spec, DecoderModel):
        raise Unexportable("a model with an encoder: only decoders are written down")
    if spec.prompt:
        raise Unexportable("a model with a learned prompt: only what reads tokens alone is written down")
    recorder = Recorder()
    with recorder:
        model = Decoder(spec, spec.context(backend="reference"))
    program = Program()
    program.twins = twins(model.block, recorder)
    given = {"self": Val(name("self"), model), "tokens": Val(name("tokens")), "call": Val(name("call"), CallRecord())}
    entry = program.entry(model, vars(LanguageModel)["forward"], given, Decoder)
    fields = _call_fields(program)
    if "call" in entry.parameters:
        _with_call(entry.node, fields)
    classes = Classes(program, recorder, model)
    classes.groups[-1].lines += _shared(model)
    parts = [_LINEAR_EACH if classes.linear_bias else _LINEAR] if classes.linear else []
    parts += [_record(fields)] if "call" in entry.parameters else []
    parts += [source(function) for function in program.functions.values()]
    parts += [_class(group) for group in classes.groups]
    code = "\n\n\n".join(parts)
    return f"{_header(spec, title)}\n{_imports(code)}\n\n\n{code}\n"


def _header(spec: Model, title: str) -> str:
    words = title or "A language model"
    count = f"{cost(spec).parameters:,}"
    yaml = "".join(f"#   {line}".rstrip() + "\n" for line in dump(spec).splitlines())
    return (
        f'"""{words} in plain PyTorch: {count} parameters.\n\n'
        "Written by archlab from the model below. It computes the same as the compiled model with its reference\n"
        "kernels, in float32 to the bit, and its parameters have the same names:\n\n"
        '    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))\n"""\n\n'
        f"# identity: {identity(spec)}\n# model:\n{yaml}"
    )


def _imports(code: str) -> str:
    """The imports that code needs."""
    used = {item.id for item in ast.walk(ast.parse(code)) if isinstance(item, ast.Name)}
    groups: list[list[str]] = [[], ["import torch"] if "torch" in used else []]
    if "math" in used:
        groups[0].append("import math")
    if "dataclass" in used:
        groups[0].append(
            "from dataclasses import dataclass, field" if "field" in used else "from dataclasses import dataclass"
        )
    if "F" in used:
        groups[1].append("import torch.nn.functional as F")
    groups[1].append("from torch import Tensor, nn")
    return "\n\n".join("\n".join(group) for group in groups if group)


def _call_fields(program: Program) -> set[str]:
    """The fields of the call record that something reads."""
    helpers = (node for nodes in program.helpers.values() for node in nodes.values())
    nodes = [*program.functions.values(), *(entry.node for entry in program.entries.values()), *helpers]
    read = (item for node in nodes for item in ast.walk(node) if isinstance(item, ast.Attribute))
    return {item.attr for item in read if isinstance(item.value, ast.Name) and item.value.id == "call"}


def _record(fields: set[str]) -> str:
    """The call record with the fields that are used."""
    rows = {item.name: item for item in dataclasses.fields(Call)}
    found = []
    for key in (key for key in rows if key in fields):
        annotation = str(rows[key].type).replace("torch.Tensor", "Tensor")
        default = "None" if rows[key].default is None else "field(default_factory=dict)"
        found.append(f"    {key}: {annotation} = {default}")
    body = "\n".join(found)
    return f'@dataclass\nclass Call:\n    """What the layers of one forward pass know besides the stream."""\n\n{body}'


def _with_call(node: ast.FunctionDef, fields: set[str]) -> None:
    """The model itself takes what the call record holds, and makes the record."""
    node.args.args = [item for item in node.args.args if item.arg != "call"]
    taken = [field for field in ("documents", "prefix") if field in fields]
    node.args.args += [ast.arg(field, name("Tensor | None")) for field in taken]
    node.args.defaults = [ast.Constant(None) for _ in taken]
    made = f"call = Call({', '.join(f'{field}={field}' for field in taken)})"
    first = 1 if ast.get_docstring(node) else 0
    node.body.insert(first, ast.parse(made).body[0])


def _class(group: Group) -> str:
    words = "The model: logits from token ids." if group.kind is Decoder else summary(group.kind)
    rows = [f"class {group.name}(nn.Module):"]
    if words:
        rows += [_docstring(words), ""]
    if group.lines:
        taken = "".join(f", {parameter}: {kind}" for parameter, kind in group.parameters)
        rows += [lines(f"def __init__(self{taken}) -> None:", 4), "        super().__init__()"]
        rows += [lines(line, 8) for line in group.lines]
        rows.append("")
    for method in group.methods:
        rows += [source(_tidied(method), 4), ""]
    if not group.lines and not group.methods:
        rows.append("    pass")
    return "\n".join(rows).rstrip()


def _docstring(words: str) -> str:
    line = f'    """{words.strip()}"""'
    if all(len(row) <= WIDTH for row in line.split("\n")):
        return line
    return textwrap.fill(" ".join(line.split()), WIDTH, initial_indent="    ", subsequent_indent="    ")


def _tidied(method: ast.FunctionDef) -> ast.FunctionDef:
    node = clone(method)
    node.decorator_list = []
    return node


def _shared(model: nn.Module) -> list[str]:
    """Statements that give parts which several layers share one home."""
    homes: dict[int, str] = {}
    rows: dict[tuple[str, str], list[int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not any(True for _ in module.parameters()):
            continue
        home = homes.setdefault(id(module), path)
        if home != path and not _inside_shared(path, model, homes):
            first, other = (re.fullmatch(r"block\.(\d+)\.(.*)", item) for item in (home, path))
            if first is None or other is None or first[2] != other[2]:
                raise Unexportable(f"{path} is shared with {home}")
            rows.setdefault((first[1], first[2]), []).append(int(other[1]))
    found = []
    count = len(model.block)  # type: ignore[arg-type]
    for (layer, step), others in rows.items():
        if others == list(range(int(layer) + 1, count)):
            over = f"self.block[{int(layer) + 1}:]"
        else:
            over = "(" + ", ".join(f"self.block[{other}]" for other in others) + ("," if len(others) == 1 else "") + ")"
        found += [f"for layer in {over}:", f"    layer.{step} = self.block[{layer}].{step}"]
    return ["\n".join(found)] if found else []


def _inside_shared(path: str, model: nn.Module, homes: dict[int, str]) -> bool:
    """Whether a part that holds this one is shared already."""
    steps = path.split(".")
    above: Iterator[str] = (".".join(steps[:end]) for end in range(1, len(steps)))
    return any(homes.get(id(model.get_submodule(item)), item) != item for item in above)
