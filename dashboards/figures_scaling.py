"""A ladder drawn: losses over compute and size with their laws, IsoFLOP parabolas, and compute-equivalent gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.dashboards import figures
from archlab.dashboards.figures import Figure
from archlab.dashboards.theme import axis, layout, translucent

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

Colours = Mapping[str, str]


def laws(rungs: pd.DataFrame, lines: pd.DataFrame, x: str, x_title: str, colours: Colours) -> Figure:
    """The losses of each series at their rungs over the column `x`, on two logarithmic axes; the fitted law as a line
    with its band. `lines` are rows {series, x, loss, low, high}, of the law over that column."""
    known = rungs[np.isfinite(rungs["loss"])]
    if not len(known):
        return figures.empty("No rung has been trained to its end yet.")
    traces: list[dict[str, Any]] = []
    for name, own in lines.groupby("series", sort=False):
        colour = colours[str(name)]
        if np.isfinite(own["low"]).all() and np.isfinite(own["high"]).all():
            traces.append(_band(own, colour, str(name)))
        line = {"color": colour, "width": 1.4, "dash": "dot"}
        traces.append(_quiet("lines", own["x"], own["loss"], str(name)) | {"line": line})
    traces += [_points(own, x, x_title, colours[str(name)]) for name, own in known.groupby("series", sort=False)]
    return {"data": traces, "layout": _layout(x_title, log=True)}


def isoflops(rungs: pd.DataFrame, lines: pd.DataFrame, minima: pd.DataFrame, x: str, colours: Colours) -> Figure:
    """Losses over sizes at equal compute, the parabola through them, and its minimum as a ring with its interval.

    `lines` are rows {series, at, x, loss}, `minima` rows {series, at, size, low, high, loss}.
    """
    known = rungs[np.isfinite(rungs["loss"])]
    traces: list[dict[str, Any]] = []
    for (name, _), own in lines.groupby(["series", "at"], sort=False):
        line = {"color": colours[str(name)], "width": 1.4, "dash": "dot"}
        traces.append(_quiet("lines", own["x"], own["loss"], str(name)) | {"line": line})
    traces += [_points(own, x, "Parameters", colours[str(name)]) for name, own in known.groupby("series", sort=False)]
    for row in minima.to_dict("records"):
        traces.append(_minimum(row, colours[row["series"]]))
    found = _layout("Parameters N", log=False)
    if len(known):  # an interval may reach much further than the rungs
        ends = math.log10(known[x].min()), math.log10(known[x].max())
        found["xaxis"]["range"] = [ends[0] - 0.1, ends[1] + 0.1]
    return {"data": traces, "layout": found}


def best_sizes(minima: pd.DataFrame, colours: Colours) -> Figure:
    """The best size by compute, with its interval. `minima` are rows {series, at, size, low, high}."""
    traces = []
    for name, own in minima.groupby("series", sort=False):
        colour, spread = colours[str(name)], _spread(own)
        point = _quiet("lines+markers", own["at"], own["size"], str(name))
        bars = {"color": colour, "thickness": 1.5, "width": 0}
        traces.append(
            point
            | {
                "name": escape(str(name)),
                "showlegend": True,
                "line": {"color": colour, "width": 1.2},
                "marker": {"size": 8, "color": colour},
                "error_y": {"type": "data", "symmetric": False, "array": spread[1], "arrayminus": spread[0], **bars},
                "hoverinfo": "all",
                "hovertemplate": f"<b>{escape(str(name))}</b><br>C %{{x:.3g}}<br>best N %{{y:.3s}}<extra></extra>",
            }
        )
    found = _layout("Compute C (FLOPs)", log=True)
    found["yaxis"]["title"]["text"] = "Best size N"
    return {"data": traces, "layout": found}


def gains(rows: Sequence[Mapping[str, Any]], points: pd.DataFrame, colours: Colours) -> Figure:
    """The compute-equivalent gain of each series with its interval, and of its rungs as small points.

    `rows` are {series, of, value, low, high}, `points` the rungs with their `gain`; logarithmic, 1 is the baseline.
    """
    places = [f"{row['series']}, {row['of']}" if row["of"] != "test" else str(row["series"]) for row in rows]
    traces: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        colour, y = colours[row["series"]], len(rows) - 1 - place
        bounded = math.isfinite(row["low"]) and math.isfinite(row["high"])
        reach = f" [{row['low']:.3g}, {row['high']:.3g}]" if bounded else ""
        trace = _quiet("markers", [row["value"]], [y], str(row["series"])) | {
            "marker": {"size": 10, "color": colour},
            "hoverinfo": "all",
            "hovertemplate": f"<b>{escape(places[place])}</b> {row['value']:.3g}×{reach}<extra></extra>",
        }
        if bounded:
            ends = {"array": [row["high"] - row["value"]], "arrayminus": [row["value"] - row["low"]]}
            trace["error_x"] = {"type": "data", "symmetric": False, **ends, "color": colour, "thickness": 2, "width": 0}
        traces.append(trace)
        own = points[(points["series"] == row["series"]) & np.isfinite(points["gain"])]
        if row["of"] == "test" and len(own):
            marker = {"size": 5, "color": translucent(colour, 0.45)}
            text = [f"{escape(str(rung))}: {gain:.3g}×" for rung, gain in zip(own["rung"], own["gain"], strict=True)]
            small = _quiet("markers", own["gain"], [y - 0.28] * len(own), str(row["series"]))
            traces.append(small | {"marker": marker, "hoverinfo": "text", "hovertext": text})
    ticks = {"tickmode": "array", "tickvals": list(range(len(rows))), "ticktext": [escape(p) for p in places[::-1]]}
    y_axis = axis("", **ticks, range=[-0.7, len(rows) - 0.3]) | {"ticks": "", "showline": False, "fixedrange": True}
    line = {
        "type": "line",
        "x0": 1,
        "x1": 1,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": "#8b939c", "width": 1.2},
    }
    x_axis = axis("Compute that the baseline needs for the same loss (times)", type="log")
    return {"data": traces, "layout": layout(xaxis=x_axis, yaxis=y_axis, shapes=[line], showlegend=False)}


def _points(own: pd.DataFrame, x: str, x_title: str, colour: str) -> dict[str, Any]:
    name = escape(str(own["series"].iloc[0]))
    hover = f"<b>%{{text}}</b><br>{escape(x_title)} %{{x:.3s}}<br>test loss %{{y:.4f}}<extra></extra>"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [float(each) for each in own[x]],
        "y": [float(each) for each in own["loss"]],
        "text": [escape(str(each)) for each in own["variant"]],
        "name": name,
        "legendgroup": name,
        "marker": {"size": 8, "color": colour},
        "hovertemplate": hover,
    }


def _band(own: pd.DataFrame, colour: str, name: str) -> dict[str, Any]:
    x, y = [*own["x"], *own["x"][::-1]], [*own["low"], *own["high"][::-1]]
    none = {"width": 0, "color": "rgba(0,0,0,0)"}
    return _quiet("lines", x, y, name) | {"fill": "toself", "fillcolor": translucent(colour, 0.12), "line": none}


def _quiet(mode: str, x: Any, y: Any, name: str) -> dict[str, Any]:
    values = {"x": [float(each) for each in x], "y": [float(each) for each in y]}
    told = {"type": "scatter", "mode": mode, "showlegend": False, "hoverinfo": "skip", "legendgroup": escape(name)}
    return {**told, **values}


def _minimum(row: Mapping[str, Any], colour: str) -> dict[str, Any]:
    import pandas as pd

    spread = _spread(pd.DataFrame([row]))
    bars = {"color": colour, "thickness": 1.5, "width": 0}
    hover = f"<b>{escape(row['series'])}</b> at {row['at']:.3g} FLOPs<br>best N %{{x:.3s}}<extra></extra>"
    return _quiet("markers", [row["size"]], [row["loss"]], row["series"]) | {
        "marker": {"size": 11, "color": "#ffffff", "line": {"color": colour, "width": 2}, "opacity": 1},
        "error_x": {"type": "data", "symmetric": False, "array": spread[1], "arrayminus": spread[0], **bars},
        "hoverinfo": "all",
        "hovertemplate": hover,
    }


def _spread(rows: pd.DataFrame) -> tuple[list[float], list[float]]:
    """How far the interval of a size reaches down and up; 0 where nothing bounds it."""
    down, up = rows["size"] - rows["low"], rows["high"] - rows["size"]
    return [float(each) for each in np.nan_to_num(down)], [float(each) for each in np.nan_to_num(up)]


def _layout(x_title: str, log: bool) -> dict[str, Any]:
    """Logarithmic over x, and over the loss too where that is said."""
    y = axis("Test loss (nats/token)", **({"type": "log"} if log else {}))
    legend = {**layout()["legend"], "y": 1.02, "yanchor": "bottom"}
    return layout(
        xaxis=axis(x_title, type="log", **({"tickformat": "~e"} if "FLOPs" in x_title else {})),
        yaxis=y,
        legend=legend,
        hovermode="closest",
    )
