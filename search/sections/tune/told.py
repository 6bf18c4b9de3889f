"""What a report says of tuning: the curves over what was tuned, and what those over the rate say of each variant."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import DASH, Block, Cell, Column, Row, column_of, number, printable
from archlab.search.results.comparable import NO_DIFFERENCE
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Seen, Told
from archlab.search.sections.tune.frames import rates_frame, tuning_frame


class ToldOfTune(Told):
    """Values of any field may be tuned; what is fitted is the curve over the learning rate."""

    key = "tune"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """rates: a row per variant and tuned setting with the VALIDATION loss that the choice was made on.
        tuning: a row per variant that tuned its learning rate: fitted optimum, largest stable rate, sensitivity.
        """
        table, noise = seen.found.table, seen.found.noise
        verdicts = zip(table["variant"], table["verdict"], strict=True)
        compared = {name for name, said in verdicts if said not in NO_DIFFERENCE and noise["unit"] == "nats/token"}
        return {
            "rates": rates_frame(seen.record, seen.selections),
            "tuning": tuning_frame(seen.record, seen.selections, noise["seed_sd"], compared),
        }

    def blocks(self, found: Comparison) -> Iterable[Block]:
        if len(found.rates):
            yield _curves(found)
        if len(found.tuning):
            yield tuning_block(found)


def _curves(comparison: Comparison) -> Block:
    """Validation perplexity per variant and tuned setting, one seed, and what the curve over the rate says."""
    rates, table = comparison.rates, comparison.table
    labels: dict[str, float] = {}
    cells: dict[tuple[str, str], Cell] = {}
    edges = dict(zip(table["variant"], table["lr_at_edge"], strict=True))
    for row in records(rates):
        shown = {"complete": number(row["validation_perplexity"], ".3f"), "planned": DASH}
        text = shown.get(row["state"], row["state"]) + ("^" if row["best"] and edges[row["variant"]] else "")
        if row["state"] == "paused":
            where = f"step {row['step']:g}" if math.isnan(row["share"]) else f"{row['share']:.0%}"
            text = f"{'ended early' if row['settled'] else 'waits'} at {where}"
        labels.setdefault(row["setting"], row["lr"])
        cells[row["variant"], row["setting"]] = Cell(text, row["best"])
    names = list(dict.fromkeys(rates["variant"]))
    columns = [Column("variant", [Cell(printable(name)) for name in names], "l")]
    for label in sorted(labels, key=lambda label: (labels[label], label)):
        columns.append(Column(printable(label), [cells.get((name, label), Cell(DASH)) for name in names]))
    legend = "* chosen" + ("; ^ at the edge of those tried" if table["lr_at_edge"].any() else "")
    paused = rates[rates["state"] == "paused"]
    if paused["settled"].any():
        legend += "; ended early: at this share of the steps, being behind"
    if not paused["settled"].all():
        legend += "; waits: at this share of the steps, until the others are as far"
    only_rates = all(label == f"{lr:g}" for label, lr in labels.items())
    what = "learning rate" if only_rates else "what was tuned"
    seed = ", ".join(str(s) for s in sorted(set(rates["seed"])))
    return Block(f"Validation perplexity by {what} (seed {seed})", columns, legend, detail=True)


def tuning_block(comparison: Comparison) -> Block:
    """What the losses over the learning rate say."""
    column = partial(column_of, records(comparison.tuning))

    def spread(row: Row) -> str:
        if math.isnan(row["sensitivity_from"]):
            return DASH
        return f"{number(row['sensitivity'], '.3f')} ({row['sensitivity_from']:g} to {row['sensitivity_to']:g})"

    def stable(row: Row) -> str:
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
    return Block("Learning rates on validation", columns, legend, detail=True)
