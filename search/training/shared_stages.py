"""Stages that trials share: what one has trained, others go on from, so that fine-tuning trains its base once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.compiling import compiled_with
from archlab.search.trial.fingerprint import fingerprint
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json
from archlab.search.utils.files import lock_file

_WAIT_S = 0.5


@contextmanager
def shared_stage(root: Path, trial: Trial, index: int, device: str, tick: Callable[[], None]) -> Iterator[Path]:
    """The folder for the end of stage `index` of all trials that are alike up to it, on machines and compilers alike.

    One process at a time has it; while another one trains the stage, `tick` is called again and again, and what it
    raises ends the waiting. The lock ends with its process.
    """
    alike = fingerprint(device) | compiled_with(load_recipe(trial.recipe, "recipe"))
    machine = hashlib.sha256(canonical_json(alike).encode()).hexdigest()
    folder = root / f"{beginning(trial, index)}-{machine[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / ".lock", 0o666) as take:
        while not take():
            tick()
            time.sleep(_WAIT_S)
        yield folder


def beginning(trial: Trial, index: int) -> str:
    """What trials share that are alike up to the end of stage `index`: 32 digits of the key of one that ends there."""
    stages = trial.recipe["stages"][:index]
    recipe = {name: value for name, value in trial.recipe.items() if name != "stages"}
    return replace(trial, recipe=recipe | ({"stages": stages} if stages else {})).key[:32]
