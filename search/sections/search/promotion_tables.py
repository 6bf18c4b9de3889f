"""The tables of a search's rungs, for a report and for pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import Block, column_of, number, short_count

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison

_LOST = "lost: repeated less chosen, so that above 0 the advantage has shrunk"


def promotion_blocks(found: Comparison) -> Iterator[Block]:
    """A table of the rungs and one of their candidates; none where nothing was promoted."""
    if len(found.promotion):
        yield rungs_block(found)
    if len(found.promoted):
        yield candidates_block(found)


def rungs_block(found: Comparison) -> Block:
    """A row per rung: who went on, and what their advantage was worth on other seeds."""
    rows = records(found.promotion)
    column = partial(column_of, rows)
    columns = [
        column("rung", lambda row: str(row["rung"])),
        column("tokens", lambda row: short_count(row["tokens"])),
        column("parameters", lambda row: short_count(row["parameters"])),
        column("seeds", lambda row: str(row["seeds"])),
        column("go on", lambda row: f"{row['promoted']} of {row['entered']}"),
        column("chosen at", lambda row: number(row["chosen"], "+.4f")),
        column("repeated at", lambda row: number(row["repeated"], "+.4f")),
        column("lost", _lost),
        column("n", lambda row: str(row["shrinkage_n"])),
        column("rank correlation", _rank, "l"),
    ]
    legend = (
        "differences to the baseline on the same seeds, validation, nats/token: means over the n candidates that went "
        f"on, at the rung that chose them and at the next one, after the last rung in the table; {_LOST}, by chance "
        "(* by chance and by the change of length or size); rank correlation: Spearman's rho of their losses at the two"
    )
    return Block("Promotion, rung by rung", columns, legend)


def _lost(row: dict[str, Any]) -> str:
    return number(row["shrinkage"], "+.4f") + "*" * (row["shrinkage_n"] > 0 and not row["one_scale"])


def _rank(row: dict[str, Any]) -> str:
    if row["rho"] != row["rho"]:
        return number(None, "")
    return f"{row['rho']:.2f} [{row['rho_low']:.2f}, {row['rho_high']:.2f}]"


def candidates_block(found: Comparison) -> Block:
    """A row per rung and candidate, best first."""
    rows = records(found.promoted)
    column = partial(column_of, rows)
    columns = [
        column("rung", lambda row: str(row["rung"])),
        column("trial", lambda row: str(row["number"])),
        column("validation loss", lambda row: number(row["loss"], ".4f")),
        column("chosen at", lambda row: number(row["delta"], "+.4f")),
        column("repeated at", lambda row: number(row["repeated"], "+.4f")),
        column("lost", lambda row: number(row["shrinkage"], "+.4f")),
        column("goes on", _place, "l"),
    ]
    legend = (
        f"chosen at: difference to the baseline at this rung; repeated at: at the next one, on other seeds; {_LOST}"
    )
    return Block("Candidates of the rungs", columns, legend)


def _place(row: dict[str, Any]) -> str:
    if row["promoted"] is None:
        return "waits"
    return row["becomes"] or ("yes" if row["promoted"] else "no")


def promotion_notes(found: Comparison) -> Iterator[str]:
    """What became of the advantage of each proposal that the table holds."""
    for row in records(found.promoted):
        if row["becomes"] and row["repeated"] == row["repeated"]:
            chosen = f"at rung {row['rung']} chosen at {row['delta']:+.4f}"
            repeated = f"repeated at {row['repeated']:+.4f} on the seeds of the table"
            yield f"search: {row['becomes']} is trial {row['number']}, {chosen}, {repeated} (validation, nats/token)"
