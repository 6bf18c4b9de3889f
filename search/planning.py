"""What a study would run: its variants with their sizes and costs, and which trials should exist given what is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arch_dsl.errors import Problem, SpecError
from arch_dsl.identity import Change, brief_text, canonical, diff
from arch_dsl.model import Model, cost, resolve
from arch_dsl.patch import Setting, apply
from arch_dsl.source import Node
from search.data.dataset import Dataset
from search.data.prepare import prepare, require
from search.match import solve
from search.recipe import Recipe
from search.selection import choose, group
from search.store import TERMINAL, Row
from search.study import Asked, Study, asked_variants
from search.trial import Trial, canonical_json

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Variant:
    """One row of the table: a resolved model and the recipe that trains it."""

    name: str
    baseline: str
    model: Model
    recipe: Recipe
    dataset: Dataset
    changes: tuple[Change, ...]
    components: dict[str, bool]
    parameters: int
    flops_per_token: int
    mismatch: float = 0.0
    matched: dict[str, int] = field(default_factory=dict)

    def trial(self, seed: int, lr: float | None = None) -> Trial:
        """This variant under one seed, at its recipe's learning rate or at another one."""
        recipe = self.recipe if lr is None else self.recipe.replace(lr=lr)
        spelled = ("data", "tokenizer")  # how the data is written down; what it is, its identity says
        plain = {name: value for name, value in canonical(recipe).items() if name not in spelled}
        return Trial(canonical(self.model), plain, self.dataset.identity, seed)

    def record(self) -> dict[str, Any]:
        """What the store keeps of it, for tables and pages."""
        return {
            "name": self.name,
            "baseline": self.baseline,
            "changes": [[c.path, brief_text(c.before), brief_text(c.after)] for c in self.changes],
            "components": self.components,
            "parameters": self.parameters,
            "mismatch": self.mismatch,
            "matched": self.matched,
            "flops_per_token": self.flops_per_token,
            "spec": canonical(self.model, brief=True),
        }


@dataclass
class Plan:
    """A study made concrete. `variants` grows while a search proposes."""

    study: Study
    builder: Builder
    variants: list[Variant]

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
        return {
            "study": self.study.study,
            "question": self.study.question,
            "baseline": first.baseline,
            "seeds": self.seeds,
            "tune": {"lr": list(self.rates)} if self.rates else {},
            "paired": len({_batches(variant) for variant in self.variants}) == 1,
            "context": first.recipe.context,
            "tokens": first.recipe.tokens,
            "steps": first.recipe.steps,
            "variants": [variant.record() for variant in self.variants],
            "recipe": canonical(first.recipe),
            "data": first.dataset.record(),
            "file": str(self.study.file) if self.study.file else None,
        }

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

    def frame(self) -> pd.DataFrame:
        """One row per variant: its changes, parameters, mismatch, FLOPs per token."""
        import pandas as pd

        columns = [
            {
                "variant": v.name,
                "changes": "; ".join(str(change) for change in v.changes),
                "parameters": v.parameters,
                "mismatch": v.mismatch,
                "flops_per_token": v.flops_per_token,
                **{path: width for path, width in v.matched.items()},
            }
            for v in self.variants
        ]
        return pd.DataFrame(columns)


def _batches(variant: Variant) -> str:
    """What decides the batches: two variants with the same text here saw the same tokens in the same order."""
    recipe = variant.recipe
    return canonical_json([variant.dataset.identity, recipe.context, recipe.batch, recipe.tokens, recipe.objective])


def plan(study: Study, data_root: Path) -> Plan:
    """The variants of a study with everything solved that is left open; prepares the data, trains nothing.

    Raises SpecError with everything that is wrong with any variant.
    """
    builder = Builder(study, data_root)
    asked = asked_variants(study)
    problems: list[Problem] = []
    built: list[Variant] = []
    targets: dict[str, int] = {}
    order = sorted(asked, key=lambda item: study.match is None or item.base != study.match.parameters)
    for item in order:
        try:
            variant = builder.variant(item, targets.get(item.cell))
        except SpecError as error:
            problems += [_of_variant(problem, item.name) for problem in error.problems]
            continue
        if study.match and item.base == study.match.parameters:
            targets[item.cell] = variant.parameters
        built.append(variant)
    if problems:
        raise SpecError(_once(problems))
    places = {item.name: index for index, item in enumerate(asked)}
    built.sort(key=lambda variant: places[variant.name])
    _refuse_twins(built, study)
    return Plan(study, builder, built)


