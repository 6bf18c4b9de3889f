"""Variants made concrete: a study's patches applied, matched in size, resolved, costed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from archlab.arch_dsl.compiler.shapes import shapes_of
from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.model import repair
from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.tree.identity import Change, canonical, diff
from archlab.search.data.dataset import Dataset
from archlab.search.objectives import has_encoder
from archlab.search.planning.auto_settings import Settled
from archlab.search.planning.datasets import Datasets
from archlab.search.recipe.fits import positions, refusals
from archlab.search.recipe.initial_weights import Start, Started, as_written, keep_weights, started
from archlab.search.recipe.parameter_groups import unmatched
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.stages import plan_stages, prompts
from archlab.search.sections.match.spec import Matcher
from archlab.search.study.changes import changed_recipe, value_at
from archlab.search.study.study import Study
from archlab.search.training.parallel.rules import refuse
from archlab.search.training.step_times import Timed, Timings
from archlab.search.variants.asked import Asked, Rung
from archlab.search.variants.variant import Built, Variant
from archlab.search.variants.zoo import varied


class Builder:
    """Turns what a study asks for into variants: patch, match, resolve, cost; data sets are prepared once each."""

    def __init__(self, study: Study, data_root: Path, micro_batch: int | None = None, *, fetch: bool = False) -> None:
        """`micro_batch` is what the store has decided that all variants are computed with at most, in sequences;
        without `fetch` no data are downloaded: what would have to be is `absent`."""
        self.study, self.data_root, self.micro_batch = study, data_root, micro_batch
        self.settled: Settled | None = None
        self.datasets = Datasets(study, data_root, fetch=fetch)
        self.bases: dict[tuple[Model, tuple[int, int]], Model] = {}
        self.built: dict[str, Built] = {}
        timings = Timings(data_root.parent / "timings", study.resources.cpus)
        self.matcher = Matcher(study.match, timings) if study.match else None
        self.files: dict[Start, Start] = {}
        self.starts: dict[tuple[str | None, Model], Started] = {}

    def variant(self, asked: Asked, target: Variant | None, matched: bool = True) -> Variant:
        """One variant, if there is a `target` matched to it, or as it is written. Raises SpecError."""
        written = self.recipe(asked.settings, asked.rung, asked.over)
        if problems := written.problems("train"):
            raise SpecError(problems)
        recipe = self.kept(written)
        recipe = self.settle(recipe.in_rows(self.micro_batch) if self.micro_batch else recipe)
        dataset = self.data(recipe)
        built = self.build(asked, target if matched else None, dataset, recipe)
        refuse_idle_groups(recipe, built.model)
        recipe, stages = plan_stages(recipe, built.model, dataset, self.datasets.staged)
        refuse(self.study.resources.parallel, built.model, recipe)
        tested = (stages[-1].recipe, stages[-1].dataset) if stages else (recipe, dataset)
        timed = Timed(built.model, recipe, dataset)
        label = f" [{asked.cell}]" if asked.cell else ""
        return Variant(
            name=asked.name,
            base=asked.base,
            baseline=f"{asked.against or self.study.report.baseline}{label}",
            model=built.model,
            recipe=recipe,
            dataset=dataset,
            changes=(*built.changes, *_recipe_changes(self.recipe((), asked.rung), written)),
            components=dict(asked.components),
            axes=dict(asked.axes),
            parameters=built.parameters,
            figures=built.figures,
            test_text=self.datasets.test_text(*tested),
            size=built.size,
            mismatch=self.matcher.mismatch(timed, built.size, target) if self.matcher and target else 0.0,
            matched=built.matched,
            start=self.started(recipe, built),
            repaired=built.repaired,
            stages=stages,
            series=asked.series,
            rung=asked.rung.label if asked.rung else "",
            row=asked.row,
        )

    def data(self, recipe: Recipe) -> Dataset:
        return self.datasets.of(recipe)

    def settle(self, recipe: Recipe) -> Recipe:
        """The recipe with what it leaves open as it was settled for the study, once it was."""
        return self.settled.apply(recipe) if self.settled else recipe

    def started(self, recipe: Recipe, built: Built) -> Started | None:
        """What a variant takes from the weights that its recipe starts from. Raises SpecError."""
        if recipe.init is None:
            return None
        key = recipe.init.sha256, built.model
        if key not in self.starts:
            self.starts[key] = started(recipe.init, built.model, built.base, self.data_root)
        return self.starts[key]

    def kept(self, recipe: Recipe) -> Recipe:
        """The recipe with the digest of the weights that it starts from, which the store keeps. Raises SpecError."""
        if recipe.init is None:
            return recipe
        if recipe.init not in self.files:
            base = self.study.file.parent if self.study.file else None
            self.files[recipe.init] = keep_weights(recipe.init, base, self.data_root)
        return recipe.replace(init=self.files[recipe.init])

    def build(self, asked: Asked, target: Variant | None, dataset: Dataset, recipe: Recipe) -> Built:
        """The model of a variant, matched, resolved and costed; once for all that differ in their recipe alone."""
        settings = [s for s in asked.settings if not s.path.startswith("train.")]
        mend = asked.impossible == "repair"
        asks = [[r.context, canonical(r.objective)] for r in recipe.whole]
        more = prompts(recipe.stages)
        matcher = self.matcher if target else None
        by_time = matcher is not None and matcher.match.kind == "step_time"
        goal = [target.trial(0).key if by_time else target.size] if matcher and target else []
        sized = [s for s in (asked.rung.settings if asked.rung else ()) if not s.path.startswith("train.")]
        changed = [[(s.path, s.node.plain()) for s in each] for each in (sized, settings)]
        timed = canonical(recipe) if by_time else None
        key = json.dumps([changed, goal, dataset.vocab, asks, more, mend, timed])
        if key not in self.built:
            base = apply(self.study.model, sized)
            start, model = varied(base, settings)
            model, repaired = repair.repaired(model) if mend else (model, [])
            lengths = recipe.objective.lengths(recipe.context, has_encoder(model))
            needed = (positions(r, model) + extra for r, extra in zip(recipe.whole, more, strict=True))
            sizes = max(r.vocab(dataset.vocab) for r in recipe.whole), max(needed)
            matched: dict[str, int] = {}
            if matcher and target:
                matcher.refuse_own_size(model, start, asked)
                model, matched = matcher.solved(model, target, sizes, lengths, Timed(model, recipe, dataset))
            model = resolve(model, vocab=sizes[0], max_positions=sizes[1])
            if problems := list(refusals(recipe, model)):
                raise SpecError(problems)
            total = cost(model, lengths.tokens, lengths.source or None)
            if (base, sizes) not in self.bases:  # once for each rung of a ladder
                self.bases[base, sizes] = resolve(base, vocab=sizes[0], max_positions=sizes[1])
            base = self.bases[base, sizes]
            figures = total.figures(recipe.context)  # per token of text
            size = self.study.match.counted(total, recipe.context) if self.study.match else 0
            changes = tuple(diff(base, model))
            self.built[key] = Built(model, changes, total.parameters, size, figures, matched, tuple(repaired), base)
        return self.built[key]

    def recipe(self, settings: Iterable[Setting], rung: Rung | None = None, over: Iterable[Setting] = ()) -> Recipe:
        """The recipe with these changes, of which those that start with `train.` are its own, at a rung; `over` is
        changed last, whatever was set before."""
        return changed_recipe(self.study, settings, rung, over)

    def given(self, path: str) -> Any:
        """What stands at a path of the base, as a condition compares it: a primitive is its type. Raises SpecError."""
        return value_at(self.study, path)


def refuse_idle_groups(recipe: Recipe, model: Model) -> None:
    """Raises SpecError for a group of the optimizer or of initial values, or a constraint, that names no parameter of a
    model."""
    groups = getattr(recipe.optimizer, "groups", ())
    if not (groups or model.init.groups or model.constraint):
        return
    names = shapes_of(model)  # which holds the constraint to them
    model.init.factors(names)
    problems = []
    for index, group in enumerate(groups):
        for pattern in unmatched([group], names):
            near = get_close_matches(pattern, names, 1)
            message = f"'{pattern}' matches no parameter" + (f"; did you mean '{near[0]}'?" if near else "")
            problems.append(Problem(f"train.optimizer.groups.{index}.parameters", message, group.mark("parameters")))
    if problems:
        raise SpecError(problems)


def _recipe_changes(before: Recipe, after: Recipe) -> list[Change]:
    """What differs between two recipes; another objective as a whole."""
    changes = diff(before, after)
    if type(before.objective) is not type(after.objective):
        sides = (canonical(recipe.objective, brief=True) for recipe in (before, after))
        changes = [change for change in changes if not change.path.startswith("objective.")]
        changes.append(Change("objective", *sides))
    if len(before.stages) == len(after.stages):
        changes = [change for change in changes if change.path != "stages"]
        for index, stages in enumerate(zip(before.stages, after.stages, strict=True)):
            changes += [dataclasses.replace(each, path=f"stages.{index}.{each.path}") for each in diff(*stages)]
    return [as_written(dataclasses.replace(change, path=f"train.{change.path}")) for change in changes]
