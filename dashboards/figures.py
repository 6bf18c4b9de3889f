"""The plots, as plain plotly figures: SVG lines only, at most 200 of them, text that is never taken for HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

import numpy as np

from archlab.dashboards import marks
from archlab.dashboards.curves import Floats, Group, Line
from archlab.dashboards.marks import Figure, Trace
from archlab.dashboards.theme import DASHES, INK, MUTED, PALETTE, axis, dashes, layout, translucent

MAXIMUM_LINES = 200
GRAPH_CONFIG = {
    # plotly.js offers "Share chart", which would send the data to a server of its makers
    "modeBarButtonsToRemove": ["sendChartToCloud", "lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    "plotlyServerURL": "",
    "displaylogo": False,
    "responsive": True,
    "toImageButtonOptions": {"format": "svg", "filename": "archlab"},
}
_APART = {  # verdicts that no more trials change, as what the variants have
    "other objective": "another objective than the baseline",
    "other test text": "another test text than the baseline",
    "lossy tokenizer": "another tokenizer than the baseline, of which one does not keep all of the text",
}


def curves(
    groups: Sequence[Group], colours: Mapping[str, str], baseline: str, x_title: str, y_title: str, falls: bool = False
) -> Figure:
    """Each variant's mean over its seeds with a band of one standard deviation, and the seeds as thin lines below.

    A diverged seed is a thin line that ends in a cross. Above 200 lines the thin ones beyond are left out, which
    `hidden_lines` counts. A curve that `falls` is framed without its first steep part, which a double click shows.
    """
    groups = sorted(groups[:MAXIMUM_LINES], key=lambda each: each.variant == baseline, reverse=True)
    room = MAXIMUM_LINES - len(groups)
    named: set[str] = set()
    short = marks.brief(group.variant for group in groups)
    thin_lines: list[Trace] = []
    bands, means = [], []
    for group, dash in zip(groups, _styles(groups, baseline), strict=True):
        colour, name = colours.get(group.variant, MUTED), escape(group.variant)
        for line in group.lines[: max(room, 0)]:
            room -= 1
            if group.seeds > 1 or line.diverged:
                thin_lines.append(_thin(line, colour, name))
            if line.diverged and len(last := np.flatnonzero(np.isfinite(line.y))[-1:]):
                text = f"{name}, {escape(line.label)}: diverged"
                thin_lines.append(marks.crosses(_plain(line.x[last]), _plain(line.y[last]), colour, name, text))
        if group.seeds > 1:
            bands.append(_band(group, colour, name))
        if len(group.x):
            mean = _mean(group, colour, name, dash)
            mean["name"] = mean["name"].replace(name, escape(short[group.variant]), 1)
            means.append(mean | {"showlegend": mean["name"] not in named})
            named.add(mean["name"])
    traces = [*bands, *thin_lines, *means]
    if not traces:
        return empty("No points yet: they appear with the first steps.")
    figure = marks.chart(traces, axis(x_title), axis(y_title))
    if falls and (frame := _frame(groups)) is not None:
        figure["layout"]["yaxis"] |= {"range": frame, "autorange": False}
    return figure


def _styles(groups: Sequence[Group], baseline: str) -> Iterator[str]:
    """A line style for each group: that of its variant, or one of its own where labels tell groups of one apart."""
    of = dashes(list(dict.fromkeys(group.variant for group in groups)), baseline)
    alike = Counter[str]()
    for group in groups:
        yield DASHES[alike[group.variant] % len(DASHES)] if group.label else of[group.variant]
        alike[group.variant] += 1


def _frame(groups: Sequence[Group]) -> list[float] | None:
    """The range that shows where variants differ: what comes after the first tenth of the longest curve."""
    long = [group for group in groups if len(group.x) >= 8]
    if not long:
        return None
    start = 0.1 * max(group.x[-1] for group in long)
    whole = [(np.asarray(line.x), np.asarray(line.y)) for group in long for line in group.lines if not line.diverged]
    late = np.concatenate([y[x >= start] for x, y in [*((group.x, group.mean) for group in long), *whole]])
    late = late[np.isfinite(late)]
    if not len(late):
        return None
    low, high = float(late.min()), float(late.max())
    room = 0.06 * (high - low)
    return [low - room, high + room]


def logarithmic(figure: Figure, name: str) -> None:
    """Makes an axis of curves logarithmic, with ticks at 1, 2 and 5 of each power of ten where it spans half a one. A
    band that reaches to zero or below ends at the lowest value of a line."""
    letter, whole = name[0], {"dtick": "D2", "tickformat": "~s" if name == "xaxis" else "~g"}
    lines = [drawn[letter] for drawn in figure["data"] if "fill" not in drawn]
    values = [each for line in lines for each in line if each is not None and each > 0]
    low = min(values, default=0.0)
    for area in (drawn for drawn in figure["data"] if "fill" in drawn):
        area[letter] = [each if each is None else max(each, low) for each in area[letter]]
    figure["layout"][name] |= {"type": "log", **(whole if max(values, default=0.0) > 3 * low else {})}


def hidden_lines(groups: Sequence[Group]) -> tuple[int, int]:
    """(trials that `curves` draws, trials that there are); a mean takes a line of its own."""
    total = sum(len(group.lines) for group in groups)
    means = sum(len(group.lines) > 1 for group in groups)
    return min(total, max(MAXIMUM_LINES - means, 0)), total


def _mean(group: Group, colour: str, name: str, dash: str) -> Trace:
    """The bold line; `meta` says what it is of, the variant or a trial."""
    seeds = f"mean of {group.seeds} {'trials' if group.factor else 'seeds'}"
    of = {"level": quote(group.factor)} if group.factor else {"variant": quote(group.variant)}
    if group.seeds == 1:
        first = next((line for line in group.lines if not line.diverged), group.lines[0])
        seeds, of = escape(f"{first.variant}, {first.label}" if group.factor else first.label), {"key": first.key}
    counted = f" (n = {group.seeds})" if group.factor and len(group.lines) > 1 else ""
    label = escape(group.label) or name
    return marks.trace("lines", _plain(group.x), _plain(group.mean)) | {
        "name": label + counted,
        "legendgroup": label,
        "line": {"color": colour, "width": 2, "dash": dash},
        "meta": of,
        "hovertemplate": f"<b>{name}</b> · {seeds}<br>%{{x:.4~s}} → %{{y:.5g}}<extra></extra>",
    }


def _thin(line: Line, colour: str, name: str) -> Trace:
    drawn = {"color": translucent(colour, 0.35), "width": 0.8}
    made = marks.quiet("lines", _plain(line.x), _plain(line.y), line=drawn, legendgroup=name)
    if not line.key:
        return made
    hover = f"{escape(line.variant)} · {escape(line.label)}<br>%{{x:.4~s}} → %{{y:.5g}}<extra></extra>"
    return made | {"meta": {"key": line.key}, "hovertemplate": hover, "hoverinfo": "all"}


def _band(group: Group, colour: str, name: str) -> Trace:
    known = np.isfinite(group.mean) & np.isfinite(group.std)
    x, mean, std = group.x[known], group.mean[known], group.std[known]
    return marks.band(_plain(x), _plain(mean - std), _plain(mean + std), colour, name, 0.13)


def rate_curve(
    rates: Sequence[Mapping[str, Any]], colours: Mapping[str, str], baseline: str, of: str = "perplexity"
) -> Figure:
    """Validation perplexity or loss by learning rate, a line per variant, its choice a ring, a diverged rate a cross on
    top.

    `rates` are rows {variant, lr, validation_`of` (NaN: none), best, state}.
    """
    value, title = f"validation_{of}", f"Validation {of}"
    names = list(dict.fromkeys(row["variant"] for row in rates))
    style = dashes(names, baseline)
    known = [row[value] for row in rates if math.isfinite(row[value])]
    if not known:
        return empty("No rate has been tried to its end yet.")
    top = max(known) + 0.06 * (max(known) - min(known) or max(known))
    traces = []
    for name in names:
        mine = sorted((row for row in rates if row["variant"] == name), key=lambda row: row["lr"])
        fine = [row for row in mine if math.isfinite(row[value])]
        colour, shown = colours[name], escape(name)
        hover = f"<b>{shown}</b><br>learning rate %{{x:g}}<br>{title.lower()} %{{y:.5g}}<extra></extra>"
        sizes = [11 if row["best"] else 5 for row in fine]
        fills = ["#ffffff" if row["best"] else colour for row in fine]
        line = {"color": colour, "width": 1.6, "dash": style[name]}
        marker = marks.ring(colour, 5) | {"size": sizes, "color": fills}
        named = {"name": shown, "legendgroup": shown, "hovertemplate": hover}
        x, y = ([row[key] for row in fine] for key in ("lr", value))
        traces.append(marks.trace("lines+markers", x, y, line=line, marker=marker, **named))
        if lost := [row["lr"] for row in mine if row["state"] == "diverged"]:
            traces.append(marks.crosses(lost, [top] * len(lost), colour, shown, f"{shown}: diverged"))
    ticks = sorted({row["lr"] for row in rates})
    labels = {"tickmode": "array", "tickvals": ticks, "ticktext": [rate_text(lr) for lr in ticks]}
    scale = axis("Learning rate", type="log", **labels)
    return marks.chart(traces, scale, axis(title), showlegend=False)


def rate_text(lr: float) -> str:
    """A rate as papers write it: 0.001 is 1e-3, 0.00025 is 2.5e-4."""
    if lr == 0 or not math.isfinite(lr):
        return f"{lr:g}"
    mantissa, exponent = f"{lr:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def worth(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """What each choice of a recipe is worth, from rows of `calibrated_choices`."""

    def difference(row: Mapping[str, Any]) -> dict[str, Any]:
        verdict = "better" if row["high"] < 0 else "worse" if row["low"] > 0 else "within noise"
        name = f"{row['choice']} {row['best']}, not {row['other']}"
        ends = {"delta_low": row["low"], "delta_high": row["high"]}
        return {"variant": name, "delta": row["worth"], **ends, "verdict": verdict}

    found = [difference(row) for row in rows]
    colours = dict.fromkeys((row["variant"] for row in found), PALETTE[0])
    return forest(found, colours, "nats/token", "Difference in validation loss", "the other value")


def forest(
    rows: Sequence[Mapping[str, Any]],
    colours: Mapping[str, str],
    unit: str,
    title: str = "Difference in test loss",
    base: str = "the baseline",
) -> Figure:
    """Each variant's difference to `base` with its interval; hollow where it is within noise.

    `rows` are rows {variant, delta, delta_low, delta_high (NaN: no interval), verdict} in the order of the table.
    """
    shown = [row for row in rows if math.isfinite(row["delta"])]
    if not shown:
        found = dict.fromkeys(row["verdict"] for row in rows)
        if found and all(verdict in _APART for verdict in found):
            return empty(f"There are no differences: the variants have {' and '.join(_APART[v] for v in found)}.")
        return empty("Differences appear when the baseline and a variant have a finished trial in common.")
    traces = [_difference(row, place, colours[row["variant"]]) for place, row in enumerate(reversed(shown))]
    short = marks.brief(row["variant"] for row in shown)
    names = [short[row["variant"]] for row in reversed(shown)]
    y = marks.names_axis(names, showgrid=False, tickfont={"size": 12.5, "color": INK})
    # on the left alone: at the right are plotly's own buttons, and a narrow screen has room for one
    hints = [marks.note(f"← better than {base}", 0, 1.0, "left bottom", xref="paper", yref="paper")]
    ends = [row[key] for row in shown for key in ("delta", "delta_low", "delta_high") if math.isfinite(row[key])]
    low, high = min([*ends, 0.0]), max([*ends, 0.0])
    room = 0.12 * (high - low) or 0.01
    x = axis(f"{title} ({unit})", range=[low - room, high + room])
    margin = {"l": 8, "r": 16, "t": 26, "b": 8}
    return marks.chart(traces, x, y, shapes=[marks.upright(0)], annotations=hints, margin=margin)


def _difference(row: Mapping[str, Any], place: int, colour: str) -> Trace:
    """The point of a variant, with its interval where it has one."""
    interval = math.isfinite(row["delta_low"])
    reach = f"95% interval {row['delta_low']:+.4f} to {row['delta_high']:+.4f}" if interval else "no interval"
    said = f"<b>{escape(row['variant'])}</b> {row['delta']:+.4f}<br>{reach}<br>{escape(row['verdict'])}<extra></extra>"
    marker = marks.ring(colour, 9, row["verdict"] in ("better", "worse"))
    made = marks.trace("markers", [row["delta"]], [place], marker=marker, hovertemplate=said, showlegend=False)
    return made | ({"error_x": marks.whiskers(colour, [row["delta_high"] - row["delta"]])} if interval else {})


def empty(message: str) -> Figure:
    """A figure that says in words why there is nothing to draw."""
    note = {"text": escape(message), "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}
    note |= {"font": {"color": MUTED, "size": 13}}
    hidden = {"visible": False, "fixedrange": True}
    return {"data": [], "layout": layout(xaxis=hidden, yaxis=hidden, annotations=[note])}


def _plain(values: Floats) -> list[float | None]:
    """Six digits are more than a screen has; NaN, which JSON lacks, is a gap."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
