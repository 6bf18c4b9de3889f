"""The table of a study in the grid: the cells that `archlab report` prints, each with the number that it sorts by."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import dash_ag_grid as dag

from archlab.dashboards.parts import to_trial
from archlab.dashboards.words import marked, pretty, shown
from archlab.search.formatting.tables import Block, Cell

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison

MOST_ROWS = 60  # a longer table scrolls by itself
VERDICTS = (
    *("baseline", "better", "worse", "within noise", "equivalent", "undecided", "diverged", "left out"),
    *("other objective", "other test text", "lossy tokenizer", "incomplete", "too few seeds", "depends on the recipe"),
)


@dataclass(frozen=True)
class Heading:
    """How a column of the report is headed here, and how wide it is at least (pixels)."""

    title: str
    tip: str
    width: int


HEADINGS = {
    "variant": Heading("Variant", "Click a heading to sort; the baseline's row is shaded", 124),
    "lr": Heading("Rate", "Learning rate: the best on validation. † lies at the edge of those tried", 78),
    "n": Heading("n", "Complete seeds", 44),
    "perplexity": Heading("Perplexity ↓", "Test perplexity, mean over seeds ± what the legend says", 154),
    "loss": Heading("Loss ↓", "Test loss, mean over seeds, nats per token", 84),
    "bits": Heading("Bits/byte ↓", "Test bits per byte; compares across tokenizers", 94),
    "bytes": Heading("Bytes/tok", "Bytes of test text per token of the variant's tokenizer", 88),
    "delta": Heading("Δ loss", "Test loss minus that of the baseline; below zero is better", 86),
    "interval": Heading("95% interval", "Of the difference; all intervals of the table hold together", 150),
    "verdict": Heading("Verdict", "Whether the difference leaves the noise", 116),
    "probe": Heading("Probe", "Validation loss by the screen's recipe, and its rank among all variants", 108),
    "trials": Heading("Trials", "What became of those that are not complete, and what was reused", 150),
    "params": Heading("Params", "Parameters of the model", 76),
    "active": Heading("Active", "Parameters that one token meets", 76),
    "load": Heading("Max load", "Load of the busiest expert on test: 1 where all are used alike", 84),
    "mismatch": Heading("Match", "How far the parameters are from those they were matched to", 74),
    "flops": Heading("FLOPs/tok", "Model FLOPs per token", 88),
    "speed": Heading("Tokens/s", "Training speed on the machine that ran it", 80),
    "memory": Heading("Memory", "The most memory that training took, mean over seeds", 92),
    "cache": Heading("Cache/tok", "What decoding keeps of each token", 88),
}
_AROUND = 22  # pixels beside the text of a cell
_WORDS = ("variant", "verdict", "trials")  # columns whose cells are words in the rows of trials
OF_TRIAL = {
    "lr": "lr",
    "perplexity": "test_perplexity",
    "loss": "test_loss",
    "bits": "test_bits_per_byte",
    "speed": "tokens_per_s",
    "memory": "peak_memory_bytes",
}
"""Which column of the trials a column of the table sorts a variant's own trials by."""


