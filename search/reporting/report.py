"""A comparison as text: what `archlab report` prints, for terminals, Markdown, papers and programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.formatting.tables import Block, Cell, Column, Page, number, printable
from archlab.search.reporting.latex import latex
from archlab.search.reporting.main_table import narrowed, table_page
from archlab.search.reporting.markdown import markdown
from archlab.search.reporting.page import page_of
from archlab.search.reporting.shape import Shape
from archlab.search.reporting.text import text
from archlab.search.sections.tune.blocks import _curve, tuning_block

if TYPE_CHECKING:
    import pandas as pd

    from archlab.search.results.comparison import Comparison


def report(comparison: Comparison, format: str = "text", shape: Shape | None = None) -> str:
    """The study's table in "text", "md", "latex", "csv" or "json". Raises ValueError for another format.

    text (at most 110 columns), md and latex hold the table, the learning-rate curve, a search's best trials, and below
    them how the intervals were made, what the table could have resolved, notes and provenance. csv holds the table
    alone with what else was measured and fitted to a ladder, json every frame; the numbers of both are exact. With a
    `shape` it is the table alone, in that shape, with what stands below it; csv and json then leave out rows alone.
    """
    if format not in FORMATS:
        near = get_close_matches(format, FORMATS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"'{format}' is not a report format{hint} ({', '.join(FORMATS)})")
    if shape is None:
        return FORMATS[format](comparison)
    page = table_page(comparison, shape)
    return PAGES[format](page) if format in PAGES else FORMATS[format](narrowed(comparison, shape.where))


def to_plain(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values: frames as lists of rows, missing numbers as None."""
    return {
        "study": comparison.study,
        "question": comparison.question,
        "baseline": comparison.baseline,
        "table": _rows(comparison.table),
        "effects": _rows(comparison.effects),
        "rates": _rows(comparison.rates),
        "tuning": _rows(comparison.tuning),
        "trials": [row | {"folder": _below_store(row["folder"])} for row in _rows(comparison.trials)],
        "search": _rows(comparison.search),
        "rungs": _rows(comparison.rungs),
        "scaling": _rows(comparison.scaling),
        "measures": _rows(comparison.measures),
        "curves": _curves(comparison.curves),
        "grids": _grids(comparison.grids),
        "searched": _plain(comparison.searched),
        "rivals": _rows(comparison.rivals),
        "screen": _rows(comparison.screen),
        "screened": _plain(comparison.screened),
        "paper": _plain(comparison.paper),
        "published": _rows(comparison.published),
        "agreement": _plain(comparison.agreement),
        "claims": _rows(comparison.claims),
        "noise": _plain(comparison.noise),
        "notes": list(comparison.notes),
        "cost": _plain(comparison.cost),
        "provenance": _plain(comparison.provenance),
    }


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [_plain(row) for row in frame.to_dict("records")]


def _below_store(folder: str | None) -> str | None:
    """The folder of a trial as it is called below a store: where that lies is the machine's own."""
    return "/".join(Path(folder).parts[-3:]) if folder else folder


