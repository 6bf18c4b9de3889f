"""What the command line prints of one model: its tree, a table of its costs, the kernels of its nodes."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, Self

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from archlab import arch_dsl, kernels
from archlab.arch_dsl.compiler.shapes import shapes_of
from archlab.arch_dsl.inspection.diagram import graph
from archlab.arch_dsl.inspection.dot import dot
from archlab.arch_dsl.inspection.text_tree import Line, tree
from archlab.arch_dsl.language.errors import SpecError, unknown
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.parts.context import Cost, NodeChoice
from archlab.arch_dsl.tree.overrides import ranges
from archlab.search.formatting.numbers import count, plain_console, size
from archlab.search.models.graphs import kernels_of
from archlab.search.planning.plan import Plan
from archlab.search.variants.variant import Variant

EXAMPLE = {"vocab": 256, "max_positions": 1024}  # sizes that no one says
_WIDTH = 140  # columns of what is no terminal
LEGEND = "B batch, T time, D d_model, V vocabulary; FLOPs forward per token, mask-aware"
COST_LEGEND = (
    "below block: one layer; FLOPs forward per token, mask-aware; for a sequence of {context} tokens in float32 what\n"
    "the backward pass needs of activations, and what decoding keeps"
)


def variant_of(planned: Plan, name: str | None) -> Variant:
    """One variant of a study, or its baseline. Raises SpecError naming the nearest variant."""
    names = [variant.name for variant in planned.variants]
    if name is not None and name not in names:
        raise SpecError.of("--variant", unknown(name, "variant", names))
    wanted = name or planned.study.report.baseline
    return next((variant for variant in planned.variants if variant.name == wanted), planned.variants[0])


@dataclass(frozen=True, repr=False)
class Shown:
    """A resolved model as it is shown: over how many tokens its costs are counted, which paths it changes in a base."""

    name: str
    model: Model
    context: int
    changed: frozenset[str] = frozenset()
    precision: str = "fp32"
    baseline: Model | None = None

    @classmethod
    def of(cls, variant: Variant, baseline: Variant | None = None) -> Self:
        """A variant of a study, beside the baseline that it is no variant of itself."""
        changed = frozenset(change.path for change in variant.changes)
        other = None if baseline is None or baseline.name == variant.name else baseline.model
        return cls(variant.name, variant.model, variant.recipe.context, changed, variant.recipe.precision, other)

    @classmethod
    def alone(cls, name: str, model: Model) -> Self:
        """A model without a study, with examples of the sizes that it leaves open."""
        sizes = {name: getattr(model, name) or size for name, size in EXAMPLE.items()}
        return cls(name, arch_dsl.resolve(model.replace(**sizes)), sizes["max_positions"])

    def __repr__(self) -> str:
        """The tree, as `archlab show` prints it."""
        told = io.StringIO()
        console = Console(
            file=told, width=_WIDTH, force_terminal=False, force_jupyter=False, color_system=None, highlight=False
        )
        _print_tree(console, self, tree(self.model, self.context))
        return told.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return f"<p><b>{escape(self.name)}</b></p><pre>{escape(repr(self))}</pre>"


def print_tree(shown: Shown, as_json: bool, costs: bool = False) -> None:
    """The site form, with shapes, parameters and forward FLOPs per token; or a table of all costs."""
    context = shown.context
    lines = tree(shown.model, context)
    if as_json:
        print(
            json.dumps(
                {
                    "variant": shown.name,
                    "spec": arch_dsl.canonical(shown.model),
                    "figures": lines[0].cost.figures(context),
                    "nodes": [node_of(line, context) for line in lines],
                }
            )
        )
        return
    _print_tree(plain_console(), shown, lines, costs)


def _print_tree(console: Console, shown: Shown, lines: list[Line], costs: bool = False) -> None:
    if costs:
        console.print(cost_table(lines, shown.context))
        console.print(COST_LEGEND.format(context=shown.context))
    else:
        console.print(drawn(lines, shown.context, shown.changed))
        console.print(f"{LEGEND}{'; changes in yellow' if shown.changed and console.is_terminal else ''}")
    console.print(summary(lines[0].cost, shown.context))
    console.print(f"identity {arch_dsl.identity(shown.model)}")


def drawn(lines: list[Line], context: int, changed: set[str] | frozenset[str] = frozenset()) -> Tree:
    """The lines of a model as a tree; what changed is yellow."""
    root = Tree(_label(lines[0], context, changed, ""))
    stack: list[tuple[Tree, str]] = [(root, "")]
    for line in lines[1:]:
        del stack[line.depth :]
        parent, path = stack[-1]
        where = f"{path}.{line.name}" if path else line.name
        stack.append((parent.add(_label(line, context, changed, where)), where))
    return root


def _label(line: Line, context: int, changed: set[str] | frozenset[str], path: str) -> Text:
    touched = any(change == path or (change.startswith(f"{path}.") and line.depth > 2) for change in changed)
    text = Text(line.name, style="bold yellow" if touched else "bold")
    if line.what:
        text.append(f"  {line.what}", style="yellow" if touched else "not bold")
    if line.shape:
        text.append(f"  {line.shape}", style="cyan not bold")
    if line.cost.parameters or line.cost.flops_model:
        flops = count(line.cost.flops_model / context)
        text.append(f"  {line.cost.parameters:,} parameters, {flops} FLOPs", style="dim not bold")
    return text


def print_parameters(shown: Shown, as_json: bool) -> None:
    """The parameters by the names that they have in checkpoints, with their shapes; equal layers on one line."""
    shapes = shapes_of(shown.model)
    if as_json:
        print(json.dumps({"variant": shown.name, "parameters": {name: list(shape) for name, shape in shapes.items()}}))
        return
    layers: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, shape in shapes.items():
        place = _LAYER.fullmatch(name)
        numbers = layers.setdefault((f"{place[1]}block.*{place[3]}" if place else name, shape), [])
        numbers.extend([int(place[2])] if place else [])
    table = Table(box=None, pad_edge=False)
    for column in ("parameter", "shape", "numbers"):
        table.add_column(column, justify="left" if column == "parameter" else "right")
    for (name, shape), numbers in layers.items():
        which = ranges(numbers)
        told = name.replace("*", f"{{{which}}}" if len(numbers) > 1 else which)
        times = f"{len(numbers)} × " if len(numbers) > 1 else ""
        table.add_row(Text(told), "×".join(map(str, shape)) or "1", f"{times}{math.prod(shape):,}")
    console = plain_console()
    console.print(table)
    console.print(summary(tree(shown.model, shown.context)[0].cost, shown.context))


def node_of(line: Line, context: int) -> dict[str, Any]:
    """A line of a tree as JSON."""
    return {
        "depth": line.depth,
        "name": line.name,
        "what": line.what,
        "shape": line.shape,
        "parameters": line.cost.parameters,
        "active_parameters": line.cost.active,
        "flops_per_token": line.cost.flops_model / context,
        "activations": line.cost.activations,
        "cache": line.cost.cache,
    }


def cost_table(lines: list[Line], context: int) -> Table:
    """A row per node of the tree that costs anything; active parameters are told where some are not."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node")
    sparse = any(line.cost.idle for line in lines)
    for name in ("parameters", *(["active"] if sparse else []), "FLOPs/token", "activations", "cache"):
        table.add_column(name, justify="right")
    for line in lines:
        cost = line.cost
        if cost != Cost():
            figures = [
                f"{cost.parameters:,}" if cost.parameters else "",
                *([f"{cost.active:,}" if cost.parameters else ""] if sparse else []),
                count(cost.flops_model / context) if cost.flops_model else "",
                size(4 * cost.activations) if cost.activations else "",
                size(4 * cost.cache) if cost.cache else "",
            ]
            table.add_row(Text("  " * line.depth + line.name), *figures)
    return table


