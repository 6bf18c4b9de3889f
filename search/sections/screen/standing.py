"""Which trials stand in a table, once a screen has spoken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from archlab.search.results.selection import Selection, choose, group


def select(record: dict[str, Any], trials: list[dict[str, Any]]) -> list[Selection]:
    """The choice for each variant of a study, in its order: the lowest validation loss wins, a diverged one never."""
    grouped = group(trials)
    found = [choose(record, v["name"], grouped.get(v["name"], [])) for v in record["variants"]]
    if not record.get("screen"):
        return found
    from archlab.search.sections.screen.decide import screened  # which chooses

    gone = screened(record, trials).left_out
    nothing: dict[str, Any] = {"missing_seeds": (), "missing_points": (), "left_out": True}
    return [replace(each, **nothing) if each.variant in gone else each for each in found]
