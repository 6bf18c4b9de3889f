"""Finds a recipe for a study's baseline and for the variant that is least like it, at equal time a trial.

1. Short trials of recipes that Optuna proposes (TPE), the study's own first; it is told the mean validation loss.
2. Trials of middle length: the best of these, and the same with each of its choices changed, which says what each is
   worth. The lowest loss of all is the candidate.
3. Whole trials of the study's own recipe and the candidate, with several seeds: loss and noise of both.

That is successive halving (arXiv:1502.07943), but that every trial is as long as its schedule. All trials are those of
ordinary studies, so that nothing is trained twice and an interrupted calibration goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.patching.patch import Setting
from archlab.search.calibration.choices import Choice, Tries, choices_of, equal_time
from archlab.search.calibration.stages import OWN, Sizes, Stage, far_from, losses, sizes, staged
from archlab.search.planning.plan import Plan, plan
from archlab.search.running.ending import EXIT_FAILED, Summary
from archlab.search.running.run import RunOptions, make_executor, quiet, run_with
from archlab.search.sections.recipes.spec import meaning, recipe_settings
from archlab.search.sections.search.proposer import Ending, Known, Proposer
from archlab.search.sections.search.samplers import TpeSampler
from archlab.search.store.addresses import store_root
from archlab.search.store.lock import in_use
from archlab.search.store.store import TERMINAL, Store
from archlab.search.study import calibrated
from archlab.search.study.changes import changed_recipe
from archlab.search.study.load import load_study
from archlab.search.study.study import Study
from archlab.search.training.step_times import Timings
from archlab.search.variants.asks import Events
from archlab.search.variants.patches import Patch

Point = dict[str, int]
_AT_ONCE = 4  # proposals after the first half, which are drawn at random


@dataclass(frozen=True)
class Calibration:
    """How a calibration ended: the study with its whole trials, and the recipe, None where there is none: what `train`
    says, and `model.init.std` if that was a choice."""

    summary: Summary
    study: str
    recipe: dict[str, Any] | None = None


def calibrate(
    study: Study | str | Path,
    store: str | Path | None = None,
    *,
    trials: int | None = None,
    against: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    executor: Literal["ray", "inline"] = "ray",
    address: str | None = None,
    on_event: Events | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    allow_plugins: bool = False,
    command: str = "",
) -> Calibration:
    """Finds the recipe, keeps it in the store, and returns how that ended; the same call goes on after an interruption.

    It takes the work of at most `trials` trials of the study, as many as the study itself by default. `against` is the
    variant that is tried beside the baseline; by default the one that is least like it. Raises what `run` does.
    """
    if not isinstance(study, Study):
        study = load_study(study, overrides, allow_plugins, store)
    _refuse(study)
    root = store_root(store).absolute()
    with Store.open(root) as opened, in_use(root):
        workers = make_executor(executor, root, resources=study.resources, address=address)
        options = RunOptions(quiet(on_event), on_plan, False, False, executor == "ray" and address is None, command)
        try:
            whole = plan(study, root / "data", fetch=True).trials
            planned = plan(study.replace(recipes=None, grid={}), root / "data")
            work = _Work(study, planned, opened, whole, trials or whole, against)
            return work.done(lambda each: run_with(workers, each, opened, options))
        finally:
            workers.close()


def _refuse(study: Study) -> None:
    """Raises SpecError for a study that has more than one recipe to find, or says a part of it twice."""
    several = {"ladder": study.ladder, "train.stages": study.train.stages, "train.ramp": study.train.ramp}
    for path, given in several.items():
        if given:
            mark = study.mark("ladder") if path == "ladder" else study.train.mark(path.removeprefix("train."))
            raise SpecError.of(path, "is more than one recipe, which a calibration finds; calibrate without it", mark)
    patch = study.variants.get(study.report.baseline, Patch())
    named = [study.components[name].settings for name in patch.components]
    for setting in (*patch.settings, *(each for settings in named for each in settings)):
        if setting.path.startswith(("train.", "init")):
            base = f"variants.{study.report.baseline}.{setting.path}"
            raise SpecError.of(base, "is a part of the recipe; write it into `train` or `model`", setting.mark)


class _Stopped(Exception):
    """A stage did not come to its end."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary


