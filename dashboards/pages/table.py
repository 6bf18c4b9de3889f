"""The ablation table: which columns, which error and which rows a reader wants, and the trials below each variant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component
from werkzeug.datastructures import MultiDict

from archlab.dashboards import table, theme
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.shell import (
    COMPARE,
    MOST_BESIDE,
    TABLE,
    address,
    downloads,
    filter_input,
    keep_address,
    notice,
    pulse,
    register_page,
    register_refresh,
    shell,
)
from archlab.dashboards.parts import block_table, choice, guarded, section
from archlab.search.formatting.filters import BadFilter
from archlab.search.formatting.tables import Block, Page
from archlab.search.reporting.main_table import column_names, main_block, table_page, trial_cells
from archlab.search.reporting.shape import Shape, read_shape
from archlab.search.sections.published.told import ToldOfPublished

TICKED = """(rows, seen) => {
  const names = rows && rows.ids ? rows.ids : (rows || []).map(row => row.id);
  const few = names.slice(0, MOST), asked = few.map(name => `variants=${encodeURIComponent(name)}`).join('&');
  const told = names.length > MOST ? `${names.length} are ticked; MOST compare` : `Compare ${names.length} variants`;
  return [`/study/${seen[0]}/compare?${asked}`, names.length < 2 ? '' : told, !names.length, !names.length];
}""".replace("MOST", str(MOST_BESIDE))
"""Where the variants that are ticked stand beside each other, what the link there says, and which buttons are off."""
ERROR_NAMES = {"std": "Std. deviation", "se": "Std. error", "interval": "95% interval"}
MOST_OPEN_ROWS = 40
_BUTTONS = ("ablation-all", "ablation-pin", "ablation-hide", "ablation-unhide")


@dataclass(frozen=True)
class Wanted:
    """What an address asks of the table; every field is a key of it. `sort` has fields of the grid, `-` for down;
    `opened`, `pinned` and `hidden` are variants."""

    shape: Shape = field(default_factory=Shape)
    sort: str = ""
    opened: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    def query(self) -> dict[str, str | list[str]]:
        """The keys that are not at their defaults; those of rows come again for each of them."""
        shape = self.shape
        said: dict[str, str | list[str]] = {"q": shape.where, "err": shape.error if shape.error != "std" else ""}
        said |= {"cols": "" if shape.columns is None else ",".join(shape.columns) or "variant"}
        said |= {"sort": self.sort, "open": [*self.opened], "pin": [*self.pinned], "hide": [*self.hidden]}
        return {key: value for key, value in said.items() if value}


def wanted(query: Mapping[str, object], study: Study) -> tuple[Wanted, list[str]]:
    """What an address asks for, and a notice for each value that does not exist; unknown keys are ignored."""
    given = {key: str(query.get(key, "")) for key in ("q", "err", "cols", "sort")}
    names = {} if study.comparison is None else column_names(study.comparison)
    shape, wrong = read_shape(names, given["err"], given["cols"] if names else "", given["q"])
    rows = {}
    for key in ("open", "pin", "hide"):
        every = query.getlist(key) if isinstance(query, MultiDict) else query.get(key)
        asked_for = every if isinstance(every, list) else [every]
        rows[key] = tuple(each for each in study.variants if each in asked_for)
        lost = [each for each in asked_for if each and each not in study.variants]
        wrong += [f"{key} {str(each)[:40]!r} is no variant" for each in lost]
    shape = replace(shape, variants=_besides(study, rows["hide"]))
    asked = Wanted(shape, given["sort"], rows["open"], rows["pin"], rows["hide"])
    return asked, [f"The address asks for what is not there: {each}." for each in wrong]


def _besides(study: Study, hidden: Collection[str]) -> tuple[str, ...] | None:
    """The variants that are not hidden, None where none is."""
    return tuple(each for each in study.variants if each not in hidden) if hidden else None


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/table` and its callbacks to an app."""
    register_page(TABLE, layout)

    outputs = {
        "rows": Output("ablation", "rowData"),
        "columns": Output("ablation", "columnDefs"),
        **{part: Output(f"ablation-{part}", "children") for part in ("notes", "problem", "files", "published")},
        "open": Output("ablation-open", "data"),
        "set": Output("ablation-set", "data"),
        "ticked": Output("ablation", "selectedRows"),
        "hidden": Output("ablation-unhide", "children"),
    }
    inputs = [
        *(Input(f"ablation-{key}", "value") for key in ("q", "err", "cols")),
        Input("ablation-sort", "data"),
        Input("ablation", "cellRendererData"),
        *(Input(f"ablation-{key}", "n_clicks") for key in ("all", "pin", "hide", "unhide")),
    ]
    states = [State("ablation-open", "data"), State("ablation-set", "data"), State("ablation", "selectedRows")]
    register_refresh(app, library, TABLE, "ablation", _refresh, outputs, inputs, states)
    keep_address(app, TABLE, "ablation-query")
    app.clientside_callback(
        TICKED,
        Output("ablation-compare", "href"),
        Output("ablation-compare", "children"),
        Output("ablation-pin", "disabled"),
        Output("ablation-hide", "disabled"),
        Input("ablation", "selectedRows"),
        State("ablation-seen", "data"),
    )


