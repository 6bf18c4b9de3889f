"""The frames of a published table beside ours: rows side by side, and how far the orders of the two agree."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.frames import NAN, records
from archlab.search.results.comparable import paired_means
from archlab.search.results.measured import DIVERGED, OF_TABLE, PERPLEXITY, is_number
from archlab.search.statistics.rank_correlation import kendall, ranks, spearman

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd

RESOLVED = ("better", "worse", "baseline")

Row = dict[str, Any]


def published_frame(record: Row, table: pd.DataFrame, measures: pd.DataFrame, unit: str) -> pd.DataFrame:
    """A row per variant that is one of the published table, in our order; of several published rows the first counts.

    `perplexity` is ours and `published` theirs (NaN: none); `delta` with its ends and `verdict` are the table's,
    `published_delta` is ln(published / that of the baseline's row); ranks are among the rows of the `group`, that have
    both, a diverged one last. `numbers` has for each other published column that is one of our numbers the pair (ours,
    theirs).
    """
    import pandas as pd

    asked = record.get("published") or {}
    variants: dict[str, Row] = asked.get("variants", {})
    own = {row["variant"]: row for row in records(table)}
    ordered = paired_means([*own.values()], "loss_mean" if unit == "nats/token" else "bits_per_byte_mean")
    found = [_row(asked, own, name, row, measures) for name, row in variants.items() if name in own]
    for group in dict.fromkeys(row["group"] for row in found):
        mine = [row for row in found if row["group"] == group]
        ranked = [(row, values) for row in mine if (values := _values(row, ordered[row["variant"]])) is not None]
        for place, name in enumerate(("rank", "published_rank")):
            for (row, _), rank in zip(ranked, ranks([values[place] for _, values in ranked]), strict=True):
                row[name] = rank
    columns = ["variant", "row", "group", "perplexity", "published", "delta", "delta_low", "delta_high", "verdict"]
    return pd.DataFrame(found, columns=[*columns, "published_delta", "rank", "published_rank", "diverged", "numbers"])


def _row(asked: Row, own: dict[str, Row], name: str, mapped: Row, measures: pd.DataFrame) -> Row:
    ours, theirs = own[name], _printed(asked, mapped)
    base = asked["variants"].get(ours["baseline"])
    at_base = _float(_cell(asked, _printed(asked, base), PERPLEXITY)) if base else NAN
    published = _float(_cell(asked, theirs, PERPLEXITY))
    return {
        "variant": name,
        "row": ", ".join(mapped["rows"]),
        "group": mapped["group"],
        "perplexity": ours["perplexity_mean"],
        "published": published,
        **{key: ours[key] for key in ("delta", "delta_low", "delta_high", "verdict")},
        "published_delta": math.log(published / at_base) if at_base > 0 and published > 0 else NAN,
        "rank": NAN,
        "published_rank": NAN,
        "diverged": _cell(asked, theirs, DIVERGED) is True,
        "numbers": {
            column: (number["times"] * _ours(number["number"], ours, own, measures), _float(theirs[column]))
            for column, number in asked["measures"].items()
            if number["number"] not in (PERPLEXITY, DIVERGED)
        },
    }


def _printed(asked: Row, mapped: Row) -> Row:
    return dict(zip(asked["columns"], asked["rows"][mapped["rows"][0]], strict=True))


def _cell(asked: Row, printed: Row, number: str) -> Any:
    """What is printed as a number of ours; None where no column is that."""
    column = next((column for column, ours in asked["measures"].items() if ours["number"] == number), None)
    return None if column is None else printed[column]


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else NAN


def _ours(number: str, row: Row, own: dict[str, Row], measures: pd.DataFrame) -> float:
    """One of our numbers of a row, NaN where it was not measured."""
    if number == "added_parameters":
        return float(row["parameters"] - own[row["baseline"]]["parameters"])
    if number in OF_TABLE:
        return float(row[OF_TABLE[number]])
    found = [
        float(each["mean"])
        for each in records(measures)
        if each["variant"] == row["variant"] and is_number(number, each["measure"], each["name"])
    ]
    return found[0] if found else NAN


def _values(row: Row, ours: float) -> tuple[float, float] | None:
    """What the two orders are made of, infinite where a row diverged; None where one of the two is not known."""
    one = math.inf if row["verdict"] == DIVERGED else ours
    other = math.inf if row["diverged"] else row["published"]
    return None if math.isnan(one) or math.isnan(other) else (one, other)


def agreement(record: Row, frame: pd.DataFrame, gone: Collection[str]) -> list[Row]:
    """How far the two orders agree, for each group: over all rows, over those whose difference to the baseline is
    resolved (its own row included, and `gone`, which diverged at every seed), and each without the variants that the
    study leaves out of it."""
    found, without = [], set((record.get("published") or {}).get("without", ()))
    rows = [row for row in records(frame) if not math.isnan(row["rank"])]
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        sure = [row for row in mine if row["verdict"] in RESOLVED or row["variant"] in gone]
        for kind, some in (("all", mine), ("resolved", sure)):
            found.append(_agreement(group, kind, some, []))
            if left := [row["variant"] for row in some if row["variant"] in without]:
                rest = [row for row in some if row["variant"] not in left]
                found.append(_agreement(group, kind, rest, left))
    return found


def _agreement(group: str, kind: str, rows: list[Row], without: list[str]) -> Row:
    ours, theirs = [row["rank"] for row in rows], [row["published_rank"] for row in rows]
    both = {"spearman": spearman(ours, theirs), "kendall": kendall(ours, theirs)}
    told: Row = {"group": group, "rows": kind, "without": without, "n": len(rows)}
    for name, found in both.items():
        told |= {name: found.rho, f"{name}_low": found.low, f"{name}_high": found.high}
    return told