class _Work:
    """A calibration at work."""

    def __init__(self, study: Study, planned: Plan, store: Store, whole: int, trials: int, against: str | None) -> None:
        """`whole` are the trials of the study, `planned` is what it compares under its own recipe alone."""
        self.study, self.planned, self.store, self.whole = study, planned, store, whole
        far = far_from(planned, against)
        first = next(each for each in planned.variants if each.name == planned.variants[0].baseline)
        self.rows = [first.base, *([far.base] if far else [])]
        timings = Timings(store.root / "timings", study.resources.cpus)
        choices = choices_of(study.model, study.train, study.resources.parallel.copies)
        self.tries = Tries(study.train, choices, lambda batch: equal_time(first, batch, timings))
        self.sizes: Sizes = sizes(trials, len(self.rows), len(self.tries.choices))
        self.points: dict[str, Point] = {OWN: self.tries.own}

    def done(self, run: Callable[[Study], Summary]) -> Calibration:
        """All stages."""
        short, middle, whole = self.sizes.stages
        try:
            best = self.search(short, run)
            worth, candidates = self.single_out(middle, best, run)
            finalists = [OWN, *candidates[: self.sizes.finalists - 1]]
            self.run(whole, finalists, run)
        except _Stopped as stopped:
            return Calibration(stopped.summary, whole.name(self.study.study))
        found = losses(self.store, whole.name(self.study.study))
        chosen = min(finalists, key=lambda name: float(np.mean(found[name])))
        if not np.isfinite(np.mean(found[chosen])):
            told = "no recipe trained to a finite loss; give the study a lower rate, and calibrate again"
            return Calibration(Summary(EXIT_FAILED, self.summary.counts, told), whole.name(self.study.study))
        return self.keep(whole, chosen, worth)

    def run(self, stage: Stage, names: list[str], run: Callable[[Study], Summary]) -> dict[str, float]:
        """Runs a stage and returns the mean loss under each of these recipes. Raises _Stopped."""
        recipes = {name: self.tries.settings(self.points[name], stage.share) for name in names}
        tokens = self.tries.tokens(None, stage.share)
        self.summary = run(staged(self.study, stage, self.rows, tokens, recipes))
        states = {trial["state"] for trial in self.store.study_trials(stage.name(self.study.study))}
        over = self.summary.exit_code == EXIT_FAILED and "complete" in states and states <= {*TERMINAL}
        if self.summary.exit_code and not over:  # a recipe whose trials fail is no better than one that diverges
            raise _Stopped(self.summary)
        found = losses(self.store, stage.name(self.study.study))
        return {name: float(np.mean(found[name])) for name in names}

    def search(self, stage: Stage, run: Callable[[Study], Summary]) -> list[str]:
        """The recipes that Optuna proposed, the best first; the study's own is one of them."""
        startup = max(self.sizes.tries // 2, 3)
        given = {0: Known(self.tries.own)}
        if self.tries.default != self.tries.own:
            given[1] = Known(self.tries.default)
        proposer = Proposer(None, self.study.study, self.tries.space(), TpeSampler(startup=startup), known=given)
        numbers: dict[str, list[int]] = {}  # of proposals, by the recipe that they are
        seen: dict[str, str] = {}
        found: dict[str, float] = {}
        drawn = [(number, dict(each.values)) for number, each in given.items()]
        drawn += [proposer.ask() for _ in range(startup - len(given))]
        while True:
            for number, point in drawn:
                name = OWN if number == 0 else f"try {number}"
                name = seen.setdefault(self._meaning(point, stage), name)
                self.points.setdefault(name, point)
                numbers.setdefault(name, []).append(number)
            found = self.run(stage, [*numbers], run)
            for name, mine in numbers.items():
                for number in mine:
                    alive = bool(np.isfinite(found[name]))
                    proposer.tell(number, Ending("complete" if alive else "diverged", (found[name],) if alive else ()))
            count = sum(map(len, numbers.values()))
            if count >= self.sizes.tries:
                return sorted(numbers, key=lambda name: found[name])
            drawn = [proposer.ask() for _ in range(min(_AT_ONCE, self.sizes.tries - count))]

    def single_out(
        self, stage: Stage, ranked: list[str], run: Callable[[Study], Summary]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """What each choice of the best recipe is worth, and the recipes for whole trials, the best first."""
        best = ranked[0]
        seen = {self._meaning(self.points[name], stage): name for name in (best, OWN)}
        rivals = {choice.name: self._rival(choice, ranked) for choice in self.tries.choices}

        def changed(*choices: str) -> str:
            point = {**self.points[best], **{each: rivals[each] for each in choices}}
            but = choices[0] if len(choices) == 1 else f"{len(choices)} choices"
            name = seen.setdefault(self._meaning(point, stage), f"{best} but {but}")
            self.points.setdefault(name, point)
            return name

        other = {each: changed(each) for each in rivals}
        names = list(dict.fromkeys([best, *other.values()]))
        means = self.run(stage, names, run)
        better = [each for each, name in other.items() if means[name] < means[best]]
        if len(better) > 1:  # each of them helps, so perhaps all do
            names = list(dict.fromkeys([*names, changed(*better)]))
            means = self.run(stage, names, run)
        found = losses(self.store, stage.name(self.study.study))
        worth = [
            {"choice": choice.name, "tried": list(choice.values), "ends": list(choice.ends), "own": choice.own}
            | {"best": self.points[best][choice.name], "other": rivals[choice.name]}
            | {"with": found[best], "without": found[other[choice.name]]}
            for choice in self.tries.choices
        ]
        return worth, [name for name in sorted(names, key=lambda name: means[name]) if name != OWN]

    def _rival(self, choice: Choice, ranked: list[str]) -> int:
        """The place of the value that the best recipe's one is held against: the study's own, or, where that is the
        best one, the one that did best in the short trials."""
        best: int = self.points[ranked[0]][choice.name]
        places = [choice.own, *(self.points[name][choice.name] for name in ranked), *range(len(choice.values))]
        return next((place for place in places if place != best), best)

    def keep(self, stage: Stage, chosen: str, worth: list[dict[str, Any]]) -> Calibration:
        """Tells the record of the whole trials what was found, and the store which recipe that is."""
        name, point = stage.name(self.study.study), self.points[chosen]
        said = self.tries.whole(point, changed_recipe(self.study, self._settings(point)))
        record = self.store.study(name)
        record["calibration"] = {
            "of": self.study.study,
            "rows": self.rows,
            "chosen": chosen,
            "places": point,
            "choices": worth,
            "shares": [each.share for each in self.sizes.stages],
            "tried": len(self.points),
            "compared": len({variant.base for variant in self.planned.variants}),
            "trials": self.whole,
        }
        self.store.save_study(name, record, self.store.study_yaml(name))
        calibrated.remember(self.store, self.study, {**said, "of": self.study.study, "study": name})
        return Calibration(self.summary, name, said)

    def _settings(self, point: Point, share: float = 1.0) -> list[Setting]:
        """What a point changes, by paths of the study."""
        return [*recipe_settings("calibrate", Node.of(self.tries.settings(point, share)), "calibrate", [])]

    def _meaning(self, point: Point, stage: Stage) -> str:
        """What recipe and start a point is, to tell the same from others."""
        base = self.study.replace(train=self.study.train.replace(tokens=self.tries.tokens(None, stage.share)))
        return meaning(self._settings(point, stage.share), base)
