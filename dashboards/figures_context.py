"""What a model makes of its context, drawn: losses by position, needles in haystacks, and probes of recall."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.dashboards import figures
from archlab.dashboards.curves import Group, Line, thin
from archlab.dashboards.marks import Figure, chart, names_axis, note, trace, upright, whiskers
from archlab.dashboards.theme import GREY, axis

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
    figure["layout"]["shapes"] = shapes = [upright(end, dash="dash") for end in ends if end <= last]
    if shapes:
        at, anchors = math.log10(ends[0]) if log else ends[0], "right top" if ends[-1] == last else "left top"
        figure["layout"]["annotations"] = [note("trained length", at, 1.0, anchors, xref="x", yref="paper")]
    return figure


def _group(name: str, rows: pd.DataFrame, log: bool) -> Group:
    x, mean, std = (np.asarray(rows[column], np.float64) for column in ("x", "mean", "std"))
    keep = np.unique(np.geomspace(1, len(x), DRAWN).round().astype(int)) - 1 if log else thin(len(x), DRAWN)
    x, mean, std = x[keep], mean[keep], std[keep]
    seeds = int(rows["n"].iloc[0])
    return Group(name, seeds, x, mean, std, [Line(name, 0, "one seed", x, x, mean)] if seeds == 1 else [])


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
    rank = {place: len(places) - 1 - order for order, place in enumerate(places)}
    traces = []
    variants = list(dict.fromkeys(map(str, rows["variant"])))
    for order, variant in enumerate(variants):
        own = rows[(rows["variant"] == variant) & np.isfinite(rows["mean"])]
        shift = 0.32 * (1 - 2 * order / max(len(variants) - 1, 1)) if len(variants) > 1 else 0.0
        spread = [float(s) if math.isfinite(s) else 0.0 for s in own.get("std", [math.nan] * len(own))]
        name = escape(variant)
        hover = f"<b>{name}</b> %{{x:.4g}} ± %{{customdata[0]:.2g}}<extra></extra>"
        told = {"customdata": [[s] for s in spread], "hovertemplate": hover, "name": name}
        marker, reach = {"size": 8, "color": colours[variant]}, whiskers(colours[variant], spread, thickness=1.5)
        y = [rank[place] + shift for place in own["place"]]
        traces.append(trace("markers", own["mean"], y, marker=marker, error_x=reach, **told))
    shapes, notes = [], []
    for mark in marks:
        at, y = mark["value"], rank[mark["place"]]
        line = {"color": GREY, "width": 1.5}
        shapes.append({"type": "line", "x0": at, "x1": at, "y0": y - 0.42, "y1": y + 0.42, "line": line})
        notes.append(note(mark["text"], at, y + 0.42, "center bottom", size=10.5))
    return chart(traces, axis(title), names_axis(places[::-1], 0.4), shapes=shapes, annotations=notes)
