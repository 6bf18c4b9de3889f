"""One component or axis: what it does over all that a study varies beside it, and how components act together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dash
from dash import Input, html
from dash.development.base_component import Component

from archlab.dashboards import figures_factor
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.shell import (
    COMPARE,
    CURVES,
    FACTOR,
    GO,
    Choice,
    Chosen,
    address,
    needs_comparison,
    register_tab,
)
from archlab.dashboards.parts import block_table, graph, section
from archlab.search.formatting.tables import Block, Cell, Column, interval, number, printable
from archlab.search.reporting.findings import listed
from archlab.search.sections.design.frames import (
    WITH,
    always_with,
    effects_frame,
    factor_name,
    factors,
    interactions_frame,
    level_name,
    paired,
    pairs_frame,
)

if TYPE_CHECKING:  # which a server starts without
    import pandas as pd

    from archlab.search.results.comparison import Comparison

NOTE = (
    "Large: the mean over cells with its 95% interval, filled where that leaves zero out; the variance is the table's, "
    "pooled over all variants, and not corrected for how many effects are looked at. "
)
NO_INTERVAL = (
    "Large: the mean over cells. It has no interval: there is none with too few seeds, with seeds that come by need, "
    "or where what is compared saw other batches. The table has the interval of each difference. "
)
SMALL = "Small: each pair and seed; a click shows the two beside each other, on a large one the curves of the levels."


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/factor`."""
    register_tab(app, library, FACTOR, choices, content)
    for figure in ("effect", "beside"):
        app.clientside_callback(GO, Input(figure, "clickData"), prevent_initial_call=True)


def choices(study: Study) -> Sequence[Choice]:
    """The components and axes of the study."""
    variants = study.record["variants"]
    names = {name: factor_name(name) for name in factors(variants)}
    return [Choice("component", "Component or axis", names, next(iter(paired(variants)), ""))] if names else []


@needs_comparison
def content(study: Study, found: Comparison, chosen: Chosen) -> list[Component]:
    """The effect of the factor, that at each level of the others, and interactions."""
    variants = study.record["variants"]
    if "component" not in chosen:
        said = "The study varies no component and has no grid: it compares variants of which none belong together."
        return [
            html.P([said, " Factors come with ", html.Code("design: full_factorial"), " or ", html.Code("grid:"), "."])
        ]
    factor = chosen["component"]
    pairs = pairs_frame(variants, found, factor)
    both = [
        address(study.name, COMPARE.step, variants=[*names]) for names in pairs[["reference", "variant"]].to_numpy()
    ]
    pairs = pairs.assign(href=both)
    if factor in paired(variants):
        shown = [_effect(study, found, factor, pairs)]
    else:
        shown = [_contrast(found, factor, always_with(variants, factor))]
    if len(pairs) and (others := [name for name in factors(variants) if name != factor]):
        shown += _beside(found, factor, others, pairs)
    crossed = interactions_frame(variants, found)
    if len(crossed):
        many = [factor_name(name) for name, levels in factors(variants).items() if len(levels) > 2]
        shown.append(_interactions(found, crossed, many))
    return shown


def _contrast(found: Comparison, factor: str, along: Sequence[str]) -> Component:
    """Why a factor has no effect of its own, and what a fraction of a factorial tells of it all the same."""
    said = f"No two variants of this study differ in {factor_name(factor)} and in nothing else"
    with_it = f": {listed(along)} always change{'s' if len(along) == 1 else ''} with it." if along else "."
    told = "All that have it, less all that lack it: {} {} {}. The notes of the table say what that is mixed up with."
    contrasts = [
        html.P(told.format(number(row["mean"], "+.4f"), found.noise["unit"], interval(row["low"], row["high"])))
        for row in found.effects[found.effects["factor"] == factor].to_dict("records")
    ]
    return section("Effect", html.P(said + with_it, className="muted"), *contrasts)


def _effect(study: Study, found: Comparison, factor: str, pairs: pd.DataFrame) -> Component:
    levels, means = factors(study.record["variants"])[factor], address(study.name, CURVES.step, by=factor)
    effects = effects_frame(pairs, found.noise)
    rows = [
        row | {"place": _place(factor, row["level"]), "whole": True, "href": means}
        for row in effects.to_dict("records")
    ]
    points = pairs.assign(place=[_place(factor, level) for level in pairs["level"]])
    figure = figures_factor.effects(rows, points, found.noise["unit"])
    against = (
        f"the variant without {factor}" if levels[0] != WITH and {*levels} & {WITH} else level_name(factor, levels[0])
    )
    columns = [
        Column("", [Cell(printable(row["place"])) for row in rows], "l"),
        Column(f"Δ {found.noise['unit']}", [Cell(number(row["mean"], "+.4f")) for row in rows]),
        Column("95% interval", [Cell(interval(row["low"], row["high"])) for row in rows]),
        Column("cells", [Cell(str(row["cells"])) for row in rows]),
        Column("pairs", [Cell(str(row["pairs"])) for row in rows]),
    ]
    table = [block_table(Block(f"Against {printable(against)}, all else equal", columns))] if rows else []
    drawn = graph("effect", figure, 110 + 70 * len(rows) if rows else 120)
    note = NOTE if any(math.isfinite(row["low"]) for row in rows) else NO_INTERVAL
    return section("Effect", drawn, html.P(note + SMALL, className="muted small"), *table)


def _place(factor: str, level: str) -> str:
    return factor if level == WITH else level_name(factor, level)


def _beside(found: Comparison, factor: str, others: Sequence[str], pairs: pd.DataFrame) -> list[Component]:
    """The effect where each of the other factors is at each of its levels, of those that its pairs have."""
    import pandas as pd

    rows, points = [], []
    for other in others:
        by = f"at {other}"
        for row in effects_frame(pairs, found.noise, by).to_dict("records"):
            level = "" if pairs["level"].nunique() == 1 else f"{_place(factor, row['level'])}, "
            place = f"{level}{level_name(other, row['at'])}"
            rows.append(row | {"place": place})
            points.append(pairs[(pairs[by] == row["at"]) & (pairs["level"] == row["level"])].assign(place=place))
    if not rows:
        return []
    figure = figures_factor.effects(rows, pd.concat(points), found.noise["unit"])
    return [section(f"{factor_name(factor)} beside the others", graph("beside", figure, 90 + 48 * len(rows)))]


def _interactions(found: Comparison, crossed: pd.DataFrame, many: Sequence[str]) -> Component:
    """Those of components and axes of two levels; the others, which have `many`, are named."""
    crossed = crossed.assign(**{side: crossed[side].map(factor_name) for side in ("one", "other")})
    names = len({*crossed["one"], *crossed["other"]})
    note = (
        f"By how much the one's difference ({found.noise['unit']}) is larger where the other is there too: below zero "
        "they help each other, above zero they do the same work twice or get into each other's way."
    )
    if many:
        note += (
            f" Drawn are components and axes of two levels; {listed(many)} {'has' if len(many) == 1 else 'have'} more."
        )
    drawn = graph("interactions", figures_factor.interactions(crossed), 90 + 56 * names)
    drawn = html.Div(drawn, style={"maxWidth": f"{260 + 170 * names}px"})
    return section("Interactions", drawn, html.P(note, className="muted small"))
