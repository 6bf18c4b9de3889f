"""Which trials a view draws, and in which unit of progress: from a study and a view to the groups of the figure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from archlab.dashboards.curves import CurveFile, Floats, Group, Line, group, group_level, smooth, strided
from archlab.dashboards.figures import rate_text
from archlab.dashboards.library import Study
from archlab.dashboards.view import METRICS, VARIANT, View
from archlab.search.sections.design.frames import factors, level_name, levels_of

FORWARD_AND_BACKWARD = 3.0
"""Training FLOPs per token over those of the forward pass (the convention of the scaling laws)."""
MOST_POINTS = 40_000
"""Of all lines of a figure together, so that a study of thousands of trials is drawn as fast as one of ten."""
MOST_VARIANTS = 24
"""In each figure of a study's first page: more can neither be told apart nor drawn at once."""


def leading(study: Study) -> list[str]:
    """The variants that the figures of a study's first page draw, in its order: all, or of very many the best, each
    with the baseline that it is compared with, and while there are few losses yet those that train."""
    names = study.variants
    if len(names) <= MOST_VARIANTS:
        return names
    baselines, losses = dict.fromkeys(names, study.record["baseline"]), {}
    if study.comparison is not None:
        table = study.comparison.table
        baselines |= dict(zip(table["variant"], table["baseline"], strict=True))
        losses = {name: loss for name, loss in zip(table["variant"], table["loss_mean"], strict=True) if loss == loss}
    begun = {trial["variant"] for trial in study.trials if trial["state"] != "planned"}
    drawn: set[str] = set()
    for name in sorted(names, key=lambda name: (losses.get(name, math.inf), name not in begun)):
        if len(both := drawn | {name, baselines[name]}) <= MOST_VARIANTS:
            drawn = both
    return [name for name in names if name in drawn]


def groups(
    study: Study, view: View, variants: Collection[str] | None = None, keys: Collection[str] | None = None
) -> list[Group]:
    """One group per variant that has a curve, or per level of what the view groups `by`, of the variants that are named
    (None: all), of the trials with these `keys` (None: all that the view has). Where the view has lines for trials, or
    has not the final seeds, each is a group.

    A variant whose seeds aren't there yet is drawn with what it has: its tuning trials.
    """
    metric = METRICS[view.metric][0]
    chosen = [each for each in _variants(study) if variants is None or each["name"] in variants]
    trials = {
        name: [trial for trial in mine if keys is None or trial["key"] in keys]
        for name, mine in _trials(study, view.trials).items()
    }
    limit = min(400, max(50, MOST_POINTS // max(1, sum(map(len, trials.values())))))
    found: dict[str, list[Line]] = {}
    places = places_of(study, view.by)
    for variant in chosen:
        mine = trials.get(variant["name"], [])
        longest = max((len(study.curves[trial["key"]].series(metric)[0]) for trial in mine), default=0)
        every = max(1, math.ceil(longest / limit))
        lines = [_line(study, variant, trial, metric, view, every) for trial in mine]
        if lines := [line for line in lines if len(line.x)]:
            found.setdefault(places.get(variant["name"], variant["name"]), []).extend(lines)
    factor = "" if view.by == VARIANT else view.by
    if view.alone:
        each = ((name, line) for name, lines in found.items() for line in lines)
        return [replace(group([line]), variant=name, factor=factor) for name, line in each]
    return [group_level(lines, name, factor) if factor else group(lines) for name, lines in found.items()]


def places_of(study: Study, by: str) -> dict[str, str]:
    """What the trials of each variant are counted to: itself, or its row, or the level of a component, axis or rung, in
    the order of the levels."""
    if by == VARIANT:
        return {name: name for name in study.variants}
    levels, order = levels_of(study.record["variants"]), factors(study.record["variants"])[by]
    told = {level: level_name(by, level) for level in order}
    names = {name: told.get(own.get(by, ""), f"no level of {by}") for name, own in levels.items()}
    return dict(sorted(names.items(), key=lambda each: [*told.values(), each[1]].index(each[1])))


def _variants(study: Study) -> list[dict[str, Any]]:
    """The study's variants, then what a search proposed, which has a name of its own too."""
    found = {each["name"]: each for each in study.record["variants"]}
    proposals = {each["number"]: each for each in (study.record.get("search") or {}).get("proposals", ())}
    for trial in study.trials:
        if trial["variant"] not in found and (facts := proposals.get(trial["settings"].get("number"))) is not None:
            found[trial["variant"]] = {**facts, "name": trial["variant"]}
    return list(found.values())


def _trials(study: Study, which: str) -> dict[str, list[dict[str, Any]]]:
    """By variant each trial once: those that stand in the table, all tuning trials, or all. Before there are any, what
    there is. None of them is a probe of a screen, whose losses are of another recipe."""
    own = [trial for trial in study.trials if trial["role"] != "screen"]
    if which != "all":  # what a search proposed has no row in the table
        known = {*study.variants}
        own = [trial for trial in own if trial["variant"] in known]
    if which == "tuning":
        own = [trial for trial in own if trial["role"] != "repeat"]
    elif which == "reported":
        own.sort(key=lambda trial: trial["role"] == "repeat")
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in study.variants}
    for trial in own:
        found.setdefault(trial["variant"], {})[trial["key"]] = trial
    every = {name: list(mine.values()) for name, mine in found.items()}
    if which != "reported" or study.comparison is None:
        return every
    frame = study.comparison.trials
    reported = set(frame["key"][frame["reported"].astype(bool)])
    return {name: [trial for trial in mine if trial["key"] in reported] or mine for name, mine in every.items()}


def _line(study: Study, variant: dict[str, Any], trial: dict[str, Any], metric: str, view: View, every: int) -> Line:
    file = study.curves[trial["key"]]
    step, seconds, value = file.series(metric)
    keep = strided(len(step), every)
    x = _position(study, variant, file, view.x, step, seconds)
    lr = trial["settings"].get("lr")
    label = f"seed {trial['seed']}" + ("" if lr is None else f", rate {rate_text(float(lr))}")
    y, lost = smooth(value, float(view.smooth)), trial["state"] == "diverged"
    return Line(variant["name"], trial["seed"], label, step[keep], x[keep], y[keep], lost, trial["key"])


def _position(study: Study, variant: dict[str, Any], file: CurveFile, x: str, step: Floats, seconds: Floats) -> Floats:
    """Where on an x axis optimizer steps lie that ended after so many seconds of training."""
    if x == "steps":
        return step
    if x == "time":
        return np.asarray(seconds / 60)
    recipe = study.record["recipe"]
    told = file.tokens(step)
    tokens = step * float(recipe["batch"] * recipe["context"]) if told is None else told
    return tokens if x == "tokens" else tokens * FORWARD_AND_BACKWARD * variant["flops_per_token"]
