"""The modules of a model as classes: equal ones share a class, and what differs among them is its parameters."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from archlab.arch_dsl.compiler.modules import Decoder
from archlab.arch_dsl.parts.layers import Linear
from archlab.arch_dsl.plain.program import Program
from archlab.arch_dsl.plain.template import Template, buffers, hole
from archlab.arch_dsl.plain.trace import Recorder, drawn_once, initial
from archlab.arch_dsl.plain.trees import Unexportable, clone, from_self, is_numbers, literal, load, numbered, text
from archlab.arch_dsl.tree.block import Branches

_NAMES = {Decoder: "Model", Branches: "Layer"}


@dataclass
class Group:
    """One class: its name, what `__init__` does, its methods; `parameters` are the numbers that differ."""

    name: str
    kind: type
    lines: list[str]
    parameters: list[tuple[str, str]]  # with their types
    methods: list[ast.FunctionDef]


class Classes:
    """The classes of a model's modules, inner ones first; `linear` says whether they have linear maps."""

    def __init__(self, program: Program, recorder: Recorder, root: nn.Module) -> None:
        self.groups: list[Group] = []
        self.linear = self.linear_bias = False
        self._program, self._recorder = program, recorder
        self._made: dict[int, Template | None] = {}  # how a module is constructed; None if nothing of it is needed
        self._constants: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        self._methods: dict[int, list[ast.FunctionDef]] = {}
        levels: defaultdict[int, list[nn.Module]] = defaultdict(list)
        for module in root.modules():
            constants = _Constants(module, self._container, self._constants)
            self._methods[id(module)] = [constants.visit(clone(node)) for node in program.methods(module)]
            levels[_height(module)].append(module)
        for height in sorted(levels):
            self._level(levels[height])

    def _container(self, module: nn.Module) -> bool:
        """Whether a module is no more than a place for others."""
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        alone = id(self._program.twin(module)) in self._program.entries or _is_torchs(module)
        return not own and not alone and not isinstance(module, Linear)

    def _level(self, modules: Sequence[nn.Module]) -> None:
        """Decides how modules are made whose parts are."""
        drafts: defaultdict[tuple[Any, ...], list[tuple[nn.Module, list[Template]]]] = defaultdict(list)
        for module in modules:
            if isinstance(module, Linear):
                self._made[id(module)] = self._linear(module)
            elif self._container(module):
                self._made[id(module)] = self._contained(module)
            elif _is_torchs(module):
                self._made[id(module)] = Template(f"nn.{module!r}", [])
            else:
                lines = list(self._lines(module))
                methods = tuple(text(node) for node in self._methods[id(module)])
                key = (type(module), tuple((line.attribute, line.code) for line in lines), methods)
                drafts[key].append((module, lines))
        for same in drafts.values():
            self._group(same)

    def _linear(self, module: Linear) -> Template:
        self.linear = True
        outputs, inputs = module.weight.shape
        method, args, _ = drawn_once(module.weight)
        if method != "normal_":
            raise Unexportable("a linear map does not start from a normal distribution")
        numbers = [("inputs", inputs), ("outputs", outputs), ("std", args[1])]
        if module.bias is None:
            return Template("linear(_hole_0_, _hole_1_, std=_hole_2_)", numbers)
        start = drawn_once(module.bias)[1][0]
        if isinstance(start, list):
            several = len(set(start)) > 1
            self.linear_bias |= several
            start = tuple(start) if several else start[0]
        return Template("linear(_hole_0_, _hole_1_, std=_hole_2_, bias=_hole_3_)", [*numbers, ("bias", start)])

    def _contained(self, module: nn.Module) -> Template | None:
        inner = ((key, self._made[id(child)]) for key, child in module.named_children())
        kept = {key: made for key, made in inner if made is not None}
        if not kept:
            return None
        if isinstance(module, nn.ModuleList | nn.Sequential):
            return Template(f"nn.{type(module).__name__}({listed([made.filled() for made in kept.values()])})", [])
        if any(hasattr(nn.ModuleDict, key) for key in kept):
            raise Unexportable(f"a part has a name that torch needs: {', '.join(kept)}")
        pairs: list[str] = []
        numbers: list[tuple[str, Any]] = []
        for key, made in kept.items():
            pairs.append(f'"{key}": {made.moved(len(numbers))}')
            numbers += [(f"{key}_{label}", value) for label, value in made.numbers]
        return Template(f"nn.ModuleDict({{{', '.join(pairs)}}})", numbers)

    def _lines(self, module: nn.Module) -> Iterator[Template]:
        """What `__init__` does: it sets numbers, parameters, buffers, parts."""
        for attribute, value in sorted(self._constants[id(module)].items()):
            yield Template(hole(0), [(attribute, value)], attribute)
        for attribute, parameter in module.named_parameters(recurse=False):
            flat = parameter.ndim == 1
            shape: Any = parameter.shape[0] if flat else tuple(parameter.shape)
            label = "width" if flat else f"{attribute}_shape"
            place = load(hole(0)) if flat else ast.Starred(load(hole(0)))
            yield Template(f"nn.Parameter({text(initial(place, parameter))})", [(label, shape)], attribute)
        yield from buffers(module, self._recorder)
        for attribute, child in module.named_children():
            made = self._made[id(child)]
            if made is not None:
                numbers = [(key if key == "width" else f"{attribute}_{key}", value) for key, value in made.numbers]
                yield Template(made.code, numbers, attribute)

    def _group(self, same: list[tuple[nn.Module, list[Template]]]) -> None:
        """Makes a class of equal modules; numbers that differ, and widths of leaves, are its parameters."""
        module, lines = same[0]
        leaf = not [*module.children()]
        chosen: dict[tuple[Any, ...], str] = {}
        types: dict[str, str] = {}
        written = []
        for index, line in enumerate(lines):
            parts = []
            for place, (label, value) in enumerate(line.numbers):
                values = tuple(other[index].numbers[place][1] for _, other in same)
                if len(set(values)) == 1 and not (leaf and label == "width"):
                    parts.append(text(literal(value)))
                    continue
                if values not in chosen:
                    chosen[values] = next(item for item in numbered(label) if item not in chosen.values())
                    types[chosen[values]] = _type_of(value)
                parts.append(chosen[values])
            written.append(f"self.{line.attribute} = {line.put(parts)}" if line.attribute else line.put(parts))
        base = _NAMES.get(type(module)) or type(module).__name__.lstrip("_")
        taken = {group.name for group in self.groups} | {"Call", "Tensor"}
        own = next(item for item in numbered(base, "") if item not in taken)
        self.groups.append(Group(own, type(module), written, list(types.items()), self._methods[id(module)]))
        arguments = ", ".join(map(hole, range(len(chosen))))
        for position, (one, _) in enumerate(same):
            numbers = [(label, values[position]) for values, label in chosen.items()]
            self._made[id(one)] = Template(f"{own}({arguments})", numbers)


def _is_torchs(module: nn.Module) -> bool:
    """Whether a class of torch computes something."""
    places = nn.ModuleList | nn.ModuleDict | nn.Sequential
    return type(module).__module__.startswith("torch.") and not isinstance(module, places)


def _type_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"tuple[{_type_of(value[0])}, ...]"
    return type(value).__name__


def _height(module: nn.Module) -> int:
    return 1 + max((_height(child) for child in module.children()), default=0)


class _Constants(ast.NodeTransformer):
    """Collects the numbers that methods of a module read, by the id of their owner and their attribute.

    A part of which no class is written, a `container`, was inlined, and its owner has its numbers: `self.norm.eps`
    becomes `self.norm_eps`.
    """

    def __init__(
        self, module: nn.Module, container: Callable[[nn.Module], bool], found: Mapping[int, dict[str, Any]]
    ) -> None:
        self.module, self.container, self.found = module, container, found

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
                self.found[id(outer)][attribute] = value
                return from_self([*steps[: index - len(inlined)], attribute])
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


def listed(calls: list[str]) -> str:
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
