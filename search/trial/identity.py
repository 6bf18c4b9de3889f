"""Hashes of a trial's model and recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from archlab.search.trial.trial import Trial

_OPEN = ("lr", "precision", "compile", "accumulate", "prepared")


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
