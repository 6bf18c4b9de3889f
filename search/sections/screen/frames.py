"""What a report shows of a screen: a row per variant with its probe, and how well the two losses agreed."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from archlab.search.sections.screen.decide import Screened, probe_tokens, ranks_of, sentences, tokens_of

COLUMNS = ("variant", "part", "probe_loss", "probe_rank", "loss", "rank")


def screen_frame(record: dict[str, Any], found: Screened | None) -> pd.DataFrame:
    """Losses of one seed on VALIDATION, in nats/token, infinite where a trial diverged, NaN where there is none yet;
    ranks with 1 for the lowest, those of `loss` among the variants that were trained. `part` is why a variant was
    trained: calibrates, kept, audited, several of these, the rule is off, waits; or left out."""
    if found is None:
        return pd.DataFrame(columns=[*COLUMNS])
    rows = []
    probed, trained = ranks_of(found.probes), ranks_of(found.losses)
    for variant in record["variants"]:
        name = variant["name"]
        losses = found.probes.get(name, math.nan), found.losses.get(name, math.nan)
        places = probed.get(name, math.nan), trained.get(name, math.nan)
        rows.append((name, found.part(name), losses[0], places[0], losses[1], places[1]))
    return pd.DataFrame(rows, columns=[*COLUMNS])


def screen_summary(record: dict[str, Any], found: Screened | None) -> dict[str, Any]:
    """state (probes, calibration, check, on, off), the threshold, rho with its interval over the variants that
    calibrate (`first`) and over all that went on (`last`), tokens of probes and those that were saved; {} without a
    screen."""
    if found is None:
        return {}
    return {
        "state": found.state,
        "correlation": record["screen"]["correlation"],
        "first": found.first.record() if found.first else None,
        "last": found.last.record() if found.last else None,
        "left_out": list(found.left_out),
        "probe_tokens": probe_tokens(record),
        "saved_tokens": tokens_of(record, found.left_out),
        "sentences": list(sentences(record, found)),
    }
