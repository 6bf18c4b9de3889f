"""What a model makes of its context, drawn: losses by position, needles in haystacks, and probes of recall."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.dashboards import figures
from archlab.dashboards.curves import Group, Line, thin
from archlab.dashboards.figures import Figure
from archlab.dashboards.theme import MUTED, axis, layout

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

DRAWN = 500  # points of a curve


def by_position(
    curves: pd.DataFrame, colours: Mapping[str, str], baseline: str, y_title: str, ends: Sequence[int], log: bool
) -> Figure:
    """A line per variant over the position in a window, dashed uprights at the lengths `ends` that models were trained
    on. `curves` are rows {variant, x, mean, std, n} of one curve."""
    groups = [_group(str(name), own, log) for name, own in curves.groupby("variant", sort=False)]
    figure = figures.curves(groups, colours, baseline, "Position in the window (tokens)", y_title, falls=not log)
    if not figure["data"]:
        return figure
    if log:
        figure["layout"]["xaxis"] |= {"type": "log", "dtick": 1}
    last = float(curves["x"].max())
    shapes = [_upright(end) for end in ends if end <= last]
    figure["layout"] |= {"shapes": shapes}
    if shapes:
        at = math.log10(ends[0]) if log else ends[0]
        figure["layout"]["annotations"] = [
            _note("trained length", at, 1.0, "x", "right" if ends[-1] == last else "left")
        ]
    return figure


def _group(name: str, rows: pd.DataFrame, log: bool) -> Group:
    x, mean, std = (np.asarray(rows[column], np.float64) for column in ("x", "mean", "std"))
    keep = np.unique(np.geomspace(1, len(x), DRAWN).round().astype(int)) - 1 if log else thin(len(x), DRAWN)
    x, mean, std = x[keep], mean[keep], std[keep]
    seeds = int(rows["n"].iloc[0])
    return Group(name, seeds, x, mean, std, [Line(name, 0, "one seed", x, x, mean)] if seeds == 1 else [])


def _upright(x: float) -> dict[str, Any]:
    line = {"color": "#8b939c", "width": 1.2, "dash": "dash"}
    return {"type": "line", "xref": "x", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _note(text: str, x: float, y: float, xref: str, anchor: str) -> dict[str, Any]:
    where = {"xref": xref, "yref": "paper", "x": x, "y": y, "xanchor": anchor, "yanchor": "top"}
    return {"text": text, "showarrow": False, "font": {"size": 11.5, "color": MUTED}, **where}


def by_domain(domains: pd.DataFrame, colours: Mapping[str, str], value: str, title: str) -> Figure:
    """A row per domain with a point per variant. `domains` are rows {variant, domain, `value`}."""
    names = list(dict.fromkeys(map(str, domains["domain"])))
    if not names:
        return figures.empty("No domain has been tested yet.")
    return dots(domains.assign(place=domains["domain"], mean=domains[value]), names, colours, title)


def dots(
    rows: pd.DataFrame,
    places: Sequence[str],
    colours: Mapping[str, str],
    title: str,
    marks: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """Points of variants in rows of a chart: {variant, place, mean, std} at `place`, whiskers of a standard deviation.

    `marks` are {place, value, text}: ticks across a row at what chance or a ceiling reaches.
    """
    import pandas as pd

    traces: list[dict[str, Any]] = []
    variants = list(dict.fromkeys(map(str, rows["variant"])))
    for order, variant in enumerate(variants):
        own = rows[(rows["variant"] == variant) & np.isfinite(rows["mean"])]
        shift = 0.32 * (1 - 2 * order / max(len(variants) - 1, 1)) if len(variants) > 1 else 0.0
        spread = [float(s) if math.isfinite(s) else 0.0 for s in own.get("std", pd.Series(np.nan, own.index))]
        name = escape(variant)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [float(x) for x in own["mean"]],
                "y": [len(places) - 1 - list(places).index(place) + shift for place in own["place"]],
                "error_x": {"type": "data", "array": spread, "color": colours[variant], "thickness": 1.5, "width": 0},
                "marker": {"size": 8, "color": colours[variant]},
                "name": name,
                "customdata": [[s] for s in spread],
                "hovertemplate": f"<b>{name}</b> %{{x:.4g}} ± %{{customdata[0]:.2g}}<extra></extra>",
            }
        )
    shapes = [_tick(len(places) - 1 - list(places).index(mark["place"]), mark["value"]) for mark in marks]
    notes = [_told(len(places) - 1 - list(places).index(mark["place"]), mark) for mark in marks]
    ticks = {
        "tickmode": "array",
        "tickvals": list(range(len(places))),
        "ticktext": [escape(place) for place in reversed(places)],
        "range": [-0.6, len(places) - 0.4],
    }
    y = axis("", **ticks) | {"ticks": "", "showline": False, "fixedrange": True}
    legend = {**layout()["legend"], "y": 1.02, "yanchor": "bottom"}
    return {
        "data": traces,
        "layout": layout(
            xaxis=axis(title), yaxis=y, shapes=shapes, annotations=notes, legend=legend, hovermode="closest"
        ),
    }


def _tick(place: int, value: float) -> dict[str, Any]:
    line = {"color": "#8b939c", "width": 1.5}
    return {"type": "line", "x0": value, "x1": value, "y0": place - 0.42, "y1": place + 0.42, "line": line}


def _told(place: int, mark: Mapping[str, Any]) -> dict[str, Any]:
    where = {"x": mark["value"], "y": place + 0.42, "xanchor": "center", "yanchor": "bottom"}
    return {"text": escape(mark["text"]), "showarrow": False, "font": {"size": 10.5, "color": MUTED}, **where}
