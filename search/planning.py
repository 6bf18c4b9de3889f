"""What a study would run: its variants with their sizes and costs, and the trials that should exist by now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arch_dsl.errors import Problem, SpecError
from arch_dsl.identity import brief_text, canonical
from arch_dsl.patch import Setting
from search import plugin_files
from search.design import ALL
from search.selection import choose, group
from search.store import TERMINAL, Row, Store
from search.study import Asked, Study, asked_variants
from search.trial import canonical_json
from search.variants import Builder, Mistakes, Variant

__all__ = ["Builder", "Plan", "Variant", "plan", "spelt"]

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Plan:
    """A study made concrete. `variants` grows while a search proposes."""

    study: Study
    builder: Builder
    variants: list[Variant]
    omitted: dict[str, str] = field(default_factory=dict)  # combinations of a design that make no sense, and why

    @property
    def seeds(self) -> list[int]:
        """The seeds of a variant's repeats; the first one tunes."""
        return list(range(self.study.seeds))

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that every variant chooses from; empty without `tune`."""
        return self.study.tune.lr.values if self.study.tune else ()

    @property
    def trials(self) -> int:
        """How many trials the study takes when all of them run to their end."""
        per_variant = len(self.rates) + len(self.seeds) - 1 if self.rates else len(self.seeds)
        searched = self.study.search.trials + len(self.seeds) - 1 if self.study.search else 0
        return per_variant * len(self.variants) + searched

    def record(self) -> dict[str, Any]:
        """The study record that the store keeps; reports and dashboards read nothing else about a study."""
        first = self.variants[0]
        added = self.added()
        used = plugin_files.record(canonical(variant.model) for variant in self.variants)
        return {
            "study": self.study.study,
            "question": self.study.question,
            "baseline": first.baseline,
            "seeds": self.seeds,
            "tune": {"lr": list(self.rates)} if self.rates else {},
            "paired": len({variant.batches for variant in self.variants}) == 1,
            "context": first.recipe.context,
            "tokens": first.recipe.tokens,
            "steps": first.recipe.all_steps,
            **({"design": self.design()} if self.study.design else {}),
            "variants": [{**variant.record(), "added": added[variant.name]} for variant in self.variants],
            "recipe": canonical(first.recipe),
            "data": first.dataset.record(),
            "file": str(self.study.file) if self.study.file else None,
            **({"plugins": used} if used else {}),
        }

    def design(self) -> dict[str, Any]:
        """What the study's design made, what of it was left out or repaired, and what its components change."""
        design = self.study.design
        assert design is not None
        names = design.components if design.components is not None else tuple(self.study.components)
        merged = {slot.name: list(slot.parts) for slot in self.study.ablate.slots} if self.study.ablate else {}
        return {
            **design.record(names),
            "changes": {name: spelt(self.study.components[name].settings) for name in names},
            "merged": {name: parts for name, parts in merged.items() if parts},
            "omitted": self.omitted,
            "repaired": {v.name: list(v.repaired) for v in self.variants if v.repaired},
        }

    def added(self) -> dict[str, int]:
        """How many parameters each variant has more than the baseline of its row's cell."""
        sizes = {variant.name: variant.parameters for variant in self.variants}
        return {v.name: v.parameters - sizes.get(v.baseline, v.parameters) for v in self.variants}

    def rows(self, trials: list[dict[str, Any]]) -> list[Row]:
        """The trials that should exist, given those that do: rates first, and repeats where the best rate is known."""
        known = group(trials)
        tuning = [row for variant in self.variants for row in self._tuning(variant)]
        repeats = [row for variant in self.variants for row in self._repeats(variant, known.get(variant.name, []))]
        return tuning + repeats

    def _tuning(self, variant: Variant) -> Iterable[Row]:
        for lr in self.rates:
            yield Row(variant.trial(self.seeds[0], lr), variant.name, "tune", {"lr": lr}, self.seeds[0])

    def _repeats(self, variant: Variant, known: list[dict[str, Any]]) -> Iterable[Row]:
        lr: float | None = None
        if self.rates:
            tuned = [row for row in known if row["role"] == "tune"]
            if len(tuned) < len(self.rates) or any(row["state"] not in TERMINAL for row in tuned):
                return
            best = choose({"tune": {"lr": list(self.rates)}, "seeds": self.seeds}, variant.name, tuned)
            if best.settings is None:
                return
            lr = best.settings["lr"]
        settings = {"lr": variant.recipe.lr if lr is None else lr}
        for seed in self.seeds:
            yield Row(variant.trial(seed, lr), variant.name, "repeat", settings, seed)

    def done(self, store: Store) -> int:
        """How many of the trials that are known to be wanted have a result in this store, by whichever study."""
        trials: list[dict[str, Any]] = []
        for _ in range(2):  # the rates first; where these are known, the repeats
            rows = {(row.trial.key, row.role): row for row in self.rows(trials)}
            known = store.known({key for key, _ in rows})
            trials = [
                {"key": key, "variant": row.variant, "role": row.role, "settings": row.settings, "seed": row.seed}
                | known[key]
                for (key, _), row in rows.items()
                if key in known
            ]
        return len({trial["key"] for trial in trials if trial["state"] in ("complete", "diverged")})

    def frame(self) -> pd.DataFrame:
        """One row per variant: its changes, parameters, those that one token meets, mismatch, FLOPs per token."""
        import pandas as pd

        columns = [
            {
                "variant": v.name,
                "changes": "; ".join(str(change) for change in v.changes),
                "parameters": v.parameters,
                "active_parameters": v.figures["active_parameters"],
                "mismatch": v.mismatch,
                "flops_per_token": v.flops_per_token,
                **v.matched,
            }
            for v in self.variants
        ]
        return pd.DataFrame(columns)


