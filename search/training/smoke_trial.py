"""The first optimizer steps of a trial at its full batch: whether it fits, how long a step takes, what it holds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from archlab.search.hardware.determinism import deterministic
from archlab.search.recipe.recipe import load_recipe
from archlab.search.recipe.stages import parts
from archlab.search.store.plugins import load_kept
from archlab.search.training.compiling import compiling
from archlab.search.training.ends import Diverged, Interrupted
from archlab.search.training.loop import Before, Loop
from archlab.search.training.module import build_model
from archlab.search.training.outcome import peak_memory
from archlab.search.training.train import Run, team_of
from archlab.search.trial.trial import Trial

if TYPE_CHECKING:
    from archlab.search.executors.process_group import Gang
    from archlab.search.trial.journal import Journal

__all__ = ["Interrupted", "train"]

STEPS = 5


def train(
    folder: Path,
    data_root: Path,
    attempt: int,
    should_stop: Callable[[], bool],
    *,
    until: int | None = None,
    gang: Gang | None = None,
) -> dict[str, Any]:
    """{"state": complete or diverged, "step_s": of the slowest stage, "peak_memory_bytes", "reason"}.

    Of every stage `STEPS` steps, each stage with initial weights of its own, and a look at the validation curve's
    windows. Leaves nothing that a trial would go on from. Raises what training would.
    """
    trial = Trial.from_json((folder / "trial.json").read_text())
    load_kept(trial.model, data_root.parent)
    recipe = load_recipe(trial.recipe, "recipe")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found: dict[str, Any] = {"state": "complete", "reason": None, "step_s": 0.0}
    with ExitStack() as context:
        context.enter_context(deterministic(device))
        team = context.enter_context(team_of(gang, device))
        journal = context.enter_context(team.journal(folder / "lines", attempt, 0))
        run = Run(folder, data_root, attempt, trial, device, build_model, team, journal, should_stop)
        context.enter_context(compiling(trial.recipe, data_root.parent, journal.pulse))
        for part in parts(recipe, trial):
            whole = replace(part, recipe=part.recipe.replace(ramp=None))
            loop = run.loop(whole, recipe, Before(), {}, None)
            try:
                found["step_s"] = max(found["step_s"], _steps(loop, journal, should_stop))
            except Diverged as end:
                found |= {"state": "diverged", "reason": f"step {end.step}: {end.reason}"}
                break
            del loop
            gc.collect()
        found["peak_memory_bytes"] = peak_memory(device)
    return found


def _steps(loop: Loop, journal: Journal, should_stop: Callable[[], bool]) -> float:
    """Seconds of a step, the median without the first one, which warms up. Raises Diverged, Interrupted."""
    taken = []
    for step in range(min(STEPS, loop.recipe.steps)):
        start = time.perf_counter()
        loop.update(step)
        loop.check()  # waits for the device
        taken.append(time.perf_counter() - start)
        if should_stop():
            raise Interrupted("stopped while the study was tried out")
    loop.validate(journal)
    return statistics.median(taken[1:] or taken)
