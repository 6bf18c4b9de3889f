"""One study: what it asks, what it found, its table with all that a reader must know beneath it, and its curves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component

from archlab.dashboards import figures, table, theme, words
from archlab.dashboards.library import Library, NotFound, Study
from archlab.dashboards.lines import leading
from archlab.dashboards.optuna_mount import pages_of
from archlab.dashboards.pages.actions import action_bar
from archlab.dashboards.pages.curves import NAMES, Zoom, draw_curves, remember_zoom
from archlab.dashboards.pages.notes import note_box
from archlab.dashboards.pages.run import tracker
from archlab.dashboards.pages.shell import (
    CURVES,
    OVERVIEW,
    downloads,
    keep_address,
    pulse,
    register_refresh,
    shell,
    view_address,
)
from archlab.dashboards.pages.table import legend_notes
from archlab.dashboards.parts import block_table, choice, command_line, graph, guarded, progress_bar, section
from archlab.dashboards.view import View, read_view
from archlab.search.reporting.findings import findings
from archlab.search.reporting.main_table import main_block, table_page
from archlab.search.reporting.shape import Shape
from archlab.search.results.told import sections_of
from archlab.search.store.store import StoreError

CONTROLS = ("metric", "x", "smooth", "trials")
"""What can be chosen of the curves here, by its key in the address."""


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>` and its callbacks to an app."""

    dash.register_page("study", path_template="/study/<name>", title=lambda name="": f"{name} · archlab", layout=layout)

    outputs = {
        "head": Output("study-head", "children"),
        "curves": Output("curves", "figure"),
        "note": Output("curves-note", "children"),
        "zoom": Output("curves-zoom", "data"),
        "first": Output("table-first", "children"),
        "rows": Output("table", "rowData"),
        "columns": Output("table", "columnDefs"),
        "notes": Output("table-notes", "children"),
        "forest": Output("forest", "figure"),
        "rates": Output("rates", "figure"),
    }
    inputs = [Input(f"curves-{key}", "value") for key in CONTROLS]
    register_refresh(app, library, OVERVIEW, "study", _refresh, outputs, inputs, [State("curves-zoom", "data")])
    keep_address(app, OVERVIEW, "study-query")

    @app.callback(
        Output("study-variants", "children"),
        Input("study-all", "n_clicks"),
        State("study-seen", "data"),
        prevent_initial_call=True,
    )
    def every(clicks: int | None, seen: list[str]) -> Any:
        try:
            study = library.study(seen[0])
        except (StoreError, NotFound):  # which the next tick says
            return no_update
        return _variants(study, study.variants) if clicks else no_update

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
        found["head"] = _head(study)
    moved = study.version.partition(":")[0] != seen.partition(":")[0]
    return {**found, **_results(study, shown)} if moved else found


@guarded
def layout(library: Library, name: object = "", **query: Any) -> Component:
    """The page of one study, in the view that the address asks for."""
    view, notices = read_view(query, CONTROLS)
    study = library.study(str(name))
    with library.reading():
        return _page(study, view, notices, str(library.root))


def _page(study: Study, view: View, notices: list[str], root: str) -> Component:
    shown = leading(study)
    found, (curves, note) = _results(study, shown), _curves(study, view, {}, shown)
    links = downloads(f"/download/{study.name}", ("md", "csv", "tex", "json"))
    tuned = bool(study.record.get("tune"))
    left_out = html.Div(_left_out(study, shown), className="muted small")
    height, rates = max(300, 110 + 34 * len(shown)), None if tuned else "rates-hidden"
    pair = [
        section("Differences", graph("forest", found["forest"], height), left_out),
        section("Learning rate", graph("rates", found["rates"], height), id=rates),
    ]
    controls = [choice(f"curves-{key}", *NAMES[key], getattr(view, key)) for key in CONTROLS]
    more = view_address(study.name, CURVES.step, view.said())
    return shell(
        study,
        OVERVIEW,
        dcc.Store(id="curves-zoom", data={}),
        *pulse("study", study, OVERVIEW, notices),
        html.Div(_head(study), id="study-head"),
        action_bar(study),
        note_box(study.note, study=study.name),
        section(
            "Results",
            html.Div(found["first"], id="table-first", className="notes", style={"marginBottom": 24}),
            table.grid(found["rows"], found["columns"]),
            html.Div(found["notes"], id="table-notes", className="notes"),
            aside=["Download ", *links],
        ),
        html.Div(pair, className="pair" if tuned else "pair pair-single"),
        section(
            "Curves",
            html.Div(controls, className="controls"),
            graph("curves", curves, 430 + 8 * max(0, len(shown) - 8)),  # the legend takes its part of it
            html.Div(note, id="curves-note", className="muted small"),
            aside=dcc.Link("Filters, scales and single trials", href=more, id="to-curves-below"),
        ),
        section("Variants", html.Div(_variants(study, shown), id="study-variants")),
        section(
            "Continue",
            html.P("Trains what is missing, and nothing twice.", className="muted small"),
            command_line(words.command(study, root.endswith("/.archlab"), root)),
            html.P(_elsewhere(Path(root), study.name), className="muted small"),
        ),
        said=view.said(),
    )


