"""What a study would run: its variants with their sizes and costs, and the trials that should exist by now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab import kernels
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.paths import get
from archlab.search.evaluation.measures import About
from archlab.search.planning.builder import Builder
from archlab.search.planning.foreseen import foreseen
from archlab.search.planning.tuning_noise import tuning_noise
from archlab.search.planning.variant_set import in_order, variant_set
from archlab.search.results.selection import group, is_over
from archlab.search.sections.ladder.width_transfer import Coordinates
from archlab.search.sections.seeds.decide import wanted_seeds
from archlab.search.sections.seeds.spec import most, sequential_record
from archlab.search.sections.tune.rows import Tuner, tuner_of
from archlab.search.sections.tune.spec import short
from archlab.search.store import plugins as plugin_files
from archlab.search.store.roles import ROLE
from archlab.search.store.store import Row, Store
from archlab.search.study.study import Study
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.section import Part
from archlab.search.variants.variant import Variant

if TYPE_CHECKING:
    import pandas as pd


@dataclass(repr=False)
class Plan:
    """A study made concrete. `variants` grows while a search proposes."""

    study: Study
    builder: Builder
    variants: list[Variant]
    omitted: dict[str, str] = field(default_factory=dict)  # combinations of a design that make no sense, and why
    tuner: Tuner | None = None
    coordinates: dict[str, Coordinates] = field(default_factory=dict)  # of what transfers along a ladder, by series
    parts: list[Part] = field(default_factory=list)  # its sections at work
    _known: int = 0
    _missing: int | None = None  # of the trials that are known to be wanted, once `done` has looked
    searched: dict[str, Any] = field(default_factory=dict)  # what a search tells the record
    _rows: dict[str, tuple[object, tuple[list[Row], list[Row]]]] = field(default_factory=dict, repr=False)
    _ordered: list[Variant] = field(default_factory=list, repr=False)
    _trials: dict[tuple[str, str, int], Trial] = field(default_factory=dict, repr=False)
    _record: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def seeds(self) -> list[int]:
        """The seeds that a variant's repeats have at most; the first one tunes."""
        return list(range(most(self.study.seeds)))

    @property
    def absent(self) -> list[str]:
        """The labels of those of its data that have yet to be downloaded."""
        return [*dict.fromkeys(data.header["labels"]["source"] for each in self.variants for data in each.absent)]

    @property
    def points(self) -> list[dict[str, Any]]:
        """The settings that every variant chooses from, before any extension; empty without `tune`."""
        return self.study.tune.points if self.study.tune else []

    @property
    def contested(self) -> bool:
        """Whether the two best values of a variant may take a second seed: its noise may hide which is the best."""
        return self.tuner is not None and len(self.points) > 1 and any(map(self.tuner.noise, self.variants))

    @property
    def trials(self) -> int:
        """How many trials the study takes when all of them run to their end, with what is known to be added."""
        per_variant = max(len(self.points) - 1, 0) + len(self.seeds) + self.contested
        proposed = sum(section.proposed(len(self.seeds)) for section in self.study.sections)
        return max(per_variant * (len(self.variants) - len(self.left_out)) + len(self.beside) + proposed, self._known)

    @property
    def beside(self) -> list[Variant]:
        """What its sections train with one seed each beside its variants, as a screen does."""
        return [variant for part in self.parts for variant in part.variants.values()]

    @property
    def left_out(self) -> set[str]:
        """The variants that its sections have decided not to train."""
        return {name for part in self.parts for name in part.left_out}

    def record(self) -> dict[str, Any]:
        """The study record that the store keeps; reports and dashboards read nothing else about a study."""
        first, study = self.variants[0], self.study
        used = plugin_files.record(canonical(variant.model) for variant in self.variants)
        budget, labels = study.budget, [each.label for each in study.evaluate.evaluated]
        rough = [*foreseen(self.variants)]
        return {
            "study": study.study,
            "question": study.question,
            "baseline": first.baseline,
            "seeds": self.seeds,
            **sequential_record(study.seeds),
            "tune": {},
            "paired": len({variant.batches for variant in self.variants}) == 1,
            "context": first.recipe.context,
            "tokens": first.recipe.tokens,
            "steps": first.recipe.all_steps,
            "trials": self.trials,
            "keep": study.keep.record(),
            **({"evaluate": canonical(study.evaluate), "measures": labels} if labels else {}),
            "budget": {"wall_s": budget.wall.seconds if budget.wall else None, "trials": budget.trials},
            **{section.key: told for section in study.sections if (told := section.record(self))},
            "variants": self._variants(),
            "recipe": first.recipe.told(),
            "data": first.dataset.record(),
            "file": str(study.file) if study.file else None,
            **({"include": list(study.include)} if study.include else {}),
            **({"scale": study.scale} if study.scale else {}),
            **({"plugins": used} if used else {}),
            **({"foreseen": rough} if rough else {}),
        }

    def _variants(self) -> list[dict[str, Any]]:
        found, added = [], self.added()
        for variant in self.variants:
            sizes = self.tuner.sizes(variant) if self.tuner else []
            own = {**variant.record(), "added": added[variant.name], **({"tuned": sizes} if sizes else {})}
            found.append(own | {k: v for part in self.parts for k, v in part.record(variant.name).items()})
        return found

    def added(self) -> dict[str, int]:
        """How many parameters each variant has more than the baseline of its row's cell."""
        sizes = {variant.name: variant.parameters for variant in self.variants}
        return {v.name: v.parameters - sizes.get(v.baseline, v.parameters) for v in self.variants}

    def rows(self, trials: list[dict[str, Any]]) -> list[Row]:
        """The trials that should exist, given those that do: the values that are tuned first, then the repeats; before
        them those of its sections, which say what else there is.

        In both the cell with the longest ones first, and of each its baseline, without which nothing compares; under a
        pruner that compares with the baseline, all baselines before all others.
        """
        known = group(trials)
        if self.parts:
            mine = {variant.name: variant for variant in self.variants}  # an edited study has rows of other trials
            now = [row for row in trials if row["variant"] in mine and self._fits(mine[row["variant"]], row)]
            for part in self.parts:
                part.look(self._kept_record(), now)
        seeds = {} if isinstance(self.study.seeds, int) else wanted_seeds(self._kept_record(), trials)
        found = [
            self.rows_of(variant, known.get(variant.name, []), seeds.get(variant.name))
            for variant in self._order()
            if all(part.wants(variant.name) for part in self.parts)
        ]
        rows = [row for phase in zip(*found, strict=True) for rows in phase for row in rows]
        for part in self.parts:
            own = [self._row_beside(part, each.name) for each in self._order() if each.name in part.variants]
            rows = [*own, *part.arranged(rows)]
        return rows

    def _row_beside(self, part: Part, variant: str) -> Row:
        """The one trial that a section has of what it trains for a variant."""
        own, seed = part.variants[variant], self.seeds[0]
        if (key := (own.name, part.role, seed)) not in self._trials:
            self._trials[key] = own.trial(seed)
        return Row(self._trials[key], variant, part.role, {"lr": own.recipe.lr}, seed)

    def forget(self) -> None:
        """Has all rows made anew: what they depend on has changed."""
        self._rows.clear()

    def rows_of(
        self, variant: Variant, known: list[dict[str, Any]], wanted: list[int] | None = None
    ) -> tuple[list[Row], list[Row]]:
        """The tune rows and the repeats of one variant, given its rows; made anew only when these have moved."""
        seeds = self.seeds if wanted is None else wanted
        steps = [(row["result"] or {}).get("step") for row in known]
        moved = tuple((row["key"], row["role"], row["state"]) for row in known), tuple(steps), tuple(seeds)
        if variant.name not in self._rows or self._rows[variant.name][0] != moved:
            self._rows[variant.name] = moved, self._new_rows(variant, known, seeds)
        return self._rows[variant.name][1]

    def _new_rows(self, variant: Variant, known: list[dict[str, Any]], seeds: list[int]) -> tuple[list[Row], list[Row]]:
        tuning: list[Row] = []
        settings: dict[str, Any] | None = {"lr": variant.recipe.lr}
        if self.tuner:
            tuning, settings = self.tuner.rows(variant, known)
        if settings is None:
            return tuning, []
        repeats = [Row(self._trial(variant, settings, seed), variant.name, "repeat", settings, seed) for seed in seeds]
        states = {row["key"]: row["state"] for row in known if row["role"] == "repeat"}
        if "pruned" in states.values():  # the variant is given up: what has not begun never does
            repeats = [row for row in repeats if states.get(row.trial.key, "planned") != "planned"]
        return tuning, repeats

    def _trial(self, variant: Variant, settings: dict[str, Any], seed: int) -> Trial:
        key = variant.name, canonical_json(settings), seed
        if key not in self._trials:
            names = [short(path) for path in self.study.tune.axes] if self.study.tune else []
            point = {name: settings[name] for name in names}
            self._trials[key] = self.tuner.trial(variant, point, seed) if self.tuner else variant.trial(seed)
        return self._trials[key]

    def may_want(self, row: Mapping[str, Any]) -> bool:
        """Whether a stored row could be one of the study's, given results that are still to come."""
        variant = next((each for each in self.variants if each.name == row["variant"]), None)
        if variant is None:
            named = row["variant"].partition("-")[0] == "found"
            return self.study.search is not None and (named or row["role"] == ROLE)  # of a rung
        if variant.name in self.left_out and row["role"] not in {part.role for part in self.parts}:
            return False
        return self._fits(variant, row)

    def _fits(self, variant: Variant, row: Mapping[str, Any]) -> bool:
        """Whether a stored row of a variant is one of its trials as they are now."""
        if row["role"] not in ("tune", "repeat", "search"):
            own = [part for part in self.parts if part.role == row["role"] and variant.name in part.variants]
            return any(row["key"] == self._row_beside(part, variant.name).trial.key for part in own)
        if row["seed"] not in self.seeds or (row["role"] == "tune" and self.tuner is None):
            return False
        if self.tuner is not None and not self.tuner.reaches(variant, row["settings"]):
            return False
        return bool(self._trial(variant, row["settings"], row["seed"]).key == row["key"])

    def _order(self) -> list[Variant]:
        """The variants as their rows are wanted; sorted anew only when a search has added one."""
        if len(self._ordered) == len(self.variants):
            return self._ordered
        self._ordered = in_order(self.variants, bool(self.study.prune and self.study.prune.paired))
        return self._ordered

    def _kept_record(self) -> dict[str, Any]:
        """The record, made anew only when a search has added a variant."""
        if self._record is None or len(self._record["variants"]) != len(self.variants):
            self._record = self.record()
        return self._record

    def hear(self, store: Store | None, decide: bool = False) -> None:
        """Has the tuning go by what the store's studies tell of the seeds' noise, nothing where there is no
        store yet; `decide` keeps what they told."""
        if self.tuner is None:
            return
        self.tuner.noise = lambda _: 0.0
        budget, trials = self.study.budget, self.trials + len(self.variants)
        mean = sum(variant.recipe.all_tokens for variant in self.variants) / len(self.variants)
        tokens = sum(each.recipe.all_tokens for each in self.beside) + mean * (trials - len(self.beside))
        spare = trials <= (budget.trials or math.inf) and tokens <= (budget.tokens or math.inf)
        self.tuner.noise = tuning_noise(self.study.study, self.variants, spare, store, decide)
        self.forget()

    def known(self, store: Store) -> list[dict[str, Any]]:
        """The rows of those trials that are known to be wanted and stand in this store, by whichever study."""
        self.hear(store)
        trials: list[dict[str, Any]] = []
        wanted: set[tuple[str, str, int | None]] = set()
        while True:  # the first rungs; where these are known the next ones, then the repeats, seed by seed
            rows = {(row.trial.key, row.role): row for row in self.rows(trials)}
            before, wanted = wanted, {(key, role, row.until) for (key, role), row in rows.items()}
            if wanted == before:
                break
            known = store.known({key for key, _ in rows})
            trials = [
                {"key": key, "variant": row.variant, "role": row.role, "settings": row.settings, "seed": row.seed}
                | {"until": row.until, "folder": str(store.trial_folder(key)), **known[key]}
                for (key, _), row in rows.items()
                if key in known
            ]
        return trials

    def done(self, store: Store) -> int:
        """How many of the trials that are known to be wanted have a result in this store, by whichever study."""
        trials = self.known(store)
        over = {trial["key"] for trial in trials if trial["state"] not in ("failed", "pruned") and is_over(trial)}
        keys = {row.trial.key for row in self.rows(trials)}
        ended = {trial["key"] for trial in trials if trial["state"] == "pruned"} if self.study.prune else set()
        self._known, self._missing = len(keys), len(keys - over - ended)
        return len(over)

    def left(self, done: int) -> int:
        """How many trials are left as far as is known, after `done` has said how many have a result."""
        return 0 if self._missing == 0 and not self.study.search else self.trials - done

    def frame(self) -> pd.DataFrame:
        """One row per variant: its changes, parameters, those that one token meets, mismatch, FLOPs per token."""
        import pandas as pd

        solved = dict.fromkeys(path for v in self.variants for path in v.matched)
        columns = [
            {
                "variant": v.name,
                "changes": "; ".join(str(change) for change in v.changes),
                "parameters": v.parameters,
                "active_parameters": v.figures["active_parameters"],
                "mismatch": v.mismatch,
                "flops_per_token": v.flops_per_token,
                **{path: v.matched.get(path, _written(v, path)) for path in solved},
            }
            for v in self.variants
        ]
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        return f"Plan({self.study.study}: {len(self.variants)} variants, {self.trials} trials)"

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return f"<p>{escape(repr(self))}</p>{self.frame().to_html(index=False, escape=True)}"


