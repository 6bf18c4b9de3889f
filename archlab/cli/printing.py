"""What commands print alike: numbers with their units, tables as wide as they are, endings, primitives, findings."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.table import Table
from rich.text import Text

from archlab.arch_dsl.catalogue.describe import describe, families, find
from archlab.cli.doctor import Finding
from archlab.search.formatting.numbers import plain_console
from archlab.search.running.ending import Summary
from archlab.search.store.addresses import store_root

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


def print_summary(summary: Summary, study: str, root: Path) -> None:
    """How a run ended, and what to type next."""
    console = plain_console()
    counts = ", ".join(f"{number} {state}" for state, number in summary.counts.items() if number)
    console.print(Text(f"{summary.message}: {counts}" if counts else summary.message))
    store = "" if root == store_root() else f" --store {shlex.quote(str(root))}"
    if summary.counts.get("complete"):
        console.print(Text(f"  archlab report {shlex.quote(study)}{store}\n  archlab dashboard{store}"))


# primitives and doctor


def print_primitives(name: str | None, as_json: bool) -> None:
    """All primitives by family, or one of them with its formula, fields and defaults."""
    if name is None:
        listing = families()
        if as_json:
            print(json.dumps(listing))
            return
        console = plain_console()
        for family, members in listing.items():
            console.print(f"[bold]{family}[/]")
            width = max(len(member) for member in members)
            for member, line in members.items():
                console.print(Text(f"  {member:<{width}}  {line}"))
        console.print("\narchlab primitives NAME explains one")
        return
    found = find(name)
    if as_json:
        print(json.dumps([describe(kind) for kind in found]))
        return
    console = plain_console()
    for kind in found:
        facts = describe(kind)
        console.print(f"[bold]{facts['type']}[/] ({facts['family']})")
        console.print(Text(facts["doc"]))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("field", "what may stand there", "default"):
            table.add_column(column)
        for field in facts["fields"]:
            table.add_row(field["name"], Text(field["allowed"]), Text(field["default"]))
        console.print(table)


def print_findings(findings: list[Finding]) -> None:
    """A line per finding: what is there, and what that means for a study."""
    console = plain_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(_MARKS[finding.status], f"[bold]{finding.name}[/]", Text(finding.detail), Text(finding.meaning))
    console.print(table)
