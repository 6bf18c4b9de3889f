"""The figures of what was measured inside of models, of ladders, and of searches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from archlab.dashboards import theme
from archlab.dashboards.library import Study
from archlab.dashboards.paper.drawing import Drawing, Look, count_axis, finish, in_legend, line_plot, log_axis
from archlab.search.results.comparison import Comparison
from archlab.search.sections.ladder.frames import ISOFLOP, OVER_C, scaling_lines, size_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACROSS = 4
_SHARES = ("_exact", "_chosen")
"""Ends of names of shares of right answers, whose colours go from 0 to 1."""


def grids(study: Study, found: Comparison) -> Iterator[Drawing]:
    """Each grid as a heatmap per variant, with one scale of colours: needles by depth and length, layers by heads."""
    for name in dict.fromkeys(map(str, found.grids["name"])):
        rows = found.grids[found.grids["name"] == name]
        if name.startswith("needle"):  # as papers have it: how deep downwards, how long to the right
            rows = rows.rename(columns={"x": "y", "y": "x", "row": "column", "column": "row"})
        if not np.isfinite(rows["mean"].astype(float)).any():
            continue
        variants = [each for each in study.variants if (rows["variant"] == each).any()]
        down = math.ceil(len(variants) / _ACROSS)
        caption = f"{name.replace('_', ' ')}: {rows['row'].iloc[0]} by {rows['column'].iloc[0]}, means over seeds."
        draw = partial(_heatmaps, rows, variants, name)
        yield Drawing(name.replace("_", "-"), caption, rows, draw, 0.3 + 1.45 * down)


def _heatmaps(rows: pd.DataFrame, variants: list[str], name: str, figure: Figure) -> None:
    values = np.asarray(rows["mean"], np.float64)
    low, high = (0.0, 1.0) if name.endswith(_SHARES) else (float(np.nanmin(values)), float(np.nanmax(values)))
    across = min(_ACROSS, len(variants))
    panes = figure.subplots(math.ceil(len(variants) / across), across, squeeze=False)
    for axes, variant in zip(panes.flat, variants, strict=False):
        own = rows[rows["variant"] == variant]
        x, y = (list(dict.fromkeys(own[key])) for key in ("x", "y"))
        cells = own.pivot(index="y", columns="x", values="mean").reindex(index=y, columns=x).astype(float)
        image = axes.imshow(cells, aspect="auto", cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
        axes.grid(visible=False)
        axes.set_title(variant, color=theme.INK)
        for ticks, labels in ((axes.set_xticks, x), (axes.set_yticks, y)):
            narrow = labels is x and any(len(_label(each)) > 2 for each in labels)
            count = min(len(labels), 2 if narrow else 5)
            places = sorted(set(np.linspace(0, len(labels) - 1, count).round().astype(int).tolist()))
            ticks(places, [_label(labels[place]) for place in places])
        if axes is panes[0, 0]:
            axes.set_ylabel(str(own["row"].iloc[0]))
        axes.set_xlabel(str(own["column"].iloc[0]))
    for axes in list(panes.flat)[len(variants) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=panes, shrink=0.8, pad=0.02)


def _label(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def layers(found: Comparison, look: Look) -> Iterator[Drawing]:
    """Curves over layers."""
    for name in dict.fromkeys(map(str, found.curves["name"])):
        if "_by_layer" not in name:
            continue
        rows = found.curves[found.curves["name"] == name]
        draw = partial(_over_layers, rows, name.removesuffix("_by_layer").replace("_", " "), look)
        yield Drawing(name.replace("_", "-"), f"{name.replace('_', ' ')}, mean over seeds.", rows, draw)


def _over_layers(rows: pd.DataFrame, title: str, look: Look, figure: Figure) -> None:
    axes = figure.subplots()
    line_plot(axes, rows, "x", look, marker=".")
    if (rows["mean"] > 0).all() and rows["mean"].max() > 50 * rows["mean"].min():
        axes.set_yscale("log")
        log_axis(axes.yaxis)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    finish(figure, axes, xlabel="Layer", ylabel=title)


def ladder(study: Study, found: Comparison) -> Iterator[Drawing]:
    """The losses of a ladder over compute with the laws that were fitted, and its IsoFLOP parabolas."""
    if not len(found.rungs) or not np.isfinite(found.rungs["loss"]).any():
        return
    lines = scaling_lines(found.rungs, study.record["ladder"])
    size = size_of(study.record["ladder"])
    names = list(dict.fromkeys(map(str, found.rungs["series"])))
    base = str(found.rungs["series"][found.rungs["variant"] == found.baseline].iloc[0])
    colours = theme.colours(names, base)
    kinds = (("scaling-compute", OVER_C, "compute", "Compute (FLOPs)"), ("isoflops", ISOFLOP, size, "Parameters"))
    for name, law, x, title in kinds:
        own = lines[lines["law"] == law]
        if law == ISOFLOP and not len(own):
            continue
        points = found.rungs.assign(kind="rung", x=found.rungs[x])[["kind", "series", "rung", "x", "loss"]]
        rows = pd.concat([points, own.assign(kind="law")], ignore_index=True)

        def draw(figure: Figure, rows: pd.DataFrame = rows, title: str = title) -> None:
            axes = figure.subplots()
            for series, each in rows.groupby("series", sort=False):
                colour = colours[str(series)]
                dots = each[each["kind"] == "rung"]
                axes.plot(dots["x"], dots["loss"], "o", markersize=3, color=colour, label=in_legend(str(series)))
                for _, law in each[each["kind"] == "law"].groupby("at", sort=False, dropna=False):
                    axes.plot(law["x"], law["loss"], ":", color=colour)
                    axes.fill_between(law["x"].astype(float), law["low"].astype(float), law["high"].astype(float),
                                      color=colour, alpha=0.13, linewidth=0)  # fmt: skip
            axes.set_xscale("log")
            log_axis(axes.xaxis)
            finish(figure, axes, xlabel=title, ylabel="Test loss (nats/token)")

        said = "power laws with 95% bands" if law == OVER_C else "parabolas in log N at one compute"
        yield Drawing(name, f"Test loss of each rung; dotted: {said}.", rows, draw)


def fronts(found: Comparison) -> Iterator[Drawing]:
    """The trials of a search with several goals, perplexity over each of the others.

    Points are on the front of all goals. A line joins those that nothing beats in the two goals that are drawn: with a
    third goal the others of the front lie above it, and joining them would draw trade-offs that there are not.
    """
    goals = [goal for goal in found.searched.get("minimize", ()) if goal != "perplexity"]
    if not goals or "perplexity" not in found.searched["minimize"] or not len(found.search):
        return
    for goal in goals:
        rows = found.search[["number", "state", "validation_perplexity", goal, "feasible", "front"]]
        rows = rows[np.isfinite(rows["validation_perplexity"]) & np.isfinite(rows[goal])]
        if not len(rows):
            continue
        name = goal.replace("_", " ").replace("flops", "FLOPs")
        said = f"Trials of the search: validation perplexity against {name}."
        if len(goals) > 1:
            said += f" Coloured: on the front of all {len(goals) + 1} goals; line: of these two."
        drawing = partial(_front, rows.reset_index(drop=True), goal, name)
        yield Drawing("front" if len(goals) == 1 else f"front-{goal.replace('_', '-')}", said, rows, drawing)


def _front(rows: pd.DataFrame, goal: str, name: str, figure: Figure) -> None:
    axes = figure.subplots()
    best = rows[rows["front"]].sort_values([goal, "validation_perplexity"])
    rest, broken = rows[~rows["front"] & rows["feasible"]], rows[~rows["feasible"].astype(bool)]
    edge = best[best["validation_perplexity"] < best["validation_perplexity"].cummin().shift(fill_value=np.inf)]
    y = "validation_perplexity"
    axes.plot(rest[goal], rest[y], "o", markersize=3, color="#aab2ba", label="dominated")
    if len(broken):
        axes.plot(broken[goal], broken[y], "x", markersize=3, color=theme.MUTED, label="not feasible")
    axes.plot(edge[goal], edge[y], "-", color=theme.PALETTE[1], drawstyle="steps-post")
    axes.plot(best[goal], best[y], "o", markersize=4, color=theme.PALETTE[1], label="front")
    count_axis(axes.xaxis)
    finish(figure, axes, xlabel=name, ylabel="Validation perplexity")
