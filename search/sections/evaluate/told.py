"""What a report says of what was measured of the final weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import records
from archlab.search.formatting.tables import Block
from archlab.search.results.comparison import Comparison
from archlab.search.results.measured import curves_frame, grids_frame, measures_frame
from archlab.search.results.told import Seen, Told
from archlab.search.sections.evaluate.blocks import measure_blocks

if TYPE_CHECKING:
    import pandas as pd


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
        return measure_blocks(found)

    def plain(self, found: Comparison) -> dict[str, Any]:
        return {"measures": found.measures, "curves": _curves(found.curves), "grids": _grids(found.grids)}

    def csv(self, found: Comparison) -> dict[str, dict[str, Any]]:
        columns: dict[str, dict[str, Any]] = {}
        for row in records(found.measures):
            for kind in ("mean", "std"):
                columns.setdefault(f"measure.{row['name']}_{kind}", {})[row["variant"]] = row[kind]
        return columns


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
        first = cells.iloc[0]
        labels = {"row": first["row"], "column": first["column"]}
        labels |= {"rows": cells["y"].drop_duplicates().tolist(), "columns": cells["x"].drop_duplicates().tolist()}
        told = {
            "variant": variant,
            "measure": measure,
            "name": name,
            "n": int(first["n"]),
            "cases": int(first["cases"]),
        }
        wide = len(labels["columns"])
        for kind in ("mean", "std"):
            flat = cells[kind].tolist()
            labels[kind] = [flat[start : start + wide] for start in range(0, len(flat), wide)]
        found.append(told | labels)
    return found
