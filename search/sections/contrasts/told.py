"""What a report says of contrasts: differences that were asked for beside those to the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from archlab.search.formatting.frames import NAN, records
from archlab.search.formatting.tables import Block, column_of, interval, number
from archlab.search.results.comparable import apart
from archlab.search.results.comparison import Comparison
from archlab.search.results.losses import lay_out
from archlab.search.results.told import Record, Seen, Told
from archlab.search.sections.seeds.decide import verdict_of

COLUMNS = ("variant", "against", "cell", "n", "delta", "low", "high", "unit", "verdict")
LEGEND = (
    "the first less the second; 95% intervals that hold together for all contrasts, by the noise of the table "
    "(Bonferroni), where these were chosen before looking"
)
OF_ALL = (
    "the first less the second; 95% intervals that hold together for all {count} pairs of the table, by its noise "
    "(Bonferroni), so also where these were chosen after looking"
)


class ToldOfContrasts(Told):
    """Of a study with `report.contrasts`."""

    key = "contrasts"

    def frames(self, seen: Seen) -> dict[str, Any]:
        """contrasts: a row per pair, in each cell, with the difference of the TEST losses in `unit`, its interval and a
        verdict, or why the two do not compare. contrasts_among: among how many pairs these could be chosen, None where
        that was done before looking."""
        import pandas as pd

        pairs, among = [*_pairs(seen.record)], seen.record.get("contrasts_among")
        rows = [_row(seen, one, other, among or len(pairs)) for one, other in pairs]
        return {"contrasts": pd.DataFrame(rows, columns=[*COLUMNS]), "contrasts_among": among}

    def blocks(self, found: Comparison) -> Iterable[Block]:
        if not (rows := records(found.contrasts)):
            return
        column, units = partial(column_of, rows), {row["unit"] for row in rows}
        one_unit = units.pop() if len(units) == 1 else None
        cells = [column("cell", lambda row: row["cell"], "l")] if any(row["cell"] for row in rows) else []
        columns = [
            column("contrast", lambda row: row["variant"], "l"),
            column("against", lambda row: row["against"], "l"),
            *cells,
            column("n", lambda row: str(row["n"])),
            column(
                f"Δ {one_unit}" if one_unit else "Δ",
                lambda row: number(row["delta"], "+.4f") + ("" if one_unit else f" {row['unit']}"),
            ),
            column("95% interval", lambda row: interval(row["low"], row["high"])),
            column("verdict", lambda row: row["verdict"], "l"),
        ]
        among = found.contrasts_among
        yield Block("Contrasts", columns, OF_ALL.format(count=among) if among else LEGEND)


def _pairs(record: Record) -> Iterator[tuple[str, str]]:
    """The pairs by the names of rows: of two variants that have cells one in each cell that has both."""
    names = [variant["name"] for variant in record["variants"]]
    cells = dict.fromkeys(name.partition(" [")[2] for name in names)
    for one, other in record.get("contrasts") or ():
        if one in names and other in names:
            yield one, other
        for cell in filter(None, cells):
            pair = f"{one} [{cell}", f"{other} [{cell}"
            if pair[0] in names and pair[1] in names:
                yield pair


def _named(one: str, other: str) -> dict[str, str]:
    """Two rows of one cell by their variants, beside it; others by their whole names."""
    (first, _, cell), (second, _, beside) = one.partition(" ["), other.partition(" [")
    if cell and cell == beside:
        return {"variant": first, "against": second, "cell": cell.removesuffix("]")}
    return {"variant": one, "against": other, "cell": ""}


def _row(seen: Seen, one: str, other: str, comparisons: int) -> dict[str, Any]:
    from archlab.search.statistics.pairs import pair_difference

    variants = [{**v, "baseline": other if v["name"] == one else v["name"]} for v in seen.record["variants"]]
    at = {variant["name"]: row for row, variant in enumerate(variants)}
    layout = lay_out({**seen.record, "variants": variants}, seen.selections)
    row, base = at[one], at[other]
    told = {**_named(one, other), "n": 0, "delta": NAN, "low": NAN, "high": NAN, "unit": layout.unit}
    if reason := apart(seen.record, variants[row], variants[base]):
        return told | {"verdict": reason}
    found = pair_difference(
        layout.losses,
        row,
        base,
        [at[variant["baseline"]] for variant in seen.record["variants"]],
        layout.documents[row],
        layout.batches,
        layout.keys,
        comparisons,
        always_valid=bool(seen.record.get("sequential")),
    )
    if found is None:
        return told | {"verdict": verdict_of(found, seen.record)}
    half, verdict = found.half_width, verdict_of(found, seen.record)
    ends = {} if half is None else {"low": found.difference - half, "high": found.difference + half}
    return told | {"n": found.pairs, "delta": found.difference, **ends, "verdict": verdict}
