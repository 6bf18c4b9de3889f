"""A round: a challenger and the champion as a study of its own, beside the baseline that both are matched to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.search.challenge.ledger import Losses, digest, round_of
from archlab.search.planning.plan import Plan, plan
from archlab.search.results.selection import Selection, loss, with_baselines
from archlab.search.sections.recipes.average import AXIS
from archlab.search.sections.rooms import select
from archlab.search.store.store import Store
from archlab.search.study.load import check
from archlab.search.study.study import ReportOptions, Study
from archlab.search.variants.mistakes import TWIN
from archlab.search.variants.patches import Patch

_DROPPED = ("scale", "ablate", "design", "ladder", "search", "space", "screen", "prune")
_IN_THE_WAY = {
    "grid": "crosses the challengers with its values; choose one of each for the model",
    "ladder": "has several sizes; challenge at one of them",
    "search": "proposes by itself; challenge a copy without `search` and `space`, with `variants: {baseline: {}}`",
}


def refuse(study: Study) -> None:
    """Raises SpecError for a study whose sections leave no single champion."""
    for name, why in _IN_THE_WAY.items():
        if getattr(study, name):
            raise SpecError.of(name, why, study.mark(name))
    if study.match and study.match.to != first_of(study):
        message = f"matches to '{study.match.to}'; a challenge matches to the first champion, '{first_of(study)}'"
        raise SpecError.of("match", message, study.mark("match"))


def first_of(study: Study) -> str:
    """The variant that is the first champion: the study's baseline."""
    return study.report.baseline if study.report.baseline in study.variants else next(iter(study.variants))


@dataclass(frozen=True)
class Round:
    """The rows of a round, the study's baseline first, then the champion where that is another one, the challenger
    last; and the identity of what each of them trains."""

    study: Study
    planned: Plan
    champion: str
    challenger: str
    seeds: int

    @classmethod
    def of(cls, study: Study, store: Store, ending: str, rows: Mapping[str, Patch], seeds: int) -> Round:
        """With these rows at so many seeds. Raises SpecError for a challenger that does not pair with the champion."""
        used = {name for patch in rows.values() for name in patch.components}
        if not used <= study.components.keys():
            used = {*study.components}  # of which the error names the nearest
        dropped: dict[str, Any] = dict.fromkeys(_DROPPED)
        champion, challenger = ([*rows] * 2)[-2:]
        made = study.replace(
            **dropped,
            study=round_of(study.study, ending),
            question=f"Is {challenger} better than {champion}?",
            scales={},
            components={name: patch for name, patch in study.components.items() if name in used},
            variants={name: replace(patch, against="") for name, patch in rows.items()},
            grid={},
            match=study.match.replace(report_unmatched=False) if study.match else None,
            seeds=seeds,
            evaluate=Study.evaluate,
            report=ReportOptions(baseline=champion),
            _others=(),
        )
        planned = _planned(made, store)
        batches = {(each.axes.get(AXIS), each.batches) for each in planned.variants}
        if len(batches) > len({recipe for recipe, _ in batches}):
            message = "sees other batches than the champion, so that their losses do not pair"
            raise SpecError.of(f"challengers.{challenger}", message)
        return cls(made, planned, champion, challenger, seeds)

    def identity(self, row: str) -> str:
        """Of what a row trains, under all recipes."""
        mine = (each for each in self.planned.variants if each.base == row)
        return digest({each.axes.get(AXIS, ""): each.trial(0).key for each in mine})

    def left(self, store: Store) -> int:
        """How many trials it still takes."""
        return self.planned.left(self.planned.done(store))

    def selections(self, store: Store) -> dict[str, list[Selection]]:
        """Of each row, one under each recipe."""
        record = with_baselines(store.study(self.study.study))
        rows = {each.name: each.base for each in self.planned.variants}
        found: dict[str, list[Selection]] = {name: [] for name in self.study.variants}
        for each in select(record, store.study_trials(self.study.study)):
            found[rows[each.variant]].append(each)
        return found

    def trained(self, store: Store) -> int:
        """How many trials were trained for it alone."""
        rows = store.study_trials(self.study.study)
        return len({row["key"] for row in rows if row["result"] and not row["reused"]})


def _planned(study: Study, store: Store) -> Plan:
    """The plan of a round. Raises SpecError, whose paths say `challengers` where a study's would say `variants`."""
    try:
        check(study)
        return plan(study, store.root / "data", fetch=True)
    except SpecError as error:
        raise SpecError(_as_challenger(each, study) for each in error.problems) from error


def _as_challenger(problem: Problem, study: Study) -> Problem:
    """A problem of the variant that is the challenger, without a place in the study's file, which does not have it."""
    if not problem.path.startswith(f"variants.{[*study.variants][-1]}"):
        return problem
    problem = replace(problem, message=problem.message.replace(TWIN, "it changes nothing"))
    elsewhere = problem.mark and study.file and problem.mark.file != str(study.file)
    path = problem.path.replace("variants", "challengers", 1)
    return replace(problem, path=path, mark=problem.mark if elsewhere else None)


def mean_losses(selections: list[Selection], seeds: int, split: str) -> Losses:
    """Of one row: for each seed the mean over its recipes, None where one of them has no loss."""
    found: Losses = []
    for seed in range(seeds):
        values = [loss(each.reported[seed], split) if seed in each.reported else None for each in selections]
        whole = [value for value in values if value is not None]
        found.append(float(np.mean(whole)) if len(whole) == len(values) else None)
    return found
