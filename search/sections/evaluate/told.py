"""What a report says of what was measured of the final weights: numbers, losses by octaves of their position, grids."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import DASH, Block, Cell, Column, number, printable, with_error
from archlab.search.results.comparison import Comparison
from archlab.search.results.measured import curves_frame, grids_frame, measures_frame
from archlab.search.results.told import Seen, Told

if TYPE_CHECKING:
    import pandas as pd

TIMED = ("decoding", "speed")  # measures whose numbers are times; to ask them would import torch
_SHOWN = 8  # octaves of a curve, the last ones; rows of a grid


class ToldOfEvaluate(Told):
    """Findings are the store's; a report has those of the trials in its table."""

    key = "evaluate"
    paged = True

    def frames(self, seen: Seen) -> dict[str, Any]:
        """measures: a row per variant and number; curves: per variant, curve and place; grids: per variant, grid and
        cell. See archlab/search/results/measured.py."""
        frames = (measures_frame, curves_frame, grids_frame)
        return dict(zip(("measures", "curves", "grids"), (frame(seen.selections) for frame in frames), strict=True))

    def blocks(self, found: Comparison) -> Iterable[Block]:
        """A table of each measure's numbers, one of each loss along a window, and one of each grid's rows."""
        variants, curves, grids = list(found.table["variant"]), found.curves, found.grids
        names = _names(variants)
        for measure in dict.fromkeys(found.measures["measure"]):
            yield numbers_block(found, str(measure))
        for name in dict.fromkeys(map(str, curves["name"])):
            curve = curves[curves["name"] == name]
            if name.startswith("loss_by_position"):
                legend = "nats/token, means over the places of a window that a column names"
                yield Block(f"Measured: {printable(name)}", [names, *_octaves(curve, variants)], legend)
            elif "_by_layer" in name:
                means = curve.set_index(["variant", "x"])["mean"]
                columns, left_out = _some(list(dict.fromkeys(curve["x"])), means, variants)
                legend = f"columns: layer; over {_range(curve['targets'])} tokens each{left_out}"
                yield Block(f"Measured: {printable(name)}", [names, *columns], legend)
        for name in dict.fromkeys(map(str, grids["name"])):
            yield _grid_block(name, grids[grids["name"] == name], variants, names)

    def plain(self, found: Comparison) -> dict[str, Any]:
        return {"measures": found.measures, "curves": _curves(found.curves), "grids": _grids(found.grids)}

    def csv(self, found: Comparison) -> dict[str, dict[str, Any]]:
        columns: dict[str, dict[str, Any]] = {}
        for row in records(found.measures):
            for kind in ("mean", "std"):
                columns.setdefault(f"measure.{row['name']}_{kind}", {})[row["variant"]] = row[kind]
        return columns


def numbers_block(comparison: Comparison, measure: str) -> Block:
    """The numbers of one measure, a row per variant of the table."""
    variants = list(comparison.table["variant"])
    rows = [row for row in records(comparison.measures) if row["measure"] == measure]
    own = {(row["name"], row["variant"]): with_error(row["mean"], row["std"]) for row in rows}
    columns = [
        Column(printable(name), [Cell(own.get((name, variant), DASH)) for variant in variants])
        for name in dict.fromkeys(name for name, _ in own)
    ]
    legend = "mean ± standard deviation over the seeds of the table"
    if is_timed(measure):
        legend += "; times of the machine that measured, which nothing repeats exactly"
    title = "Timed" if is_timed(measure) else "Measured"
    return Block(f"{title}: {printable(measure)}", [_names(variants), *columns], legend)


def _names(variants: list[str]) -> Column:
    return Column("variant", [Cell(printable(variant)) for variant in variants], "l")


def is_timed(label: str) -> bool:
    """Whether a measure of this label is one of times."""
    return any(f"{label}_".startswith(f"{name}_") for name in TIMED)


