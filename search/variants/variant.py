"""A variant: a model that was built, matched and costed, under its name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from archlab.arch_dsl.model.model import Model
from archlab.arch_dsl.tree.identity import Change, brief_text, canonical
from archlab.search.data.dataset import Dataset
from archlab.search.recipe.curve import curve_windows
from archlab.search.recipe.initial_weights import Started
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.stages import StagePlan
from archlab.search.training.step_times import Timed
from archlab.search.trial.trial import Trial, identity_of
from archlab.search.utils.canonical import canonical_json


@dataclass(frozen=True)
class Variant:
    """One row of the table: a resolved model and the recipe that trains it."""

    name: str
    base: str
    baseline: str
    model: Model
    recipe: Recipe
    dataset: Dataset
    changes: tuple[Change, ...]
    components: dict[str, bool]
    axes: dict[str, str]
    parameters: int
    figures: dict[str, int]  # what else it costs: Cost.figures
    test_text: str  # equal where the test documents are the same text, whatever the tokenizers
    size: int = 0  # what matching counts of it
    mismatch: float = 0.0
    matched: dict[str, int] = field(default_factory=dict)
    start: Started | None = None  # where it starts from weights
    repaired: tuple[str, ...] = ()  # the rules that changed a combination which made no sense
    stages: tuple[StagePlan, ...] = ()
    series: str = ""  # what all rungs of a ladder have in common of its name
    rung: str = ""  # and what is the rung's own
    row: str = ""  # its name before it was crossed, where components do not say all that it changes

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs per token, mask-aware."""
        return self.figures["flops_per_token"]

    @property
    def timed(self) -> Timed:
        return Timed(self.model, self.recipe, self.dataset)

    def trial(self, seed: int, lr: float | None = None) -> Trial:
        """This variant under one seed, at its recipe's learning rate or at another one."""
        recipe = self.recipe if lr is None else self.recipe.replace(lr=lr)
        spelled = ("data", "tokenizer")  # how the data is written down; what it is, its identity says
        plain = {name: value for name, value in recipe.told().items() if name not in spelled}
        if recipe.init:
            plain["init"] = {"sha256": recipe.init.sha256}
        for stage, own in zip(plain.get("stages", ()), recipe.stages, strict=True):
            del stage["name"], stage["data"]
            stage["model"] = own.model.text
        return Trial(self._written, plain, self.dataset.identity, seed)

    @cached_property
    def _written(self) -> dict[str, Any]:
        """The model as all of its trials share it: of ten thousand trials each would hold a copy."""
        written: dict[str, Any] = canonical(self.model)
        return written

    @property
    def _kept(self) -> dict[str, Any]:
        """The model without what is the default, but with how it starts: that default has changed once."""
        brief: dict[str, Any] = canonical(self.model, brief=True)
        return {**brief, "init": {**brief.get("init", {}), "std": self.model.init.std}}

    @cached_property
    def identity(self) -> dict[str, str]:
        """The hashes of its model and of its recipe, which tables name as where they come from."""
        return identity_of(self.trial(0))

    @property
    def absent(self) -> list[Dataset]:
        """Those of its data, by stage, that have yet to be downloaded."""
        return [each for each in (self.dataset, *(stage.dataset for stage in self.stages)) if each.absent]

    @property
    def batches(self) -> str:
        """What decides the batches: two variants with the same text here saw the same tokens in the same order."""
        recipe = self.recipe
        said = [self.dataset.identity, recipe.context, recipe.sequences, recipe.tokens, canonical(recipe.objective)]
        said += [] if recipe.ramp is None else [canonical(recipe.ramp)]
        said += [] if recipe.data_seed is None else [{"data_seed": recipe.data_seed}]
        for stage in self.stages:
            own = stage.recipe
            said.append([stage.dataset.identity, own.context, own.sequences, own.tokens, canonical(own.objective)])
        return canonical_json(said)

    def record(self) -> dict[str, Any]:
        """What the store keeps of it, for tables and pages."""
        asked = self.recipe.whole[-1].objective
        return {
            "name": self.name,
            "baseline": self.baseline,
            "changes": [[c.path, brief_text(c.before), brief_text(c.after)] for c in self.changes],
            "components": self.components,
            **({"axes": self.axes} if self.axes else {}),
            **({"row": self.row} if self.row and (self.axes or self.rung or self.components) else {}),
            "parameters": self.parameters,
            "mismatch": self.mismatch,
            "matched": self.matched,
            **self.figures,
            "tokens": self.recipe.tokens,
            "context": self.recipe.context,
            "batches": self.batches,
            "test": self.test_text,
            "curve_windows": curve_windows(self.recipe),
            "bytes_per_token": self.dataset.bytes_per_token("test"),
            **({"lossy": self.dataset.lossy} if self.dataset.lossy else {}),
            "domains": [domain.name for domain in (self.stages[-1] if self.stages else self).dataset.domains],
            **({} if asked.every else {"objective": canonical(asked)}),
            "spec": self._kept,
            "identity": self.identity,
            **({"series": self.series, "rung": self.rung} if self.series else {}),
            **({"start": dataclasses.asdict(self.start)} if self.start else {}),
            **({"stages": [stage.record() for stage in self.stages]} if self.stages else {}),
        }


@dataclass(frozen=True)
class Built:
    """A resolved model, what it changes in the base, what it costs, and what matching solved."""

    model: Model
    changes: tuple[Change, ...]
    parameters: int
    size: int  # what matching counts
    figures: dict[str, int]
    matched: dict[str, int]
    repaired: tuple[str, ...]
    base: Model  # what it changes, resolved
