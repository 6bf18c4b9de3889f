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

_HEADINGS = {
    "decoder": "decoders",
    "mixture of experts": "mixtures of experts",
    "recurrent or hybrid": "recurrent, hybrid",
    "encoder-decoder": "encoder-decoders",
    "encoder": "encoders",
}


def print_zoo(as_json: bool, sizes: bool = False) -> None:
    """A row per model with the range of its sizes, by kind and release, or a row for each of the `sizes`."""
    listed = list(zoo.rows())
    if as_json:
        print(json.dumps([asdict(row) for row in listed]))
    elif sizes:
        _print_sizes(listed)
    else:
        _print_models(listed)


def _print_models(listed: list[zoo.Row]) -> None:
    console = plain_console()
    models = [[*rows] for _, rows in groupby(listed, key=lambda row: row.name)]
    for kind, heading in _HEADINGS.items():
        table = Table(box=None, pad_edge=False, header_style="bold", width=console.width)
        for name in (heading, "release", "parameters", "introduced"):
            table.add_column(name, ratio=1 if name == "introduced" else None, min_width=20 if name == heading else 0)
        for sizes in sorted((sizes for sizes in models if sizes[0].kind == kind), key=lambda sizes: sizes[0].release):
            counts = [row.parameters for row in sizes]
            least, most = count(min(counts)), count(max(counts))
            reach = least if least == most else f"{least} to {most}"
            table.add_row(sizes[0].name, sizes[0].release, f"{reach:<15}", sizes[0].introduced)
        console.print(table)
        console.print()
    console.print("archlab zoo show NAME/SIZE shows a model, archlab zoo --sizes lists all sizes with their counts")


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
