"""The figures of single trials and of what they were tested on: curves of every seed, norms of gradients, domains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from archlab.dashboards import lines
from archlab.dashboards.library import Study
from archlab.dashboards.paper.drawing import Drawing, Look, count_axis, in_legend, late_range, log_axis, under
from archlab.dashboards.view import View
from archlab.search.results.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def seeds(study: Study, look: Look) -> Drawing | None:
    """The curve of every trial of the table; one that diverged ends in a cross."""
    rows = _of_trials(study, "validation")
    if rows is None or not rows.groupby("variant")["seed"].nunique().gt(1).any():
        return None

    def draw(figure: Figure) -> None:
        axes = _trial_lines(figure, rows, look)
        late = rows[(rows["tokens"] >= 0.1 * rows["tokens"].max()) & ~rows["diverged"]]["value"].dropna()
        if len(late):
            axes.set_ylim(*late_range(float(late.min()), float(late.max())))
        axes.set_ylabel("Validation loss (nats/token)")

    said = "Validation loss while training: a line per trial, all seeds; a cross: diverged."
    return Drawing("training-seeds", said, rows, draw)


def gradients(study: Study, look: Look) -> Drawing | None:
    """The norm of the gradients of every trial of the table, which rises before training is lost."""
    rows = _of_trials(study, "gradient")
    if rows is None or not (rows["value"] > 0).any():
        return None

    def draw(figure: Figure) -> None:
        axes = _trial_lines(figure, rows, look)
        axes.set_yscale("log")
        log_axis(axes.yaxis)
        axes.set_ylabel("Gradient norm")

    return Drawing(
        "gradient-norm", "Norm of the gradients: a line per trial, all seeds; a cross: diverged.", rows, draw
    )


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
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("Test perplexity")
        under(figure, axes)

    height = 0.9 + 0.14 * len(names) * max(2.0, len(variants) / 1.5)
    return Drawing("domains", "Test perplexity by domain, means over seeds.", rows, draw, height)


def _of_trials(study: Study, metric: str) -> pd.DataFrame | None:
    """A row per point of the curve of each trial of the table; None where there is no curve."""
    parts = [
        pd.DataFrame(
            {
                "variant": line.variant,
                "seed": line.seed,
                "key": line.key,
                "tokens": line.x,
                "value": line.y,
                "diverged": line.diverged,
            }
        )
        for group in lines.groups(study, View(metric=metric))
        for line in group.lines
    ]
    return pd.concat(parts, ignore_index=True) if parts else None


def _trial_lines(figure: Figure, rows: pd.DataFrame, look: Look) -> Axes:
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
    axes.set_xlabel("Training tokens")
    count_axis(axes.xaxis)
    under(figure, axes)
    return axes
