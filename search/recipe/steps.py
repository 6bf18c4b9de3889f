"""The number of steps of a trial, from its recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def total_steps(folder: Path) -> int | None:
    """Optimizer steps of a trial that has been started, from its recipe."""
    return steps_of(json.loads((folder / "trial.json").read_text())["recipe"])


def steps_of(recipe: dict[str, Any]) -> int | None:
    """Optimizer steps over all stages; None where the recipe does not say (that of a test)."""
    if not {"tokens", "batch", "context"} <= recipe.keys():
        return None
    if {"ramp", "batch_tokens", "stages"} & recipe.keys():
        from archlab.search.recipe.recipe import load_recipe

        return load_recipe(recipe).all_steps
    return math.ceil(int(recipe["tokens"]) / int(recipe["batch"] * recipe["context"]))