def _written(variant: Variant, path: str) -> Any:
    """What a variant has at a path that was solved in others, such as the baseline's width; None where it has none."""
    try:
        return get(variant.model, tuple(path.split(".")))
    except SpecError:
        return None


def plan(study: Study, data_root: Path, micro_batch: int | None = None, *, fetch: bool = False) -> Plan:
    """The variants of a study with everything solved that is left open; prepares the data, trains nothing.

    `micro_batch` is what was decided for the study: how many sequences are computed at a time at most. Data are only
    downloaded to `fetch` them or to time steps on them: a plan without is the same but for the identities of its
    trials, and does not refuse what only the text can.

    Raises SpecError with everything that is wrong with any variant, and for kernels forced by a name of none.
    """
    try:
        kernels.forced()
    except ValueError as error:
        raise SpecError.of("environment", str(error)) from error
    timed = study.match is not None and study.match.kind == "step_time"
    builder = Builder(study, data_root, micro_batch, fetch=fetch or timed)
    found = variant_set(builder)
    asked = [] if any(each.absent for each in found.variants) else found.variants  # a measure may fit those alone
    if problems := [*study.evaluate.problems(lambda: (About.of(each.trial(0), data_root) for each in asked))]:
        raise SpecError(problems)
    tuner = tuner_of(study.tune, builder, found.variants, found.made, most(study.seeds)) if study.tune else None
    parts = (section.part(builder, found.variants, found.made) for section in study.sections)
    return Plan(study, builder, found.variants, found.omitted, tuner, found.coordinates, [*filter(None, parts)])
