"""One study: what it asks, what it found, the table with everything beneath it that a reader must know, and the curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from dashboards import figures, lines, table, theme, words
from dashboards.library import Library, Study
from dashboards.pages.studies import KEEP_ADDRESS, REFRESH_MS
from dashboards.parts import choice, command_line, graph, guarded, progress_bar, section
from dashboards.view import METRICS, SMOOTHING, TRIALS, X_AXES, View, read_view
from search.render.blocks import build_page
from search.store import StoreError

CONTROLS = {"metric": "Show", "x": "Over", "smooth": "Smoothing", "trials": "Trials"}


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>` and its callbacks to an app."""

    @guarded(lambda: library.root)
    def layout(name: str = "", **query: Any) -> Component:
        view, notices = read_view(query)
        study = library.study(name)
        with library.reading():
            return _page(study, view, notices, str(library.root))

    dash.register_page("study", path_template="/study/<name>", title=lambda name="": f"{name} · archlab", layout=layout)

    @app.callback(
        Output("study-version", "data"),
        Output("study-notice", "children"),
        Output("study-head", "children"),
        Output("table", "rowData"),
        Output("table", "columnDefs"),
        Output("table-notes", "children"),
        Output("forest", "figure"),
        Output("rates", "figure"),
        Output("curves", "figure"),
        Output("curves-note", "children"),
        Input("study-tick", "n_intervals"),
        State("study-version", "data"),
        State("study-name", "data"),
        *[State(f"curves-{key}", "value") for key in CONTROLS],
        prevent_initial_call=True,
    )
    def refresh(_: int, seen: str, name: str, *chosen: str) -> Any:
        try:
            study = library.study(name)
        except StoreError as error:
            return (f"{seen}!", _notice(f"Shown as it last was: {error}"), *[no_update] * 8)
        if study.version == seen:
            return [no_update] * 10
        view = _view(chosen)
        with library.reading():
            rows, columns = _rows(study)
            curves, note = _curves(study, view)
        differences = _forest(study), _rate_curve(study)
        return (study.version, None, _head(study), rows, columns, _notes(study), *differences, curves, note)

    @app.callback(
        Output("curves", "figure", allow_duplicate=True),
        Output("curves-note", "children", allow_duplicate=True),
        Output("study-query", "data"),
        *[Input(f"curves-{key}", "value") for key in CONTROLS],
        State("study-name", "data"),
        prevent_initial_call=True,
    )
    def choose(*values: str) -> Any:
        view = _view(values[:-1])
        try:
            study = library.study(values[-1])
        except StoreError as error:
            return no_update, str(error), view.query()
        with library.reading():
            return (*_curves(study, view), view.query())

    app.clientside_callback(KEEP_ADDRESS, Input("study-query", "data"), prevent_initial_call=True)


def _view(chosen: Any) -> View:
    return replace(View(), **dict(zip(CONTROLS, chosen, strict=True)))


def _page(study: Study, view: View, notices: list[str], root: str) -> Component:
    rows, columns = _rows(study)
    curves, note = _curves(study, view)
    default = root.endswith("/.archlab")
    links = [
        html.A(f".{ending}", href=f"/download/{study.name}.{ending}", className="download")
        for ending in ("md", "csv", "tex", "json")
    ]
    tuned = bool(study.record.get("tune"))
    pair = [section("Differences", graph("forest", _forest(study), _forest_height(study)))]
    pair.append(
        section(
            "Learning rate",
            graph("rates", _rate_curve(study), _forest_height(study)),
            id=None if tuned else "rates-hidden",
        )
    )
    return html.Div(
        [
            dcc.Store(id="study-name", data=study.name),
            dcc.Store(id="study-version", data=study.version),
            dcc.Store(id="study-query"),
            dcc.Interval(id="study-tick", interval=REFRESH_MS),
            html.Div([_notice(text) for text in notices] or None, id="study-notice"),
            html.Div(_head(study), id="study-head"),
            section(
                "Results",
                table.grid(rows, columns),
                html.Div(_notes(study), id="table-notes", className="notes"),
                aside=["Download ", *links],
            ),
            html.Div(pair, className="pair" if tuned else "pair pair-single"),
            section(
                "Curves",
                _controls(view),
                graph("curves", curves, 430),
                html.Div(note, id="curves-note", className="muted small"),
            ),
            section("Variants", _variants(study)),
            section(
                "Continue",
                html.P("Trains what is missing, and nothing twice.", className="muted small"),
                command_line(words.command(study, default, root)),
            ),
        ],
        className="study",
    )


