"""Stages: what follows on a recipe's training, with its weights: other data, another objective, a changed model. Here
is what they do in training, and what they will do, checked before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from archlab.arch_dsl import canonical, load
from archlab.arch_dsl.compiler.modules import stored
from archlab.arch_dsl.compiler.shapes import shapes_of
from archlab.arch_dsl.language.errors import Problem, SpecError, nearest
from archlab.arch_dsl.model.constraint import Constrained
from archlab.arch_dsl.model.model import Model, resolve
from archlab.arch_dsl.patching.patch import apply, settings_of
from archlab.arch_dsl.tree.identity import Change, brief_text, diff
from archlab.search.recipe.fits import refusals
from archlab.search.recipe.stage import Stage
from archlab.search.trial.trial import Trial

if TYPE_CHECKING:
    from archlab.search.data.dataset import Dataset
    from archlab.search.recipe.recipe import Recipe


@dataclass(frozen=True)
class Part:
    """A stage of a trial, ready to be trained: the first is that of the recipe itself."""

    recipe: Recipe
    model: dict[str, Any]
    data: str
    trainable: tuple[str, ...]

    def take_over(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Sets what an earlier stage trained, as far as the model's constraint allows, and freezes what this one does
        not train."""
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        with torch.no_grad():
            for name, value in stored(model).items():
                if name in weights:
                    value.copy_(weights[name])
        if isinstance(model, Constrained):
            model.constrain()
        training = set(trained(self.trainable, shapes))
        for name, value in model.named_parameters():
            value.requires_grad_(name in training)


def parts(recipe: Recipe, trial: Trial) -> list[Part]:
    """The stages of a trial, in their order."""
    recipes = recipe.whole
    found = [Part(recipes[0], trial.model, trial.data, ())]
    for stage, own in zip(recipe.stages, recipes[1:], strict=True):
        before = found[-1]
        model = canonical(staged(load(before.model), stage))
        found.append(Part(own, model, stage.prepared or before.data, stage.trainable))
    return found


def staged(model: Model, stage: Stage) -> Model:
    """A resolved model as a stage changes it, resolved. Raises SpecError for a change that does not fit."""
    if not stage.model:
        return model
    return resolve(apply(model, settings_of(stage.model.node, "the stage's model")))


def prompts(stages: Sequence[Stage]) -> list[int]:
    """The tokens of prompts that the model has at most in the recipe's own training and in each stage."""
    found = [0]
    for stage in stages:
        own = [value for path, value in stage.model.items() if path.split(".")[-1] == "prompt"]
        found.append(max([found[-1], *(value for value in own if isinstance(value, int))]))
    return found


def trained(patterns: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The parameters that a stage trains, by path: all of them where it names no pattern."""
    if not patterns:
        return list(shapes)
    return [name for name in shapes if any(fnmatchcase(name, pattern) for pattern in patterns)]


@dataclass(frozen=True)
class StagePlan:
    """A stage of a variant: what it reads and changes, and how many of the model's parameters it trains."""

    name: str
    recipe: Recipe
    dataset: Dataset
    changes: tuple[Change, ...]
    parameters: int
    trained: int

    def record(self) -> dict[str, Any]:
        """What the store keeps of it."""
        return {
            "name": self.name,
            "tokens": self.recipe.tokens,
            "data": self.dataset.record(),
            "objective": canonical(self.recipe.objective, brief=True),
            "changes": [[c.path, brief_text(c.before), brief_text(c.after)] for c in self.changes],
            "parameters": self.parameters,
            "trained_parameters": self.trained,
        }


def plan_stages(
    recipe: Recipe, model: Model, dataset: Dataset, data: Callable[[Stage, Recipe, Dataset, str], Dataset]
) -> tuple[Recipe, tuple[StagePlan, ...]]:
    """The stages of a recipe for a resolved model, and the recipe that names their data.

    `data` gives that of a stage with its recipe, after another data set. Raises SpecError.
    """
    plans, stages = [], []
    for index, (stage, own) in enumerate(zip(recipe.stages, recipe.whole[1:], strict=True)):
        path = f"train.stages.{index}"
        if stage.prepared is not None:
            message = "is what planning finds out of `data`; say that"
            raise SpecError.of(f"{path}.prepared", message, stage.mark("prepared"))
        dataset = data(stage, own, dataset, path)
        if stage.data is not None:
            stage = stage.replace(prepared=dataset.identity)
        before = model
        try:
            model = staged(model, stage)
        except SpecError as error:
            raise SpecError(replace(p, path=f"{path}.model.{p.path}") for p in error.problems) from error
        plan = _plan(stage, own, before, model, dataset, path)
        plans.append(plan)
        stages.append(stage)
    return recipe.replace(stages=tuple(stages)), tuple(plans)


def _plan(stage: Stage, recipe: Recipe, before: Model, model: Model, dataset: Dataset, path: str) -> StagePlan:
    old, shapes = shapes_of(before), shapes_of(model)
    problems = list(refusals(recipe, model, path))
    for name in shapes:
        if name in old and old[name] != shapes[name]:
            message = f"{name} would have shape {list(shapes[name])} instead of {list(old[name])}; a stage keeps sizes"
            problems.append(Problem(f"{path}.model", message, stage.mark("model") or stage.mark()))
    problems += _unmatched(stage.trainable, shapes, f"{path}.trainable", stage)
    grouped = [pattern for group in getattr(recipe.optimizer, "groups", ()) for pattern in group.parameters]
    problems += _unmatched(grouped, shapes, f"{path}.optimizer.groups", stage)
    if problems:
        raise SpecError(problems)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    count = sum(sizes[name] for name in trained(stage.trainable, shapes))
    return StagePlan(stage.name or "a stage", recipe, dataset, tuple(diff(before, model)), sum(sizes.values()), count)


def _unmatched(patterns: Sequence[str], shapes: dict[str, Any], path: str, stage: Stage) -> Iterator[Problem]:
    for pattern in patterns:
        if not trained([pattern], shapes):
            near = _meant(pattern, shapes)
            message = f"'{pattern}' matches no parameter" + (f"; did you mean '{near}'?" if near else "")
            yield Problem(path, message, stage.mark(path.rpartition(".")[2]) or stage.mark())


def _meant(pattern: str, shapes: dict[str, Any]) -> str | None:
    """The pattern with each unknown step as the most alike of the parameters' steps, or a parameter's name."""
    steps = {step for name in shapes for step in name.split(".")}
    alike = (step if "*" in step or step in steps else nearest(step, steps) or step for step in pattern.split("."))
    near = ".".join(alike)
    if trained([near], shapes):
        return near
    return next(iter(get_close_matches(pattern, shapes, 1)), None)


def stage_lines(plans: Sequence[StagePlan]) -> Iterator[str]:
    """The stages of a variant, for people."""
    for plan in plans:
        read = ", ".join(f"{each:.2g}" for each in plan.recipe.epochs(plan.dataset))
        data = f"{read} epochs of " * bool(read) + plan.dataset.record()["source"]
        how = f"{plan.recipe.tokens:,} tokens ({plan.recipe.steps} steps), lr {plan.recipe.lr:g}, {data}"
        share = f"trains {plan.trained:,} of {plan.parameters:,} parameters"
        if not plan.recipe.tokens:
            how, share = f"windows of {plan.recipe.context}", "trains nothing"
        text = f"then {plan.name}: {how}, {plan.recipe.objective.type}, {share}"
        changes = "; ".join(map(str, plan.changes))
        yield f"{text}; {changes}" if changes else text
