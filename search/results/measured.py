"""The frames of what was measured of the trials that stand in a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.results.selection import Selection
from archlab.search.statistics.contrast import Floats

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd


def measures_frame(selections: list[Selection]) -> pd.DataFrame:
    """A row per variant and number that was measured: mean and standard deviation (n - 1) over its n seeds.

    Trials are those of the table, with what was found under `measures`; a variant without a mean has no row. Findings
    of another version than the newest one among the trials are left out, as if they were missing.
    """
    import pandas as pd

    rows = []
    for (variant, measure, name), by_seed in values_by_seed(selections).items():
        found = [*by_seed.values()]
        told = {"mean": float(np.mean(found)), "std": _spread(found), "n": len(found)}
        rows.append({"variant": variant, "measure": measure, "name": name, **told})
    return pd.DataFrame(rows, columns=["variant", "measure", "name", "mean", "std", "n"])


def values_by_seed(selections: list[Selection]) -> dict[tuple[str, str, str], dict[int, float]]:
    """(variant, measure, name) -> what was measured of the trial of each seed, of the same findings."""
    return {
        key: {seed: math.nan if value is None else float(value) for seed, value in by_seed.items()}
        for key, by_seed in _findings(selections, "values").items()
    }


def curves_frame(selections: list[Selection]) -> pd.DataFrame:
    """A row per variant, curve and place `x`: mean and standard deviation over n seeds, each of so many `targets`.

    Of the same findings as `measures_frame`.
    """
    import pandas as pd

    frames = []
    for (variant, measure, name), found in _findings(selections, "curves").items():
        mean, spread = _over_seeds(curve["y"] for curve in found.values())
        first = next(iter(found.values()))
        told = {"variant": variant, "measure": measure, "name": name, "x": first["x"]}
        frames.append(pd.DataFrame(told | {"mean": mean, "std": spread, "n": len(found), "targets": first["n"]}))
    columns = ["variant", "measure", "name", "x", "mean", "std", "n", "targets"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def grids_frame(selections: list[Selection]) -> pd.DataFrame:
    """A row per variant, grid and cell, row by row: `y` is the label of its row and `x` that of its column, `row` and
    `column` what these are; mean and standard deviation over n seeds, each of so many `cases`.

    Of the same findings as `measures_frame`.
    """
    import pandas as pd

    frames = []
    for (variant, measure, name), found in _findings(selections, "grids").items():
        mean, spread = _over_seeds(grid["values"] for grid in found.values())
        first = next(iter(found.values()))
        told = {"variant": variant, "measure": measure, "name": name, "row": first["row"], "column": first["column"]}
        cells = pd.DataFrame([(y, x) for y in first["rows"] for x in first["columns"]], columns=["y", "x"])
        cells = cells.astype(object)  # or the integers of one grid become the floats of another
        means = {"mean": mean.ravel(), "std": spread.ravel(), "n": len(found), "cases": first["n"]}
        frames.append(cells.assign(**told, **means))
    columns = ["variant", "measure", "name", "row", "column", "y", "x", "mean", "std", "n", "cases"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def _over_seeds(values: Iterable[Any]) -> tuple[Floats, Floats]:
    """Mean and standard deviation (n - 1) of arrays of one shape, in which None becomes NaN."""
    found = np.array([*values], dtype=np.float64)
    return found.mean(0), found.std(axis=0, ddof=1) if len(found) > 1 else np.full(found.shape[1:], np.nan)


def _spread(values: list[float]) -> float:
    """Standard deviation (n - 1); of equal values exactly 0, which their mean need not have."""
    if len(values) < 2:
        return math.nan
    return 0.0 if len(set(values)) == 1 else float(np.std(values, ddof=1))


def _findings(selections: list[Selection], kind: str) -> dict[tuple[str, str, str], dict[int, Any]]:
    """(variant, measure, name) -> what was found of that kind of the trial of each seed that stands in the table, by
    the newest version of the measure among all of them."""
    standing = [
        (selection.variant, seed, finding)
        for selection in selections
        if not selection.has_no_mean
        for seed, trial in selection.complete.items()
        for finding in trial.get("measures") or ()
    ]
    newest: dict[str, int] = {}
    for _, _, finding in standing:
        newest[finding["measure"]] = max(finding["version"], newest.get(finding["measure"], finding["version"]))
    found: dict[tuple[str, str, str], dict[int, Any]] = {}
    for variant, seed, finding in standing:
        if finding["version"] == newest[finding["measure"]]:
            for name, value in finding.get(kind, {}).items():
                found.setdefault((variant, finding["measure"], name), {})[seed] = value
    return found


PERPLEXITY = "perplexity"
DIVERGED = "diverged"
OF_TABLE = {
    PERPLEXITY: "perplexity_mean",
    "loss": "loss_mean",
    "bits_per_byte": "bits_per_byte_mean",
    **{name: name for name in ("parameters", "active_parameters", "flops_per_token", "tokens_per_s", "lr")},
    "peak_memory_bytes": "peak_memory_bytes",
    "added_parameters": "",  # more than the row that it is compared with
    DIVERGED: "",  # whether a published row diverged
}


def is_number(asked: str, measure: str, name: str) -> bool:
    """Whether a number that was measured is the one that a published table asks for, as `measure` or `measure.name`.

    A measure with options has these behind its name, and its numbers may begin with both.
    """
    head, _, tail = asked.partition(".")
    return (measure == head or measure.startswith(f"{head}_")) and name in (tail or head, f"{measure}_{tail}")