def _head(study: Study) -> list[Component]:
    """Question, verdict and progress."""
    kind, sentence = words.activity(study)
    said: list[Component] = []
    if study.problem is not None:
        said = [html.P(study.problem, className="problem")]
    elif study.comparison is not None:
        said = [
            html.Li([html.Span(className=f"verdict-mark mark-{kind.replace(' ', '-')}"), html.Span(text)])
            for kind, text in words.verdicts(study.comparison)
        ]
    data, record = study.record["data"], study.record
    facts = [
        f"{record['tokens']:,} tokens per trial",
        f"context {record['context']}",
        f"{data['source']}, {data['tokenizer']}",
        f"{len(record['seeds'])} seeds",
    ]
    return [
        html.Div(
            [dcc.Link("Studies", href="/"), html.Span("/", className="slash"), html.Span(study.name, className="here")],
            className="crumbs",
        ),
        html.H1(record.get("question") or study.name, className="question"),
        html.Ul(said, className="verdicts"),
        html.Div(
            [
                progress_bar(study),
                html.Div(
                    [
                        html.Span(
                            [
                                html.Span(className=f"dot dot-{kind}"),
                                words.progress(study),
                                html.Span(f" · {sentence}", className="muted"),
                            ]
                        ),
                        html.Span(" · ".join(facts), className="muted"),
                    ],
                    className="status-line",
                ),
            ],
            className="status",
        ),
    ]


def _rows(study: Study) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if study.comparison is None:
        return [], []
    return table.rows(study.comparison, _colours(study)), table.columns(study.comparison)


def _notes(study: Study) -> list[Component]:
    """How the numbers were made, what could have been resolved, and what a reader must know."""
    if study.comparison is None:
        return []
    page = build_page(study.comparison)
    found: list[Component] = [html.P(f"{table.legend(study.comparison)}.")]
    found += [html.P(line, className="method") for line in page.lines]
    if page.notes:
        found.append(html.Ul([html.Li(note) for note in page.notes]))
    return [*found, html.P(page.provenance, className="provenance")]


def _forest(study: Study) -> figures.Figure:
    if study.comparison is None:
        return figures.empty(study.problem or "")
    rows = [row for row in study.comparison.table.to_dict("records") if row["variant"] != study.comparison.baseline]
    return figures.forest(rows, _colours(study), study.comparison.noise["unit"])


def _forest_height(study: Study) -> int:
    return max(300, 110 + 34 * len(study.variants))


def _rate_curve(study: Study) -> figures.Figure:
    if study.comparison is None:
        return figures.empty(study.problem or "")
    rows = study.comparison.rates.to_dict("records")
    return figures.rate_curve(rows, _colours(study), study.comparison.baseline)


def _curves(study: Study, view: View) -> tuple[figures.Figure, str]:
    """The figure, and what must be said about it."""
    found = lines.groups(study, view)
    falls = view.metric in ("validation", "training")
    titles = X_AXES[view.x][1], METRICS[view.metric][2]
    figure = figures.curves(found, _colours(study), study.record["baseline"], *titles, falls)
    figure["layout"]["uirevision"] = view.query()
    drawn, total = figures.hidden_lines(found)
    said = [
        "Bold: mean over seeds; band: ± one standard deviation; thin: each seed."
        if view.trials == "reported"
        else "Each line is one trial, first seed."
    ]
    if falls:
        said.append("The steep start lies above the frame; a double click shows it.")
    if drawn < total:
        said.append(f"Showing {drawn} of {total} trials as lines.")
    damaged = sum(file.unreadable for file in study.curves.values())
    if damaged:
        said.append(f"{damaged} damaged lines in metrics.jsonl were left out.")
    return figure, " ".join(said)


def _colours(study: Study) -> dict[str, str]:
    return theme.colours(study.variants, study.record["baseline"])


def _controls(view: View) -> Component:
    names = {
        "metric": {key: value[1] for key, value in METRICS.items()},
        "x": {key: value[0] for key, value in X_AXES.items()},
        "smooth": SMOOTHING,
        "trials": TRIALS,
    }
    return html.Div(
        [choice(f"curves-{key}", label, names[key], getattr(view, key)) for key, label in CONTROLS.items()],
        className="controls",
    )


def _variants(study: Study) -> Component:
    """What each variant changes in the base, as a diff."""
    colours, rows = _colours(study), []
    for variant in study.record["variants"]:
        changes = [_change(*change) for change in variant.get("changes") or []]
        matched = [
            html.Div([html.Code(path), f" set to {value} to match"], className="matched")
            for path, value in (variant.get("matched") or {}).items()
        ]
        name = html.Div(
            [html.Span(className="swatch", style={"background": colours[variant["name"]]}), variant["name"]],
            className="variant-name",
        )
        body = [*changes, *matched] or [html.Span("the base, unchanged", className="muted")]
        rows.append(html.Div([name, html.Div(body, className="changes")], className="variant"))
    return html.Div(rows, className="variants")


def _change(path: str, before: Any, after: Any) -> Component:
    return html.Div(
        [
            html.Code(path, className="path"),
            html.Del(str(before)),
            html.Span("→", className="arrow"),
            html.Ins(str(after)),
        ],
        className="change",
    )


def _notice(text: str) -> Component:
    return html.Div(text, className="notice", role="status")
