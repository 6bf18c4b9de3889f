"""The number of steps of a trial, from its recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from archlab.search.trial.metrics import read_metrics
from archlab.search.trial.outcome_files import read_result
from archlab.search.utils.files import read_json


def total_steps(folder: Path) -> int | None:
    """Optimizer steps of a trial that has been started, from its recipe; None where its trial.json is damaged."""
    recipe = (read_json(folder / "trial.json") or {}).get("recipe")
    return steps_of(recipe) if isinstance(recipe, dict) else None


def steps_of(recipe: dict[str, Any]) -> int | None:
    """Optimizer steps over all stages; None where the recipe does not say (that of a test)."""
    if not {"tokens", "batch", "context"} <= recipe.keys():
        return None
    if {"ramp", "batch_tokens", "stages"} & recipe.keys():
        from archlab.search.recipe.recipe import load_recipe

        return load_recipe(recipe).all_steps
    return math.ceil(int(recipe["tokens"]) / int(recipe["batch"] * recipe["context"]))


def is_whole(folder: Path) -> bool:
    """Whether a trial has come to its last step: looked at anew, as judging it may have taken long."""
    if read_result(folder) is not None:
        return True
    steps = total_steps(folder)
    return steps is not None and any(line["step"] >= steps for line in read_metrics(folder))
