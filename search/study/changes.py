"""What changes make of a study's base model and recipe; without data, and before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.spec import Family, marks_of, set_marks
from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.tree.identity import canonical
from archlab.arch_dsl.tree.paths import get
from archlab.search.recipe.recipe import Recipe
from archlab.search.study.study import Study
from archlab.search.variants.asked import Rung
from archlab.search.variants.zoo import varied


def changed_recipe(
    study: Study, settings: Iterable[Setting], rung: Rung | None = None, over: Iterable[Setting] = ()
) -> Recipe:
    """The recipe with these changes, of which those that start with `train.` are its own, at a rung.

    `over` is changed last, whatever was set before. Raises SpecError.
    """
    recipe = study.train
    try:
        for each in (rung.settings if rung else (), settings, over):
            mine = [
                dataclasses.replace(s, path=s.path.removeprefix("train.")) for s in each if s.path.startswith("train.")
            ]
            recipe = _one_batch(apply(recipe, mine), mine) if mine else recipe
        return recipe
    except SpecError as error:
        raise SpecError(dataclasses.replace(p, path=f"train.{p.path}") for p in error.problems) from error


def changed(study: Study, settings: Iterable[Setting], rung: Rung | None = None) -> tuple[Model, Recipe]:
    """The base model and the recipe with these changes. Raises SpecError with what is wrong with either."""
    mine = list(settings)
    problems: list[Problem] = []
    model, recipe = study.model, study.train
    try:
        for each in (rung.settings if rung else (), mine):
            _, model = varied(model, [s for s in each if not s.path.startswith("train.")])
    except SpecError as error:
        problems += error.problems
    try:
        recipe = changed_recipe(study, mine, rung)
    except SpecError as error:
        problems += error.problems
    if problems:
        raise SpecError(problems)
    return model, recipe


def value_at(study: Study, path: str) -> Any:
    """What stands at a path of the base, as a condition compares it: a primitive is its type. Raises SpecError."""
    spec = study.train if path.startswith("train.") else study.model
    value = get(spec, tuple(path.removeprefix("train.").split(".")))
    return value.type if isinstance(value, Family) else canonical(value, brief=True)


def _one_batch(recipe: Recipe, settings: Iterable[Setting]) -> Recipe:
    """The recipe with its batch in sequences or in tokens alone, as the last of the two was set."""
    said = [setting.path for setting in settings if setting.path in ("batch", "batch_tokens")]
    if said == ["batch"]:
        return recipe.replace(batch_tokens=None)
    if said == ["batch_tokens"]:
        set_marks(recipe, {name: mark for name, mark in marks_of(recipe).items() if name != "batch"})
    return recipe
