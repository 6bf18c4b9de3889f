"""One study: what it asks, what it found, its table with all that a reader must know beneath it, and its curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dash
from dash import Input, Output, State, ctx, dcc, html
from dash.development.base_component import Component

from archlab.dashboards import figures, table, theme, words
from archlab.dashboards.library import Library, Study
from archlab.dashboards.lines import leading
from archlab.dashboards.pages.curves import Zoom, drawn, remember_zoom
from archlab.dashboards.pages.shell import CURVES, OVERVIEW, keep_address, led, pulse, register_refresh, shell
from archlab.dashboards.pages.study_parts import CONTROLS, controls, elsewhere, head, notes, variants
from archlab.dashboards.parts import command_line, graph, guarded, section
from archlab.dashboards.view import View, read_view
from archlab.search.reporting.main_table import main_block


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>` and its callbacks to an app."""

    dash.register_page("study", path_template="/study/<name>", title=lambda name="": f"{name} · archlab", layout=layout)

    outputs = {
        "head": Output("study-head", "children"),
        "curves": Output("curves", "figure"),
        "note": Output("curves-note", "children"),
        "zoom": Output("curves-zoom", "data"),
        "rows": Output("table", "rowData"),
        "columns": Output("table", "columnDefs"),
        "notes": Output("table-notes", "children"),
        "forest": Output("forest", "figure"),
        "rates": Output("rates", "figure"),
    }
    inputs = [Input(f"curves-{key}", "value") for key in CONTROLS]
    register_refresh(app, library, OVERVIEW, "study", _refresh, outputs, inputs, [State("curves-zoom", "data")])
    keep_address(app, OVERVIEW, "study-query")
    remember_zoom(app, "curves", "curves-zoom")


def _refresh(study: Study, seen: str, *values: Any) -> dict[str, Any]:
    """What the page shows by now; a choice begins with the whole of the curves."""
    *chosen, zoom = values
    view, shown = replace(View(), **dict(zip(CONTROLS, chosen, strict=True))), leading(study)
    found: dict[str, Any] = {}
    if ctx.triggered_id != "study-tick":
        found, zoom = {"zoom": {}, "query": view.query()}, {}
    found["curves"], found["note"] = _curves(study, view, zoom, shown)
    if study.version != seen:
        found["head"] = head(study)
    if study.version.partition(":")[0] != seen.partition(":")[0]:
        found["rows"], found["columns"] = _rows(study)
        found |= {"notes": notes(study), "forest": _forest(study, shown), "rates": _rate_curve(study, shown)}
    return found


@guarded
def layout(library: Library, name: object = "", **query: Any) -> Component:
    """The page of one study, in the view that the address asks for."""
    view, notices = read_view(query, CONTROLS)
    study = library.study(str(name))
    with library.reading():
        return _page(study, view, notices, str(library.root))


def _page(study: Study, view: View, notices: list[str], root: str) -> Component:
    rows, columns = _rows(study)
    shown = leading(study)
    curves, note = _curves(study, view, {}, shown)
    default = root.endswith("/.archlab")
    more = led(study.name, CURVES.step, view.said())
    links = [
        html.A(f".{ending}", href=f"/download/{study.name}.{ending}", className="download")
        for ending in ("md", "csv", "tex", "json")
    ]
    tuned = bool(study.record.get("tune"))
    left_out = html.Div(_left_out(study, shown), className="muted small")
    height = max(300, 110 + 34 * len(shown))
    pair = [section("Differences", graph("forest", _forest(study, shown), height), left_out)]
    pair.append(
        section(
            "Learning rate",
            graph("rates", _rate_curve(study, shown), height),
            id=None if tuned else "rates-hidden",
        )
    )
    return shell(
        study,
        OVERVIEW,
        dcc.Store(id="curves-zoom", data={}),
        *pulse("study", study, OVERVIEW, notices),
        html.Div(head(study), id="study-head"),
        section(
            "Results",
            table.grid(rows, columns),
            html.Div(notes(study), id="table-notes", className="notes"),
            aside=["Download ", *links],
        ),
        html.Div(pair, className="pair" if tuned else "pair pair-single"),
        section(
            "Curves",
            controls(view),
            graph("curves", curves, 430 + 8 * max(0, len(shown) - 8)),  # the legend takes its part of it
            html.Div(note, id="curves-note", className="muted small"),
            aside=dcc.Link("Filters, scales and single trials", href=more, id="to-curves-below"),
        ),
        section("Variants", variants(study, _colours(study))),
        section(
            "Continue",
            html.P("Trains what is missing, and nothing twice.", className="muted small"),
            command_line(words.command(study, default, root)),
            html.P(elsewhere(Path(root), study.name), className="muted small"),
        ),
        said=view.said(),
    )


def _curves(study: Study, view: View, zoom: Zoom, shown: list[str]) -> tuple[figures.Figure, str]:
    """The curves of these variants, and what must be said about them."""
    said = _left_out(study, shown)
    figure, note = drawn(study, view, zoom, variants=shown if said else None)
    return figure, f"{said} {note}" if said else note


def _left_out(study: Study, shown: list[str]) -> str | None:
    """What the figures of this page do not draw."""
    if len(shown) == len(study.variants):
        return None
    ranked = study.comparison is not None and study.comparison.table["loss_mean"].notna().any()
    which = "the best and their baselines" if ranked else "what trains first and its baselines"
    counted = f"Drawn are {len(shown)} of {len(study.variants)} variants, {which}"
    return f"{counted}; the table and the page of curves have all."


def _rows(study: Study) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if study.comparison is None:
        return [], []
    block = main_block(study.comparison)
    return table.rows(block, study.comparison, _colours(study)), table.columns(block)


def _forest(study: Study, shown: list[str]) -> figures.Figure:
    if study.comparison is None:
        return figures.empty(study.problem or "")
    rows = [
        row
        for row in study.comparison.table.to_dict("records")
        if row["variant"] != row["baseline"] and row["variant"] in shown
    ]
    return figures.forest(rows, _colours(study), study.comparison.noise["unit"])


def _rate_curve(study: Study, shown: list[str]) -> figures.Figure:
    if study.comparison is None:
        return figures.empty(study.problem or "")
    rows = [row for row in study.comparison.rates.to_dict("records") if row["along"] and row["variant"] in shown]
    return figures.rate_curve(rows, _colours(study), study.comparison.baseline)


def _colours(study: Study) -> dict[str, str]:
    return theme.colours(study.variants, study.record["baseline"])
