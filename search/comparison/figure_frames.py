"""What figures draw beside the frames of a comparison: smoothed curves, differences to the baseline, probes and what
chance reaches, measures and what uniform attention would have. Pure functions from frames to frames."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.formatting.words import is_number

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

WINDOWS = (1, 11, 101)
"""Tokens that a loss by position is smoothed over; the figures of arXiv:2503.02130 have 101."""


def usual_window(places: int) -> int:
    """The widest of `WINDOWS` that is at most a sixteenth of so many places."""
    return max(window for window in WINDOWS if window == 1 or window <= places / 16)


def smoothed(curves: pd.DataFrame, window: int) -> pd.DataFrame:
    """Each curve of a curves frame with the mean over `window` places around each one, at the ends over those that
    there are, weighted by their targets. The deviation of such means over the seeds is not known, and NaN."""
    import pandas as pd

    if window == 1:
        return curves
    parts = []
    for _, curve in curves.groupby(["variant", "measure", "name"], sort=False):
        values = np.asarray(curve["mean"], np.float64)
        weights = np.where(np.isfinite(values), np.asarray(curve["targets"], np.float64), 0.0)
        kernel, edge = np.ones(window), window // 2
        sums = np.convolve(np.nan_to_num(values) * weights, kernel)[edge : edge + len(values)]
        total = np.convolve(weights, kernel)[edge : edge + len(values)]
        means = np.divide(sums, total, out=np.full(len(values), np.nan), where=total > 0)
        parts.append(curve.assign(mean=means, std=np.nan))
    return pd.concat(parts, ignore_index=True) if parts else curves


def minus_baseline(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """A curves or grids frame as differences of means to the same cell of each variant's own baseline; a baseline, and
    a cell that its baseline lacks, has none. The deviation of a difference is not known, and NaN."""
    keys = [name for name in ("measure", "name", "y", "x") if name in frame]
    of = dict(zip(table["variant"], table["baseline"], strict=True))
    base = frame[["variant", *keys, "mean"]].rename(columns={"variant": "baseline", "mean": "base"})
    ours = frame.assign(baseline=frame["variant"].map(of))
    both = ours[ours["variant"] != ours["baseline"]].merge(base, on=["baseline", *keys])
    return both.assign(mean=both["mean"] - both["base"], std=np.nan)[list(frame.columns)]


def probes_frame(measures: pd.DataFrame) -> pd.DataFrame:
    """A row per variant and share of right answers (recall, induction, the needle, a data set of questions): its mean,
    std, n, and beside it what `chance` and a `ceiling` reach, NaN where that is not measured."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    own = {(row["variant"], row["name"]): row for row in measures.to_dict("records")}
    for (variant, name), row in own.items():
        label = row["measure"]
        beside = _BESIDE.get(str(name).removeprefix(f"{label}_"))
        if beside is None:
            continue
        limits = {what: own.get((variant, f"{label}_{end}"), {}).get("mean", np.nan) for what, end in beside.items()}
        told = {key: row[key] for key in ("variant", "measure", "name", "mean", "std", "n")}
        rows.append(told | {"chance": np.nan, "ceiling": np.nan} | limits)
    return pd.DataFrame(rows, columns=["variant", "measure", "name", "mean", "std", "n", "chance", "ceiling"])


_BESIDE = {
    "accuracy": {"chance": "chance", "ceiling": "ceiling"},
    "chosen": {"chance": "chance", "ceiling": "ceiling"},
    "exact": {"ceiling": "exact_ceiling"},
}
"""End of a number's name, and of those that stand beside it."""


def uniform_frame(measures: pd.DataFrame) -> pd.DataFrame:
    """A row per variant and number that has a `uniform` one beside it: what it would be if every query gave all that it
    may read the same."""
    end = "_uniform"
    even = measures[measures["name"].str.endswith(end)] if len(measures) else measures
    even = even.assign(name=[str(name).removesuffix(end) for name in even["name"]], uniform=even["mean"])
    return measures.merge(even[["variant", "measure", "name", "uniform"]], on=["variant", "measure", "name"])


def over_rows(grids: pd.DataFrame) -> pd.DataFrame:
    """A grids frame as curves over its columns: `x`, and the mean over the rows of what is there."""
    keys = ["variant", "measure", "name", "x"]
    told = grids.groupby(keys, sort=False).agg(mean=("mean", "mean"), n=("n", "first"), targets=("cases", "first"))
    return told.reset_index().assign(std=np.nan)


def settings_frame(found: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The trials of a search frame with a column for each setting that the trials have, named by its path, and these
    columns: numbers and texts as they are, all else as a patch spells it; NaN where a trial has no such setting."""
    import pandas as pd

    paths = [*dict.fromkeys(path for each in found["settings"] for path in each if path != "lr")]
    columns = {path: [_plain(each.get(path, np.nan)) for each in found["settings"]] for path in paths}
    rest = found.drop(columns="settings").rename(columns={"validation_perplexity": "perplexity"})
    return pd.concat([rest, pd.DataFrame(columns, index=found.index)], axis=1), paths


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) or is_number(value) else json.dumps(value)
