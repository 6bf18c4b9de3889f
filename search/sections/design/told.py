"""What a report says of components and axes: what each does over all else that a study varies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import Block, column_of, interval, number
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Seen, Told
from archlab.search.sections.design.frames import all_effects, level_name

LEGEND = (
    "means over the cells in which all else is equal, with 95% intervals by the table's noise, not corrected for how "
    "many effects are looked at; pairs: of a cell's variants and a seed"
)

SIZES = "params: by how much the models of the level are larger"
MATCHED = ", as each cell is matched to its own target (`all_cells: true` matches all to one)"
_ALIKE = 0.005  # of sizes that differ by no more nothing is said

FRACTION = (
    "of a component that is never alone: all that have it less all that lack it, mixed up with what the notes say"
)


class ToldOfDesign(Told):
    """Of any study whose components or axes stand in several variants, with a `design:` or without."""

    key = "design"

    def frames(self, seen: Seen) -> dict[str, Any]:
        """effects: a row per level of what the study varies more than once, its mean difference over all else; empty
        where each change stands in one row."""
        return {"effects": all_effects(seen.record["variants"], seen.found)}

    def blocks(self, found: Comparison) -> Iterable[Block]:
        """The effect of every level against the first one of its factor; nothing where no factor is varied twice."""
        rows, noise = records(found.effects), found.noise
        if not rows:
            return
        column = partial(column_of, rows)
        columns = [
            column("effect", lambda row: level_name(row["factor"], row["level"]), "l"),
            column("against", lambda row: level_name(row["factor"], row["against"]), "l"),
            column(f"Δ {noise['unit']}", lambda row: number(row["mean"], "+.4f")),
            column("95% interval", lambda row: interval(row["low"], row["high"])),
            column("cells", lambda row: str(row["cells"])),
            column("pairs", lambda row: str(row["pairs"])),
        ]
        if unlike := any(abs(row["larger"]) > _ALIKE for row in rows):
            columns.insert(2, column("params", lambda row: number(row["larger"], "+.1%")))
        legend = LEGEND if all(row["paired"] for row in rows) else f"{LEGEND}; {FRACTION}"
        if unlike:
            legend += f"; {SIZES}{MATCHED if found.table['mismatch'].notna().any() else ''}"
        if noise["always_valid"]:
            legend += "; no intervals, as seeds were added until differences were resolved"
        yield Block("Effects over all else that varies", columns, legend)
