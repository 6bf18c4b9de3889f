"""How each variant bears its learning rate: loss by rate, what diverged, spikes, and the norm of the gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import dash
from dash import html
from dash.development.base_component import Component

from archlab.dashboards import figures, lines, theme
from archlab.dashboards.figures import Figure
from archlab.dashboards.library import Library, Study
from archlab.dashboards.pages.curves import NAMES
from archlab.dashboards.pages.shell import STABILITY, Choice, Chosen, needs_comparison, register_tab
from archlab.dashboards.parts import asks, block_table, graph, measuring, missing, section
from archlab.dashboards.view import METRICS, X_AXES, View
from archlab.search.formatting.tables import DASH, Block, Cell, Column, number, printable
from archlab.search.sections.design.frames import levels_of, told
from archlab.search.sections.evaluate.told import numbers_block
from archlab.search.sections.tune.told import tuning_block

if TYPE_CHECKING:  # which a server starts without
    from archlab.search.results.comparison import Comparison

_RATES = ("lr", "train.lr")  # what a grid may call the learning rate
SHOWN = {key: METRICS[key][1] for key in ("gradient", "training", "validation")}


def register(app: dash.Dash, library: Library) -> None:
    """Adds the page `/study/<name>/stability`."""
    register_tab(app, library, STABILITY, choices, content)


def choices(study: Study) -> Sequence[Choice]:
    """What is drawn over the training."""
    return [
        Choice("metric", "Show", SHOWN),
        Choice("x", *NAMES["x"]),
        Choice("trials", *NAMES["trials"], "tuning" if study.record.get("tune") else ""),
        Choice("smooth", *NAMES["smooth"]),
    ]


@needs_comparison
def content(study: Study, found: Comparison, chosen: Chosen) -> list[Component]:
    """Rates, divergence, spikes, and curves of the training."""
    colours = theme.colours(study.variants, study.record["baseline"])
    shown = [_rates(study, found, colours), _over_training(study, chosen, colours)]
    lost = [row for row in found.trials.to_dict("records") if row["state"] == "diverged"]
    part = block_table(_diverged(lost)) if lost else html.P("No trial has diverged.", className="muted")
    shown.append(section("Diverged", part))
    spikes = [name for name in map(str, dict.fromkeys(found.measures["measure"])) if name.startswith("loss_spikes")]
    said = "Sudden jumps of the training loss, and of the norm of its gradients."
    blocks = [block_table(numbers_block(found, name)) for name in spikes]
    absent = missing(said, "evaluate: [loss_spikes]", measuring(study, "loss_spikes"), asks(study, "loss_spikes"))
    shown.append(section("Spikes", *(blocks or [absent])))
    return shown


def _rates(study: Study, found: Comparison, colours: Mapping[str, str]) -> Component:
    """Loss against rate, its fitted optimum a diamond, and what is read from it."""
    rows = [row for row in found.rates.to_dict("records") if row["along"]]
    fitted = [row for row in found.tuning.to_dict("records") if math.isfinite(row["fitted_lr"])]
    baseline, note = found.baseline, "Rings: the chosen rate. Crosses at the top: diverged."
    note += " Diamonds: the lowest point of a parabola through the neighbours of the best." if fitted else ""
    if not rows and (rows := crossed_rates(study, found)):
        names = list(dict.fromkeys(row["variant"] for row in rows))
        baseline, colours, fitted = names[0], theme.colours(names, names[0]), []
        note = "Each rate of the grid, means over the seeds. Rings: the best one. Crosses at the top: a seed diverged."
    if not rows:
        said = "How the loss depends on the learning rate, and the largest that is stable."
        return section("Learning rate", missing(said, "tune: {lr: {grid: 1-2-5, from: 5e-4, to: 5e-3}}"))
    figure = figures.rate_curve(rows, colours, baseline, "loss")
    if figure["data"]:
        figure["data"] += [_diamond(row, colours) for row in fitted]
        legend = {**figure["layout"]["legend"], "y": 1.02, "yanchor": "bottom"}
        figure["layout"] |= {"showlegend": True, "legend": legend}
    table = [block_table(tuning_block(found))] if len(found.tuning) else []
    return section("Learning rate", graph("rates", figure, 420), html.P(note, className="muted small"), *table)


def crossed_rates(study: Study, found: Comparison) -> list[dict[str, Any]]:
    """Rows for `figures.rate_curve` of a study whose grid has learning rates: of each of its other combinations. As in
    the table, where a seed diverged there is no mean."""
    losses = found.trials[found.trials["reported"]].groupby("variant")["validation_loss"].mean()
    lost = {*found.table[found.table["verdict"] == "diverged"]["variant"]}
    rows: list[dict[str, Any]] = []
    best: dict[str, float] = {}
    for name, levels in levels_of(study.record["variants"]).items():
        rate = next((float(levels[key]) for key in _RATES if key in levels), None)
        loss = math.nan if name in lost else float(losses.get(name, math.nan))
        if rate is None or not (math.isfinite(loss) or name in lost):
            continue
        series = told((factor, level) for factor, level in levels.items() if factor not in _RATES)
        series = series or found.baseline.partition(" [")[0]
        state = "diverged" if name in lost else "complete"
        rows.append({"variant": series, "lr": rate, "validation_loss": loss, "state": state})
        if math.isfinite(loss):
            best[series] = min(loss, best.get(series, math.inf))
    return [row | {"best": row["validation_loss"] == best.get(row["variant"])} for row in rows]


def _diamond(row: Mapping[str, Any], colours: Mapping[str, str]) -> dict[str, Any]:
    """The fitted optimum of a variant."""
    line = {"color": colours[row["variant"]], "width": 1.5}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [row["fitted_lr"]],
        "y": [row["fitted_loss"]],
        "marker": {"symbol": "diamond-open", "size": 9, "color": colours[row["variant"]], "line": line},
        "hovertemplate": "fitted: rate %{x:.2g}, loss %{y:.4f}<extra></extra>",
        "legendgroup": escape(row["variant"]),
        "showlegend": False,
    }


def _over_training(study: Study, chosen: Chosen, colours: Mapping[str, str]) -> Component:
    view = View(chosen["metric"], chosen["x"], chosen["smooth"], chosen["trials"])
    groups = lines.groups(study, view)
    titles = X_AXES[view.x][1], METRICS[view.metric][2]
    figure: Figure = figures.curves(groups, colours, study.record["baseline"], *titles, view.metric != "gradient")
    if view.metric == "gradient" and figure["data"]:
        figures.logarithmic(figure, "yaxis")
    figure["layout"]["uirevision"] = f"view{view.query()}"
    drawn, total = figures.hidden_lines(groups)
    note = "Each line is a trial of the tuning." if view.trials == "tuning" else "Bold: mean over seeds; thin: each."
    note += " A cross: diverged there." + (f" {drawn} of {total} trials are drawn." if drawn < total else "")
    return section("Over the training", graph("training", figure, 420), html.P(note, className="muted small"))


def _diverged(rows: Sequence[Mapping[Any, Any]]) -> Block:
    columns = [
        Column("variant", [Cell(printable(row["variant"])) for row in rows], "l"),
        Column("rate", [Cell(number(row["lr"], "g")) for row in rows]),
        Column("seed", [Cell(str(row["seed"])) for row in rows]),
        Column("after steps", [Cell(number(row["step"], ",.0f")) for row in rows]),
        Column("what was seen", [Cell(printable(row["reason"] or DASH)) for row in rows], "l"),
    ]
    return Block("Trials that diverged", columns)
