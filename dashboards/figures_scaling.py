"""A ladder drawn: losses over compute and size with their laws, IsoFLOP parabolas, and compute-equivalent gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.dashboards import figures
from archlab.dashboards.marks import Figure, Trace, band, chart, names_axis, quiet, ring, trace, upright, whiskers
from archlab.dashboards.theme import axis, translucent

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

Colours = Mapping[str, str]
LOSS = "Test loss (nats/token)"


def laws(rungs: pd.DataFrame, lines: pd.DataFrame, x: str, x_title: str, colours: Colours) -> Figure:
    """The losses of each series at their rungs over the column `x`, on two logarithmic axes; the fitted law as a line
    with its band. `lines` are rows {series, x, loss, low, high}, of the law over that column."""
    known = rungs[np.isfinite(rungs["loss"])]
    if not len(known):
        return figures.empty("No rung has been trained to its end yet.")
    traces: list[Trace] = []
    for name, own in lines.groupby("series", sort=False):
        colour, group = colours[str(name)], escape(str(name))
        if np.isfinite(own["low"]).all() and np.isfinite(own["high"]).all():
            ends = (own[column].tolist() for column in ("x", "low", "high"))
            traces.append(band(*ends, colour, group, 0.12))
        traces.append(_law(own, colour, group))
    traces += [_points(own, x, x_title, colours[str(name)]) for name, own in known.groupby("series", sort=False)]
    return chart(traces, _compute_axis(x_title), axis(LOSS, type="log"))


def isoflops(rungs: pd.DataFrame, lines: pd.DataFrame, minima: pd.DataFrame, x: str, colours: Colours) -> Figure:
    """Losses over sizes at equal compute, the parabola through them, and its minimum as a ring with its interval.

    `lines` are rows {series, at, x, loss}, `minima` rows {series, at, size, low, high, loss}.
    """
    known = rungs[np.isfinite(rungs["loss"])]
    traces = [
        _law(own, colours[str(name)], escape(str(name)))
        for (name, _), own in lines.groupby(["series", "at"], sort=False)
    ]
    traces += [_points(own, x, "Parameters", colours[str(name)]) for name, own in known.groupby("series", sort=False)]
    for (name, at), row in minima.groupby(["series", "at"], sort=False):
        hover = f"<b>{escape(str(name))}</b> at {at:.3g} FLOPs<br>best N %{{x:.3s}}<extra></extra>"
        told = {"hoverinfo": "all", "hovertemplate": hover, "legendgroup": escape(str(name))}
        point = quiet("markers", row["size"], row["loss"], marker=ring(colours[str(name)], 11), **told)
        traces.append(point | {"error_x": _size_whiskers(row, colours[str(name)])})
    found = chart(traces, _compute_axis("Parameters N"), axis(LOSS))
    if len(known):  # an interval may reach much further than the rungs
        ends = math.log10(known[x].min()), math.log10(known[x].max())
        found["layout"]["xaxis"]["range"] = [ends[0] - 0.1, ends[1] + 0.1]
    return found


def best_sizes(minima: pd.DataFrame, colours: Colours) -> Figure:
    """The best size by compute, with its interval. `minima` are rows {series, at, size, low, high}."""
    traces = []
    for name, own in minima.groupby("series", sort=False):
        colour, shown = colours[str(name)], escape(str(name))
        hover = f"<b>{shown}</b><br>C %{{x:.3g}}<br>best N %{{y:.3s}}<extra></extra>"
        named = {"name": shown, "legendgroup": shown, "showlegend": True, "hoverinfo": "all", "hovertemplate": hover}
        style = {"line": {"color": colour, "width": 1.2}, "marker": {"size": 8, "color": colour}}
        points = trace("lines+markers", own["at"], own["size"], **named, **style)
        traces.append(points | {"error_y": _size_whiskers(own, colour)})
    return chart(traces, _compute_axis("Compute C (FLOPs)"), axis("Best size N", type="log"))


def gains(rows: Sequence[Mapping[str, Any]], points: pd.DataFrame, colours: Colours) -> Figure:
    """The compute-equivalent gain of each series with its interval, and of its rungs as small points.

    `rows` are {series, of, value, low, high}, `points` the rungs with their `gain`; logarithmic, 1 is the baseline.
    """
    places = [f"{row['series']}, {row['of']}" if row["of"] != "test" else str(row["series"]) for row in rows]
    traces: list[Trace] = []
    for place, row in enumerate(rows):
        colour, y, group = colours[row["series"]], len(rows) - 1 - place, escape(str(row["series"]))
        bounded = math.isfinite(row["low"]) and math.isfinite(row["high"])
        reach = f" [{row['low']:.3g}, {row['high']:.3g}]" if bounded else ""
        hover = f"<b>{escape(places[place])}</b> {row['value']:.3g}×{reach}<extra></extra>"
        told = {"hoverinfo": "all", "hovertemplate": hover, "legendgroup": group}
        point = quiet("markers", [row["value"]], [y], marker={"size": 10, "color": colour}, **told)
        if bounded:
            point["error_x"] = whiskers(colour, [row["high"] - row["value"]], [row["value"] - row["low"]])
        traces.append(point)
        own = points[(points["series"] == row["series"]) & np.isfinite(points["gain"])]
        if row["of"] == "test" and len(own):
            marker = {"size": 5, "color": translucent(colour, 0.45)}
            text = [f"{escape(str(rung))}: {gain:.3g}×" for rung, gain in zip(own["rung"], own["gain"], strict=True)]
            told = {"hoverinfo": "text", "hovertext": text, "legendgroup": group}
            traces.append(quiet("markers", own["gain"], [y - 0.28] * len(own), marker=marker, **told))
    x_axis = axis("Compute that the baseline needs for the same loss (times)", type="log")
    y_axis = names_axis(places[::-1])
    return chart(traces, x_axis, y_axis, shapes=[upright(1)], showlegend=False)


def _points(own: pd.DataFrame, x: str, x_title: str, colour: str) -> Trace:
    name = escape(str(own["series"].iloc[0]))
    hover = f"<b>%{{text}}</b><br>{escape(x_title)} %{{x:.3s}}<br>test loss %{{y:.4f}}<extra></extra>"
    text = [escape(str(each)) for each in own["variant"]]
    made = trace("markers", own[x], own["loss"], text=text, name=name, legendgroup=name)
    return made | {"marker": {"size": 8, "color": colour}, "hovertemplate": hover}


def _law(own: pd.DataFrame, colour: str, group: str) -> Trace:
    line = {"color": colour, "width": 1.4, "dash": "dot"}
    return quiet("lines", own["x"], own["loss"], line=line, legendgroup=group)


def _size_whiskers(rows: pd.DataFrame, colour: str) -> dict[str, Any]:
    """How far the interval of a size reaches up and down; 0 where nothing bounds it."""
    reach = (rows["high"] - rows["size"], rows["size"] - rows["low"])
    return whiskers(colour, *(np.nan_to_num(each).tolist() for each in reach), thickness=1.5)


def _compute_axis(title: str) -> dict[str, Any]:
    return axis(title, type="log", **({"tickformat": "~e"} if "FLOPs" in title else {}))