def summary(cost: Cost, context: int) -> str:
    """The figures of a whole model: parameters and work, then memory."""
    said = cost.figures(context)
    return (
        f"{count(cost.parameters)} parameters, "
        + (f"{count(cost.active)} of them active, " if cost.idle else "")
        + (f"{count(cost.trained_only)} of them in training alone, " if cost.trained_only else "")
        + f"{count(said['non_embedding'])} without embeddings; "
        f"{count(said['flops_per_token'])} FLOPs per token forward, "
        f"{count(said['training_flops_per_token'])} in training\n"
        f"{size(said['activation_bytes'])} of activations per sequence of {context} tokens, "
        f"{size(said['cache_bytes_per_token'])} of cache per token, in float32"
    )


def print_dot(model: Shown, device: str | None) -> None:
    """The model as DOT text, with what differs from its baseline in colour."""
    _, _, choices = _kernels(model, device)
    print(dot(graph(model.model, model.baseline, model.context, choices)), end="")


def _kernels(model: Shown, device: str | None) -> tuple[kernels.Device, torch.dtype, list[NodeChoice]]:
    """The device, the type of numbers there, and which implementation each node gets."""
    try:
        target = kernels.Device.parse(device) if device else kernels.Device.current()
    except ValueError as error:
        raise SpecError.of("--device", str(error)) from error
    dtype = torch.bfloat16 if model.precision == "bf16" else torch.float32
    return target, dtype, kernels_of(model.model, target, dtype)


def print_kernels(model: Shown, device: str | None, as_json: bool) -> None:
    """Which implementation each node gets, for what; layers in which a node asks for and gets the same are one row."""
    target, dtype, choices = _kernels(model, device)
    if as_json:
        print(json.dumps([asdict(choice) for choice in choices]))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "op", "asks for", "implementation", "reason"):
        table.add_column(column)
    for path, choice in _by_layers(choices):
        said = f"slower than this device allows: {choice.reason}" if choice.fallback else choice.reason
        table.add_row(Text(path), choice.op, Text(choice.asked), choice.implementation, Text(said))
    console = plain_console()
    console.print(Text(f"{model.name} on {target}, {str(dtype).removeprefix('torch.')}"))
    console.print(table)


def _by_layers(choices: list[NodeChoice]) -> Iterator[tuple[str, NodeChoice]]:
    """Equal choices of equal nodes once, with the layers that have them: `block[0-2].attention` unless all do."""
    layers: dict[str, set[int]] = {}
    found: dict[tuple[str, NodeChoice], list[int]] = {}
    for choice in choices:
        place = _LAYER.fullmatch(choice.path)
        name = f"{place[1]}block{{}}{place[3]}" if place else choice.path
        reason = _told_within(choice.reason, int(place[2])) if place else choice.reason
        depths = found.setdefault((name, replace(choice, path=name, reason=reason)), [])
        if place and int(place[2]) not in depths:
            depths.append(int(place[2]))
            layers.setdefault(place[1], set()).add(int(place[2]))
    for (name, choice), depths in found.items():
        every = depths == sorted(layers.get(name.partition("block{}")[0], ()))
        yield name.replace("{}", "" if every else f"[{ranges(depths)}]", 1), choice


def _told_within(reason: str, depth: int) -> str:
    """A reason that names nodes of the same layer and of the one before without their numbers."""
    own = re.sub(rf"\bblock\.{depth}\.", "block.", reason)
    return re.sub(rf"\bblock\.{depth - 1}\.", "the last block.", own)


_LAYER = re.compile(r"((?:\w+\.)?)block\.(\d+)(\..*)")
