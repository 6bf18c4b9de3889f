"""The figures of a study, made of the frames that the dashboard and the report are made of."""

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
from archlab.dashboards.paper import more, trials
from archlab.dashboards.paper.drawing import MUTED, Drawing, Look, count_axis, in_legend, late_range, line_plot, under
from archlab.dashboards.view import View
from archlab.search.comparison.figure_frames import probes_frame, smoothed, usual_window
from archlab.search.results.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS, PERPLEXITY = "loss_by_position", "perplexity_by_context"


def drawings(study: Study) -> list[Drawing]:
    """Every figure that the study has numbers for."""
    found = study.comparison
    if found is None:
        return []
    base = study.record["baseline"]
    look = Look(theme.colours(study.variants, base), theme.dashes(study.variants, base))
    made: list[Drawing | None] = [_training(study, look), trials.seeds(study, look), _forest(found, look)]
    made += [_rates(found, look), trials.gradients(study, look), trials.domains(found, look)]
    made += _positions(study, found, look)
    made += [_probes(found, look), *more.grids(study, found), *more.layers(found, look)]
    made += [*more.ladder(study, found), *more.fronts(found)]
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
    draw = partial(_lines, rows, "tokens", "Training tokens", "Validation loss (nats/token)", look, falls=True)
    return Drawing("training", "Validation loss while training: mean over seeds ± one standard deviation.", rows, draw)


def _lines(
    rows: pd.DataFrame, x: str, x_title: str, y_title: str, look: Look, figure: Figure, falls: bool = False
) -> None:
    """A line per variant with its band."""
    axes = figure.subplots()
    line_plot(axes, rows, x, look)
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    count_axis(axes.xaxis)
    if falls:
        late = rows[rows[x] >= 0.1 * rows[x].max()]["mean"].dropna()
        if len(late):
            axes.set_ylim(*late_range(float(late.min()), float(late.max())))
    under(figure, axes)


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
            axes.errorbar(
                row["delta"],
                place,
                xerr=ends if math.isfinite(row["delta_low"]) else None,
                fmt="o",
                color=colour,
                markerfacecolor=colour if clear else "white",
                markersize=4,
                elinewidth=1.1,
            )
        axes.axvline(0, color="#8b939c", linewidth=0.8)
        axes.set_yticks(range(len(rows)), rows["variant"].tolist()[::-1])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"Difference in test loss ({unit})")

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
        axes.set_xlabel("Learning rate")
        axes.set_ylabel("Validation perplexity")
        under(figure, axes)

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

        def draw(figure: Figure, rows: pd.DataFrame = rows, name: str = name, end: str = end) -> None:
            both = {name: "L(i) (nats/token)", PERPLEXITY + end: "P(l)"}
            for axes, (curve, title) in zip(figure.subplots(1, 2), both.items(), strict=True):
                own = rows[rows["name"] == curve]
                line_plot(axes, own, "x", look)
                start = max(float(own["x"].max()) / 16, 1.0)
                late = own[own["x"] >= start]["mean"].dropna()
                axes.set_ylim(*late_range(float(late.min()), float(late.max())))
                axes.set_xlabel("Position" if curve == name else "Context")
                axes.set_ylabel(title)
                for length in trained:
                    axes.axvline(length, color=MUTED, linestyle="--", linewidth=0.8)
            under(figure, axes)

        smooth = f", over {over} neighbouring ones" if over > 1 else ""
        caption = f"Test loss L(i) by position{smooth}, perplexity P(l) by context; dashed: the length of training."
        yield Drawing(name.replace("_", "-"), caption, rows, draw, 2.2)


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
                    axes.plot([at.mean()] * 2, [place - 0.38, place + 0.38], ":", color=MUTED, linewidth=1)
        axes.set_yticks(range(len(names)), [str(name).replace("_", " ") for name in names])
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("Share of right answers")
        under(figure, axes)

    caption = "Shares of right answers, mean ± standard deviation over seeds; dotted: chance, and a ceiling."
    return Drawing("probes", caption, rows, draw, 0.9 + 0.14 * len(names) * max(2, rows["variant"].nunique() / 1.5))
