"""The table of a study in the grid: the cells that `archlab report` prints, each with the number that it sorts by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dash_ag_grid as dag

from search.comparison import Comparison
from search.render.blocks import Column, build_page

MOST_ROWS = 60  # a longer table scrolls by itself
MINUS = "\N{MINUS SIGN}"
VERDICTS = (
    *("baseline", "better", "worse", "within noise", "equivalent", "undecided", "diverged"),
    *("other objective", "other test text", "lossy tokenizer", "incomplete", "too few seeds"),
)


@dataclass(frozen=True)
class Heading:
    """How a column of the report is headed here: `number` is the column of the comparison that it sorts by."""

    title: str
    tip: str
    width: int
    number: str | None = None


HEADINGS = {
    "variant": Heading("Variant", "Click a heading to sort; the baseline's row is shaded", 124, "variant"),
    "lr": Heading("Rate", "Learning rate: the best on validation. † lies at the edge of those tried", 78, "lr"),
    "n": Heading("n", "Complete seeds", 44, "n"),
    "perplexity": Heading(
        "Perplexity ↓", "Test perplexity, mean ± standard deviation over seeds", 128, "perplexity_mean"
    ),
    "bits/byte": Heading("Bits/byte ↓", "Test bits per byte; compares across tokenizers", 94, "bits_per_byte_mean"),
    "Δ": Heading("Δ loss", "Test loss minus that of the baseline; below zero is better", 80, "delta"),
    "95% interval": Heading("95% interval", "Of Δ loss; all intervals of the table hold together", 150, "delta"),
    "verdict": Heading("Verdict", "Whether Δ loss leaves the noise", 116, "verdict"),
    "params": Heading("Params", "Parameters of the model", 76, "parameters"),
    "active": Heading("Active", "Parameters that one token meets", 76, "active_parameters"),
    "max load": Heading(
        "Max load", "Load of the busiest expert on test: 1 where all are used alike", 84, "router_load_max"
    ),
    "mismatch": Heading("Match", "How far the parameters are from those they were matched to", 74, "mismatch"),
    "FLOPs/token": Heading("FLOPs/tok", "Model FLOPs per token", 88, "flops_per_token"),
    "tokens/s": Heading("Tokens/s", "Training speed on the machine that ran it", 80, "tokens_per_s"),
}


def rows(comparison: Comparison, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row per variant: `text` as printed, `number` to sort by (None: there is none), each by the column's field."""
    records = comparison.table.to_dict("records")
    columns = build_page(comparison).blocks[0].columns
    found = []
    for i, record in enumerate(records):
        name = record["variant"]
        row: dict[str, Any] = {
            "id": name,
            "baseline": name == record["baseline"],
            "swatch": {"--swatch": swatch(name, comparison.baseline, colours)},
            "text": {},
            "number": {},
        }
        for column in columns:
            field, heading = _field(column), _heading(column)
            cell = column.cells[i]
            row["text"][field] = pretty(cell.text)
            row["number"][field] = _plain(record[heading.number]) if heading.number else cell.text
            if cell.strong:
                row["best"] = True
        found.append(row)
    return found


def swatch(variant: str, baseline: str, colours: Mapping[str, str]) -> str:
    """A variant's colour as CSS; the baseline's is dark on light and light on dark."""
    return "var(--baseline)" if variant == baseline else colours[variant]


def columns(comparison: Comparison) -> list[dict[str, Any]]:
    """The grid's columns, in the report's order."""
    return [_definition(column) for column in build_page(comparison).blocks[0].columns]


def legend(comparison: Comparison) -> str:
    """What the marks of the table mean."""
    text = build_page(comparison).blocks[0].legend.replace("* best", "bold: best").replace("^ rate", "† rate")
    return text[:1].upper() + text[1:]


def pretty(text: str) -> str:
    """A printed cell with a true minus sign and the edge mark of a paper."""
    if text[:1] in "-[+" or text[:1].isdigit():
        return text.replace("-", MINUS).replace("^", " †").replace(f"e{MINUS}", "e-")
    return text


def _heading(column: Column) -> Heading:
    for start, heading in HEADINGS.items():
        if column.header == start or column.header.split(" ")[0] == start:
            return heading
    return Heading(column.header, f"Whether the variant has {column.header}", 84)


def _field(column: Column) -> str:
    """A name that the grid's expressions can spell."""
    return "c_" + "".join(c if c.isalnum() else "_" for c in column.header)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _definition(column: Column) -> dict[str, Any]:
    field, heading = _field(column), _heading(column)
    found: dict[str, Any] = {
        "colId": field,
        "headerName": heading.title,
        "headerTooltip": heading.tip,
        "valueGetter": {"function": f"params.data.number.{field}"},
        "valueFormatter": {"function": f"params.data.text.{field}"},
        "minWidth": heading.width,
        "flex": heading.width,
    }
    if column.align == "r":
        found["type"] = "rightAligned"
    if heading.number == "perplexity_mean":
        found["cellClassRules"] = {"cell-best": "params.data.best"}
    if heading.number == "variant":
        found |= {
            "pinned": "left",
            "flex": None,
            "width": heading.width,
            "cellStyle": {"function": "params.data.swatch"},
            "cellClass": "cell-variant",
        }
    if heading.number == "verdict":
        rules = {f"verdict-{verdict.replace(' ', '-')}": f"params.value == '{verdict}'" for verdict in VERDICTS}
        found |= {"cellClass": "cell-verdict", "cellClassRules": rules}
    return found


def grid(found: list[dict[str, Any]], definitions: list[dict[str, Any]]) -> dag.AgGrid:
    """The grid: the baseline's row marked, no pages, as tall as its rows as long as these are few."""
    options = {
        "domLayout": "autoHeight" if len(found) <= MOST_ROWS else "normal",
        "theme": {"function": "themeQuartz"},
        "rowHeight": 42,
        "headerHeight": 40,
        "suppressCellFocus": True,
        "enableCellTextSelection": True,
        "tooltipShowDelay": 300,
        "suppressMovableColumns": True,
    }
    sorting = {"sortable": True, "resizable": True, "suppressHeaderMenuButton": True}
    return dag.AgGrid(
        id="table",
        rowData=found,
        columnDefs=definitions,
        defaultColDef={**sorting, "sortingOrder": ["asc", "desc", None]},
        getRowId="params.data.id",
        rowClassRules={"row-baseline": "params.data.baseline"},
        dashGridOptions=options,
        style={"height": None if len(found) <= MOST_ROWS else "720px", "width": "100%"},
        className="paper-table",
    )