def _of_variant(problem: Problem, name: str) -> Problem:
    return dataclasses.replace(problem, message=f"{problem.message} (variant {name})")


def _once(problems: list[Problem]) -> list[Problem]:
    """A mistake of the base model shows in every variant; it is said once."""
    seen: dict[tuple[str, object], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.path, problem.mark or problem.message), problem)
    return list(seen.values())


def _refuse_twins(variants: list[Variant], study: Study) -> None:
    """Two names for one model and recipe would compare a thing with itself."""
    seen: dict[str, str] = {}
    problems = []
    for variant in variants:
        key = variant.trial(0).key
        if key in seen:
            message = f"is the same model and recipe as '{seen[key]}'; a table needs each once"
            problems.append(Problem(f"variants.{variant.name}", message, study.mark("variants")))
        seen.setdefault(key, variant.name)
    if problems:
        raise SpecError(problems)


class Builder:
    """Turns what a study asks for into variants: patch, match, resolve, cost; data sets are prepared once each."""

    def __init__(self, study: Study, data_root: Path) -> None:
        self.study, self.data_root = study, data_root
        self.datasets: dict[str, Dataset] = {}
        self.base: Model | None = None

    def variant(self, asked: Asked, target: int | None) -> Variant:
        """One variant; its `by` field is solved if there is a `target` number of parameters. Raises SpecError."""
        of_recipe = [_below(s, "train.") for s in asked.settings if s.path.startswith("train.")]
        of_model = [s for s in asked.settings if not s.path.startswith("train.")]
        recipe = apply(self.study.train, of_recipe)
        if problems := recipe.problems("train"):
            raise SpecError(problems)
        dataset = self.dataset(recipe)
        model = apply(self.study.model, of_model)
        matched: dict[str, int] = {}
        if target is not None and self.study.match:
            model, matched = self.solved(model, self.study.match.by, target, dataset.vocab, recipe.context)
        model = resolve(model, vocab=dataset.vocab, max_positions=recipe.context)
        total = cost(model, recipe.context)
        base = resolve(self.study.model, vocab=dataset.vocab, max_positions=recipe.context)
        label = f" [{asked.cell}]" if asked.cell else ""
        return Variant(
            name=asked.name,
            baseline=f"{self.study.report.baseline}{label}",
            model=model,
            recipe=recipe,
            dataset=dataset,
            changes=(*diff(base, model), *_recipe_changes(self.study.train, recipe)),
            components=dict(asked.components),
            parameters=total.parameters,
            flops_per_token=total.flops_model // recipe.context,
            mismatch=total.parameters / target - 1 if target else 0.0,
            matched=matched,
        )

    def solved(self, model: Model, by: str, target: int, vocab: int, context: int) -> tuple[Model, dict[str, int]]:
        """The model with the integer field `by` solved for `target` parameters."""
        assert self.study.match is not None
        mark = self.study.match.mark("by")

        def at(width: int) -> Model:
            return apply(model, [Setting(by, Node(width), "match", mark)])

        def parameters(width: int) -> int:
            return cost(resolve(at(width), vocab=vocab, max_positions=context), context).parameters

        try:
            width, _ = solve(parameters, target)
        except SpecError as error:
            raise SpecError(Problem("match.by", f"{by}: {p.message}", mark) for p in error.problems) from error
        return at(width), {by: width}

    def dataset(self, recipe: Recipe) -> Dataset:
        """The prepared data of a recipe. Raises SpecError if there is not enough of it."""
        key = canonical_json([canonical(recipe.data), canonical(recipe.tokenizer)])
        if key not in self.datasets:
            base = self.study.file.parent if self.study.file else None
            self.datasets[key] = prepare(recipe.data, recipe.tokenizer, self.data_root, base)
        dataset = self.datasets[key]
        require(dataset, recipe.context, recipe.batch, mark=recipe.mark("data") or self.study.mark("train"))
        return dataset


def _below(setting: Setting, prefix: str) -> Setting:
    return dataclasses.replace(setting, path=setting.path.removeprefix(prefix))


def _recipe_changes(before: Recipe, after: Recipe) -> list[Change]:
    return [dataclasses.replace(change, path=f"train.{change.path}") for change in diff(before, after)]