def _grid_block(name: str, grid: pd.DataFrame, variants: list[str], names: Column) -> Block:
    """At most eight rows of a grid, evenly spaced, each as the mean over its columns. Of layers by what is no number
    of a head, but differs in kind, columns as the means over layers."""
    axis, other = ("x", "y") if grid["row"].iloc[0] == "layer" and grid["column"].iloc[0] != "head" else ("y", "x")
    said = {"y": printable(grid["row"].iloc[0]), "x": printable(grid["column"].iloc[0])}
    labels = list(dict.fromkeys(grid[axis]))
    means = grid.groupby(["variant", axis], sort=False)["mean"].mean()  # of what is not NaN
    columns, left_out = _some(labels, means, variants)
    legend = f"columns: {said[axis]}; means over {said[other]}, of {_range(grid['cases'])} cases each{left_out}"
    return Block(f"Measured: {printable(name)}", [names, *columns], legend)


def _some(labels: list[Any], means: pd.Series[float], variants: list[str]) -> tuple[list[Column], str]:
    """A column for each of at most eight labels, evenly spaced, and what is to be said of the others."""
    kept = sorted(set(np.linspace(0, len(labels) - 1, min(len(labels), _SHOWN)).round().astype(int).tolist()))
    columns = [
        Column(printable(str(label)), [Cell(number(means.get((variant, label)), ".4g")) for variant in variants])
        for label in (labels[place] for place in kept)
    ]
    more = f"; {len(columns)} of {len(labels)}, the others and every cell are in --json"
    return columns, more if len(columns) < len(labels) else ""


def _range(counts: pd.Series[Any]) -> str:
    """The least and the most of them, or the one that all are."""
    return " to ".join(map(str, sorted({int(counts.min()), int(counts.max())})))


def _octaves(frame: pd.DataFrame, variants: list[str]) -> list[Column]:
    """The mean over places 1, 2, 3 to 4, 5 to 8, …, weighted by their targets."""
    last = int(frame["x"].max())
    ends = sorted({min(2**power, last) for power in range(math.ceil(math.log2(last)) + 1)})
    own = {variant: frame[frame["variant"] == variant] for variant in variants}
    columns = []
    for before, end in list(zip([0, *ends[:-1]], ends, strict=True))[-_SHOWN:]:
        cells = [Cell(number(_mean(own[variant], before, end), ".4f")) for variant in variants]
        columns.append(Column(f"{before + 1}" if end == before + 1 else f"{before + 1}-{end}", cells))
    return columns


def _mean(curve: pd.DataFrame, before: int, end: int) -> float:
    """Over the places after one up to another; NaN where there is none."""
    x, mean = np.asarray(curve["x"], int), np.asarray(curve["mean"], float)
    there = (x > before) & (x <= end) & np.isfinite(mean)
    targets = np.asarray(curve["targets"], float)[there]
    return float(np.average(mean[there], weights=targets)) if targets.sum() else math.nan


def _curves(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per variant and curve, with lists along it."""
    along = ["x", "mean", "std", "targets"]
    return [
        {"variant": variant, "measure": measure, "name": name, "n": int(curve["n"].iloc[0])}
        | {column: curve[column].tolist() for column in along}
        for (variant, measure, name), curve in frame.groupby(["variant", "measure", "name"], sort=False)
    ]


def _grids(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per variant and grid, with its labels and a list of lists."""
    found = []
    for (variant, measure, name), cells in frame.groupby(["variant", "measure", "name"], sort=False):
        first, columns = cells.iloc[0], cells["x"].drop_duplicates().tolist()
        told: dict[str, Any] = {"variant": variant, "measure": measure, "name": name}
        told |= {"n": int(first["n"]), "cases": int(first["cases"]), "row": first["row"], "column": first["column"]}
        told |= {"rows": cells["y"].drop_duplicates().tolist(), "columns": columns}
        for kind in ("mean", "std"):
            told[kind] = cells[kind].to_numpy().reshape(-1, len(columns)).tolist()
        found.append(told)
    return found
