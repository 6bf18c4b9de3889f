"""Which trials of a study a pruner holds against which, from the table and the trials' own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from archlab.search.recipe.curve import curve_windows
from archlab.search.recipe.recipe import load_recipe
from archlab.search.recipe.steps import steps_of
from archlab.search.results.selection import with_baselines
from archlab.search.sections.prune.spec import History, Pruner, Seen
from archlab.search.sections.seeds.noise import known_noise, noise_key
from archlab.search.store.roles import ROLE
from archlab.search.store.store import Store
from archlab.search.trial.loss_windows import paired_error, read_windows
from archlab.search.trial.metrics import read_metrics, validation_history
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json

SEED_SD = "seed_sd"  # the study's decisions of this name: the noise that paired pruning goes by


class Pruning:
    """Compares a trial's validation losses with those of the study's others of the same data and recipe but the rate.

    Each validation is judged once, the ones of earlier attempts by earlier runs; under a paired pruner every one that
    the baseline's trial allows to judge, as these judgements do not depend on when they are made. What is known of
    trials and their kinds is kept, so that nothing is read twice.
    """

    def __init__(self, pruner: Pruner, study: str, store: Store) -> None:
        self.pruner, self.study, self.store = pruner, study, store
        self.kinds: dict[str, tuple[str, int, int]] = {}
        self.judged: dict[str, set[int]] = {}
        self.whole: dict[str, History] = {}
        self.noise: dict[str, float] = {}
        for variant in self._variants() if pruner.paired else ():
            self._seed_sd(variant)

    def __call__(self, key: str, step: int, history: list[tuple[int, float]]) -> bool:
        """Whether the trial of `key` is to end, given its validations so far."""
        if key in self.judged and all(at in self.judged[key] for at, _ in history):
            return False
        rows = self.store.study_trials(self.study)
        mine = [row for row in rows if row["key"] == key]
        seeds = _tuning_seeds(rows)
        if not mine or (not self.pruner.paired and any(_is_held(row, seeds) for row in mine)):
            return False  # a mean lacks none of its seeds: only what is paired with the baseline prunes them
        base = self._baseline(mine, rows) if self.pruner.paired else None
        if self.pruner.paired and base is None:
            return False
        if key not in self.judged:
            earlier = [] if self.pruner.paired else read_metrics(Path(mine[0]["folder"]))
            self.judged[key] = {
                line["step"] for line in earlier if "validation_loss" in line and line["attempt"] < mine[0]["attempt"]
            }
        fresh = [end for end, (at, _) in enumerate(history, 1) if at not in self.judged[key]]
        if not fresh:
            return False
        self.judged[key].update(at for at, _ in history)
        seen = self._seen(mine[0], rows, base)
        return any(self.pruner.decide(seen(history[:end])) for end in fresh)

    def _seen(
        self, row: dict[str, Any], rows: list[dict[str, Any]], base: dict[str, Any] | None
    ) -> Callable[[History], Seen]:
        """What a pruner is told of a trial, as a function of its validations so far."""
        key, (kind, steps, windows) = row["key"], self._kind(row["key"])
        if base is None:
            seeds = _tuning_seeds(rows)
            others = {each["key"]: each for each in rows if each["key"] != key and not _is_held(each, seeds)}
            histories = {
                other: validation_history(Path(each["folder"]))
                for other, each in others.items()
                if self._kind(other)[0] == kind
            }
            return lambda history: Seen(key, history, histories, steps)
        if base["key"] not in self.whole:
            self.whole[base["key"]] = validation_history(Path(base["folder"]))
        curve = self.whole[base["key"]]
        # by step what the choice of windows adds to the noise of a difference, in the first stage
        ours, theirs, losses = *(read_windows(Path(each["folder"]), windows) for each in (row, base)), dict(curve)
        common = ours.keys() & theirs.keys() & losses.keys()
        errors = {step: paired_error(ours[step], theirs[step], losses[step]) for step in common}
        seed_sd = next((self._seed_sd(each) for each in self._variants() if each["name"] == row["variant"]), 0.0)
        return lambda history: Seen(key, history, {}, steps, curve, errors, seed_sd)

    def _baseline(self, mine: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The baseline's complete trial of the same seed and recipe: at the same settings, or for a repeat its own."""
        record = with_baselines(self.store.study(self.study))
        bases = {variant["name"]: variant["baseline"] for variant in record["variants"]}
        row = next((each for each in mine if each["role"] == "repeat"), mine[0])
        base = bases.get(row["variant"])
        kind = self._kind(row["key"])
        found = [
            each
            for each in rows
            if each["variant"] == base != row["variant"]
            and each["seed"] == row["seed"]
            and each["state"] == "complete"
            and each["role"] in ("tune", "repeat")
            and self._kind(each["key"]) == kind
        ]
        alike = [each for each in found if each["settings"] == row["settings"]]
        reported = [each for each in found if each["role"] == row["role"] == "repeat"]
        return next(iter([*alike, *reported]), None)

    def _variants(self) -> list[dict[str, Any]]:
        variants: list[dict[str, Any]] = self.store.study(self.study)["variants"]
        return variants

    def _seed_sd(self, variant: dict[str, Any]) -> float:
        """The seeds' noise at a variant's scale and data, 0 where no study has told it.

        Decided once for the study: what it tells itself meanwhile must not change what a later run of it prunes.
        """
        if "batches" not in variant:
            return 0.0
        if (key := noise_key(variant)) not in self.noise:

            def told() -> float:
                noise = known_noise(self.store, key)
                return noise.variance**0.5 if noise else 0.0

            self.noise[key] = self.store.decide(self.study, f"{SEED_SD} {key}", told)
        return self.noise[key]

    def _kind(self, key: str) -> tuple[str, int, int]:
        """What trials must share to be compared, the optimizer steps of such a trial, the windows of its curve."""
        if key not in self.kinds:
            trial = Trial.from_json(self.store.spec(key))
            recipe = {name: value for name, value in trial.recipe.items() if name != "lr"}
            windows = curve_windows(load_recipe(trial.recipe)) if self.pruner.paired else 0
            self.kinds[key] = canonical_json([trial.data, recipe]), steps_of(trial.recipe) or 0, windows
        return self.kinds[key]


def _tuning_seeds(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Each variant's seed that tunes: its first one."""
    return {row["variant"]: row["seed"] for row in sorted(rows, key=lambda row: -row["seed"]) if row["role"] == "tune"}


def _is_held(row: dict[str, Any], seeds: dict[str, int]) -> bool:
    """Whether a trial is to come to its end: a mean takes it, as a repeat or a second seed of a value that is tuned, or
    a screen ranks it."""
    return bool(row["role"] in ("repeat", ROLE) or (row["role"] == "tune" and row["seed"] != seeds[row["variant"]]))