def rows(block: Block, comparison: Comparison, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row per variant: `text` as printed, `number` to sort by (None: there is none), each by the column's field."""
    baselines, found = set(comparison.table["baseline"]), []
    for i, name in enumerate(block.columns[0].values):
        row = {
            "id": name,
            "baseline": name in baselines,
            "swatch": {"--swatch": swatch(name, comparison.baseline, colours)},
            "text": {field_of(column.key): shown(column.cells[i], column) for column in block.columns},
            "number": {field_of(column.key): column.values[i] for column in block.columns},
        }
        found.append(row | ({"best": True} if any(column.cells[i].strong for column in block.columns) else {}))
    return found


def swatch(variant: str, baseline: str, colours: Mapping[str, str]) -> str:
    """A variant's colour as CSS; a dark page turns it round, as it does with figures."""
    return "var(--baseline)" if variant == baseline else colours.get(variant, "var(--faint)")


def legend(block: Block) -> str:
    """What the marks of the table mean."""
    text = marked(block.legend)
    return text[:1].upper() + text[1:]


def heading(key: str, header: str) -> Heading:
    """How a column of the table is headed, by its key and what the report calls it."""
    if key == "delta" and "nats" not in header:
        return replace(HEADINGS[key], title=header, tip="That of the baseline taken away; below zero is better")
    if key in HEADINGS:
        return HEADINGS[key]
    kind, _, name = key.partition(".")
    if kind == "component":
        return Heading(header, f"Whether the variant has {name}", 84)
    if kind == "varied":
        return Heading(name.rpartition(".")[2], name, 150)
    return Heading(header, name or header, 140)


def field_of(key: str) -> str:
    """A name that the grid's expressions can spell, and no other column has."""
    return "c_" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in key)


def columns(block: Block) -> list[dict[str, Any]]:
    """The grid's columns, in the report's order."""
    found = []
    for column in block.columns:
        widest = max((len(cell.text) for cell in column.cells), default=0)
        own = definition(column.key, heading(column.key, column.header), column.align == "r", widest)
        if column.align == "c":
            own |= {"headerClass": "cell-tick", "cellClass": "cell-tick"}
        if column.key == "perplexity":
            own["cellClassRules"] = {"cell-best": "params.data.best"}
        if column.key == "variant":
            own |= names(cell.text for cell in column.cells)
        if column.key == "verdict":
            own |= badges(VERDICTS)
        found.append(own)
    return found


def names(shown: Iterable[str]) -> dict[str, Any]:
    """What makes a column that of the names of variants: as wide as lets each of them stand on two lines, in bounds. A
    name that is longer still is cut short, and whole in its tooltip."""
    own = list(shown)
    letters = next((each for each in range(18, 27) if all(len(wrap(name, each)) <= 2 for name in own)), 27)
    width = max(_AROUND + 12 + round(7.8 * min(letters, max(map(len, own), default=0))), 124)
    return {
        "pinned": "left",
        "flex": None,
        "width": width,
        "minWidth": min(width, 150),
        "cellRenderer": "Link",
        "cellStyle": {"function": "params.data.swatch"},
        "cellClass": "cell-variant",
        "tooltipValueGetter": {"function": f"params.data.text.{field_of('variant')}"},
    }


def definition(key: str, head: Heading, right: bool = True, widest: int | None = None) -> dict[str, Any]:
    """A column of rows {text: {field: as shown}, number: {field: to sort by, None where there is none}}, as wide as its
    heading says, or less where the words of that and the `widest` cell (in letters) need less."""
    field = field_of(key)
    parts = [part + "_" for part in head.title.split("_")]  # a heading may be broken there
    needed = _AROUND + max(7.6 * (max(map(len, parts)) - 1), 8.2 * (widest or 0))
    least = head.width if widest is None else min(head.width, round(needed))
    return {
        "colId": field,
        "headerName": head.title.replace("_", "_\N{ZERO WIDTH SPACE}"),
        "wrapHeaderText": True,
        "headerTooltip": head.tip,
        "valueGetter": {"function": f"params.data.number.{field}"},
        "valueFormatter": {"function": f"params.data.text.{field}"},
        "comparator": {"function": "missingLast"},
        "width": least,
        "minWidth": least,
        "flex": least,
        **({"type": "rightAligned"} if right else {}),
    }


def badges(values: Iterable[str]) -> dict[str, Any]:
    """What makes the cells of a column badges, coloured by their values."""
    rules = {f"verdict-{value.replace(' ', '-')}": f"params.value == '{value}'" for value in values}
    return {"cellClass": "cell-verdict", "cellClassRules": rules}


