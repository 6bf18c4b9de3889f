"""Which trials a view draws, and in which unit of progress: from a study and a view to the groups of the figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from dashboards.curves import SERIES, CurveFile, Floats, Group, Line, group, smooth, strided
from dashboards.figures import rate_text
from dashboards.library import Study
from dashboards.view import METRICS, View

FORWARD_AND_BACKWARD = 3.0
"""Training FLOPs per token over those of the forward pass (the convention of the scaling laws)."""


MOST_POINTS = 40_000
"""Of all lines of a figure together, so that a study of thousands of trials is drawn as fast as one of ten."""


def groups(study: Study, view: View, variants: Collection[str] | None = None) -> list[Group]:
    """One group per variant that has a curve, of those that are named (None: all). In the view `tuning` each learning
    rate is a group member of its own.

    A variant whose seeds aren't there yet is drawn with what it has: its tuning trials.
    """
    metric = METRICS[view.metric][0]
    assert metric in SERIES
    chosen = [each for each in study.record["variants"] if variants is None or each["name"] in variants]
    trials = _trials(study, view.trials)
    limit = min(400, max(50, MOST_POINTS // max(1, sum(len(trials[each["name"]]) for each in chosen))))
    found = []
    for variant in chosen:
        mine = trials[variant["name"]]
        longest = max((len(study.curves[trial["key"]].series(metric)[0]) for trial in mine), default=0)
        every = max(1, math.ceil(longest / limit))
        lines = [_line(study, variant, trial, metric, view, every) for trial in mine]
        lines = [line for line in lines if len(line.x)]
        if not lines:
            continue
        if view.trials == "tuning":
            found += [group([line]) for line in lines]
        else:
            found.append(group(lines))
    return found


def _trials(study: Study, which: str) -> dict[str, list[dict[str, Any]]]:
    """By variant each trial once: those that stand in the table, or all tuning trials. Before there are any, what there
    is, but for probes of a screen, whose losses are of another recipe."""
    tuning: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in study.variants}
    repeats: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in study.variants}
    for trial in study.trials:
        if trial["variant"] in tuning and trial["role"] != "screen":
            (repeats if trial["role"] == "repeat" else tuning)[trial["variant"]][trial["key"]] = trial
    if which == "tuning":
        return {name: list(mine.values()) for name, mine in tuning.items()}
    reported = set()
    if study.comparison is not None:
        reported = set(study.comparison.trials["key"][study.comparison.trials["reported"].astype(bool)])
    found = {}
    for name, mine in tuning.items():
        own = list({**mine, **repeats[name]}.values())
        found[name] = [trial for trial in own if trial["key"] in reported] or own
    return found


def _line(study: Study, variant: dict[str, Any], trial: dict[str, Any], metric: str, view: View, every: int) -> Line:
    file = study.curves[trial["key"]]
    step, seconds, value = file.series(metric)
    keep = strided(len(step), every)
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
