"""A trial is variant x recipe x data x seed; its key is the hash of all four, its identity those of the first two."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from archlab.search.utils.canonical import canonical_json

_OPEN = ("lr", "precision", "compile", "accumulate", "prepared")


@dataclass(frozen=True)
class Trial:
    """What is trained. Everything that changes its numbers is in these four fields, and nothing else is.

    `model` is the canonical resolved spec, `recipe` the canonical recipe, `data` the identity of a prepared data
    set, `seed` splits into an initialisation seed and a data seed. What is evaluated is no part of a trial.
    """

    model: dict[str, Any]
    recipe: dict[str, Any]
    data: str
    seed: int

    @cached_property
    def key(self) -> str:
        """sha256 of the canonical JSON, 64 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The text of `trial.json`."""
        return canonical_json({"model": self.model, "recipe": self.recipe, "data": self.data, "seed": self.seed})

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """Reads what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        return cls(**json.loads(text))


def identity_of(trial: Trial) -> dict[str, str]:
    """The sha256 of a trial's resolved model (that of `arch_dsl.identity`), and of its recipe without what is tuned,
    or settled by machine or store: the same wherever a study is planned."""
    recipe = _closed(trial.recipe)
    recipe |= {"stages": [_closed(stage) for stage in recipe["stages"]]} if "stages" in recipe else {}
    return {"model": _digest(trial.model), "recipe": _digest(recipe)}


def _digest(plain: Any) -> str:
    """What `tree.identity.digest` gives, whose package imports torch: two seconds before a page or a report."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _closed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name not in _OPEN}