def _refresh(
    study: Study,
    seen: str,
    where: str | None,
    error: str,
    columns: list[str],
    sort: str | None,
    clicked: dict[str, Any] | None,
    *more: Any,
) -> dict[str, Any]:
    """What the page shows by now: only what a choice, a click or a tick has changed. `more` has the clicks on buttons,
    which rows are open, pinned and hidden, and which are ticked."""
    *_, opened, rows, ticked = more
    moved = TABLE.version(study) != seen  # also what a tick would bring is brought by whatever comes first
    if study.comparison is None:
        return {"notice": notice(study.problem or "")}
    if "ablation.cellRendererData" in ctx.triggered_prop_ids and clicked:
        name = clicked["value"]
        opened = [each for each in opened if each != name] if name in opened else [*opened, name]
    elif ctx.triggered_id == "ablation-all":
        opened = [] if opened else study.variants
    usual = [key for key, (_, standard) in column_names(study.comparison).items() if standard]
    chosen = None if columns == usual else tuple(columns)
    rows = _set(rows, str(ctx.triggered_id).removeprefix("ablation-"), _names(ticked))
    shape = Shape(error, chosen, where or "", _besides(study, rows["hide"]))
    asked = Wanted(shape, sort or "", tuple(opened), tuple(rows["pin"]), tuple(rows["hide"]))
    found: dict[str, Any] = {"open": opened, "set": rows, "hidden": _hidden(asked)}
    if ctx.triggered_id in ("ablation-pin", "ablation-hide"):
        found["ticked"] = []
    found["query"] = f"?{urlencode(asked.query(), doseq=True, safe=',')}" if asked.query() else ""
    try:
        block = main_block(study.comparison, asked.shape)
    except BadFilter as problem:
        return {**found, "problem": str(problem), "seen": no_update}
    found |= {"notes": _notes(study, asked, block), "problem": None, "files": _files(study, asked)}
    if moved:
        found["published"] = _published(study)
    if ctx.triggered_id not in ("ablation", "ablation-sort", "ablation-q", *_BUTTONS):
        found["columns"] = _columns(block, asked)
    if ctx.triggered_id == "ablation-sort" and not moved:
        return {**found, "notice": no_update}
    return {**found, "rows": _rows(study, block, asked)}


def _names(ticked: Any) -> list[str]:
    """The variants whose rows are ticked."""
    if isinstance(ticked, dict):
        return [*ticked.get("ids", ())]
    return [row["id"] for row in ticked or ()]


def _set(rows: dict[str, list[str]], pressed: str, ticked: list[str]) -> dict[str, list[str]]:
    """Which rows are pinned and hidden once a button was pressed: `pin` loosens rows that are all pinned."""
    pinned, hidden = rows["pin"], rows["hide"]
    if pressed == "pin" and ticked:
        loose = set(ticked) <= set(pinned)
        pinned = [each for each in pinned if each not in ticked] if loose else [*dict.fromkeys([*pinned, *ticked])]
    elif pressed == "hide":
        hidden = [*dict.fromkeys([*hidden, *ticked])]
    elif pressed == "unhide":
        hidden = []
    return {"pin": pinned, "hide": hidden}


def _hidden(asked: Wanted) -> str:
    return f"Show {len(asked.hidden)} hidden" if asked.hidden else ""


