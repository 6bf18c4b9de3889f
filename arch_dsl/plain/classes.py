"""The modules of a model as classes: equal ones share a class, and what differs among them is its parameters."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from arch_dsl.block import Branches
from arch_dsl.families import Primitive
from arch_dsl.layers import Linear
from arch_dsl.modules import Decoder
from arch_dsl.plain.program import Program
from arch_dsl.plain.trace import Recorder, drawn_once, initial
from arch_dsl.plain.values import Unexportable, clone, is_number, is_numbers, literal, names_in, text

_NAMES = {Decoder: "Model", Branches: "Layer"}
_HOLE = re.compile(r"_hole_(\d+)_")


@dataclasses.dataclass
class Line:
    """`self.{attribute} = {template}`; the holes of the template are numbers, each with a label."""

    attribute: str
    template: str
    numbers: list[tuple[str, Any]]


@dataclasses.dataclass
class Made:
    """How a module is constructed: a template with holes, and the numbers in them."""

    template: str
    numbers: list[tuple[str, Any]]

    def filled(self) -> str:
        """The template with its numbers."""
        return _HOLE.sub(lambda hole: text(literal(self.numbers[int(hole[1])][1])), self.template)


@dataclasses.dataclass
class Group:
    """One class: its name, what `__init__` sets, its methods; `parameters` are the numbers that differ."""

    name: str
    kind: type
    lines: list[str]
    parameters: list[tuple[str, str]]  # with their types
    methods: list[ast.FunctionDef]


class Classes:
    """The classes of a model's modules, inner ones first."""

    def __init__(self, program: Program, recorder: Recorder, root: nn.Module) -> None:
        self.program, self.recorder = program, recorder
        self.groups: list[Group] = []
        self.linear = self.linear_bias = False
        self._made: dict[int, Made | None] = {}
        self._constants: dict[int, dict[str, Any]] = {}
        self._methods: dict[int, list[ast.FunctionDef]] = {}
        self._entries: dict[int, list[ast.FunctionDef]] = {}
        for (key, _), entry in program.entries.items():
            self._entries.setdefault(key, []).append(entry.node)
        for module in root.modules():
            self._read_methods(module)
        levels: dict[int, list[nn.Module]] = {}
        for module in root.modules():
            levels.setdefault(_height(module), []).append(module)
        for height in sorted(levels):
            self._level(levels[height])

    # Which numbers a class needs

    def _read_methods(self, module: nn.Module) -> None:
        """The methods of a module's class, with the numbers of inlined parts as its own."""
        twin = id(self.program.twins.get(id(module), module))
        nodes = [clone(node) for node in (*self.program.helpers.get(twin, {}).values(), *self._entries.get(twin, []))]
        for node in nodes:
            _Constants(self, module).visit(node)
        self._methods[id(module)] = nodes

    def container(self, module: nn.Module) -> bool:
        """Whether a module is no more than a place for others."""
        own = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
        twin = id(self.program.twins.get(id(module), module))
        return not own and twin not in self.program.modules and not isinstance(module, Linear)

    def constant(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Notes that a class needs a number."""
        self._constants.setdefault(id(module), {})[attribute] = value

    # How modules are made

    def made(self, module: nn.Module) -> Made | None:
        """How a module is constructed, or None if nothing of it is needed."""
        return self._made[id(module)]

    def _level(self, modules: Sequence[nn.Module]) -> None:
        drafts: dict[tuple[Any, ...], list[tuple[nn.Module, list[Line]]]] = {}
        for module in modules:
            if (made := self._simple(module)) is not None or self.container(module):
                self._made[id(module)] = made
                continue
            lines = list(self._lines(module))
            key = (
                type(module),
                tuple((line.attribute, line.template) for line in lines),
                tuple(text(node) for node in self._methods[id(module)]),
            )
            drafts.setdefault(key, []).append((module, lines))
        for same in drafts.values():
            self._group(same)

    def _simple(self, module: nn.Module) -> Made | None:
        """Linear maps, torch's own modules, and containers."""
        if isinstance(module, Linear):
            return self._linear(module)
        if self.container(module):
            return self._contained(module)
        if type(module).__module__.startswith("torch."):
            return Made(f"nn.{module!r}", [])
        return None

    def _linear(self, module: Linear) -> Made:
        self.linear = True
        outputs, inputs = module.weight.shape
        method, args, _ = drawn_once(module.weight)
        std = args[1] if method == "normal_" else None
        if std is None:
            raise Unexportable("a linear map does not start from a normal distribution")
        numbers = [("inputs", inputs), ("outputs", outputs), ("std", std)]
        template = "linear(_hole_0_, _hole_1_, std=_hole_2_"
        if module.bias is not None:
            start = drawn_once(module.bias)[1][0]
            if isinstance(start, list) and len(set(start)) == 1:
                start = start[0]
            self.linear_bias |= isinstance(start, list)
            numbers.append(("bias", tuple(start) if isinstance(start, list) else start))
            template += ", bias=_hole_3_"
        return Made(template + ")", numbers)

    def _contained(self, module: nn.Module) -> Made | None:
        inner = {key: self.made(child) for key, child in module.named_children()}
        kept = {key: made for key, made in inner.items() if made is not None}
        if not kept:
            return None
        if isinstance(module, nn.ModuleList | nn.Sequential):
            return Made(f"nn.{type(module).__name__}({_listed([made.filled() for made in kept.values()])})", [])
        if any(hasattr(nn.ModuleDict, key) for key in kept):
            raise Unexportable(f"a part has a name that torch needs: {', '.join(kept)}")
        pairs: list[str] = []
        numbers: list[tuple[str, Any]] = []
        for key, made in kept.items():
            pairs.append(f'"{key}": {_shifted(made.template, len(numbers))}')
            numbers += [(f"{key}_{label}", value) for label, value in made.numbers]
        return Made(f"nn.ModuleDict({{{', '.join(pairs)}}})", numbers)

    def _lines(self, module: nn.Module) -> Iterator[Line]:
        """What `__init__` sets: numbers, parameters, buffers, parts."""
        for attribute, value in sorted(self._constants.get(id(module), {}).items()):
            yield Line(attribute, "_hole_0_", [(attribute, value)])
        for attribute, parameter in module.named_parameters(recurse=False):
            shape: Any = parameter.shape[0] if parameter.ndim == 1 else tuple(parameter.shape)
            holes = ast.Name("_hole_0_") if parameter.ndim == 1 else ast.Starred(ast.Name("_hole_0_"))
            label = "width" if parameter.ndim == 1 else f"{attribute}_shape"
            expression = initial(holes, parameter)
            yield Line(attribute, f"nn.Parameter({text(expression)})", [(label, shape)])
        yield from self._buffers(module)
        for attribute, child in module.named_children():
            made = self.made(child)
            if made is not None:
                numbers = [
                    (label if label in ("width",) else f"{attribute}_{label}", value) for label, value in made.numbers
                ]
                yield Line(attribute, made.template, numbers)

    def _buffers(self, module: nn.Module) -> Iterator[Line]:
        found = {key: self.recorder.expression(value) for key, value in module.named_buffers(recurse=False)}
        for name, expression in _common(found):
            holes = _Holes(name)
            template = text(holes.visit(expression))
            if name in found:
                persistent = name not in module._non_persistent_buffers_set
                template = f'register_buffer("{name}", {template}{"" if persistent else ", persistent=False"})'
                yield Line("", f"self.{template}", holes.numbers)
            else:
                yield Line("", f"{name} = {template}", holes.numbers)

    def _group(self, same: list[tuple[nn.Module, list[Line]]]) -> None:
        """Makes a class of equal modules; numbers that differ, and widths of leaves, are its parameters."""
        module, lines = same[0]
        leaf = not any(True for _ in module.children())
        chosen: dict[tuple[Any, ...], str] = {}
        types: dict[str, str] = {}
        written = []
        for index, line in enumerate(lines):
            holes = []
            for place, (label, value) in enumerate(line.numbers):
                values = tuple(_hashable(other[index].numbers[place][1]) for _, other in same)
                if len(set(values)) == 1 and not (leaf and label == "width"):
                    holes.append(text(literal(value)))
                    continue
                if values not in chosen:
                    names = itertools.chain([label], (f"{label}_{number}" for number in itertools.count(2)))
                    chosen[values] = next(item for item in names if item not in chosen.values())
                    types[chosen[values]] = _type_of(value)
                holes.append(chosen[values])
            template = line.template
            for hole, other in enumerate(holes):
                if other.startswith("("):
                    template = template.replace(f"*_hole_{hole}_", other[1:-1].rstrip(","))
            filled = _HOLE.sub(lambda hole, holes=holes: holes[int(hole[1])], template)  # type: ignore[misc]
            written.append(f"self.{line.attribute} = {filled}" if line.attribute else filled)
        base = _NAMES.get(type(module)) or type(module).__name__.lstrip("_")
        taken = {group.name for group in self.groups} | {"Call", "Tensor"}
        own = itertools.chain([base], (f"{base}{number}" for number in itertools.count(2)))
        name = next(item for item in own if item not in taken)
        parameters = [(parameter, types[parameter]) for parameter in chosen.values()]
        self.groups.append(Group(name, type(module), written, parameters, self._methods[id(module)]))
        arguments = ", ".join(f"_hole_{number}_" for number in range(len(chosen)))
        for position, (twin, _) in enumerate(same):
            numbers = [(label, values[position]) for values, label in chosen.items()]
            self._made[id(twin)] = Made(f"{name}({arguments})", numbers)


class _Constants(ast.NodeTransformer):
    """Finds the numbers that methods read from `self`, and brings those of inlined parts to their owner."""

    def __init__(self, classes: Classes, module: nn.Module) -> None:
        self.classes, self.module = classes, module

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        steps = _steps(node)
        if steps is None:
            self.generic_visit(node)
            return node
        owner, outer = self.module, self.module
        hoisted: list[str] = []
        for index, step in enumerate(steps):
            child = owner._modules.get(step)
            if child is not None:
                hoisted = [*hoisted, step] if self.classes.container(child) else []
                owner = child
                outer = outer if self.classes.container(child) else child
                continue
            if is_numbers(vars(owner).get(step)):
                attribute = "_".join([*hoisted, step])
                self.classes.constant(outer, attribute, vars(owner)[step])
                start = text(node).split(".")[: index + 1 - len(hoisted)] if hoisted else None
                if start is not None:
                    return ast.parse(".".join([*start, attribute]), mode="eval").body
            break
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


class _Holes(ast.NodeTransformer):
    """Takes the numbers out of an expression."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.numbers: list[tuple[str, Any]] = []

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not is_number(node.value):
            return node
        self.numbers.append((f"{self.label}_{len(self.numbers)}", node.value))
        return ast.Name(f"_hole_{len(self.numbers) - 1}_", ast.Load())


def _common(found: dict[str, ast.expr]) -> list[tuple[str, ast.expr]]:
    """Expressions with what repeats in them computed once, and long ones in steps."""
    pending = dict(found)
    for number in itertools.count(1):
        counts: Counter[str] = Counter()
        for expression in pending.values():
            counts.update(text(node) for node in ast.walk(expression) if isinstance(node, ast.Call | ast.BinOp))
        again = [item for item, count in counts.items() if count > 1 and len(item) > 20]
        longest = max(map(text, pending.values()), key=len, default="")
        if not again and len(longest) > 90:
            inner = [text(node) for node in ast.walk(ast.parse(longest)) if isinstance(node, ast.Call | ast.BinOp)]
            again = [item for item in inner if 20 < len(item) < 70]
        if not again:
            break
        largest = max(again, key=len)
        step = "table" if number == 1 else f"table_{number}"
        pending = {key: _Step(largest, step).visit(expression) for key, expression in pending.items()}
        pending[step] = ast.parse(largest, mode="eval").body
    ordered: list[tuple[str, ast.expr]] = []
    while pending:
        ready = {key: item for key, item in pending.items() if not any(name in pending for name in names_in(item))}
        ordered += sorted(ready.items(), key=lambda pair: pair[0] in found)
        pending = {key: item for key, item in pending.items() if key not in ready}
    steps = [key for key, _ in ordered if key not in found]
    names = {key: "table" if key == steps[-1] else f"part_{index}" for index, key in enumerate(steps, 1)}
    return [(names.get(key, key), _Renamed(names).visit(item)) for key, item in ordered]


class _Renamed(ast.NodeTransformer):
    """Changes names."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.names.get(node.id, node.id), ast.Load())


class _Step(ast.NodeTransformer):
    """Puts a name in the place of an expression."""

    def __init__(self, target: str, step: str) -> None:
        self.target, self.step = target, step

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Call | ast.BinOp) and text(node) == self.target:
            return ast.Name(self.step, ast.Load())
        return super().generic_visit(node)


