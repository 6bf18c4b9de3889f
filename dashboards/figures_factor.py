"""What a component does, drawn: its effect with every pair of variants below it, and how components act together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.dashboards import figures
from archlab.dashboards.marks import Figure, Trace, chart, names_axis, ring, trace, upright, whiskers
from archlab.dashboards.panels import SIGNED
from archlab.dashboards.theme import BASELINE_COLOUR, INK, MUTED, PALETTE, axis, layout, translucent

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

_SPREAD = 0.22  # of the points of a row around its middle


def effects(rows: Sequence[Mapping[str, Any]], pairs: pd.DataFrame, unit: str) -> Figure:
    """A row per effect: the mean as a large point with its interval, each pair of variants and seed as a small one.

    `rows` are {place, mean, low, high, cells, pairs} in the order from the top, `pairs` {place, difference, variant,
    reference, seed, href}, where a click leads to.
    """
    if not rows:
        return figures.empty("Differences appear when two variants that differ in nothing else have a finished seed.")
    traces: list[Trace] = []
    for at, row in enumerate(reversed(rows)):
        own = pairs[pairs["place"] == row["place"]]
        text = [
            f"{escape(a)}<br>minus {escape(b)}<br>seed {seed}: {value:+.4f}"
            for a, b, seed, value in zip(own["variant"], own["reference"], own["seed"], own["difference"], strict=True)
        ]
        colour = BASELINE_COLOUR if row.get("whole") else PALETTE[0]
        heights = (at - 0.3 + _SPREAD * (k / max(len(own) - 1, 1) - 0.5) for k in range(len(own)))
        marker = {"size": 5, "color": translucent(colour, 0.4)}
        told = {"hoverinfo": "text", "hovertext": text, "customdata": list(own["href"])}
        traces.append(trace("markers", own["difference"], heights, marker=marker, **told))
        traces.append(_mean(row, at + 0.12, colour))
    names = [str(row["place"]) for row in reversed(rows)]
    y = names_axis(names, showgrid=False, tickfont={"size": 12.5, "color": INK})
    x = axis(f"Difference in test loss ({unit}); below zero is better")
    return chart(traces, x, y, shapes=[upright(0)], showlegend=False)


def _mean(row: Mapping[str, Any], y: float, colour: str) -> Trace:
    """The effect: filled where its interval leaves zero out."""
    known = math.isfinite(row["low"])
    clear = known and (row["low"] > 0 or row["high"] < 0)
    reach = f"<br>95% interval {row['low']:+.4f} to {row['high']:+.4f}" if known else "<br>no interval"
    told = f"<br>{row['pairs']} pairs in {row['cells']} cells"
    hover = f"<b>{escape(str(row['place']))}</b> %{{x:+.4f}}{reach}{told}<extra></extra>"
    made = trace("markers", [row["mean"]], [y], marker=ring(colour, 10, clear), hovertemplate=hover)
    if row.get("href"):
        made["customdata"] = [row["href"]]
    if known:
        made["error_x"] = whiskers(colour, [row["high"] - row["mean"]])
    return made


def interactions(found: pd.DataFrame) -> Figure:
    """A square per two factors, their interaction written in it; `found` are rows {one, other, value, half, cells}."""
    names = list(dict.fromkeys([*found["one"], *found["other"]]))
    pairs = {}
    for row in found.to_dict("records"):
        text = f"{round(row['value'], 4) + 0:+.4f}".replace("-", "\N{MINUS SIGN}")
        half = f" ± {row['half']:.3f}" if math.isfinite(row["half"]) else ""
        for a, b in ((row["one"], row["other"]), (row["other"], row["one"])):
            told = f"{escape(a)} with {escape(b)}: {row['value']:+.4f}{half}<br>in {row['cells']} cells"
            pairs[a, b] = (row["value"], text, told)
    cells = [[pairs.get((a, b), (None, "", "")) for b in names] for a in names]
    values, texts, told = ([[cell[part] for cell in row] for row in cells] for part in range(3))
    most = float(np.abs(found["value"]).max()) or 1.0
    heat = {
        "type": "heatmap",
        "z": values,
        "x": [escape(name) for name in names],
        "y": [escape(name) for name in names],
        "colorscale": SIGNED,
        "zmin": -most,
        "zmax": most,
        "xgap": 1,
        "ygap": 1,
        "text": texts,
        "texttemplate": "%{text}",
        "hovertext": told,
        "hoverinfo": "text",
        "hoverongaps": False,
        "colorbar": {"thickness": 9, "outlinewidth": 0, "tickfont": {"size": 11, "color": MUTED}},
    }
    plain = {"ticks": "", "showline": False, "showgrid": False, "type": "category", "fixedrange": True}
    y = axis("", **plain, autorange="reversed")
    return {"data": [heat], "layout": layout(xaxis=axis("", **plain), yaxis=y)}
