"""One stage of a trial, and what it changes of the recipe before it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, NotNegative, Positive, Range, Spec
from archlab.search.data.sources.family import Source
from archlab.search.objectives import Objective
from archlab.search.recipe.optimizers import Optimizer
from archlab.search.recipe.schedules import Schedule
from archlab.search.utils.files import NO_JSON

OF_TRAINING = ("lr", "optimizer", "schedule", "clip", "z_loss", "trainable")
OF_TESTING = ("model", "data", "objective", "context", "precision")


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
            with suppress(*NO_JSON):
                node = Node.of(json.loads(node.value), node.mark)
        if node.value is None:
            return cls()
        if not isinstance(node.value, dict):
            problems.append(Problem(path, f"must be a mapping from paths to values, found {node.kind}", node.mark))
            return INVALID
        return cls(node)


class Stage(Spec):
    """Training that goes on from the weights of what came before. What it does not say stays as it was.

    `tokens` and `lr` are its own, `schedule` and the optimizer's moments begin anew. With no tokens it trains nothing,
    and what follows, such as the test, has its model, data and context. `model` changes the model: a mask, dropout,
    adapters; what is new in it starts as in a new model. `trainable` freezes all parameters but those whose path
    matches a pattern, in which `*` stands for any part of a path. `data` is read by the first stage's tokenizer.
    """

    title: ClassVar[str] = "stage"
    name: str | None = None
    tokens: Annotated[int, Range(min=0)]
    lr: Positive | None = None
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

    def problems(self, path: str) -> Iterator[Problem]:
        """What its tokens and its other fields get wrong together."""
        if self.tokens:
            if self.lr is None:
                yield Problem(f"{path}.lr", f"is missing: {self.title} needs it", self.mark())
            return
        for name in OF_TRAINING:
            if getattr(self, name) not in (None, ()):
                message = "stands in a stage of no tokens, which trains nothing"
                yield Problem(f"{path}.{name}", message, self.mark(name) or self.mark())
        if not any(getattr(self, name) for name in OF_TESTING):
            message = f"must be at least 1, found 0, in a stage that changes none of {', '.join(OF_TESTING)}"
            yield Problem(f"{path}.tokens", message, self.mark("tokens") or self.mark())

    def said(self) -> dict[str, Any]:
        """What it says of the recipe."""
        own = ("name", "prepared", "model", "trainable")
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in own}
        return {name: value for name, value in given.items() if value is not None}