def _curves(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per variant and curve, with lists along it."""
    along = ["x", "mean", "std", "targets"]
    return [
        {"variant": variant, "measure": measure, "name": name, "n": int(curve["n"].iloc[0])}
        | {column: _plain(curve[column].tolist()) for column in along}
        for (variant, measure, name), curve in frame.groupby(["variant", "measure", "name"], sort=False)
    ]


def _grids(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per variant and grid, with its labels and a list of lists."""
    found = []
    for (variant, measure, name), cells in frame.groupby(["variant", "measure", "name"], sort=False):
        first = cells.iloc[0]
        told: dict[str, Any] = {
            "variant": variant,
            "measure": measure,
            "name": name,
            "n": int(first["n"]),
            "cases": int(first["cases"]),
        }
        told |= {"row": first["row"], "column": first["column"]}
        told |= {"rows": cells["y"].drop_duplicates().tolist(), "columns": cells["x"].drop_duplicates().tolist()}
        wide = len(told["columns"])
        for kind in ("mean", "std"):
            flat = _plain(cells[kind].tolist())
            told[kind] = [flat[start : start + wide] for start in range(0, len(flat), wide)]
        found.append(told)
    return found


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(comparison: Comparison) -> str:
    return json.dumps(to_plain(comparison), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _csv(comparison: Comparison) -> str:
    """The table, a column per component and per number that was measured; a missing number is an empty field.

    `mismatch` needs a `match`, and active parameters and the load of experts a model that has some."""
    rows = _rows(comparison.table)
    names = list(dict.fromkeys(name for row in rows for name in row["components"]))
    unmatched = comparison.table["mismatch"].isna().all()
    dense = (comparison.table["active_parameters"] == comparison.table["parameters"]).all()
    left_out = {"components", "varied", *(["mismatch"] if unmatched else [])}
    left_out |= {"active_parameters", "router_load_max"} if dense else set()
    plain = [column for column in comparison.table.columns if column not in left_out]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    measures = {(row["variant"], row["name"]): row for row in _rows(comparison.measures)}
    measured = list(dict.fromkeys(name for _, name in measures))
    heads = [f"measure.{name}_{kind}" for name in measured for kind in ("mean", "std")]
    sized = [column for column in comparison.rungs.columns if column not in ("variant", "parameters", "loss")]
    rungs = {row["variant"]: row for row in _rows(comparison.rungs)}
    fits = [row for row in _rows(comparison.scaling) if row["name"] and row["at"] is None]
    constants = list(dict.fromkeys((row["of"], row["law"], row["name"]) for row in fits))
    fitted = {(row["series"], row["of"], row["law"], row["name"]): row for row in fits}
    fitted_heads = [f"scaling.{'.'.join(each)}{end}" for each in constants for end in ("", "_low", "_high")]
    ladder = [*(f"ladder.{name}" for name in sized), *fitted_heads] if rungs else []
    writer.writerow([*plain, *(f"component.{name}" for name in names), *heads, *ladder])
    for row in rows:
        own = [measures.get((row["variant"], name), {}) for name in measured]
        numbers = [each.get(kind) for each in own for kind in ("mean", "std")]
        has = [bool(row["components"].get(name)) for name in names]
        rung = rungs.get(row["variant"], {})
        mine = [fitted.get((rung["series"], *each), {}) for each in constants] if rung else []
        scaling = [each.get(kind) for each in mine for kind in ("value", "low", "high")]
        told = [*(rung[name] for name in sized), *scaling] if rung else []
        writer.writerow([*(row[column] for column in plain), *has, *numbers, *told])
    return out.getvalue()


PAGES: dict[str, Callable[[Page], str]] = {"text": text, "md": markdown, "latex": latex}
FORMATS: dict[str, Callable[[Comparison], str]] = {
    "text": lambda comparison: text(build_page(comparison)),
    "md": lambda comparison: markdown(build_page(comparison)),
    "latex": lambda comparison: latex(build_page(comparison)),
    "csv": _csv,
    "json": _json,
}


def build_page(comparison: Comparison) -> Page:
    """All that text, Markdown and LaTeX print."""
    # all are made of what is defined here
    from archlab.search.reporting.main_table import main_block
    from archlab.search.sections.design.blocks import effect_blocks
    from archlab.search.sections.evaluate.blocks import measure_blocks
    from archlab.search.sections.ladder.blocks import scaling_blocks
    from archlab.search.sections.published.blocks import published_blocks
    from archlab.search.sections.screen.blocks import screen_blocks
    from archlab.search.sections.search.blocks import search_blocks

    blocks = [main_block(comparison), *effect_blocks(comparison), *published_blocks(comparison)]
    if len(comparison.rates):
        blocks.append(_curve(comparison))
    if len(comparison.tuning):
        blocks.append(tuning_block(comparison))
    blocks += [*screen_blocks(comparison), *search_blocks(comparison)]
    if len(comparison.domains):
        blocks.append(_by_domain(comparison))
    blocks += scaling_blocks(comparison)
    blocks += measure_blocks(comparison)
    return page_of(comparison, blocks)


def _by_domain(comparison: Comparison) -> Block:
    """The test perplexity of each variant in each domain of a mixture."""
    frame = comparison.domains.pivot(index="variant", columns="domain", values="perplexity")
    variants = list(dict.fromkeys(comparison.domains["variant"]))
    columns = [Column("variant", [Cell(printable(name)) for name in variants], "l")]
    for domain in dict.fromkeys(comparison.domains["domain"]):
        cells = [Cell(number(float(frame.loc[name, domain]), ".4g")) for name in variants]
        columns.append(Column(printable(str(domain)), cells))
    tokens = comparison.provenance["tokens"][0]
    drawn = [
        f"{row['name']} {row['share']:.0%} of the rows, {tokens * row['share'] / row['train_tokens']:.2g} epochs"
        for row in comparison.provenance["data"].get("domains", ())
    ]
    return Block("Test perplexity by domain", columns, printable(f"{comparison.baseline}: {'; '.join(drawn)}"))
