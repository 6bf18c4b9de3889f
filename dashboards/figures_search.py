"""A search drawn: its front, how it went, which axes mattered, and all axes of all trials side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from archlab.dashboards import figures
from archlab.dashboards.marks import Figure, Trace, chart, quiet, trace
from archlab.dashboards.panels import RISING
from archlab.dashboards.theme import BASELINE_COLOUR, INK, MUTED, PALETTE, axis, layout
from archlab.search.formatting.filters import Filter, to_number
from archlab.search.formatting.tables import short_count
from archlab.search.formatting.words import shortest

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

FRONT = PALETTE[1]
STEPS = {"shape": "hv", "color": FRONT, "width": 1.6}
_ROOM = 18  # characters of a text on an axis
_STEPS = 8  # of an axis of whole numbers, each with its own tick
_BRUSH = re.compile(r"dimensions\[(\d+)\]\.constraintrange")


def front(trials: pd.DataFrame, goal: str, title: str) -> Figure:
    """Perplexity over another goal: the front, and as steps what is dominated in these two goals; the others grey,
    crosses where a trial breaks a constraint. `trials` are rows {number, perplexity, `goal`, front, feasible, told}."""
    known = trials[np.isfinite(trials["perplexity"]) & np.isfinite(trials[goal])]
    if not len(known):
        return figures.empty("No trial has come to its end yet.")
    best = known[known["front"]].sort_values([goal, "perplexity"])
    edge = best[best["perplexity"] == best["perplexity"].cummin()]  # a front of three goals has others too
    left_out = known[~known["feasible"]]
    traces = [
        _points(known[~known["front"] & known["feasible"]], goal, "dominated", {"size": 7, "color": "#aab2ba"}),
        _points(left_out, goal, "breaks a constraint", {"size": 8, "color": MUTED, "symbol": "x-thin-open"}),
        quiet("lines", edge[goal], edge["perplexity"], line=STEPS),
        _points(best, goal, "front", {"size": 9, "color": FRONT}),
    ]
    return chart(traces, axis(title), axis("Validation perplexity"))


def history(trials: pd.DataFrame) -> Figure:
    """The perplexity of each trial in the order of the proposals, and the best one so far."""
    known = trials[np.isfinite(trials["perplexity"])].sort_values("number")
    if not len(known):
        return figures.empty("No trial has come to its end yet.")
    lowest = known["perplexity"].where(known["feasible"]).cummin()
    best = trace("lines", known["number"], lowest, line=STEPS, name="best so far", hoverinfo="skip")
    traces = [_points(known, "number", "trial", {"size": 7, "color": BASELINE_COLOUR}), best]
    return chart(traces, axis("Proposal"), axis("Validation perplexity"))


def _points(rows: pd.DataFrame, x: str, name: str, marker: Mapping[str, Any]) -> Trace:
    hover = "<b>%{customdata[0]}</b><br>%{x:.4s} · perplexity %{y:.4g}<br>%{customdata[1]}<extra></extra>"
    told = [[f"trial {n}", escape(told)] for n, told in zip(rows["number"], rows["told"], strict=True)]
    options = {"customdata": told, "name": name, "marker": dict(marker), "hovertemplate": hover}
    return trace("markers", rows[x], rows["perplexity"], **options)


def importances(shares: Mapping[str, float]) -> Figure:
    """The share of each axis as a bar, the largest on top."""
    names = sorted(shares, key=lambda path: shares[path])
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [shares[path] for path in names],
        "y": [escape(path) for path in names],
        "marker": {"color": PALETTE[0]},
        "text": [f"{shares[path]:.0%}" for path in names],
        "textposition": "outside",
        "hoverinfo": "skip",
    }
    x = axis("Share in being among the best quarter", tickformat=".0%", range=[0, 1.12 * max(shares.values())])
    y = axis("", type="category") | {"ticks": "", "showline": False, "showgrid": False, "tickfont": {"color": INK}}
    return {"data": [bar], "layout": layout(xaxis=x, yaxis=y, bargap=0.45)}


def _quoted(text: str) -> str:
    return f"'{text}'" if '"' in text else f'"{text}"'


def _short(value: float) -> str:
    return short_count(float(f"{value:.2g}")) if value >= 1 else f"{value:.2g}"


@dataclass(frozen=True)
class Dimension:
    """An axis of the parallel coordinates. `values` are its places on it: those of a text are the number of the text
    among `texts`, those of a number that spans a factor of five its logarithm (`log`); `whole` are whole numbers."""

    name: str
    values: tuple[float, ...]
    texts: tuple[str, ...] = ()
    log: bool = False
    whole: bool = False

    @classmethod
    def of(cls, name: str, column: pd.Series) -> Dimension:
        """From the values of trials; one that a trial lacks is a text of its own."""
        if all(isinstance(each, int | float) for each in column) and np.isfinite(column.astype(float)).all():
            numbers = column.astype(float)
            log = bool(numbers.min() > 0 and numbers.max() / numbers.min() >= 5)
            whole = bool((numbers == numbers.round()).all())
            return cls(name, tuple(np.log10(numbers) if log else numbers), log=log, whole=whole)
        said = ["none" if isinstance(each, float) and math.isnan(each) else str(each) for each in column]
        texts = tuple(sorted(set(said), key=lambda text: (to_number(text) is None, to_number(text) or 0.0, text)))
        return cls(name, tuple(float(texts.index(each)) for each in said), texts)

    def terms(self, span: Sequence[float]) -> str:
        """The filter that a brushed span of the axis is."""
        low, high = min(span), max(span)
        if self.texts:
            kept = [text for place, text in enumerate(self.texts) if low <= place <= high]
            quoted = (_quoted(text) if re.search(r"[\s,\"'=!<>~]", text) else text for text in kept)
            return f"{self.name}={','.join(quoted)}" if kept else ""
        ends = (10**low, 10**high) if self.log else (low, high)
        if self.whole and math.ceil(ends[0]) <= math.floor(ends[1]):
            return f"{self.name}>={math.ceil(ends[0])} {self.name}<={math.floor(ends[1])}"
        return f"{self.name}>={ends[0]:.4g} {self.name}<={ends[1]:.4g}"

    def span(self, where: Filter) -> list[float] | None:
        """What of the axis a filter leaves; None where it leaves all, or what is no span."""
        own = [term for term in where.terms if term.name == self.name and not term.negated]
        if self.texts:
            listed = [value for term in own if term.operator == "=" for value in term.values]
            places = [place for place, text in enumerate(self.texts) if text in listed]
            return [places[0] - 0.4, places[-1] + 0.4] if places else None
        ends = {term.operator: to_number(term.values[0]) for term in own if len(term.values) == 1}
        ends |= {">=": ends["="], "<=": ends["="]} if "=" in ends else {}
        if not {">=", "<="} & ends.keys() or not self.values:
            return None
        low, high = ends.get(">="), ends.get("<=")
        reach = [10**each if self.log else each for each in (min(self.values), max(self.values))]
        room = 0.4 if self.whole else 0.0  # a brush of one number has to have a width
        found = [reach[0] if low is None else low - room, reach[1] if high is None else high + room]
        return [math.log10(max(each, 1e-300)) for each in found] if self.log else found


def brushed(event: Sequence[Any], dimensions: Sequence[Dimension]) -> dict[str, str]:
    """What a reader has just brushed: name of the dimension to its filter, empty where the brush was taken off."""
    found = {}
    for key, value in (event[0] or {}).items() if event else ():
        match = _BRUSH.fullmatch(key)
        if match and int(match[1]) < len(dimensions):
            own = dimensions[int(match[1])]
            span = value[0] if value and isinstance(value[0], list) else value
            found[own.name] = own.terms(span) if span else ""
    return found


def spoken(text: str) -> str:
    """A setting that a patch spells as an object, as people do: window(size=32)."""
    if not text.startswith("{"):
        return text
    said = json.loads(text)
    name = said.pop("type", "")
    return f"{name}({', '.join(f'{key}={value}' for key, value in said.items())})"


def parallel(dimensions: Sequence[Dimension], colour: Sequence[float], where: Filter) -> Figure:
    """A line per trial through all dimensions, coloured by `colour`, its perplexity; a filter is shown as brushes."""
    drawn, names = [], [each.name for each in dimensions]
    for own in dimensions:
        made = {"label": escape(shortest(own.name, names)), "values": list(own.values), "multiselect": False}
        if own.texts:
            made |= {"tickvals": list(range(len(own.texts))), "ticktext": [spoken(each)[:_ROOM] for each in own.texts]}
        elif own.log:
            ticks = np.linspace(min(own.values), max(own.values), 4)
            made |= {"tickvals": [float(each) for each in ticks], "ticktext": [_short(10**each) for each in ticks]}
        elif own.whole and len(set(own.values)) <= _STEPS:
            made |= {"tickvals": sorted(set(own.values))}
        if (span := own.span(where)) is not None:
            made["constraintrange"] = span
        drawn.append(made)
    shades = [*(shade for _, shade in RISING[:0:-1]), "#c3d9ec"]
    scale = [[place, shade] for (place, _), shade in zip(RISING, shades, strict=True)]
    lines = {
        "type": "parcoords",
        "dimensions": drawn,
        "line": {"color": list(colour), "colorscale": scale},
        "labelfont": {"size": 12, "color": INK},
        "tickfont": {"size": 11, "color": MUTED},
        "rangefont": {"size": 10, "color": "rgba(0,0,0,0)"},
        "unselected": {"line": {"color": "#e1e4e7", "opacity": 0.5}},
    }
    return {"data": [lines], "layout": layout(margin={"l": 110, "r": 60, "t": 46, "b": 18})}
