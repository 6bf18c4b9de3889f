"""A ladder: how the loss falls with compute and size, what compute a variant is worth, and which size is best."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import dash
from dash import html
from dash.development.base_component import Component

from archlab.dashboards import figures_scaling, theme
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.shell import SCALING, Chosen, needs_comparison, register_tab
from archlab.dashboards.parts import block_table, graph, section
from archlab.search.formatting.frames import records
from archlab.search.sections.ladder import frames as laws
from archlab.search.sections.ladder.told import ToldOfLadder

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

    from archlab.search.results.comparison import Comparison

BANDS = "Dotted: the fitted law with its 95% band, over the rungs that it was fitted to."


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/scaling`."""
    register_tab(app, library, SCALING, lambda _: [], content)


@needs_comparison
def content(study: Study, found: Comparison, _: Chosen) -> list[Component]:
    """Laws, gains, IsoFLOP minima, and the tables of the report."""
    if not len(found.rungs):
        return [html.P("The study has no ladder.", className="muted")]
    ladder = study.record["ladder"]
    names = list(dict.fromkeys(map(str, found.rungs["series"])))
    base = str(found.rungs["series"][found.rungs["variant"] == found.baseline].iloc[0])
    colours = theme.colours(names, base)
    size, lines = laws.size_of(ladder), laws.scaling_lines(found.rungs, ladder)
    shown = [_laws(found, lines, size, colours)]
    gains = found.scaling[(found.scaling["law"] == laws.GAIN) & (found.scaling["name"] == "gain")]
    if len(gains):
        rows = records(gains)
        figure = figures_scaling.gains(rows, found.rungs, colours)
        note = (
            "Large: one gain for all rungs with its 95% interval; small: each rung. Right of 1 the variant is better."
        )
        gained = graph("gains", figure, 110 + 46 * len(rows))
        shown.append(section("Compute-equivalent gain", gained, html.P(note, className="muted small")))
    minima = _minima(found.scaling)
    if len(parabolas := lines[lines["law"] == laws.ISOFLOP]):
        shown.append(_isoflops(found, parabolas, minima, size, colours))
    if missing := _unfitted(found):
        shown.append(section("Not fitted", html.Ul([html.Li(each) for each in missing], className="muted")))
    return [*shown, section("Tables", *(block_table(block) for block in ToldOfLadder().blocks(found)))]


def _laws(found: Comparison, lines: pd.DataFrame, size: str, colours: dict[str, str]) -> Component:
    over = {"compute": (laws.OVER_C, "Compute C (FLOPs)"), size: (laws.OVER_N, "Parameters N")}
    drawn = [
        graph(
            f"law-{column}", figures_scaling.laws(found.rungs, lines[lines["law"] == law], column, title, colours), 400
        )
        for column, (law, title) in over.items()
        if column == "compute" or (lines["law"] == law).any()
    ]
    pair = "pair" if len(drawn) > 1 else "pair pair-single"
    return section("Laws", html.Div(drawn, className=pair), html.P(BANDS, className="muted small"))


def _isoflops(
    found: Comparison, lines: pd.DataFrame, minima: pd.DataFrame, size: str, colours: dict[str, str]
) -> Component:
    drawn = [graph("isoflops", figures_scaling.isoflops(found.rungs, lines, minima, size, colours), 400)]
    if minima["at"].nunique() > 1:
        drawn.append(graph("best-sizes", figures_scaling.best_sizes(minima, colours), 400))
    note = "Dotted: a parabola in log N at one compute; rings: its minimum with the 95% interval, where it has one."
    pair = "pair" if len(drawn) > 1 else "pair pair-single"
    return section("IsoFLOP minima", html.Div(drawn, className=pair), html.P(note, className="muted small"))


def _minima(fits: pd.DataFrame) -> pd.DataFrame:
    """Rows {series, at, size, low, high, loss} of the fits."""
    own = fits[(fits["law"] == laws.ISOFLOP) & (fits["name"] != "")]
    sizes = own[own["name"] == "N"].rename(columns={"value": "size"})[["series", "at", "size", "low", "high"]]
    losses = own[own["name"] == "L"].rename(columns={"value": "loss"})[["series", "at", "loss"]]
    return sizes.merge(losses, on=["series", "at"])


def _unfitted(found: Comparison) -> list[str]:
    """What could not be fitted, and why."""
    rows = found.scaling[(found.scaling["why"] != "") & (found.scaling["of"] == laws.ALL)].to_dict("records")
    where = [f" at {row['at']:.3g} FLOPs" if math.isfinite(row["at"]) else "" for row in rows]
    return [
        f"{row['series']}: {laws.TOLD[row['law']]}{at}, as {row['why']}" for row, at in zip(rows, where, strict=True)
    ]
