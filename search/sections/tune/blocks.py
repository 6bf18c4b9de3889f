"""Tuned rates and the curve over the rate, as tables of a report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import DASH, Block, Cell, Column, number, printable

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison


def curve_block(comparison: Comparison) -> Block:
    """Validation perplexity per variant and tuned setting, one seed, and what the curve over the rate says."""
    labels: dict[str, float] = {}
    cells: dict[tuple[str, str], Cell] = {}
    edges = dict(zip(comparison.table["variant"], comparison.table["lr_at_edge"], strict=True))
    for row in comparison.rates.to_dict("records"):
        shown = {"complete": number(row["validation_perplexity"], ".3f"), "planned": DASH}
        text = shown.get(row["state"], row["state"]) + ("^" if row["best"] and edges[row["variant"]] else "")
        if row["state"] == "paused":
            where = f"step {row['step']:g}" if math.isnan(row["share"]) else f"{row['share']:.0%}"
            text = f"{'ended early' if row['settled'] else 'waits'} at {where}"
        labels.setdefault(row["setting"], row["lr"])
        cells[row["variant"], row["setting"]] = Cell(text, row["best"])
    names = list(dict.fromkeys(comparison.rates["variant"]))
    columns = [Column("variant", [Cell(printable(name)) for name in names], "l")]
    for label in sorted(labels, key=lambda label: (labels[label], label)):
        columns.append(Column(printable(label), [cells.get((name, label), Cell(DASH)) for name in names]))
    seed = ", ".join(str(s) for s in sorted(set(comparison.rates["seed"])))
    legend = "* chosen" + ("; ^ at the edge of those tried" if comparison.table["lr_at_edge"].any() else "")
    paused = comparison.rates[comparison.rates["state"] == "paused"]
    if paused["settled"].any():
        legend += "; ended early: at this share of the steps, being behind"
    if not paused["settled"].all():
        legend += "; waits: at this share of the steps, until the others are as far"
    only_rates = all(label == f"{lr:g}" for label, lr in labels.items())
    what = "learning rate" if only_rates else "what was tuned"
    return Block(f"Validation perplexity by {what} (seed {seed})", columns, legend)


def tuning_block(comparison: Comparison) -> Block:
    """What the losses over the learning rate say."""
    rows = records(comparison.tuning)

    def column(header: str, show: Callable[[dict[str, Any]], str], align: str = "r") -> Column:
        return Column(header, [Cell(printable(show(row))) for row in rows], align)

    def spread(row: dict[str, Any]) -> str:
        if math.isnan(row["sensitivity_from"]):
            return DASH
        return f"{number(row['sensitivity'], '.3f')} ({row['sensitivity_from']:g} to {row['sensitivity_to']:g})"

    def stable(row: dict[str, Any]) -> str:
        above = "" if math.isnan(row["diverged_lr"]) else f" ({row['diverged_lr']:g} diverged)"
        return number(row["stable_lr"], "g") + above

    columns = [
        column("variant", lambda row: row["variant"], "l"),
        column("best", lambda row: number(row["lr"], "g")),
        column("fitted", lambda row: number(row["fitted_lr"], ".2g")),
        column("curvature", lambda row: number(row["curvature"], ".3f")),
        column("largest stable", stable),
        column("sensitivity", spread),
        column("with one seed", lambda row: row["verdict"] or DASH, "l"),
    ]
    legend = (
        "fitted: lowest point of a parabola in ln(rate), curvature in nats/token per unit of it; sensitivity: mean "
        "excess over the best, in nats/token; largest stable: of those that came to their end; with one seed: whether "
        "a difference to the baseline hangs on the rate, from one pair of seeds, not corrected; not the verdict above"
    )
    return Block("Learning rates on validation", columns, legend)