def _shifted(template: str, by: int) -> str:
    return _HOLE.sub(lambda hole: f"_hole_{int(hole[1]) + by}_", template)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _type_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"tuple[{_type_of(value[0])}, ...]"
    return type(value).__name__


def _height(module: nn.Module) -> int:
    return 1 + max((_height(child) for child in module.children()), default=0)


def _listed(calls: list[str]) -> str:
    """A list of constructor calls, equal ones as a loop."""
    count = len(calls)
    if count > 1 and len(set(calls)) == 1:
        return f"{calls[0]} for _ in range({count})"
    heads = {call.partition("(")[0] for call in calls}
    arguments = [call.partition("(")[2].removesuffix(")") for call in calls]
    if len(heads) == 1 and count > 2 and all(item and "(" not in item for item in arguments):
        (head,) = heads
        if all("," not in item for item in arguments):
            return f"{head}(number) for number in ({', '.join(arguments)})"
        rows = ", ".join(f"({item})" for item in arguments)
        return f"{head}(*numbers) for numbers in ({rows})"
    if not any(arguments):
        for period in range(2, count // 2 + 1):
            if count % period == 0 and calls == calls[:period] * (count // period):
                kinds = ", ".join(call.removesuffix("()") for call in calls[:period])
                return f"kind() for kind in ({kinds}) * {count // period}"
        runs = [(key, len(list(group))) for key, group in itertools.groupby(calls)]
        if count > 2 and len(runs) < count:
            parts = [f"[{key.removesuffix('()')}]" + (f" * {number}" if number > 1 else "") for key, number in runs]
            return f"kind() for kind in {' + '.join(parts)}"
    return f"[{', '.join(calls)}]"


def summary(kind: type) -> str | None:
    """What a module's class computes, in a paragraph: its own words, or those of the primitive that builds it."""
    if kind.__doc__ and kind.__module__.split(".")[0] != "torch":
        return kind.__doc__.split("\n\n")[0]
    for member in _members(Primitive):
        build = vars(member).get("build")
        if build is not None and kind.__name__ in build.__code__.co_names and build.__module__ == kind.__module__:
            return (member.__doc__ or "").split("\n\n")[0] or None
    return None


def _members(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _members(child)
