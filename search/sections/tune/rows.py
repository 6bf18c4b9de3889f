"""The tuning of a plan's variants: their trials at every value, and the rows that are wanted of them by now."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.patching.patch import Setting
from archlab.search.recipe.curve import rungs
from archlab.search.results.selection import choose, loss
from archlab.search.sections.tune.halving import Point, Tuned, enclose, tuned
from archlab.search.sections.tune.spec import RATE, Tune, short
from archlab.search.store.store import TERMINAL, Row
from archlab.search.trial.metrics import validation_history
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.asks import Builds
from archlab.search.variants.mistakes import Mistakes
from archlab.search.variants.section import Made
from archlab.search.variants.variant import Variant

_ENDED_WITHOUT = ("failed", "pruned", "diverged")


@dataclass
class Tuner:
    """Makes the tune rows of variants. `asked` has what each variant was made of, and what it was matched to; `seed` is
    the one that tunes."""

    tune: Tune
    builder: Builds
    asked: Made
    seed: int
    second: int | None = None  # the seed that tells values apart which the first one can't
    noise: Callable[[Variant], float] = lambda _: 0.0  # of a trial's seed, nats/token: infinite where it isn't known
    variants: dict[tuple[str, str], Variant | None] = field(default_factory=dict)
    trials: dict[tuple[str, str, int], Trial] = field(default_factory=dict)
    curves: dict[str, dict[int, float]] = field(default_factory=dict)

    def rows(self, variant: Variant, known: Iterable[dict[str, Any]]) -> tuple[list[Row], dict[str, Any] | None]:
        """The tune rows that should exist, given those of the variant that do, and the choice once it is made."""
        present = {row["key"]: row for row in known if row["role"] == "tune"}
        steps = self.rungs(variant)

        def losses(point: Point) -> Sequence[float | None]:
            return self._losses(present.get(self.trial(variant, point).key), steps)

        found = tuned(self.tune, len(steps), losses, partial(self._is_possible, variant))
        twice = self._twice(variant, found, present)
        rows = self._rows(variant, found, twice)
        if not found.settled or not self._are_over(variant, found, twice, present):
            return rows, None
        return rows, self._choice(variant, rows, present)

    def _rows(self, variant: Variant, found: Tuned, twice: list[str]) -> list[Row]:
        """The rows of all points as far as they are wanted, and those of `twice` with the second seed."""
        steps = [*self.rungs(variant), None]
        settings = {name: {"lr": variant.recipe.lr, **point} for name, point in found.points.items()}  # always a rate
        rows = []
        for name, point in found.points.items():
            until = steps[found.reach[name]]
            rows.append(Row(self.trial(variant, point), variant.name, "tune", settings[name], self.seed, until))
        for name in twice:
            again = self.trial(variant, found.points[name], self.second)
            rows.append(Row(again, variant.name, "tune", settings[name], again.seed))
        return rows

    def _choice(
        self, variant: Variant, rows: list[Row], present: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """The settings that are best by the trials that have come to their end."""
        ended = [row for row in rows if row.until is None and row.trial.key in present]
        mine = [{**present[row.trial.key], "settings": row.settings, "until": None} for row in ended]
        return choose({"tune": self.tune.plain(), "seeds": []}, variant.name, mine).settings

    def _twice(self, variant: Variant, found: Tuned, present: Mapping[str, dict[str, Any]]) -> list[str]:
        """The names of the points that get a second seed, because the first one cannot tell them apart.

        These are the best and the second one, where their losses differ by no more than the standard deviation of such
        a difference, sqrt(2) times the noise of a trial's seed. A second seed of the best one is one of its repeats, so
        that this costs a trial. Where the mean of both seeds moves the best, a neighbour that had stopped and a value
        beyond are wanted as they were for the first seed, with the second one as well unless the first has told them
        to be behind. A neighbour that had come to its end stays as it is: a second seed of it bought nothing in the
        studies of benchmarks/certainty.py.
        """
        limit = math.sqrt(2) * self.noise(variant)
        twice = sorted((name for name in found.points if math.isfinite(found.end(name))), key=found.end)[:2]
        losses = [found.end(name) for name in twice]
        if self.second is None or not found.settled or len(twice) < 2 or not limit or losses[1] - losses[0] > limit:
            return []
        while self._are_over(variant, found, twice, present):
            best = self._choice(variant, self._rows(variant, found, twice), present)
            leader = next(name for name, point in found.points.items() if point.items() <= (best or {}).items())
            fresh = enclose(self.tune, found, leader, partial(self._is_possible, variant))
            if not fresh or not found.settled:
                break
            alive = [name for name in fresh if math.isfinite(found.end(name))]
            twice += [name for name in alive if found.end(name) - found.end(leader) <= limit]
        return twice

    def _are_over(
        self, variant: Variant, found: Tuned, twice: list[str], present: Mapping[str, dict[str, Any]]
    ) -> bool:
        """Whether the second seeds of these points have ended."""
        keys = [self.trial(variant, found.points[name], self.second).key for name in twice]
        return all(present.get(key, {}).get("state") in TERMINAL for key in keys)

    def _is_possible(self, variant: Variant, point: Point) -> bool:
        return self.at(variant, point) is not None

    def rungs(self, variant: Variant) -> list[int]:
        """The steps at which values may stop: the first points of the validation curve at or after each rung."""
        if not self.tune.brackets or len(self.tune.points) < 2:
            return []
        points = rungs(variant.recipe)
        wanted = [share * variant.recipe.all_steps * (1 - 1e-9) for share in self.tune.brackets.rungs]
        found = [next((point for point in points if point >= step), None) for step in wanted]
        return sorted({step for step in found if step is not None})

    def trial(self, variant: Variant, settings: Mapping[str, Any], seed: int | None = None) -> Trial:
        """The trial of a variant at these settings, with the seed that tunes or with another one."""
        key = variant.name, canonical_json(dict(settings)), self.seed if seed is None else seed
        if key not in self.trials:
            at = self.at(variant, settings)
            assert at is not None, "rows are made of points that are possible"
            self.trials[key] = at.trial(key[2], settings.get("lr"))
        return self.trials[key]

    def reaches(self, variant: Variant, settings: Mapping[str, Any]) -> bool:
        """Whether settings are among the values, or among those beyond, and make sense in a variant."""
        if any(settings.get(short(path)) not in self.tune.reach(path) for path in self.tune.axes):
            return False
        point = {short(path): settings[short(path)] for path in self.tune.axes}
        return self.at(variant, point) is not None

    def at(self, variant: Variant, settings: Mapping[str, Any]) -> Variant | None:
        """The variant at these settings, but for the learning rate; None where it makes no sense."""
        try:
            return self.made(variant, settings)
        except SpecError:
            return None

    def made(self, variant: Variant, settings: Mapping[str, Any]) -> Variant:
        """The variant at these settings, but for the learning rate. Raises SpecError where it makes no sense."""
        others = {path: value for path, value in settings.items() if path != "lr"}
        if not others:
            return variant
        key = variant.name, canonical_json(others)
        if key not in self.variants:
            self.variants[key] = None
            asked, target = self.asked[variant.name]
            own = []
            for path, value in others.items():  # each at the place where it was written
                axis, mark = self.tune.axes[path], self.tune.mark(path)
                place = next((n.mark for each, n in zip(axis.values, axis.nodes, strict=True) if each == value), None)
                own.append(Setting(path, Node.of(value, place or mark), "tune", mark))
            made = self.builder.variant(replace(asked, settings=(*asked.settings, *own)), target, bool(variant.matched))
            self.variants[key] = replace(made, name=variant.name, baseline=variant.baseline)
        found = self.variants[key]
        if found is None:
            raise SpecError.of("tune", f"{canonical_json(others)} makes no sense in '{variant.name}'", self.tune.mark())
        return found

    def problems(self, variant: Variant) -> Iterable[Problem]:
        """What is wrong with the values of `tune` in one variant."""
        keys: dict[str, Point] = {}
        for point in self.tune.points:
            try:
                at = self.made(variant, point)
            except SpecError as error:
                yield from error.problems
                continue
            path = [*self.tune.axes][-1]
            if at.batches != variant.batches:
                message = "changes the batches, so that losses do not pair; make it an axis of `grid`"
                yield Problem(f"tune.{path}", message, self.tune.mark(path))
            first = keys.setdefault(at.trial(self.seed, point.get("lr")).key, point)
            if first is not point:
                message = f"{canonical_json(first)} and {canonical_json(point)} are one model and recipe"
                yield Problem("tune", message, self.tune.mark())

    def sizes(self, variant: Variant) -> list[dict[str, Any]]:
        """What the variant costs at each combination of the values, or of those beyond, that change its model."""
        others = [path for path in self.tune.axes if path != RATE]
        found = []
        for values in itertools.product(*map(self.tune.reach, others)) if others else ():
            settings = dict(zip(others, values, strict=True))
            if at := self.at(variant, settings):
                said = {"parameters": at.parameters, "mismatch": at.mismatch, "matched": at.matched, **at.figures}
                found.append({"settings": settings, **said})
        return found

    def _losses(self, row: dict[str, Any] | None, steps: list[int]) -> Sequence[float | None]:
        """A trial's losses at the rungs and at its end.

        One that ended without a loss keeps those that it had, so that what went on at a rung because of it stays
        decided.
        """
        if row is None:
            return [None] * (len(steps) + 1)
        final = loss(row, "validation")
        if row["state"] in _ENDED_WITHOUT or (row["state"] == "complete" and final is None):
            known = {step: _number(value) for step, value in _history(row)} if steps else {}
            return [*(known.get(step, math.inf) for step in steps), math.inf]
        if final is not None:
            curve = self._curve(row, steps) if steps else {}
            return [*(_between(curve, step, final) for step in steps), final]
        reached = (row["result"] or {}).get("step", 0)
        there = self._curve(row, steps) if steps and reached >= steps[0] else {}
        return [*(there.get(step, math.inf) if step <= reached else None for step in steps), None]

    def _curve(self, row: dict[str, Any], steps: list[int]) -> dict[int, float]:
        """The losses of a trial's validation curve at the rungs that it has come to; what is known doesn't change."""
        known = self.curves.setdefault(row["key"], {})
        result = row["result"]
        if row["state"] != "complete" and result:
            known.setdefault(result["step"], _number(result["validation"]["loss"]))
        reached = steps[-1] if row["state"] == "complete" else result["step"]
        if steps and any(step <= reached and step not in known for step in steps):
            known.update({step: _number(value) for step, value in _history(row)})
        return known


def tuner_of(tune: Tune, builds: Builds, variants: list[Variant], made: Made, seeds: int) -> Tuner:
    """What tunes the variants of a study. Raises SpecError where a value makes no sense in one of them."""
    tuner = Tuner(tune, builds, made, 0, 1 if seeds > 1 else None)
    if any(path != RATE for path in tune.axes):
        wrong = Mistakes(len(variants))
        for variant in variants:
            wrong.add(tuner.problems(variant), variant.name)
        if problems := [*wrong.problems()]:
            raise SpecError(problems)
    return tuner


def _history(row: dict[str, Any]) -> list[tuple[int, float]]:
    """The validation curve, read where the row doesn't bring it."""
    if "curve" in row:
        return list(row["curve"])
    return validation_history(Path(row["folder"])) if row.get("folder") else []


def _between(curve: Mapping[int, float], step: int, final: float) -> float:
    """The loss at a step. Where a trial that went on from a shorter one has none there, it lies on the line through
    its neighbours in the log of the step; before the first one it is the first one's."""
    if step in curve:
        return curve[step]
    before, after = (
        max((s for s in curve if 0 < s < step), default=None),
        min((s for s in curve if s > step), default=None),
    )
    if before is None or after is None:
        return final if after is None else curve[after]
    share = math.log(step / before) / math.log(after / before)
    return curve[before] + share * (curve[after] - curve[before])


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.inf
