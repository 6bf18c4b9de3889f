"""The report as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = {"doctor", "options", "family", "said"}  # in the JSON alone


def page(
    found: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str], short: Sequence[str], off: str | None
) -> str:
    """What fell short first, then a table for each part."""
    lines = ["# What `archlab bench --gpu` found", ""]
    lines += ["## What fell short", "", *(f"- {each}" for each in short or ["nothing"]), ""]
    if off:
        lines += [f"Kernels that are wrong or slow are not used on this card any more: `{off}` lists them.", ""]
    for name, part in found.items():
        lines += [f"## {titles[name]}", "", f"{part['seconds']:.0f} s{_ended(part)}", "", *_table(part["rows"]), ""]
        for said in [part.get("said"), *(row.get("said") for row in part["rows"])]:
            lines += ["```", said.strip(), "```", ""] if said else []
    return "\n".join(lines)


def _ended(part: Mapping[str, Any]) -> str:
    return (
        "" if part["exit"] == 0 else ", ended at its limit" if part["exit"] is None else f", exit code {part['exit']}"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """All rows; a single one as a row for each of its fields."""
    if not rows:
        return ["no rows"]
    if len(rows) == 1:
        pairs = [(name, value) for name, value in rows[0].items() if name not in HIDDEN]
        return ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in pairs)]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return [*lines, *(f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows)]


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "/")
