"""The frames of what was measured of the trials that stand in a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.results.selection import Selection

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
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    newest = _newest(selections)
    for selection in selections:
        for seed, trial in ({} if selection.has_no_mean else selection.complete).items():
            for each in _current(trial, newest):
                for name, value in each["values"].items():
                    number = math.nan if value is None else float(value)
                    found.setdefault((selection.variant, each["measure"], name), {})[seed] = number
    return found


def curves_frame(selections: list[Selection]) -> pd.DataFrame:
    """A row per variant, curve and place `x`: mean and standard deviation over n seeds, each of so many `targets`.

    Of the same findings as `measures_frame`.
    """
    import pandas as pd

    frames, newest = [], _newest(selections)
    for selection in selections:
        curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for trial in _standing(selection):
            for each in _current(trial, newest):
                for name, curve in each["curves"].items():
                    curves.setdefault((each["measure"], name), []).append(curve)
        for (measure, name), found in curves.items():
            y = np.array([curve["y"] for curve in found], dtype=np.float64)  # None becomes NaN
            spread = y.std(axis=0, ddof=1) if len(found) > 1 else np.full(y.shape[1], np.nan)
            told = {"variant": selection.variant, "measure": measure, "name": name, "x": found[0]["x"]}
            frames.append(
                pd.DataFrame(told | {"mean": y.mean(0), "std": spread, "n": len(found), "targets": found[0]["n"]})
            )
    columns = ["variant", "measure", "name", "x", "mean", "std", "n", "targets"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def grids_frame(selections: list[Selection]) -> pd.DataFrame:
    """A row per variant, grid and cell, row by row: `y` is the label of its row and `x` that of its column, `row` and
    `column` what these are; mean and standard deviation over n seeds, each of so many `cases`.

    Of the same findings as `measures_frame`.
    """
    import pandas as pd

    frames, newest = [], _newest(selections)
    for selection in selections:
        grids: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for trial in _standing(selection):
            for each in _current(trial, newest):
                for name, grid in each.get("grids", {}).items():
                    grids.setdefault((each["measure"], name), []).append(grid)
        for (measure, name), found in grids.items():
            values = np.array([grid["values"] for grid in found], dtype=np.float64)  # None becomes NaN
            spread = values.std(axis=0, ddof=1) if len(found) > 1 else np.full(values.shape[1:], np.nan)
            first = found[0]
            told = {"variant": selection.variant, "measure": measure, "name": name}
            told |= {"row": first["row"], "column": first["column"]}
            cells = pd.DataFrame([(y, x) for y in first["rows"] for x in first["columns"]], columns=["y", "x"])
            cells = cells.astype(object)  # or the integers of one grid become the floats of another
            means = {"mean": values.mean(0).ravel(), "std": spread.ravel(), "n": len(found), "cases": first["n"]}
            frames.append(cells.assign(**told, **means))
    columns = ["variant", "measure", "name", "row", "column", "y", "x", "mean", "std", "n", "cases"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def _spread(values: list[float]) -> float:
    """Standard deviation (n - 1); of equal values exactly 0, which their mean need not have."""
    if len(values) < 2:
        return math.nan
    return 0.0 if len(set(values)) == 1 else float(np.std(values, ddof=1))


def _newest(selections: list[Selection]) -> dict[str, int]:
    """Each measure's newest version among the trials that stand."""
    newest: dict[str, int] = {}
    for selection in selections:
        for trial in _standing(selection):
            for each in trial.get("measures") or ():
                newest[each["measure"]] = max(each["version"], newest.get(each["measure"], each["version"]))
    return newest


def _current(trial: dict[str, Any], newest: dict[str, int]) -> list[dict[str, Any]]:
    return [each for each in trial.get("measures") or () if each["version"] == newest[each["measure"]]]


def _standing(selection: Selection) -> list[dict[str, Any]]:
    return [] if selection.has_no_mean else list(selection.complete.values())


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

    A measure with options has these behind its name.
    """
    head, _, tail = asked.partition(".")
    return (measure == head or measure.startswith(f"{head}_")) and name == (tail or head)
