"""What a report prints of a screen: every variant with its probe, and whether it went on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import DASH, Block, Cell, Column, number, printable

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison


def screen_blocks(comparison: Comparison) -> list[Block]:
    """The table of a screen, the best probe first; none without one."""
    if not len(comparison.screen):
        return []
    ordered = comparison.screen.sort_values("probe_loss", kind="stable")
    rows = records(ordered)

    def column(header: str, show: Callable[[dict[str, Any]], str], align: str = "r") -> Column:
        return Column(header, [Cell(printable(show(row))) for row in rows], align)

    columns = [
        column("variant", lambda row: row["variant"], "l"),
        column("probe", lambda row: _loss(row["probe_loss"])),
        column("rank", lambda row: number(row["probe_rank"], "g")),
        column("validation loss", lambda row: _loss(row["loss"])),
        column("its rank", lambda row: number(row["rank"], "g")),
        column("goes on", lambda row: row["part"], "l"),
    ]
    title = "Screen, validation loss in nats/token (first seed)"
    return [Block(title, columns, "its rank: among the variants that were trained")]


def _loss(value: float) -> str:
    return DASH if math.isnan(value) else "diverged" if math.isinf(value) else f"{value:.4f}"