def sorted_by(definitions: list[dict[str, Any]], asked: str) -> list[dict[str, Any]]:
    """The columns, those that an address sorts by sorted: fields in order, `-` before one that falls."""
    order = [each for each in asked.split(",") if each]
    for column in definitions:
        for place, each in enumerate(order):
            if each.lstrip("-") == column["colId"]:
                column |= {"initialSort": "desc" if each.startswith("-") else "asc", "initialSortIndex": place}
    return definitions


def with_trials(
    found: list[dict[str, Any]],
    trials: Mapping[str, list[tuple[dict[str, Any], dict[str, Cell]]]],
    opened: Collection[str],
    study: str,
) -> list[dict[str, Any]]:
    """The rows of variants, each that is open followed by its own trials."""
    shown = []
    for row in found:
        shown.append(row | {"open": row["id"] in opened})
        for trial, cells in trials.get(row["id"], []) if row["id"] in opened else ():
            texts = {field_of(key): cell.text if key in _WORDS else pretty(cell.text) for key, cell in cells.items()}
            numbers = {field_of(key): trial[name] for key, name in OF_TRIAL.items()}
            numbers = {field: value if math.isfinite(value) else None for field, value in numbers.items()}
            shown.append(
                {
                    "id": f"{row['id']}/{trial['key']}",
                    "parent": row["id"],
                    "trial": True,
                    "left_out": not trial["reported"],
                    "href": to_trial(trial["key"], study),
                    "swatch": row["swatch"],
                    "text": texts,
                    "number": texts | numbers,
                }
            )
    return shown


_EDGE_MOVES = ("firstDataRendered", "gridSizeChanged", "displayedColumnsWidthChanged", "bodyScroll")
"""Events of AG Grid after which other columns may lie beyond the right edge."""

TICKS = {
    "rowSelection": {
        "mode": "multiRow",
        "headerCheckbox": False,
        "enableClickSelection": False,
        "isRowSelectable": {"function": "params.data.parent === undefined"},
        "hideDisabledCheckboxes": True,
    },
    "selectionColumnDef": {"pinned": "left", "width": 44, "sortable": False, "resizable": False},
}
"""Options of a grid whose rows can be ticked."""


def grid(
    found: list[dict[str, Any]],
    definitions: list[dict[str, Any]],
    name: str = "table",
    room: int = 0,
    more: Mapping[str, Any] = {},
    ticked: Sequence[str] = (),
) -> dag.AgGrid:
    """The grid: the baseline's row marked, no pages, as tall as its rows as long as these, with `room` for those that
    a reader may open, are few. Any but the overview's tells its order to the store `<name>-sort`. `more` are options
    of AG Grid's, `ticked` the ids of rows that are."""
    whole = len(found) + room <= MOST_ROWS
    options = {
        "domLayout": "autoHeight" if whole else "normal",
        "theme": {"function": "themeQuartz"},
        "rowHeight": 42,
        "headerHeight": 40,
        "suppressCellFocus": True,
        "enableCellTextSelection": True,
        "tooltipShowDelay": 300,
        "suppressMovableColumns": True,
        "animateRows": False,  # rows that a filter takes away would stay for 0.4 s
        "postSortRows": {"function": "seedsBelow(params)"},
        **more,
    }
    sorting = {"sortable": True, "resizable": True, "suppressHeaderMenuButton": True}
    states = {"row-baseline": "baseline", "row-pinned": "pinned", "row-trial": "trial", "row-left-out": "left_out"}
    return dag.AgGrid(
        id=name,
        rowData=found,
        columnDefs=definitions,
        defaultColDef={**sorting, "sortingOrder": ["asc", "desc", None]},
        getRowId="params.data.id",
        rowClassRules={name: f"params.data.{state}" for name, state in states.items()},
        dashGridOptions=options,
        style={"height": None if whole else "720px", "width": "100%"},
        className="paper-table",
        **({"selectedRows": {"ids": list(ticked)}} if ticked else {}),
        eventListeners={each: [f"tellEdge(params, '{name}')"] for each in _EDGE_MOVES}
        | ({} if name == "table" else {"sortChanged": [f"tellSort(params, '{name}-sort')"]}),
    )
