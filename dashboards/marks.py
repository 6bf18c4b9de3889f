"""What figures are put together of: traces and their markers, whiskers and bands, notes, lines, axes of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from archlab.dashboards.theme import GREY, MUTED, axis, layout, translucent

Figure = dict[str, Any]
Trace = dict[str, Any]


def chart(traces: Sequence[Trace], x: Trace, y: Trace, **options: Any) -> Figure:
    """A figure of points and lines, whose legend stands above it."""
    legend = {**layout()["legend"], "y": 1.02, "yanchor": "bottom"}
    made = layout(xaxis=x, yaxis=y, **{"legend": legend, "hovermode": "closest", **options})
    return {"data": list(traces), "layout": made}


def trace(mode: str, x: Iterable[Any], y: Iterable[Any], **options: Any) -> Trace:
    """Points or lines."""
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), **options}


def quiet(mode: str, x: Iterable[Any], y: Iterable[Any], **options: Any) -> Trace:
    """Points or lines that are not in the legend and, without other options, say nothing when pointed at."""
    return trace(mode, x, y, **{"showlegend": False, "hoverinfo": "skip", **options})


def band(x: Sequence[Any], low: Sequence[Any], high: Sequence[Any], colour: str, group: str, alpha: float) -> Trace:
    """The area between `low` and `high`: the one forward and the other back, as one closed outline."""
    none = {"width": 0, "color": "rgba(0,0,0,0)"}
    filled = {"fill": "toself", "fillcolor": translucent(colour, alpha), "line": none, "legendgroup": group}
    return quiet("lines", [*x, *x[::-1]], [*low, *high[::-1]], **filled)


def crosses(x: Iterable[Any], y: Iterable[Any], colour: str, group: str, text: str) -> Trace:
    """Where trials were lost."""
    marker = {"symbol": "x-thin", "size": 9, "line": {"color": colour, "width": 2}}
    return quiet("markers", x, y, marker=marker, hoverinfo="text", hovertext=text, legendgroup=group)


def ring(colour: str, size: int, filled: bool = False) -> dict[str, Any]:
    """A marker that is hollow, or filled."""
    line = {"color": colour, "width": 2}
    return {"size": size, "color": colour if filled else "#ffffff", "line": line, "opacity": 1}


def whiskers(
    colour: str, up: Sequence[float], down: Sequence[float] | None = None, thickness: float = 2
) -> dict[str, Any]:
    """How far intervals reach from their points; without `down` as far as `up`."""
    reach = {"array": up} if down is None else {"array": up, "arrayminus": down, "symmetric": False}
    return {"type": "data", **reach, "color": colour, "thickness": thickness, "width": 0}


def upright(x: float, **line: Any) -> dict[str, Any]:
    """A line from the bottom of a figure to its top."""
    where = {"xref": "x", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    return {"type": "line", **where, "line": {"color": GREY, "width": 1.2, **line}}


def note(text: str, x: float, y: float, anchors: str, size: float = 11.5, **where: Any) -> dict[str, Any]:
    """A text in a figure; `anchors` say which corner of it stands at the place: `left bottom`."""
    across, down = anchors.split()
    font = {"size": size, "color": MUTED}
    at = {"x": x, "y": y, "xanchor": across, "yanchor": down, **where}
    return {"text": escape(text), "showarrow": False, "font": font, **at}


def brief(names: Iterable[str]) -> dict[str, str]:
    """Names of a legend: of cells of a grid, `gated [kv_heads=2, recipe=as is]`, their levels: `gated · 2 · as is`,
    where these tell all of them apart."""
    own = list(dict.fromkeys(names))
    found = {}
    for name in own:
        variant, _, cell = name.removesuffix("]").partition(" [")
        parts = re.split(r", (?=[\w.*]+=)", cell) if name.endswith("]") else []
        plain = parts and all("=" in part for part in parts)
        found[name] = " · ".join([variant, *(part.partition("=")[2] for part in parts)]) if plain else name
    return found if len({*found.values()}) == len(own) else {name: name for name in own}


def names_axis(names: Sequence[str], room: float = 0.3, **options: Any) -> dict[str, Any]:
    """A vertical axis with a name at each whole number from 0 on, and `room` up to 1 left out at both ends."""
    ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": [escape(name) for name in names]}
    made = axis("", **ticks, range=[room - 1, len(names) - room])
    return made | {"ticks": "", "showline": False, "fixedrange": True, **options}
