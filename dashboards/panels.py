"""Grids side by side, a panel per variant on one scale of colours: needles by depth and length, heads by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.dashboards import figures
from archlab.dashboards.curves import Floats
from archlab.dashboards.marks import Figure, note, upright
from archlab.dashboards.theme import INK, MUTED, layout

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

MOST = 24  # panels of a figure
ROOM = 24  # cells beside each other in which numbers are written
RISING = [[0.0, "#f6f7f8"], [0.3, "#c3d9ec"], [0.6, "#5f9fcb"], [0.85, "#1f6199"], [1.0, "#0b2f55"]]
SIGNED = [[0.0, "#0072b2"], [0.25, "#86bbdc"], [0.5, "#f6f7f8"], [0.75, "#eeb088"], [1.0, "#d55e00"]]
_NAME = 32  # characters of a variant above its panel


@dataclass(frozen=True)
class Look:
    """How a grid is drawn: `low` and `high` are the ends of the colours (None: those of the values), `signed` has zero
    in the middle, `log` are colours by powers of ten, `upwards` has the first row at the bottom, `split` draws a line
    after the last column label that is at most so large."""

    title: str = ""
    low: float | None = None
    high: float | None = None
    signed: bool = False
    log: bool = False
    upwards: bool = True
    split: float | None = None
    form: str = ".3g"
    across: int = 4


def panels(grids: pd.DataFrame, variants: Sequence[str], colours: Mapping[str, str], look: Look) -> tuple[Figure, int]:
    """The figure and its height in px. `grids` are rows {variant, y, x, row, column, mean, std, n} of one grid; without
    it a variant has no panel."""
    found = {name: own for name in variants if len(own := grids[grids["variant"] == name])}
    if not found:
        return figures.empty("Nothing has been measured here yet."), 120
    shown = dict(list(found.items())[:MOST])
    low, high = _ends(np.concatenate([own["mean"].astype(float) for own in shown.values()]), look)
    across = min(look.across, max(len(shown), 2))
    down = math.ceil(len(shown) / across)
    rows = max(own["y"].nunique() for own in shown.values())
    tall = min(max(15 * rows, 96), 300)
    head, foot = 26, 46
    height = down * (tall + head + foot) + 4
    made: dict[str, Any] = {"coloraxis": _scale(look, low, high)}
    traces, shapes, notes = [], [], []
    for place, (name, own) in enumerate(shown.items()):
        column, line = place % across, place // across
        end = "" if place == 0 else str(place + 1)
        left = column / across + (0.04 if column else 0.0)
        top = 1 - (line * (tall + head + foot) + head) / height
        box = [left, (column + 1) / across - 0.012], [top - tall / height, top]
        traces.append(_heat(own, name, end, look, low))
        made |= _axes(own, end, box, look, column == 0)
        notes.append(_name(name, box, colours[name]))
        if look.split is not None:
            shapes += _split(own, end, look.split)
    figure = {"data": traces, "layout": layout(**made, annotations=notes, shapes=shapes, hovermode="closest")}
    figure["layout"]["margin"] = {"l": 52, "r": 8, "t": 0, "b": 4}
    return figure, height


def left_out(grids: pd.DataFrame) -> int:
    """How many variants have a grid and no panel."""
    return max(int(grids["variant"].nunique()) - MOST, 0)


def _ends(values: Floats, look: Look) -> tuple[float, float]:
    """The ends of the colours."""
    known = values[np.isfinite(values) & ((values > 0) | (not look.log))]
    if not len(known):
        return 0.0, 1.0
    if look.signed:
        most = float(np.abs(known).max()) or 1.0
        return -most, most
    low = float(known.min()) if look.low is None else look.low
    high = float(known.max()) if look.high is None else look.high
    return (math.log10(low), math.log10(high)) if look.log else (low, high if high > low else low + 1.0)


def _scale(look: Look, low: float, high: float) -> dict[str, Any]:
    bar: dict[str, Any] = {
        "thickness": 9,
        "outlinewidth": 0,
        "len": 1,
        "tickfont": {"size": 11, "color": MUTED},
        "title": {"text": escape(look.title), "side": "right", "font": {"size": 11.5, "color": MUTED}},
    }
    if look.log:
        powers = [power for power in range(math.floor(low), math.ceil(high) + 1) if low <= power <= high]
        ticks = powers if len(powers) > 1 else [low, high]
        bar |= {"tickvals": ticks, "ticktext": [f"{10**tick:.3g}" for tick in ticks]}
    return {"colorscale": SIGNED if look.signed else RISING, "cmin": low, "cmax": high, "colorbar": bar}


def _heat(own: pd.DataFrame, name: str, end: str, look: Look, low: float) -> dict[str, Any]:
    values, spread = _square(own, "mean"), _square(own, "std")
    labels = [[f"{each:g}" if isinstance(each, float) else str(each) for each in dict.fromkeys(own[k])] for k in "yx"]
    said = [[_text(value, look.form) for value in row] for row in values]
    around = [[f" ± {each:.2g}" if math.isfinite(each) else "" for each in row] for row in spread]
    told = [[escape(a) + b for a, b in zip(*each, strict=True)] for each in zip(said, around, strict=True)]
    row, column = (escape(str(own[key].iloc[0])) for key in ("row", "column"))
    gap = 1 if values.shape[1] * look.across <= 3 * ROOM else 0
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = np.log10(values) if look.log else values
    heat: dict[str, Any] = {
        "type": "heatmap",
        "z": [[float(z) if math.isfinite(z) else None for z in line] for line in drawn],
        "x": [escape(label) for label in labels[1]],
        "y": [escape(label) for label in labels[0]],
        "xaxis": f"x{end}",
        "yaxis": f"y{end}",
        "coloraxis": "coloraxis",
        "xgap": gap,
        "ygap": gap,
        "customdata": told,
        "name": escape(name),
        "hovertemplate": f"<b>{escape(name)}</b><br>{row} %{{y}}, {column} %{{x}}<br>%{{customdata}}<extra></extra>",
        "hoverongaps": False,
    }
    if values.shape[1] * look.across <= ROOM and len(values) <= 24:
        heat |= {"text": said, "texttemplate": "%{text}", "textfont": {"size": 10.5}}
    return heat


def _square(own: pd.DataFrame, value: str) -> Floats:
    """The cells `[rows, columns]`, which a grids frame has row by row."""
    return np.asarray(own[value], np.float64).reshape(own["y"].nunique(), -1)


def _text(value: float, form: str) -> str:
    """A number with its zeros at the end, so that all cells have as many digits."""
    return f"{value:#{form}}".rstrip(".").replace("-", "\N{MINUS SIGN}") if math.isfinite(value) else ""


def _axes(own: pd.DataFrame, end: str, box: tuple[list[float], list[float]], look: Look, first: bool) -> dict[str, Any]:
    common: dict[str, Any] = {
        "type": "category",
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
        "tickfont": {"size": 10.5, "color": MUTED},
        "fixedrange": True,
    }
    what = {"font": {"size": 11, "color": MUTED}, "standoff": 6}
    x = {**common, "domain": box[0], "anchor": f"y{end}", "title": {"text": escape(str(own["column"].iloc[0])), **what}}
    y = {**common, "domain": box[1], "anchor": f"x{end}", "autorange": True if look.upwards else "reversed"}
    if first:
        y["title"] = {"text": escape(str(own["row"].iloc[0])), **what}
    return {f"xaxis{end}": x | {"tickangle": 0, "nticks": 12}, f"yaxis{end}": y | {"nticks": 12}}


def _name(name: str, box: tuple[list[float], list[float]], colour: str) -> dict[str, Any]:
    """A variant's name above its panel, with its colour before it."""
    short = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
    above = note("", box[0][0], box[1][1], "left bottom", xref="paper", yref="paper", hovertext=escape(name))
    text = f'<span style="color:{colour}">■</span> {escape(short)}'
    return above | {"text": text, "font": {"size": 12.5, "color": INK}}


def _split(own: pd.DataFrame, end: str, most: float) -> list[dict[str, Any]]:
    """A line between the columns up to a label and those beyond; none where all are on one side."""
    labels = [float(label) for label in dict.fromkeys(own["x"])]
    inside = sum(label <= most for label in labels)
    if inside in (0, len(labels)):
        return []
    line = upright(inside - 0.5, color="#d55e00", width=1.6, dash="dash")
    return [line | {"xref": f"x{end}", "yref": f"y{end} domain"}]
