"""The studies that a calibration is made of: short trials of many recipes, longer ones of some, whole ones of few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.tree.identity import diff
from archlab.search.planning.plan import Plan
from archlab.search.results.selection import loss
from archlab.search.sections.recipes.spec import Recipes
from archlab.search.store.store import Store
from archlab.search.study.study import ReportOptions, Study
from archlab.search.utils.names import with_ending
from archlab.search.variants.variant import Variant

OWN = "as is"  # the study's own recipe
_PLAIN = ("scale", "ablate", "design", "ladder", "tune", "search", "space", "screen", "prune")


@dataclass(frozen=True)
class Stage:
    """One study of a calibration: what its name ends with, the share of a trial's time that its trials take, seeds."""

    ending: str
    share: float
    seeds: int = 1

    def name(self, study: str) -> str:
        """What the store calls it."""
        return with_ending(study, self.ending)


@dataclass(frozen=True)
class Sizes:
    """How much of a calibration's work goes where: `tries` recipes in short trials, and `finalists` in whole ones, the
    study's own among both; the middle has the best one, each of its choices changed, and perhaps several at once."""

    stages: tuple[Stage, Stage, Stage]
    tries: int
    finalists: int


def sizes(trials: int, rows: int, choices: int) -> Sizes:
    """What the work of so many whole trials is spent on, where each recipe is tried on `rows` variants. Raises
    SpecError where it is too little."""
    for short, middle, finalists, seeds, fewest in _WAYS:
        left = trials / rows - finalists * seeds - (2 + choices) * middle
        tries = int(left / short)
        if tries >= fewest:
            stages = Stage(".calibrate-1", short), Stage(".calibrate-2", middle), Stage(".calibrate", 1.0, seeds)
            return Sizes(stages, min(tries, _MOST), finalists)
    short, middle, finalists, seeds, fewest = _WAYS[-1]
    least = rows * (finalists * seeds + (2 + choices) * middle + fewest * short)
    message = f"takes the work of at least {int(np.ceil(least))} trials of the study, found {trials}"
    raise SpecError.of("calibrate", f"{message}; `--trials {int(np.ceil(least))}` allows that")


_MOST = 60  # recipes that are tried
# shares of short and middle trials, finalists, seeds, tries at least: the first way that there is enough work for
_WAYS = ((0.25, 0.5, 4, 5, 32), (0.25, 0.5, 3, 4, 20), (0.25, 0.5, 2, 3, 12), (0.125, 0.25, 2, 2, 8))


def far_from(planned: Plan, wanted: str | None) -> Variant | None:
    """The variant that is least like the baseline, trained alike on the same batches; None where there is none. Raises
    SpecError for a `wanted` one that is not there."""
    first = next(each for each in planned.variants if each.name == planned.variants[0].baseline)
    alike = {
        each.base: each
        for each in reversed(planned.variants)
        if each.base != first.base and each.batches == first.batches and each.recipe.told() == first.recipe.told()
    }
    if wanted is not None:
        if wanted not in alike:
            names = ", ".join(sorted(alike)) or "none"
            raise SpecError.of(
                "calibrate", f"'{wanted}' is no variant with the baseline's recipe and batches; there are {names}"
            )
        return alike[wanted]
    return max(alike.values(), key=lambda each: (len(diff(first.model, each.model)), each.base), default=None)


def staged(study: Study, stage: Stage, rows: list[str], tokens: int, recipes: Mapping[str, Mapping[str, Any]]) -> Study:
    """A stage as a study of its own: the rows under these recipes, whose own takes so many tokens."""
    used = {name for row in rows for name in study.variants[row].components}
    plain = dict.fromkeys(_PLAIN)
    base = study.replace(
        **plain,
        study=stage.name(study.study),
        question=f"Which recipe suits {study.study}?",
        scales={},
        components={name: patch for name, patch in study.components.items() if name in used},
        variants={row: replace(study.variants[row], against="") for row in rows},
        grid={},
        match=study.match.replace(report_unmatched=False) if study.match and study.match.to in rows else None,
        train=study.train.replace(tokens=tokens),
        seeds=stage.seeds,
        evaluate=Study.evaluate,
        keep=Study.keep,
        budget=Study.budget,
        report=ReportOptions(baseline=rows[0]),
        _others=(),
    )
    problems: list[Any] = []
    named = Recipes.parse_node(Node.of({name: dict(changes) for name, changes in recipes.items()}), "recipes", problems)
    if problems:
        raise SpecError(problems)
    return base.replace(recipes=named)


def losses(store: Store, name: str) -> dict[str, list[float]]:
    """The validation losses of a stage under each recipe: the mean over its seeds, row by row; infinite where a trial
    has none."""
    record, found = store.study(name), dict[str, dict[str, list[float]]]()
    for trial in store.study_trials(name):
        row, recipe = record["recipes"]["rows"].get(trial["variant"], (None, None))
        if row is not None:
            value = loss(trial, "validation") if trial["state"] == "complete" else None
            found.setdefault(recipe, {}).setdefault(row, []).append(np.inf if value is None else value)
    return {recipe: [float(np.mean(values)) for values in rows.values()] for recipe, rows in found.items()}
