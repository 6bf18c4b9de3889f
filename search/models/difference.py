"""Two models side by side: what differs, place by place, and what that does to parameters and FLOPs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from archlab.arch_dsl.language.errors import shorten
from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.tree.identity import Change, brief_text, diff, identity
from archlab.search.formatting.numbers import count, plain_console
from archlab.search.models.find import Found
from archlab.search.models.print_model import EXAMPLE

_WIDEST = 48  # characters of a value in the table
_RUNS = 4  # of layers in the heading of a group
_LAYERS = re.compile(r"\[([0-9,-]+)\]")


@dataclass(frozen=True)
class Side:
    """One of the two, resolved, with what a sequence of the shared context costs."""

    name: str
    model: Model
    parameters: int
    flops_per_token: int


@dataclass(frozen=True)
class Difference:
    """What differs between two models. `assumed` are sizes that one of them left open, and what they were set to."""

    before: Side
    after: Side
    changes: tuple[Change, ...]
    context: int
    assumed: dict[str, int]


def difference(before: Found, after: Found) -> Difference:
    """Compares two models; a size that one leaves open is that of the other. Raises SpecError for a wrong one."""
    sizes: dict[str, int] = {}
    for name, example in EXAMPLE.items():
        given = [getattr(found.model, name) for found in (before, after)]
        if None in given:
            sizes[name] = next((size for size in given if size is not None), example)
    models = []
    for found in (before, after):
        left_open = {name: size for name, size in sizes.items() if getattr(found.model, name) is None}
        models.append(resolve(found.model.replace(**left_open)))
    context = min(model.max_positions or EXAMPLE["max_positions"] for model in models)
    sides = [
        Side(found.name, model, total.parameters, total.flops_model // context)
        for found, model in zip((before, after), models, strict=True)
        for total in (cost(model, context),)
    ]
    return Difference(sides[0], sides[1], tuple(diff(*models)), context, sizes)


def place(change: Change) -> str:
    """Where a change stands: a branch, a part of the model, or the model itself."""
    return change.path.rpartition(".")[0] or "model"


def plain(found: Difference) -> dict[str, Any]:
    """The difference as JSON values."""
    sides = {
        key: {
            "name": side.name,
            "identity": identity(side.model),
            "parameters": side.parameters,
            "flops_per_token": side.flops_per_token,
        }
        for key, side in (("from", found.before), ("to", found.after))
    }
    changes = [{"path": c.path, "place": place(c), "from": c.before, "to": c.after} for c in found.changes]
    return {**sides, "context": found.context, "assumed": found.assumed, "changes": changes}


def print_difference(found: Difference, as_json: bool) -> None:
    """A row per difference, grouped by place; then the sizes of both."""
    if as_json:
        print(json.dumps(plain(found)))
        return
    console = plain_console()
    before, after = found.before, found.after
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", before.name, after.name):
        table.add_column(Text(name))
    table.add_column("difference", justify="right")
    groups: dict[str, list[Change]] = {}
    for change in found.changes:
        groups.setdefault(place(change), []).append(change)
    for where, changes in groups.items():
        table.add_row(Text(_LAYERS.sub(_fewer, where), "bold"))
        for change in changes:
            texts = [Text(_told(value)) for value in (change.before, change.after)]
            table.add_row(Text(f"  {change.path.rpartition('.')[2]}"), *texts)
    table.add_row(Text("size", "bold"))
    table.add_row("  parameters", f"{before.parameters:,}", f"{after.parameters:,}", _more(before, after, "parameters"))
    flops = (f"{count(side.flops_per_token)}" for side in (before, after))
    table.add_row("  FLOPs/token", *flops, _more(before, after, "flops_per_token"))
    console.print(table)
    if not found.changes:
        console.print("the two are the same model")
    open_sizes = "; ".join(f"{name} {size} where none is given" for name, size in found.assumed.items())
    console.print(f"FLOPs forward per token of a sequence of {found.context}{'; ' + open_sizes if open_sizes else ''}")


def _fewer(layers: re.Match[str]) -> str:
    """A long list of layers by its first ones, and how many there are."""
    runs = layers[1].split(",")
    if len(runs) <= _RUNS:
        return layers[0]
    count = sum(int(run.partition("-")[2] or run.partition("-")[0]) - int(run.partition("-")[0]) + 1 for run in runs)
    return f"[{','.join(runs[: _RUNS - 1])},… {count} layers]"


def _told(value: Any) -> str:
    """A value on one line; a whole branch by its type, or its members, and what it has besides its norms and join."""
    if not isinstance(value, dict) or "type" not in value:
        return shorten("none" if value is None else brief_text(value), _WIDEST)
    if "branches" in value:
        return f"{value['type']} {', '.join(value['branches'])}"
    fields = {name: item for name, item in value.items() if name not in ("type", "pre", "post", "join")}
    ordered = sorted(fields.items(), key=lambda field: isinstance(field[1], list | dict))
    said = ", ".join(f"{name} {brief_text(_types(item))}" for name, item in ordered)
    return shorten(f"{value['type']}: {said}" if said else str(value["type"]), 2 * _WIDEST)


def _types(item: Any) -> Any:
    """A site by the types of what stands there."""
    if isinstance(item, list):
        return [_types(each) for each in item]
    return item["type"] if isinstance(item, dict) and "type" in item else item


def _more(before: Side, after: Side, field: str) -> str:
    old, new = getattr(before, field), getattr(after, field)
    return f"{new - old:+,} ({new / old - 1:+.1%})"
