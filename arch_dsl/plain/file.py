"""The file: what it says of itself, its imports, its functions, its classes."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

from archlab.arch_dsl.compiler.modules import Decoder, LanguageModel
from archlab.arch_dsl.language.spec import walk
from archlab.arch_dsl.model.model import DecoderModel, Model, cost, kept, resolve
from archlab.arch_dsl.parts.context import Call
from archlab.arch_dsl.parts.families import Primitive
from archlab.arch_dsl.plain.application import Application, entry
from archlab.arch_dsl.plain.classes import Classes, Group
from archlab.arch_dsl.plain.layout import WIDTH, lines, source
from archlab.arch_dsl.plain.program import Program, twins
from archlab.arch_dsl.plain.trace import Recorder
from archlab.arch_dsl.plain.trees import Unexportable, load, name
from archlab.arch_dsl.plain.values import CallRecord, Val
from archlab.arch_dsl.tree.identity import dump, identity

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

    Its logits and gradients equal those of `compile(spec, backend="reference")`, and so do its names of parameters;
    heads that only training has are left out. It needs torch alone. Raises Unexportable for a primitive whose forward
    pass cannot be written down.
    """
    spec = kept(resolve(spec))
    if not isinstance(spec, DecoderModel):
        raise Unexportable("a model with an encoder: only decoders are written down")
    if spec.prompt and any(getattr(part, "reads_prefix", False) for _, part in walk(tuple(spec.layers()))):
        raise Unexportable("a model with a learned prompt and a prefix mask: a file takes the prefix of tokens alone")
    if spec.depths:
        raise Unexportable("a model with depths: a file has one set of positions for all rows")
    recorder = Recorder()
    with recorder:
        model = Decoder(spec, spec.context(backend="reference"))
    program = Program(twins(model.block, recorder))
    given = {"self": Val(load("self"), model), "tokens": Val(load("tokens")), "call": Val(load("call"), CallRecord())}
    forward = entry(program, model, Application(vars(LanguageModel)["forward"], given, (), Decoder))
    called, fields = "call" in forward.parameters, fields_read(program)
    if called:
        make_record(forward.node, fields)
    classes = Classes(program, recorder, model)
    classes.groups[-1].lines += shared(model)
    parts = [_LINEAR_EACH if classes.linear_bias else _LINEAR] if classes.linear else []
    parts += [record(fields)] if called else []
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
    fields = ", field" if "field" in used else ""
    stdlib = {"math": "import math", "dataclass": f"from dataclasses import dataclass{fields}"}
    others = {"torch": "import torch", "F": "import torch.nn.functional as F"}
    first, second = ([line for name, line in group.items() if name in used] for group in (stdlib, others))
    return "\n\n".join("\n".join(group) for group in (first, [*second, "from torch import Tensor, nn"]) if group)


def _class(group: Group) -> str:
    words = "The model: logits from token ids." if group.kind is Decoder else _summary(group.kind)
    rows = [f"class {group.name}(nn.Module):"]
    if words:
        rows += [_docstring(words), ""]
    if group.lines:
        taken = "".join(f", {parameter}: {kind}" for parameter, kind in group.parameters)
        rows += [lines(f"def __init__(self{taken}) -> None:", 4), "        super().__init__()"]
        rows += [lines(line, 8) for line in group.lines]
        rows.append("")
    for method in group.methods:
        rows += [source(method, 4), ""]
    if not group.lines and not group.methods:
        rows.append("    pass")
    return "\n".join(rows).rstrip()


def _docstring(words: str) -> str:
    line = f'    """{words.strip()}"""'
    if all(len(row) <= WIDTH for row in line.split("\n")):
        return line
    return textwrap.fill(" ".join(line.split()), WIDTH, initial_indent="    ", subsequent_indent="    ")


def _summary(kind: type) -> str | None:
    """What a module's class computes, in a paragraph: its own words, or those of the primitive that builds it."""
    if kind.__doc__ and kind.__module__.split(".")[0] != "torch":
        return kind.__doc__.split("\n\n")[0]
    for member in _members(Primitive):
        build = vars(member).get("build")
        built = build is not None and build.__module__ == kind.__module__ and kind.__name__ in build.__code__.co_names
        if built or vars(member).get("module") is kind:
            return (member.__doc__ or "").split("\n\n")[0] or None
    return None


def _members(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _members(child)


# The call record

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


# Parts that several layers share


def shared(model: nn.Module) -> list[str]:
    """The statements. Raises Unexportable for a part that is shared outside of layers."""
    homes: dict[int, str] = {}
    rows: dict[tuple[str, str], list[int]] = {}
    modules = model.named_modules(remove_duplicate=False)
    held = (item for item in modules if next(item[1].parameters(), None) is not None)
    for path, part in itertools.chain(held, model.named_parameters(remove_duplicate=False)):
        home = homes.setdefault(id(part), path)
        if home != path and not _inside_shared(path, model, homes):
            first, other = (re.fullmatch(r"block\.(\d+)\.(.*)", item) for item in (home, path))
            if first is None or other is None or first[2] != other[2]:
                raise Unexportable(f"{path} is shared with {home}")
            rows.setdefault((first[1], first[2]), []).append(int(other[1]))
    found = []
    for (layer, step), others in rows.items():
        following = range(int(layer) + 1, len(model.block))  # type: ignore[arg-type]
        several = ", ".join(f"self.block[{other}]" for other in others) + "," * (len(others) == 1)
        over = f"self.block[{following.start}:]" if others == list(following) else f"({several})"
        found += [f"for layer in {over}:", f"    layer.{step} = self.block[{layer}].{step}"]
    return ["\n".join(found)] if found else []


def _inside_shared(path: str, model: nn.Module, homes: dict[int, str]) -> bool:
    """Whether a part that holds this one is shared already."""
    above = itertools.accumulate(path.split(".")[:-1], "{}.{}".format)
    return any(homes.get(id(model.get_submodule(item)), item) != item for item in above)
