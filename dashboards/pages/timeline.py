"""When trials ran: a bar per attempt, in the place that it had or by variant, coloured by how it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dash
import flask
from dash import Input, html
from dash.development.base_component import Component

from archlab.dashboards.figures import Figure
from archlab.dashboards.library import Library, Study
from archlab.dashboards.load import MOST_FILES, moments, of_machines
from archlab.dashboards.pages.runs import span
from archlab.dashboards.pages.shell import GO, TIMELINE, Choice, Chosen, register_tab
from archlab.dashboards.parts import graph, section, to_trial
from archlab.dashboards.theme import INK, axis, layout
from archlab.search.comparison.attempts import attempts_frame
from archlab.search.formatting.words import terse

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

COLOURS = {
    "complete": "#2d8a5b",
    "running": "#3f87cf",
    "paused": "#8dbbe8",
    "planned": "#c3cad1",
    "interrupted": "#98a1aa",
    "pruned": "#667079",
    "diverged": "#dd9a1c",
    "failed": "#c4452f",
    "stale": "#aa4499",
}
"""By how an attempt ended; `planned`: stopped with a checkpoint, to go on later."""
NAMES = {"planned": "stopped, goes on later", "paused": "paused where it was to", "stale": "superseded"}


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/timeline`."""
    register_tab(app, library, TIMELINE, choices, content)
    app.clientside_callback(GO, Input("timeline-figure", "clickData"), prevent_initial_call=True)


def choices(_: Study) -> Sequence[Choice]:
    """What a row of the figure is."""
    return [Choice("rows", "Rows", {"places": "Places", "variants": "Variants"})]


def content(study: Study, chosen: Chosen) -> list[Component]:
    """The figure, and what it adds up to."""
    served: Library = flask.current_app.config["LIBRARY"]  # pages are of all apps of a process
    frame = attempts_frame(served.events(study.name), time.time(), study.holder is not None)
    if not len(frame):
        return [html.P("No trial was started by this study: what it reused was trained by another.", className="muted")]
    named = {trial["key"]: trial for trial in study.trials}
    gone = "no longer wanted"
    variants = [named[key]["variant"] if key in named else gone for key in frame["key"]]
    if chosen["rows"] == "variants":
        labels = [name for name in [*study.variants, gone] if name in variants]
        frame = frame.assign(variant=variants, row=[labels.index(name) for name in variants])
    else:
        labels = [f"place {place + 1}" for place in range(int(frame["place"].max()) + 1)]
        frame = frame.assign(variant=variants, row=frame["place"])
    figure = bars(frame, labels, named, study.name)
    figure["layout"]["uirevision"] = chosen["rows"]
    start, end = float(frame["start"].min()), float(frame["end"].max())
    whole, busy = end - start, float((frame["end"] - frame["start"]).sum())
    edge = max(0.03 * whole, 1.0)  # s; both figures end beside the bars
    window = start - edge, end + edge
    figure["layout"]["xaxis"]["range"] = moments(window)
    again = int((frame.groupby("key").size() > 1).sum())
    told = f"{len(frame)} attempts of {frame['key'].nunique()} trials in {span(whole)}; {span(busy)} of work"
    told += f"; {again} trials were continued or tried again" if again else ""
    height = min(max(200, 90 + 30 * len(labels)), 1600)
    note = html.P(f"{told}. A click on a bar leads to its trial.", className="muted small")
    return [section("Attempts", graph("timeline-figure", figure, height), note), *_machines(served, study, window)]


def _machines(library: Library, study: Study, window: tuple[float, float]) -> list[Component]:
    """The load of the machines over the same time (unix s)."""
    newest = sorted({t["key"]: t for t in study.trials}.values(), key=lambda trial: -trial["updated"])[:MOST_FILES]
    figure = of_machines((library.loads.of(Path(trial["folder"])) for trial in newest), *window)
    if figure is None:
        return []
    figure["layout"]["xaxis"]["range"] = moments(window)
    note = html.P("All that runs there counts, also what is not archlab's.", className="muted small")
    return [section("Machine load", graph("timeline-load", figure, 260), note)]


def bars(frame: pd.DataFrame, labels: Sequence[str], named: dict[str, dict[str, Any]], study: str) -> Figure:
    """A thick line per attempt, a trace per way of ending; times are of the reader's machine, in UTC."""
    traces = []
    for ended, mine in frame.groupby("ended", sort=False):
        points: list[tuple[Any, ...]] = []  # (x, y, text, address): both ends of a bar, and a gap
        for row in mine.to_dict("records"):
            trial, what = named.get(row["key"]), str(row["variant"])
            if trial is not None:
                what = f"{what} · seed {trial['seed']} {' '.join(terse(trial['settings']))}"
            text = f"<b>{escape(what)}</b><br>attempt {row['attempt']}: {span(row['end'] - row['start'])}, {ended}"
            for moment in moments([row["start"], row["end"]]):
                points.append((moment, row["row"], text, to_trial(row["key"], study)))
            points.append((None,) * 4)
        colour = COLOURS[str(ended)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                **dict(zip(("x", "y", "text", "customdata"), map(list, zip(*points, strict=True)), strict=True)),
                "name": NAMES.get(str(ended), str(ended)),
                "line": {"color": colour, "width": 11},
                "marker": {"color": colour, "size": 3, "symbol": "line-ns"},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    ticks = {"tickmode": "array", "tickvals": list(range(len(labels))), "ticktext": [escape(label) for label in labels]}
    rows = axis("", **ticks, range=[len(labels) - 0.4, -0.6]) | {"ticks": "", "showline": False, "showgrid": False}
    rows["tickfont"] = {"size": 12.5, "color": INK}
    legend = layout()["legend"] | {"y": 1.02, "yanchor": "bottom"}
    return {
        "data": traces,
        "layout": layout(xaxis=axis("", type="date"), yaxis=rows, hovermode="closest", legend=legend),
    }
