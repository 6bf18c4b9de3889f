"""The curves of a study: means or single trials, of those that a filter keeps, over what a reader chooses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import dash
from dash import Input, Output, State, ctx, dcc, html
from dash.development.base_component import Component

from archlab.dashboards import figures, lines, theme
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.shell import (
    CURVES,
    filter_input,
    keep_address,
    pulse,
    register_page,
    register_refresh,
    shell,
)
from archlab.dashboards.parts import choice, graph, guarded, section
from archlab.dashboards.trials import kept, trials_of
from archlab.dashboards.view import LINES, METRICS, SCALES, SMOOTHING, TRIALS, VARIANT, X_AXES, View, read_view
from archlab.dashboards.words import curve_of
from archlab.search.formatting.filters import BadFilter
from archlab.search.formatting.words import shortest
from archlab.search.sections.design.frames import ROW, factors

Zoom = dict[str, list[float]]
"""The part of the curves that a reader looks at: {axis: [from, to]}, [] for an axis that was told to show all."""
REMEMBER_ZOOM = """(event, zoom) => {
  if (!event) return window.dash_clientside.no_update;
  const kept = {...zoom};
  for (const axis of ['xaxis', 'yaxis']) {
    if (event[axis + '.range[0]'] !== undefined) kept[axis] = [event[axis + '.range[0]'], event[axis + '.range[1]']];
    if (event[axis + '.autorange']) kept[axis] = [];
  }
  return kept;
}"""
ADDRESS = """(query, zoom) => {
  const said = new URLSearchParams(query.slice(1));
  for (const [axis, key] of [['xaxis', 'xr'], ['yaxis', 'yr']])
    if (zoom[axis]) said.set(key, zoom[axis].map(end => +(+end).toPrecision(6)).join(',') || 'all');
  const text = said.toString().replaceAll('%2C', ',');
  return text && '?' + text;
}"""
"""The address of a view with its zoom."""
CLICK = """(click, figure, seen) => {
  const to = click && (figure.data[click.points[0].curveNumber].meta || {});
  if (to && to.key) window.archlabVisit(`/run/${to.key}?study=${seen[0]}`);
  if (to && to.variant) window.archlabVisit(`/study/${seen[0]}/table?open=${to.variant}`);
  if (to && to.level) window.archlabVisit(`/study/${seen[0]}/factor?component=${to.level}`);
}"""
"""A thin line leads to its trial, a mean to its variant with its trials open, or to what the factor does."""
NAMES = {
    "metric": ("Show", {key: value[1] for key, value in METRICS.items()}),
    "x": ("Over", {key: value[0] for key, value in X_AXES.items()}),
    "smooth": ("Smoothing", SMOOTHING),
    "trials": ("Trials", TRIALS),
    "lines": ("Lines", LINES),
    "scale": ("Scale", SCALES),
    "by": ("By", {VARIANT: "Variant"}),
}
"""Control: (its label, what its values are called); a study's factors are values of the last one too."""


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/curves` and its callbacks to an app."""
    register_page(CURVES, layout)
    outputs = {
        "figure": Output("curve", "figure"),
        "note": Output("curve-note", "children"),
        "problem": Output("curve-problem", "children"),
        "zoom": Output("curve-zoom", "data"),
    }
    inputs = [Input("curve-q", "value"), *(Input(f"curve-{key}", "value") for key in NAMES)]
    register_refresh(app, library, CURVES, "curve", _refresh, outputs, inputs, [State("curve-zoom", "data")])
    remember_zoom(app, "curve", "curve-zoom")
    keep_address(app, CURVES, "curve-query", ADDRESS, Input("curve-zoom", "data"))
    app.clientside_callback(
        CLICK, Input("curve", "clickData"), State("curve", "figure"), State("curve-seen", "data"),
        prevent_initial_call=True,
    )  # fmt: skip


def remember_zoom(app: dash.Dash, figure: str, store: str) -> None:
    """Keeps the part of a figure that a reader looks at in a store."""
    app.clientside_callback(
        REMEMBER_ZOOM,
        Output(store, "data", allow_duplicate=True),
        Input(figure, "relayoutData"),
        State(store, "data"),
        prevent_initial_call=True,
    )


def _refresh(study: Study, _: str, where: str | None, *values: Any) -> dict[str, Any]:
    """What the page shows by now; a choice begins with the whole of what it shows."""
    *chosen, zoom = values
    ticked = ctx.triggered_id == "curve-tick"
    view, zoom = View(**dict(zip(NAMES, chosen, strict=True))), zoom if ticked else {}
    try:
        figure, note = draw_curves(study, view, zoom, where or "")
    except BadFilter as problem:
        return {"problem": str(problem), "query": _query(view, where)}
    found = {"figure": figure, "note": note, "problem": None, "query": _query(view, where)}
    return found if ticked else {**found, "zoom": zoom}


@guarded
def layout(library: Library, name: object = "", **query: Any) -> Component:
    """The page, in the view that the address asks for."""
    study, (view, notices) = library.study(str(name)), read_view(query)
    where, problem = str(query.get("q", "")), None
    zoom, wrong = _zoom(query)
    varied = factors(study.record["variants"])
    levels = {name: shortest(name, varied) for name in varied if name != VARIANT}  # each by its last steps
    levels |= {ROW: "Variant over all cells"} if ROW in levels else {}
    names = {**NAMES, "by": (NAMES["by"][0], NAMES["by"][1] | levels)}
    if (by := str(query.get("by", VARIANT))) in names["by"][1]:
        view = replace(view, by=by)
    else:
        wrong.append(f"The address asks for by {by[:40]!r}, which the study does not vary.")
    with library.reading():
        try:
            figure, note = draw_curves(study, view, zoom, where)
        except BadFilter as error:
            problem = str(error)
            figure, note = draw_curves(study, view, zoom)
    search = filter_input("curve-q", where, "verdict=better lr>=0.002 seed=0", "Filter trials")
    controls = [choice(f"curve-{key}", label, told, getattr(view, key)) for key, (label, told) in names.items()]
    if len(names["by"][1]) == 1:  # the callbacks ask for its value all the same
        controls.append(html.Div(controls.pop(), hidden=True))
    return shell(
        study,
        CURVES,
        dcc.Store(id="curve-zoom", data=zoom),
        *pulse("curve", study, CURVES, [*notices, *wrong], _query(view, where)),
        html.Div([search, *controls], className="controls"),
        html.Div(problem, id="curve-problem", className="problem small", role="alert"),
        section("Curves", graph("curve", figure, 620), html.Div(note, id="curve-note", className="muted small")),
        said={**view.said(), "q": where},
    )


def _query(view: View, where: str | None) -> str:
    """The address of a view, without its zoom."""
    return view.query() + (f"{'&' if view.query() else '?'}{urlencode({'q': where})}" if where else "")


def _zoom(query: Mapping[str, object]) -> tuple[Zoom, list[str]]:
    """What part an address asks for, `xr=1e5,2e6` as the axis counts it (a logarithm by its exponents) or `all`, and a
    notice for what is no part."""
    found: Zoom = {}
    wrong = []
    for axis, key in (("xaxis", "xr"), ("yaxis", "yr")):
        if not (text := str(query.get(key, ""))):
            continue
        try:
            found[axis] = [] if text == "all" else [float(each) for each in text.split(",")]
            if found[axis] and (len(found[axis]) != 2 or not all(map(math.isfinite, found[axis]))):
                raise ValueError(text)
        except ValueError:
            found.pop(axis, None)
            wrong.append(f"The address asks for {key} {text[:40]!r}, which is no range (there is: FROM,TO and all).")
    return found, wrong


def draw_curves(
    study: Study, view: View, zoom: Zoom, where: str = "", variants: Collection[str] | None = None
) -> tuple[figures.Figure, str]:
    """The figure, of all variants or of those that are named, and what must be said about it. Raises BadFilter."""
    keys = {trial["key"] for trial in kept(study, trials_of(study), where)} if where.strip() else None
    found = lines.groups(study, view, variants, keys)
    falls = view.metric in ("validation", "training")
    titles = X_AXES[view.x][1], METRICS[view.metric][2]
    names = list(dict.fromkeys(lines.places_of(study, view.by).values()))
    baseline = study.record["baseline"] if view.by == VARIANT else names[0]
    figure = figures.curves(found, theme.colours(names, baseline), baseline, *titles, falls and view.scale == "linear")
    if not found and where:
        figure = figures.empty("No trial with a curve matches the filter.")
    figure["layout"]["uirevision"] = f"view{view.query()}{where}"  # lines that were switched off stay so
    for axis in ("xaxis", "yaxis") if figure["data"] else ():
        if view.scale == "xy" or (view.scale == "y" and axis == "yaxis"):
            figures.logarithmic(figure, axis)
        if axis in zoom:
            figure["layout"][axis] |= {"range": zoom[axis] or None, "autorange": not zoom[axis]}
    return figure, " ".join(_notes(study, view, found, "range" in figure["layout"].get("yaxis", {}) and not zoom))


def _notes(study: Study, view: View, found: list[lines.Group], framed: bool) -> list[str]:
    """What must be known to read the curves."""
    count, total = figures.hidden_lines(found)
    said = ["Bold: mean over seeds; band: ± one standard deviation; thin: each seed."]
    if view.alone:
        said = ["Each line is one trial."]
    elif view.by != VARIANT:
        said = [
            f"Bold: mean over the n trials that share a level of {view.by}, read at the same places of the axis, as "
            "far as all of them go; band: ± one standard deviation of them; thin: each trial. What else they differ "
            "in is averaged over, and may be unlike at the levels: a click on a mean leads to pairs that differ in "
            "nothing else."
        ]
    if view.metric == "validation":
        said.append(f"Validation while training is read on {curve_of(study)}; the table is of the whole text.")
    if framed:
        said.append("The steep start lies above the frame; a double click shows it.")
    if count < total:
        said.append(f"Showing {count} of {total} trials as lines.")
    damaged = sum(file.unreadable for file in study.curves.values())
    if damaged:
        said.append(f"{damaged} damaged lines in metrics.jsonl were left out.")
    return said
