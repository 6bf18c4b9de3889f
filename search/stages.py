"""Stages: what follows on a recipe's training, with its weights: other data, another objective, a changed model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from arch_dsl import canonical, load
from arch_dsl.errors import Problem
from arch_dsl.model import Model, resolve
from arch_dsl.parse import INVALID
from arch_dsl.patch import apply, settings_of
from arch_dsl.source import Node
from arch_dsl.spec import Count, NotNegative, Positive, Spec
from search.data.sources import Source
from search.objectives import Objective
from search.optimizers import Optimizer
from search.schedules import Schedule
from search.trial import Trial

if TYPE_CHECKING:
    from search.recipe import Recipe


class Changes(Mapping[str, Any]):
    """What a stage changes in the model: paths to values, as in the patch of a variant."""

    def __init__(self, node: Node | None = None) -> None:
        self.node = node or Node({}, None)
        self._plain: dict[str, Any] = self.node.plain()

    def __getitem__(self, path: str) -> Any:
        return self._plain[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    @property
    def text(self) -> str:
        """All of it, in its order, which a trial's sorted JSON would lose."""
        return json.dumps(self._plain)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Changes) and list(self.items()) == list(other.items())

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of paths, or from the `text` of one."""
        if isinstance(node.value, str):
            with suppress(ValueError):
                node = Node.of(json.loads(node.value), node.mark)
        if node.value is None:
            return cls()
        if not isinstance(node.value, dict):
            problems.append(Problem(path, f"must be a mapping from paths to values, found {node.kind}", node.mark))
            return INVALID
        return cls(node)


class Stage(Spec):
    """Training that goes on from the weights of what came before. What it does not say stays as it was.

    `tokens` and `lr` are its own, `schedule` and the optimizer's moments begin anew. `model` changes the model: a mask,
    dropout, adapters; what is new in it starts as in a new model. `trainable` freezes all parameters but those whose
    path matches a pattern, in which `*` stands for any part of a path. `data` is read by the first stage's tokenizer.
    """

    title: ClassVar[str] = "stage"
    name: str | None = None
    tokens: Count
    lr: Positive
    data: Source | None = None
    prepared: str | None = None
    objective: Objective | None = None
    context: Count | None = None
    batch: Count | None = None
    accumulate: Count | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    clip: Positive | None = None
    precision: Literal["fp32", "bf16"] | None = None
    z_loss: NotNegative | None = None
    model: Changes = Changes()
    trainable: tuple[str, ...] = ()

    def said(self) -> dict[str, Any]:
        """What it says of the recipe."""
        own = ("name", "prepared", "model", "trainable")
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in own}
        return {name: value for name, value in given.items() if value is not None}


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
