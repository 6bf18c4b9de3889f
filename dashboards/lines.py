"""Which trials a view draws, and in which unit of progress: from a study and a view to the groups of the figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dashboards.curves import SERIES, CurveFile, Floats, Group, Line, group, smooth, thin
from dashboards.figures import rate_text
from dashboards.library import Study
from dashboards.view import METRICS, View

FORWARD_AND_BACKWARD = 3.0
"""Training FLOPs per token over those of the forward pass (the convention of the scaling laws)."""


def groups(study: Study, view: View) -> list[Group]:
    """One group per variant that has a curve. In the view `tuning` each learning rate is a group member of its own.

    A variant whose seeds aren't there yet is drawn with what it has: its tuning trials.
    """
    metric = METRICS[view.metric][0]
    assert metric in SERIES
    found = []
    for variant in study.record["variants"]:
        trials = _trials(study, variant["name"], view.trials)
        lines = [_line(study, variant, trial, metric, view) for trial in trials]
        lines = [line for line in lines if len(line.x)]
        if not lines:
            continue
        if view.trials == "tuning":
            found += [group([line]) for line in lines]
        else:
            found.append(group(lines))
    return found


def _trials(study: Study, variant: str, which: str) -> list[dict[str, Any]]:
    """Each trial once: those that stand in the table, or all tuning trials. Before there are any, what there is."""
    mine = {trial["key"]: trial for trial in study.trials if trial["variant"] == variant and trial["role"] != "repeat"}
    if which == "tuning":
        return list(mine.values())
    mine |= {trial["key"]: trial for trial in study.trials if trial["variant"] == variant}
    reported = set() if study.comparison is None else set(study.comparison.trials.query("reported")["key"])
    return [trial for trial in mine.values() if trial["key"] in reported] or list(mine.values())


def _line(study: Study, variant: dict[str, Any], trial: dict[str, Any], metric: str, view: View) -> Line:
    file = study.curves[trial["key"]]
    step, seconds, value = file.series(metric)
    keep = thin(len(step))
    x = _position(study, variant, file)[view.x](step, seconds)
    lr = trial["settings"].get("lr")
    label = f"seed {trial['seed']}" + ("" if lr is None else f", rate {rate_text(float(lr))}")
    y = smooth(value, float(view.smooth))
    return Line(variant["name"], trial["seed"], label, step[keep], x[keep], y[keep], trial["state"] == "diverged")


def _position(study: Study, variant: dict[str, Any], file: CurveFile) -> dict[str, Callable[[Floats, Floats], Floats]]:
    """What each choice of the x axis makes of (optimizer step, seconds of training)."""
    recipe = study.record["recipe"]
    tokens = float(recipe["batch"] * recipe["context"])
    flops = FORWARD_AND_BACKWARD * variant["flops_per_token"]
    return {
        "tokens": lambda step, _: step * tokens,
        "steps": lambda step, _: step,
        "flops": lambda step, _: step * tokens * flops,
        "time": lambda _, seconds: np.asarray(seconds / 60),
    }