def plan(study: Study, data_root: Path) -> Plan:
    """The variants of a study with everything solved that is left open; prepares the data, trains nothing.

    Raises SpecError with everything that is wrong with any variant.
    """
    builder = Builder(study, data_root)
    asked = asked_variants(study)
    mistakes = Mistakes(len(asked))
    built: list[Variant] = []
    targets: dict[str, int] = {}
    impossible: list[tuple[Asked, SpecError]] = []
    order = sorted(asked, key=lambda item: study.match is None or item.base != study.match.to)
    for item in order:
        try:
            variant = builder.variant(item, targets.get(item.cell))
        except SpecError as error:
            if item.impossible == "refuse":
                mistakes.add(error.problems, item.name)
            else:
                impossible.append((item, error))
            continue
        if study.match and item.base == study.match.to:
            targets[item.cell] = variant.size(study.match)
        built.append(variant)
    if impossible:
        _refuse_needed(impossible, built, study, mistakes)
    asks = {canonical_json(canonical(variant.recipe.objective)) for variant in built}
    if study.prune and len(asks) > 1:
        message = "holds trials against each other, and losses of different objectives do not compare"
        raise SpecError.of("prune", message, study.mark("prune"))
    if problems := [*mistakes.problems(), *builder.idle_problems()]:
        raise SpecError(problems)
    places = {item.name: index for index, item in enumerate(asked)}
    built.sort(key=lambda variant: places[variant.name])
    omitted = {item.name: _brief(error.problems[0]) for item, error in impossible}
    kept = _without_twins(built, study, {item.name for item in asked if item.impossible != "refuse"}, omitted)
    return Plan(study, builder, kept, omitted)


def _brief(problem: Problem) -> str:
    """A problem in a line, without its place."""
    return f"{problem.path}: {problem.message}" if problem.path else problem.message


def _refuse_needed(
    impossible: list[tuple[Asked, SpecError]], built: list[Variant], study: Study, mistakes: Mistakes
) -> None:
    """Notes what cannot be left out: what others are compared with, and a component that no variant would have."""
    used = {name for variant in built for name, on in variant.components.items() if on}
    for item, error in impossible:
        lost = {name for name, on in item.components.items() if on} - used
        if why := _needed(item.base, study):
            mistakes.add([replace(each, message=f"{each.message}; {why}") for each in error.problems], item.name)
        elif lost:
            mistakes.add(error.problems, item.name)


def _needed(base: str, study: Study) -> str:
    """Why a variant cannot be left out, if it cannot: others are compared with it or matched to it."""
    against = [name for name, patch in study.variants.items() if patch.against == base]
    if base == study.report.baseline and not against:
        against = [name for name in study.variants if name != base]
    if against:
        more = f" and {len(against) - 2} more" if len(against) > 2 else ""
        told = f"'{base}' is never left out: {', '.join(map(repr, against[:2]))}{more} would be compared with nothing"
        return f"{told}; take a design without it, such as add_one_in or pairwise" if base == ALL else told
    if study.match and base == study.match.to:
        return f"'{base}' is never left out: the others are matched to it"
    return ""


def _without_twins(variants: list[Variant], study: Study, optional: set[str], omitted: dict[str, str]) -> list[Variant]:
    """Two names for one model and recipe would compare a thing with itself: refused, or left out where a design may."""
    seen: dict[str, str] = {}
    kept, problems = [], []
    for variant in variants:
        key = variant.trial(0).key
        message = f"is the same model and recipe as '{seen.get(key)}'"
        if key not in seen:
            seen[key] = variant.name
            kept.append(variant)
        elif variant.name in optional and not _needed(variant.base, study):
            omitted[variant.name] = message
        else:
            designed = study.variants[variant.base].designed
            mark = study.mark("design" if designed else f"variants.{variant.base}")
            why = _needed(variant.base, study) if variant.name in optional else ""
            told = f"{message}; {why or 'a table needs each once'}"
            problems.append(Problem(f"variants.{variant.name}", told, mark))
    if problems:
        raise SpecError(problems)
    return kept


def spelt(settings: Iterable[Setting]) -> list[str]:
    """Changes as a study writes them."""
    return [f"{setting.path}: {brief_text(setting.node.plain())}" for setting in settings]