def _curves(study: Study, view: View, zoom: Zoom, shown: list[str]) -> tuple[figures.Figure, str]:
    """The curves of these variants, and what must be said about them."""
    said = _left_out(study, shown)
    figure, note = draw_curves(study, view, zoom, variants=shown if said else None)
    return figure, f"{said} {note}" if said else note


def _left_out(study: Study, shown: list[str]) -> str | None:
    """What the figures of this page do not draw."""
    if len(shown) == len(study.variants):
        return None
    ranked = study.comparison is not None and study.comparison.table["loss_mean"].notna().any()
    which = "the best and their baselines" if ranked else "what trains first and its baselines"
    counted = f"Drawn are {len(shown)} of {len(study.variants)} variants, {which}"
    return f"{counted}; the table and the page of curves have all."


def _results(study: Study, shown: list[str]) -> dict[str, Any]:
    """What changes with the results alone: the table, what is said below it, and the figures of these variants."""
    found = study.comparison
    if found is None:
        empty = figures.empty(study.problem or "")
        return {"first": [], "rows": [], "columns": [], "notes": [], "forest": empty, "rates": empty}
    colours, block = theme.colours(study.variants, study.record["baseline"]), main_block(found)
    first, then = (
        [
            block_table(b)
            for told in sections_of(found)
            if not told.paged and told.heads is heads
            for b in told.blocks(found)
        ]
        for heads in (True, False)
    )
    apart = [r for r in found.table.to_dict("records") if r["variant"] != r["baseline"] and r["variant"] in shown]
    choices = found.calibrated_choices.to_dict("records") if found.told.get("calibration") else []
    rates = [row for row in found.rates.to_dict("records") if row["along"] and row["variant"] in shown]
    return {
        "first": first,
        "rows": table.rows(block, found, colours),
        "columns": table.columns(block),
        "notes": [*legend_notes(table_page(found, Shape())), *then],
        "forest": figures.worth(choices) if choices else figures.forest(apart, colours, found.noise["unit"]),
        "rates": figures.rate_curve(rates, colours, found.baseline),
    }


def _head(study: Study) -> list[Component]:
    """Question, verdict and progress."""
    kind, sentence = words.activity(study)
    said: list[Component] = []
    if study.problem is not None:
        said = [html.P(study.problem, className="problem")]
    elif study.comparison is not None:
        said = [
            html.Li([html.Span(className=f"verdict-mark mark-{kind.replace(' ', '-')}"), html.Span(text)])
            for kind, text in findings(study.comparison)
        ]
    data, record = study.record["data"], study.record
    facts = [
        f"{_span(record, 'tokens')} tokens per trial",
        f"context {_span(record, 'context')}",
        f"{data['source']}, {data['tokenizer']}",
        f"{len(record['seeds'])} seed{'s' if len(record['seeds']) > 1 else ''}",
    ]
    state = html.Span(
        [html.Span(className=f"dot dot-{kind}"), words.progress(study), html.Span(f" · {sentence}", className="muted")]
    )
    line = html.Div([state, html.Span(" · ".join(facts), className="muted")], className="status-line")
    return [
        html.H1(record.get("question") or study.name, className="question"),
        html.Ul(said, className="verdicts"),
        html.Div([progress_bar(study), line], className="status"),
    ]


def _span(record: dict[str, Any], name: str) -> str:
    """A number of the recipe, from the least to the most among the variants."""
    found = {variant.get(name, record[name]) for variant in record["variants"]}
    return " to ".join(f"{value:,}" for value in sorted({min(found), max(found)}))


def _variants(study: Study, shown: Collection[str]) -> list[Component]:
    """What each variant changes in the base, as a diff: of those that the figures draw, until all are asked for."""
    colours, rows = theme.colours(study.variants, study.record["baseline"]), []
    for variant in (each for each in study.record["variants"] if each["name"] in shown):
        solved = variant.get("matched") or {}
        changes = [_change(*change) for change in variant.get("changes") or [] if change[0] not in solved]
        matched = [
            html.Div([html.Code(path), f" set to {value} to match"], className="matched")
            for path, value in solved.items()
        ]
        colour = table.swatch(variant["name"], study.record["baseline"], colours)
        swatch = html.Span(className="swatch", style={"background": colour})
        name = html.Div([swatch, variant["name"]], className="variant-name")
        body = [*changes, *matched] or [html.Span("the base, unchanged", className="muted")]
        rows.append(html.Div([name, html.Div(body, className="changes")], className="variant"))
    found: list[Component] = [html.Div(rows, className="variants")]
    if len(rows) < len(study.variants):
        text = f"Show all {len(study.variants)} variants"
        found.append(dmc.Button(text, id="study-all", size="compact-sm", variant="default", mt="sm"))
    return found


def _change(path: str, before: Any, after: Any) -> Component:
    arrow = html.Span("→", className="arrow")
    return html.Div(
        [html.Code(path, className="path"), html.Del(str(before)), arrow, html.Ins(str(after))], className="change"
    )


def _elsewhere(root: Path, name: str) -> list[Any]:
    """Where other programs show the study: Optuna's pages, and MLflow."""
    links = [html.A(title, href=href, target="_blank") for title, href in pages_of(root, name).items()]
    optuna = ["Optuna: ", *(part for link in links for part in (link, " · "))] if links else []
    return [*optuna, *tracker(root)]
