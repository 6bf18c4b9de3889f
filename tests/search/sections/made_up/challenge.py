"""A section that archlab does not have, in one file: a champion is trained first, and others only if it loses.

challenge: {champion: wide}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem
from archlab.search.formatting.tables import Block, Cell, Column
from archlab.search.results.comparison import Comparison
from archlab.search.results.selection import loss
from archlab.search.results.told import Record, Rows, Seen, Told
from archlab.search.variants.asks import Builds, Planned, Question
from archlab.search.variants.mistakes import no_variant
from archlab.search.variants.section import Made, Part, Section
from archlab.search.variants.variant import Variant


class Challenge(Section):
    """Trains the others only where the champion's mean validation loss is not below the baseline's."""

    key = "challenge"
    title: ClassVar[str] = "challenge"
    champion: str

    def problems(self, study: Question) -> Iterable[Problem]:
        if self.champion not in study.variants:
            message = no_variant(self.champion, list(study.variants))
            yield Problem("challenge.champion", message, self.mark("champion"))

    def part(self, builds: Builds, variants: list[Variant], made: Made) -> Part:
        return Challenging(self.champion)

    def record(self, planned: Planned) -> dict[str, Any]:
        return {"champion": self.champion}

    def lines(self, planned: Planned) -> Iterable[str]:
        yield f"challenge: {self.champion} first, {len(planned.variants) - 2} others if it loses"


class Challenging(Part):
    def __init__(self, champion: str) -> None:
        self.champion = champion
        self.first = {champion}

    def look(self, record: Record, trials: Rows) -> None:
        self.first = {self.champion, record["baseline"]}
        self.left_out = beaten(record, trials) or ()

    def wants(self, variant: str) -> bool:
        return variant in self.first


def beaten(record: Record, trials: Rows) -> set[str] | None:
    """The variants that need no training; None while the champion or the baseline has seeds to come."""
    losses = []
    for name in (record["challenge"]["champion"], record["baseline"]):
        found = [loss(row, "validation") for row in trials if row["variant"] == name]
        if len(found) < len(record["seeds"]) or None in found:
            return None
        losses.append(sum(value for value in found if value is not None))
    others = {v["name"] for v in record["variants"]} - {record["challenge"]["champion"], record["baseline"]}
    return others if losses[0] < losses[1] else set()


class ToldOfChallenge(Told):
    key = "challenge"
    beside = "verdict"

    def left_out(self, record: Record, trials: Rows) -> Collection[str]:
        return beaten(record, trials) or ()

    def frames(self, seen: Seen) -> dict[str, Any]:
        return {"challenged": sorted(self.left_out(seen.whole, seen.trials)) if seen.whole.get(self.key) else []}

    def notes(self, found: Comparison) -> Iterable[str]:
        if found.challenged:
            yield f"challenge: {', '.join(found.challenged)} had to do nothing"

    def columns(self, found: Comparison, rows: list[dict[str, Any]]) -> Iterable[Column]:
        if found.challenged:
            cells = [Cell("spared" if row["variant"] in found.challenged else "ran") for row in rows]
            yield Column("challenge", cells, "l", key="challenge", values=tuple(cell.text for cell in cells))

    def blocks(self, found: Comparison) -> Iterable[Block]:
        if found.challenged:
            yield Block("Challenged", [Column("variant", [Cell(name) for name in found.challenged], "l")])

    def csv(self, found: Comparison) -> dict[str, dict[str, Any]]:
        return {"challenge.spared": dict.fromkeys(found.challenged, True)} if found.challenged else {}
