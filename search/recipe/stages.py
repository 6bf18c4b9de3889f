"""Stages: what follows on a recipe's training, with its weights: other data, another objective, a changed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from archlab.arch_dsl import canonical, load
from archlab.arch_dsl.model.model import Model, resolve
from archlab.arch_dsl.patching.patch import apply, settings_of
from archlab.search.recipe.stage import Stage
from archlab.search.trial.trial import Trial

if TYPE_CHECKING:
    from archlab.search.recipe.recipe import Recipe


@dataclass(frozen=True)
class Part:
    """A stage of a trial, ready to be trained: the first is that of the recipe itself."""

    recipe: Recipe
    model: dict[str, Any]
    data: str
    trainable: tuple[str, ...]

    def take_over(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Sets what an earlier stage trained, and freezes what this one does not train."""
        shapes = {}
        for name, value in model.named_parameters():
            shapes[name] = tuple(value.shape)
            if name in weights:
                with torch.no_grad():
                    value.copy_(weights[name])
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
