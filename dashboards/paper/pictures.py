"""The figures of a study: how it trained, differences and rates, and what its models were tested on.

They are made of the frames that the dashboard and the report are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from archlab.dashboards import lines, theme
from archlab.dashboards.figures import rate_text
from archlab.dashboards.library import Study
from archlab.dashboards.paper import more
from archlab.dashboards.paper.drawing import (
    Drawing,
    Look,
    count_axis,
    finish,
    in_legend,
    late_range,
    line_plot,
    log_axis,
    zoom,
)
from archlab.dashboards.view import View
from archlab.dashboards.words import curve_of
from archlab.search.comparison.figure_frames import probes_frame, smoothed, usual_window
from archlab.search.results.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS, PERPLEXITY = "loss_by_position", "perplexity_by_context"


def drawings(study: Study) -> list[Drawing]:
    """Every figure that the study has numbers for."""
    found = study.comparison
    if found is None:
        return []
    base = study.record["baseline"]
    look = Look(theme.colours(study.variants, base), theme.dashes(study.variants, base))
    made = [_training(study, look), _seeds(study, look), _forest(found, look), _rates(found, look)]
    made += [_gradients(study, look), domains(found, look), *_positions(study, found, look), _probes(found, look)]
    made += [*more.grids(study, found), *more.layers(found, look), *more.ladder(study, found), *more.fronts(found)]
    return [each for each in made if each is not None]


def _training(study: Study, look: Look) -> Drawing | None:
    """The curves of training: mean over the seeds, band of one standard deviation."""
    parts = [
        pd.DataFrame({"variant": each.variant, "tokens": each.x, "mean": each.mean, "std": each.std, "n": each.seeds})
        for each in lines.groups(study, View())
        if len(each.x)
    ]
    if not parts:
        return None
    rows = pd.concat(parts, ignore_index=True)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        line_plot(axes, rows, "tokens", look)
        count_axis(axes.xaxis)
        zoom(axes, rows[rows["tokens"] >= 0.1 * rows["tokens"].max()]["mean"])
        finish(figure, axes, xlabel="Training tokens", ylabel="Validation loss (nats/token)")

    said = f"Validation loss while training, on {curve_of(study)}: mean over seeds ± one standard deviation."
    return Drawing("training", said, rows, draw)


def _seeds(study: Study, look: Look) -> Drawing | None:
    """The curve of every trial of the table; one that diverged ends in a cross."""
    rows = _of_trials(study, "validation")
    if rows is None or not rows.groupby("variant")["seed"].nunique().gt(1).any():
        return None

    def draw(figure: Figure) -> None:
        axes = _trial_lines(figure, rows, look, "Validation loss (nats/token)")
        zoom(axes, rows[(rows["tokens"] >= 0.1 * rows["tokens"].max()) & ~rows["diverged"]]["value"])

    said = f"Validation loss while training, on {curve_of(study)}: a line per trial, all seeds; a cross: diverged."
    return Drawing("training-seeds", said, rows, draw)


def _gradients(study: Study, look: Look) -> Drawing | None:
    """The norm of the gradients of every trial of the table, which rises before training is lost."""
    rows = _of_trials(study, "gradient")
    if rows is None or not (rows["value"] > 0).any():
        return None

    def draw(figure: Figure) -> None:
        axes = _trial_lines(figure, rows, look, "Gradient norm")
        axes.set_yscale("log")
        log_axis(axes.yaxis)

    said = "Norm of the gradients: a line per trial, all seeds; a cross: diverged."
    return Drawing("gradient-norm", said, rows, draw)


def _of_trials(study: Study, metric: str) -> pd.DataFrame | None:
    """A row per point of the curve of each trial of the table; None where there is no curve."""
    parts = []
    for line in (line for group in lines.groups(study, View(metric=metric)) for line in group.lines):
        trial = {"variant": line.variant, "seed": line.seed, "key": line.key}
        parts.append(pd.DataFrame({**trial, "tokens": line.x, "value": line.y, "diverged": line.diverged}))
    return pd.concat(parts, ignore_index=True) if parts else None


def _trial_lines(figure: Figure, rows: pd.DataFrame, look: Look, y_title: str) -> Axes:
    """A thin line per trial in the colour of its variant, one name for all of a variant."""
    axes = figure.subplots()
    named: set[str] = set()
    for (variant, _), own in rows.groupby(["variant", "key"], sort=False):
        name = str(variant)
        label = {} if name in named else {"label": in_legend(name)}
        axes.plot(own["tokens"], own["value"], **look.line(name), **label, linewidth=0.7, alpha=0.8)
        named.add(name)
        known = own[np.isfinite(own["value"])]
        if own["diverged"].iloc[0] and len(known):
            axes.plot(known["tokens"].iloc[-1:], known["value"].iloc[-1:], "x", color=look.colours[name], markersize=4)
    count_axis(axes.xaxis)
    finish(figure, axes, xlabel="Training tokens", ylabel=y_title)
    return axes


def _forest(found: Comparison, look: Look) -> Drawing | None:
    """The differences to the baseline with their intervals, filled where these leave zero out."""
    table = found.table[(found.table["variant"] != found.table["baseline"]) & np.isfinite(found.table["delta"])]
    if not len(table):
        return None
    rows = table[["variant", "baseline", "delta", "delta_low", "delta_high", "verdict"]].reset_index(drop=True)
    unit = found.noise["unit"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows.iloc[::-1].to_dict("records")):
            colour = look.colours[row["variant"]]
            clear = row["verdict"] in ("better", "worse")
            ends = [[max(row["delta"] - row["delta_low"], 0)], [max(row["delta_high"] - row["delta"], 0)]]
            reach = ends if math.isfinite(row["delta_low"]) else None
            style = {"color": colour, "markerfacecolor": colour if clear else "white", "markersize": 4}
            axes.errorbar(row["delta"], place, xerr=reach, fmt="o", elinewidth=1.1, **style)
        axes.axvline(0, color=theme.GREY, linewidth=0.8)
        axes.set_yticks(range(len(rows)), rows["variant"].tolist()[::-1])
        axes.grid(axis="y", visible=False)
        axes.set(ylim=(-0.6, len(rows) - 0.4))
        figure.supxlabel(f"Difference in test loss ({unit})", fontsize=axes.xaxis.label.get_size())  # beside long names

    caption = (
        f"Differences in test loss to the baseline ({unit}) and, with enough seeds, their 95% intervals, which hold "
        "together; below zero is better, filled is what an interval tells from zero."
    )
    return Drawing("differences", caption, rows, draw, 0.75 + 0.19 * len(rows))


def _rates(found: Comparison, look: Look) -> Drawing | None:
    """Validation perplexity over the learning rate, the choice a ring, what diverged a cross on top."""
    rows = found.rates[found.rates["along"].astype(bool)] if len(found.rates) else found.rates
    known = rows[np.isfinite(rows["validation_perplexity"])] if len(rows) else rows
    if not len(known) or known["lr"].nunique() < 2:
        return None
    rows = rows[["variant", "lr", "seed", "state", "validation_loss", "validation_perplexity", "best"]]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        top = late_range(known["validation_perplexity"].min(), known["validation_perplexity"].max())[1]
        for name, own in rows.sort_values("lr").groupby("variant", sort=False):
            style = look.line(str(name))
            axes.plot(own["lr"], own["validation_perplexity"], marker=".", label=in_legend(str(name)), **style)
            best, lost = own[own["best"].astype(bool)], own[own["state"] == "diverged"]
            axes.plot(best["lr"], best["validation_perplexity"], "o", markerfacecolor="white", color=style["color"])
            axes.plot(lost["lr"], [top] * len(lost), "x", color=style["color"])
        axes.set_xscale("log")
        ticks = sorted(rows["lr"].dropna().unique())
        axes.set_xticks(ticks, [rate_text(float(each)) for each in ticks])
        axes.minorticks_off()
        finish(figure, axes, xlabel="Learning rate", ylabel="Validation perplexity")

    caption = "Validation perplexity by learning rate; ring: chosen, cross: diverged."
    return Drawing("learning-rates", caption, rows, draw)


def _positions(study: Study, found: Comparison, look: Look) -> Iterator[Drawing]:
    """L(i) and P(l) side by side for each length of windows, a dashed line where training ended."""
    names = [str(name) for name in dict.fromkeys(found.curves["name"]) if str(name).startswith(LOSS)]
    trained = sorted({variant.get("context", study.record["context"]) for variant in study.record["variants"]})
    for name in names:
        end = name.removeprefix(LOSS)
        loss = found.curves[found.curves["name"] == name]
        over = usual_window(int(loss["x"].max()))
        perplexity = found.curves[found.curves["name"] == PERPLEXITY + end]
        rows = pd.concat([smoothed(loss, over), perplexity], ignore_index=True)
        draw = partial(_two_curves, rows, {name: "L(i) (nats/token)", PERPLEXITY + end: "P(l)"}, trained, look)
        smooth = f", over {over} neighbouring ones" if over > 1 else ""
        caption = f"Test loss L(i) by position{smooth}, perplexity P(l) by context; dashed: the length of training."
        yield Drawing(name.replace("_", "-"), caption, rows, draw, 2.2)


def _two_curves(rows: pd.DataFrame, titles: dict[str, str], trained: list[int], look: Look, figure: Figure) -> None:
    panes = figure.subplots(1, 2)
    for axes, x_title, (curve, title) in zip(panes, ("Position", "Context"), titles.items(), strict=True):
        own = rows[rows["name"] == curve]
        line_plot(axes, own, "x", look)
        zoom(axes, own[own["x"] >= max(float(own["x"].max()) / 16, 1.0)]["mean"])
        axes.set(xlabel=x_title, ylabel=title)
        for length in trained:
            axes.axvline(length, color=theme.MUTED, linestyle="--", linewidth=0.8)
    finish(figure, axes)


def _probes(found: Comparison, look: Look) -> Drawing | None:
    """Shares of right answers, with what chance and a ceiling reach."""
    rows = probes_frame(found.measures)
    if not len(rows):
        return None
    names = list(dict.fromkeys(rows["name"]))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        variants = list(dict.fromkeys(rows["variant"]))
        step = 0.7 / max(len(variants), 1)
        for order, variant in enumerate(variants):
            own = rows[rows["variant"] == variant]
            y = [names.index(name) + 0.35 - step * (order + 0.5) for name in own["name"]]
            axes.errorbar(
                own["mean"], y, xerr=own["std"].fillna(0), fmt="o", markersize=3, color=look.colours[variant],
                label=in_legend(variant), elinewidth=0.9,
            )  # fmt: skip
        for place, name in enumerate(names):
            for end in ("chance", "ceiling"):
                at = rows[rows["name"] == name][end].dropna()
                if len(at):
                    axes.plot([at.mean()] * 2, [place - 0.38, place + 0.38], ":", color=theme.MUTED, linewidth=1)
        axes.set_yticks(range(len(names)), [str(name).replace("_", " ") for name in names])
        finish(figure, axes, xlim=(-0.02, 1.02), xlabel="Share of right answers")

    caption = "Shares of right answers, mean ± standard deviation over seeds; dotted: chance, and a ceiling."
    return Drawing("probes", caption, rows, draw, 0.9 + 0.14 * len(names) * max(2, rows["variant"].nunique() / 1.5))


def domains(found: Comparison, look: Look) -> Drawing | None:
    """Test perplexity by domain of a mixture."""
    rows = found.domains
    if not len(rows):
        return None
    names, variants = (list(dict.fromkeys(map(str, rows[key]))) for key in ("domain", "variant"))
    step = 0.7 / len(variants)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for order, variant in enumerate(variants):
            own = rows[rows["variant"] == variant]
            y = [names.index(str(name)) - 0.35 + step * (order + 0.5) for name in own["domain"]]
            colour = look.colours[variant]
            axes.plot(own["perplexity"], y, "o", markersize=3, color=colour, label=in_legend(variant))
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="y", visible=False)
        finish(figure, axes, ylim=(len(names) - 0.4, -0.6), xlabel="Test perplexity")

    height = 0.9 + 0.14 * len(names) * max(2.0, len(variants) / 1.5)
    return Drawing("domains", "Test perplexity by domain, means over seeds.", rows, draw, height)
