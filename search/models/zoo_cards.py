"""What the command line prints of the zoo: a table of all sizes, and one model with its card, its YAML and its tree."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.inspection.text_tree import tree
from archlab.search.formatting.numbers import count, plain_console
from archlab.search.models.print_model import LEGEND, drawn, node_of, summary

_NAMED = 6  # sizes that the list of models names


def print_zoo(as_json: bool, sizes: bool = False) -> None:
    """A row per model with the range of its `sizes`, or a row for each of them."""
    listed = list(zoo.rows())
    if as_json:
        print(json.dumps([asdict(row) for row in listed]))
    elif sizes:
        _print_sizes(listed)
    else:
        _print_models(listed)


def _print_models(listed: list[zoo.Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "sizes", "parameters", "release", "names of sizes"):
        table.add_column(name, justify="right" if name == "sizes" else "left", overflow="fold")
    for name, rows in groupby(listed, key=lambda row: row.name):
        sizes = [*rows]
        least, most = (count(which(row.parameters for row in sizes)) for which in (min, max))
        reach = least if least == most else f"{least} to {most}"
        names = [row.size for row in sizes]
        shown = ", ".join(names if len(names) <= _NAMED else [*names[:2], "…", names[-1]])
        table.add_row(name, str(len(sizes)), reach, sizes[0].release, shown)
    console = plain_console()
    console.print(table)
    console.print("\narchlab zoo show NAME/SIZE shows a model, archlab zoo --sizes lists all sizes with their counts")


def _print_sizes(listed: list[zoo.Row]) -> None:
    """A count that is not the published one is marked."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "size", "parameters", "published", "context", "release"):
        table.add_column(name, justify="right" if name in ("parameters", "published", "context") else "left")
    for name, sizes in groupby(listed, key=lambda row: row.name):
        for index, row in enumerate(sizes):
            said = f"{row.published}{'' if row.agrees else ' ≠'}"
            first = (name, row.release) if index == 0 else ("", "")
            table.add_row(first[0], row.size, f"{row.parameters:,}", said, str(row.context or ""), first[1])
    console = plain_console()
    console.print(table)
    console.print(
        "≠ differs from the published number by more than its rounding\n\narchlab zoo show NAME/SIZE shows it"
    )


def print_entry(given: str, as_json: bool) -> None:
    """A model of the zoo, `NAME` or `NAME/SIZE`."""
    name, slash, size = given.partition("/")
    found = zoo.entry(name)
    model = zoo.load(name, size if slash else None)
    resolved = arch_dsl.resolve(model)
    context = model.max_positions or 1024
    lines = tree(resolved, context)
    facts: dict[str, Any] = {
        "name": found.name,
        "size": size if slash else None,
        "card": asdict(found.card),
        "parameters": zoo.counted(found, resolved),
        "published": found.size(size).published if size else None,
        "sizes": list(found.sizes),
        "recipes": dict(found.train),
        "notes": list(found.notes),
    }
    if as_json:
        nodes = [node_of(line, context) for line in lines]
        shown = {"model": arch_dsl.canonical(model, brief=True), "figures": lines[0].cost.figures(context)}
        print(json.dumps({**facts, **shown, "nodes": nodes}))
        return
    console = plain_console()
    console.print(Text(given, style="bold"))
    for key, value in facts["card"].items():
        if value is not None:
            console.print(Text(f"  {key:<10} {value}"))
    console.print(Text(f"  {'sizes':<10} {', '.join(found.sizes)}"))
    console.print(Text(f"  {'recipes':<10} {', '.join(found.train) or 'none'}"))
    if facts["published"]:
        console.print(Text(f"  {'parameters':<10} {count(facts['parameters'])}, published {facts['published']}"))
    for note in found.notes:
        console.print(Text(f"  {'note':<10} {note}"))
    console.print(Text(f"\n{arch_dsl.dump(model)}"))
    console.print(drawn(lines, context))
    console.print(LEGEND)
    console.print(summary(lines[0].cost, context))
