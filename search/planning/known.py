"""What a store knows of a plan: what has a result, goes on from shorter trials or was edited, and the seeds' noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from archlab.search.executors.resources import Room
from archlab.search.planning.edits import edits
from archlab.search.planning.estimate import Estimate, estimate
from archlab.search.planning.plan import Plan
from archlab.search.recipe.recipe import load_recipe
from archlab.search.sections.budget.spec import Spent, spent_of
from archlab.search.sections.seeds.noise import Noise, known_noise, noise_key
from archlab.search.sections.seeds.spec import most
from archlab.search.store.store import Store
from archlab.search.training.shared_beginnings import FOLDER, fitting
from archlab.search.trial import checkpoint


@dataclass
class Known:
    """What the store knows of a plan: trials that have a result, the smallest difference that can be resolved, what was
    edited since the study was run, what goes on from shorter trials, and what was spent so far."""

    done: int
    resolution: Resolution | None
    edits: list[str]
    going_on: GoingOn | None
    spent: Spent

    @classmethod
    def of(cls, planned: Plan, root: Path) -> Self:
        """Of the store in a folder, if there is one."""
        if not (root / "store.json").exists():
            planned.hear(None)
            return cls(0, resolution(planned, None), [], None, Spent())
        with Store.open(root, create=False) as store:
            spent = spent_of(store, planned.study.study)
            done, resolved = planned.done(store), resolution(planned, store)
            return cls(done, resolved, edits(planned, store), going_on(planned, store), spent)

    def guess(self, planned: Plan, root: Path, slots: int | None) -> Estimate:
        """Of what is left. Raises ResourcesError when this machine has no room for a trial."""
        done = self.done if planned.left(self.done) else planned.trials
        return estimate(planned, root, slots or planned.study.resources.slots([Room.here()]), done)


@dataclass(frozen=True)
class GoingOn:
    """How many trials can go on from shorter ones, the last step from which one does, and how many are new."""

    trials: int
    step: int
    new: int

    def __str__(self) -> str:
        many = self.trials > 1
        goes = f"{self.trials} trials go on from shorter ones" if many else "1 trial goes on from a shorter one"
        new = "1 is new" if self.new == 1 else f"{self.new} are new"
        return f"{goes} (at most to step {self.step:,}, on machines alike); {new}"


def going_on(planned: Plan, store: Store) -> GoingOn | None:
    """Which of a plan's trials that have not begun can go on from shorter ones; None when none can."""
    root = store.root / FOLDER
    if planned.study.keep.log2 or not root.is_dir():
        return None
    rows = {row.trial.key: row for row in planned.rows(store.study_trials(planned.study.study))}
    known = store.known(rows)
    folders = {key: store.trial_folder(key) for key in known}
    begun = {key for key, folder in folders.items() if folder.is_dir() and checkpoint.steps_in(folder)}
    begun |= {key for key, each in known.items() if each["state"] != "planned"}
    fresh = [row for key, row in rows.items() if key not in begun]
    ways = [fitting(root, row.trial, load_recipe(row.trial.recipe)) for row in fresh if row.until is None]
    steps = [found[0][0] for found in ways if found]
    return GoingOn(len(steps), max(steps), len(fresh) - len(steps)) if steps else None


@dataclass(frozen=True)
class Resolution:
    """The smallest difference that a plan's intervals can leave zero out for: with `seeds`, those that its budget
    allows; `factor` times the seed noise of one trial (None: there is no interval), which is `difference` nats/token
    where the noise is known."""

    seeds: int
    df: int
    factor: float | None
    difference: float | None
    noise: Noise | None

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' if self.seeds != 1 else ''}"
        if self.factor is None:
            few = f"{seeds}: too few for an interval"
            return few if self.seeds else "nothing: the budget has no trial of every variant"
        if self.noise is None or self.difference is None:
            return (
                f"{seeds} resolve differences of {self.factor:.2g} times the spread of a variant's seeds; what that "
                f"is in nats this study measures, on {self.df} degrees of freedom: no study of this store has yet, at "
                "this scale and data"
            )
        count = len(self.noise.studies)
        return (
            f"{seeds} resolve {self.difference:.2g} nats/token; from {self.noise.trials} trials of {count} "
            f"stud{'ies' if count > 1 else 'y'} at this scale and data (a trial's seed: "
            f"{math.sqrt(self.noise.variance):.2g}, on {self.noise.df} degrees of freedom)"
        )


def resolution(planned: Plan, store: Store | None) -> Resolution | None:
    """What a plan can resolve with the seeds that its budget allows; None where it compares nothing in pairs.

    With sequential seeds it is the half-width at the most seeds. Where a grid or a ladder has several scales, it is
    that of the baseline whose seeds differ most, once this is known of each.
    """
    from archlab.search.statistics.contrast import MINIMUM_SEEDS, simultaneous_critical
    from archlab.search.statistics.dunnett import dunnett_critical
    from archlab.search.statistics.moderated import expected_df
    from archlab.search.statistics.sequential import TUNED_AT, always_valid_critical

    variants = planned.variants
    groups = {variant.batches for variant in variants}
    comparisons = sum(variant.name != variant.baseline for variant in variants)
    if not comparisons or len(groups) >= len(variants):
        return None
    seeds = _affordable(planned)
    rows = len(variants) - len(groups)
    noise = _largest_noise(store, planned) if store else None
    fixed = isinstance(planned.study.seeds, int)
    if seeds < (MINIMUM_SEEDS if fixed else 2):
        critical = math.inf
    elif fixed:
        critical = dunnett_critical(comparisons, expected_df(len(variants), len(groups), seeds))
    else:
        critical = always_valid_critical(seeds, rows * (seeds - 1), rows * (TUNED_AT - 1), comparisons)
    df, factor = rows * max(seeds - 1, 0), critical * math.sqrt(2 / max(seeds, 1))
    if noise is None or not math.isfinite(critical):
        return Resolution(seeds, df, factor if math.isfinite(factor) else None, None, noise)
    parts = 2 * noise.variance / seeds, noise.documents
    both = float(simultaneous_critical(*parts, critical, 10_000 if noise.documents else 0, comparisons))
    return Resolution(seeds, df, factor, both * math.sqrt(sum(parts)), noise)


def _largest_noise(store: Store, planned: Plan) -> Noise | None:
    """That of the baseline whose seeds differ most; None where it isn't known of each."""
    keys = dict.fromkeys(noise_key(each.record()) for each in planned.variants if each.name == each.baseline)
    found = [known_noise(store, key) for key in keys]
    known = [noise for noise in found if noise is not None]
    return max(known, key=lambda noise: noise.variance) if len(known) == len(found) else None


def _affordable(planned: Plan) -> int:
    """The seeds of every variant that the budget allows, at most those that the study asks for."""
    budget, asked = planned.study.budget, most(planned.study.seeds)
    trials = [limit for limit in (budget.trials,) if limit is not None]
    if budget.tokens is not None:
        left = max(budget.tokens - sum(each.recipe.all_tokens for each in planned.beside), 0)
        trials.append(len(planned.beside) + left // planned.variants[0].recipe.all_tokens)
    over = max(planned.trials - min(trials), 0) if trials else 0
    return max(asked - -(-over // len(planned.variants)), 0)
