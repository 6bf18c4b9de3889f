"""What each factor does over all else that a study varies, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import Block, Cell, Column, interval, number, printable
from archlab.search.sections.design.frames import level_name

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison

LEGEND = (
    "means over the cells in which all else is equal, with 95% intervals by the table's noise, not corrected for how "
    "many effects are looked at; pairs: of a cell's variants and a seed"
)

FRACTION = (
    "of a component that is never alone: all that have it less all that lack it, mixed up with what the notes say"
)


def effect_blocks(comparison: Comparison) -> Iterator[Block]:
    """The effect of every level against the first one of its factor; nothing where no factor is varied twice."""
    rows = records(comparison.effects)
    if not rows:
        return
    columns = [
        Column("effect", [Cell(printable(level_name(row["factor"], row["level"]))) for row in rows], "l"),
        Column("against", [Cell(printable(level_name(row["factor"], row["against"]))) for row in rows], "l"),
        Column(f"Δ {comparison.noise['unit']}", [Cell(number(row["mean"], "+.4f")) for row in rows]),
        Column("95% interval", [Cell(interval(row["low"], row["high"])) for row in rows]),
        Column("cells", [Cell(str(row["cells"])) for row in rows]),
        Column("pairs", [Cell(str(row["pairs"])) for row in rows]),
    ]
    legend = LEGEND if all(row["paired"] for row in rows) else f"{LEGEND}; {FRACTION}"
    if comparison.noise["always_valid"]:
        legend += "; no intervals, as seeds were added until differences were resolved"
    yield Block("Effects over all else that varies", columns, legend)
