"""What plans and reports say of a design, in lines: its resolution, what it mixes up, what it left out and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

LONGEST = 100  # characters of one change; --json shows all
MOST = 12  # lines of one kind; the rest is counted


def design_lines(record: dict[str, Any]) -> Iterator[str]:
    """The design as a plan shows it: its kind, its components with what they change, and its notes."""
    names = record["components"]
    yield f"design: {record['type']} of {len(names)} components{_resolution(record)}"
    for name, parents in record.get("generators", {}).items():
        yield f"  {name} is on in the runs where an odd number of {', '.join(parents)} is"
    yield from _shortened([f"  not told apart: {' = '.join(effects)}" for effects in record.get("aliases", ())])
    yield from component_lines({name: record["changes"][name] for name in names}, record["merged"])
    yield from _changed(record)


def component_lines(
    changes: dict[str, list[str]], merged: dict[str, list[str]], title: str = "components"
) -> Iterator[str]:
    """A line per component: what it changes, long values cut, and the slots that it holds together."""
    yield f"{title}:"
    width = max(map(len, changes))
    for name, said in changes.items():
        why = f"  ({', '.join(merged[name])} cannot vary alone)" if name in merged else ""
        yield f"  {name:<{width}}  {'; '.join(_cut(text) for text in said)}{why}"


def design_notes(record: dict[str, Any]) -> Iterator[str]:
    """The design as a report's notes say it: what was not run as asked, and what its numbers mix up."""
    if record.get("aliases"):
        effects = sum(len(group) for group in record["aliases"])
        yield (
            f"a fractional design{_resolution(record)}: {effects} effects of components and pairs are not told apart, "
            f"such as {' = '.join(record['aliases'][0])}"
        )
    for name, parts in record["merged"].items():
        yield f"{name}: {', '.join(parts)} cannot vary alone and are one component"
    yield from _changed(record)


def _resolution(record: dict[str, Any]) -> str:
    return f", resolution {record['resolution']}" if record.get("resolution") else ""


def _changed(record: dict[str, Any]) -> Iterator[str]:
    yield from _shortened([f"left out: {name} ({why})" for name, why in record["omitted"].items()])
    yield from _shortened([f"repaired: {name} ({', '.join(rules)})" for name, rules in record["repaired"].items()])


def _cut(text: str) -> str:
    """A change on one line; reports read this module, and must not import torch for `arch_dsl.language.errors`."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _shortened(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:MOST]
    if len(lines) > MOST:
        yield f"{lines[0].partition(':')[0]}: {len(lines) - MOST} more (--json shows all)"
