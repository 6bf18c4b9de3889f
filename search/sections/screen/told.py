"""What a report says of a screen: every variant with its probe, and how well the two losses agreed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import DASH, Block, Column, column_of, number
from archlab.search.results.comparison import Comparison
from archlab.search.results.told import Record, Rows, Seen, Told
from archlab.search.sections.screen.decide import probe_tokens, ranks_of, screened, sentences, tokens_of

COLUMNS = ("variant", "part", "probe_loss", "probe_rank", "loss", "rank")


class ToldOfScreen(Told):
    """See archlab.search.sections.screen.decide."""

    key = "screen"
    leads = True
    beside = "verdict"

    def left_out(self, record: Record, trials: Rows) -> Collection[str]:
        return screened(record, trials).left_out

    def frames(self, seen: Seen) -> dict[str, Any]:
        """screen: a row per variant, losses of one seed on VALIDATION, in nats/token, infinite where a trial diverged,
            NaN where there is none yet; ranks with 1 for the lowest, those of `loss` among the variants that were
            trained. `part` is why a variant was trained: calibrates, kept, audited, several of these, the rule is off,
            waits; or left out.
        screened: state (probes, calibration, check, on, off), the threshold, rho with its interval over the variants
            that calibrate (`first`) and over all that went on (`last`), tokens of probes and those that were saved.
        """
        import pandas as pd

        record = seen.whole
        if not record.get("screen"):
            return {"screen": pd.DataFrame(columns=[*COLUMNS]), "screened": {}}
        found = screened(record, seen.trials)
        probed, trained, rows = ranks_of(found.probes), ranks_of(found.losses), []
        for variant in record["variants"]:
            name = variant["name"]
            numbers = [each.get(name, math.nan) for each in (found.probes, probed, found.losses, trained)]
            rows.append((name, found.part(name), *numbers))
        summary = {
            "state": found.state,
            "correlation": record["screen"]["correlation"],
            "first": found.first.record() if found.first else None,
            "last": found.last.record() if found.last else None,
            "left_out": list(found.left_out),
            "probe_tokens": probe_tokens(record),
            "saved_tokens": tokens_of(record, found.left_out),
            "sentences": list(sentences(record, found)),
        }
        return {"screen": pd.DataFrame(rows, columns=[*COLUMNS]), "screened": summary}

    def cells(self, found: Comparison) -> Mapping[str, list[Any]]:
        return {name: found.screen[name].tolist() for name in ("probe_loss", "probe_rank") if len(found.screen)}

    def spared(self, found: Comparison) -> int:
        return int(found.screened["saved_tokens"]) if found.screened.get("left_out") else 0

    def notes(self, found: Comparison) -> Iterable[str]:
        yield from found.screened.get("sentences", ())

    def columns(self, found: Comparison, rows: list[dict[str, Any]]) -> Iterable[Column]:
        if len(found.screen):
            values = tuple(row["probe_loss"] if math.isfinite(row["probe_loss"]) else None for row in rows)
            yield replace(column_of(rows, "probe (rank)", _probe, keep=8), key="probe", values=values)

    def blocks(self, found: Comparison) -> Iterable[Block]:
        """The table of a screen, the best probe first; none without one."""
        rows = records(found.screen.sort_values("probe_loss", kind="stable"))
        if not rows:
            return
        column = partial(column_of, rows)
        columns = [
            column("variant", lambda row: row["variant"], "l"),
            column("probe", lambda row: _loss(row["probe_loss"])),
            column("rank", lambda row: number(row["probe_rank"], "g")),
            column("validation loss", lambda row: _loss(row["loss"])),
            column("its rank", lambda row: number(row["rank"], "g")),
            column("goes on", lambda row: row["part"], "l"),
        ]
        title = "Screen, validation loss in nats/token (first seed)"
        yield Block(title, columns, "its rank: among the variants that were trained")


def _loss(value: float) -> str:
    return DASH if math.isnan(value) else "diverged" if math.isinf(value) else f"{value:.4f}"


def _probe(row: Mapping[str, Any]) -> str:
    """A probe's validation loss with its rank."""
    loss = "diverged" if math.isinf(row["probe_loss"]) else f"{row['probe_loss']:.3f}"
    return DASH if math.isnan(row["probe_loss"]) else f"{loss} ({row['probe_rank']:g})"