@guarded
def layout(library: Library, name: object = "", **query: Any) -> Component:
    """The page, in the shape that the address asks for."""
    study = library.study(str(name))
    if study.comparison is None:
        return shell(study, TABLE, notice(study.problem or ""), dcc.Interval(id="retry", interval=5000))
    asked, notices = wanted(query, study)
    problem, shown = None, asked
    try:
        block = main_block(study.comparison, asked.shape)
    except BadFilter as error:
        problem, shown = str(error), replace(asked, shape=replace(asked.shape, where=""))
        block = main_block(study.comparison, shown.shape)
    rows = _rows(study, block, shown)
    return shell(
        study,
        TABLE,
        dcc.Store(id="ablation-open", data=list(asked.opened)),
        dcc.Store(id="ablation-sort", data=asked.sort),
        dcc.Store(id="ablation-set", data={"pin": asked.pinned, "hide": asked.hidden}),
        *pulse("ablation", study, TABLE, notices),
        _controls(study, asked),
        html.Div(problem, id="ablation-problem", className="problem small", role="alert"),
        section(
            "Ablation table",
            table.grid(rows, _columns(block, asked), "ablation", MOST_OPEN_ROWS if len(rows) > 20 else 0, table.TICKS),
            html.Div(_notes(study, shown, block), id="ablation-notes", className="notes"),
            aside=html.Span(_files(study, asked), id="ablation-files"),
        ),
        html.Div(_published(study), id="ablation-published"),
        said=asked.query(),
    )


def _controls(study: Study, asked: Wanted) -> Component:
    names = column_names(study.comparison)
    usual = [key for key, (_, standard) in names.items() if standard]
    columns = [{"value": key, "label": table.heading(key, header).title} for key, (header, _) in names.items()]
    search = filter_input("ablation-q", asked.shape.where, "verdict=better lr>=0.002 state!=failed", "Filter rows")
    chosen = dmc.MultiSelect(
        id="ablation-cols",
        data=columns,
        value=usual if asked.shape.columns is None else list(asked.shape.columns),
        size="xs",
        searchable=True,
        clearable=False,
        className="columns",
        **{"aria-label": "Columns"},
    )
    error = choice("ablation-err", "±", ERROR_NAMES, asked.shape.error)
    buttons = [
        dmc.Button(text, id=f"ablation-{key}", size="compact-sm", variant="default", **told)
        for key, text, told in (
            ("all", "Show trials", {}),
            ("pin", "Pin", {"aria-label": "Pin or loosen the ticked rows"}),
            ("hide", "Hide", {"aria-label": "Hide the ticked rows"}),
        )
    ]
    unhide = dmc.Button(
        _hidden(asked), id="ablation-unhide", size="compact-sm", variant="subtle", className="unless-empty"
    )
    compare = dcc.Link("", id="ablation-compare", href=address(study.name, COMPARE.step))
    row = html.Div([search, error, *buttons, unhide, compare], className="controls")
    return html.Div([row, html.Details([html.Summary("Columns"), chosen], className="more")])


def _columns(block: Block, asked: Wanted) -> list[dict[str, Any]]:
    """The grid's columns; the first one opens rows, and those that the address sorts by are sorted."""
    found = table.columns(block)
    found[0] |= {"cellRenderer": "Opener", "equals": {"function": "neverEqual"}, "width": found[0]["width"] + 26}
    return table.sorted_by(found, asked.sort)


def _rows(study: Study, block: Block, asked: Wanted) -> list[dict[str, Any]]:
    colours = theme.colours(study.variants, study.record["baseline"])
    trials = trial_cells(study.comparison, asked.shape) if asked.opened else {}
    rows = [row | {"pinned": row["id"] in asked.pinned} for row in table.rows(block, study.comparison, colours)]
    return table.with_trials(rows, trials, asked.opened, study.name)


def _notes(study: Study, asked: Wanted, block: Block) -> list[Component]:
    count, every = len(block.columns[0].cells), len(study.comparison.table)
    left = f"{count} of {every} variants. " if count else "No variant matches the filter."
    found = legend_notes(table_page(study.comparison, asked.shape))
    return [html.P(left), *found] if count < every else found


def legend_notes(page: Page) -> list[Component]:
    """What a report says below its table: legend, method, notes and provenance."""
    legend, lines = f"{table.legend(page.blocks[0])}.", [html.P(line, className="method") for line in page.lines]
    listed = [html.Ul([html.Li(note) for note in page.notes])] if page.notes else []
    return [html.P(legend), *lines, *listed, html.P(page.provenance, className="provenance")]


def _published(study: Study) -> Component | None:
    """The table of a paper that the study reproduces, apart from ours."""
    blocks = [*ToldOfPublished().blocks(study.comparison)]
    return section("Published", *map(block_table, blocks), id="published") if blocks else None


def _files(study: Study, asked: Wanted) -> list[Any]:
    """The table as it is shown, to take along, and where its numbers come from."""
    kept = {key: value for key, value in asked.query().items() if key in ("q", "err", "cols", "hide")}
    query = f"?{urlencode(kept, doseq=True, safe=',')}" if kept else ""
    links = downloads(f"/download/{study.name}/table", ("tex", "md", "csv", "json"), query)
    origin = html.A("provenance", href=f"/download/{study.name}/provenance.json", className="download")
    return ["Download ", *links, origin]
