"""What trials that begin alike share: the ends of stages, so that fine-tuning trains its base once, and the states of
shorter trials, from which longer ones go on, equal but for `tokens` and `schedule`, at the same rates so far.

A step is a pure function of the trial and the step before. So two trials of one kind, whose learning rates and rows are
the same in all steps up to one, have the same bits after it, and the longer one goes on from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archlab.search.recipe.curve import curve_points
from archlab.search.recipe.recipe import Recipe, load_recipe
from archlab.search.training.compiling import compiled_with
from archlab.search.training.loop import Loop
from archlab.search.trial import checkpoint
from archlab.search.trial.fingerprint import fingerprint
from archlab.search.trial.journal import Journal, events
from archlab.search.trial.loss_windows import read_windows, write_windows
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json
from archlab.search.utils.files import lock_file

FOLDER = "prefixes"  # of a store
_WAIT_S = 0.5


@contextmanager
def shared_stage(root: Path, trial: Trial, index: int, device: str, tick: Callable[[], None]) -> Iterator[Path]:
    """The folder for the end of stage `index` of all trials that are alike up to it, on machines and compilers alike.

    One process at a time has it; while another one trains the stage, `tick` is called again and again, and what it
    raises ends the waiting. The lock ends with its process.
    """
    alike = fingerprint(device) | compiled_with(load_recipe(trial.recipe, "recipe"))
    machine = hashlib.sha256(canonical_json(alike).encode()).hexdigest()
    folder = root / f"{stages_key(trial, index)}-{machine[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / ".lock", 0o666) as take:
        while not take():
            tick()
            time.sleep(_WAIT_S)
        yield folder


def stages_key(trial: Trial, index: int) -> str:
    """What trials share that are alike up to the end of stage `index`: 32 digits of the key of one that ends there."""
    stages = trial.recipe["stages"][:index]
    recipe = {name: value for name, value in trial.recipe.items() if name != "stages"}
    return replace(trial, recipe=recipe | ({"stages": stages} if stages else {})).key[:32]


def kind(trial: Trial) -> str:
    """What trials share that are equal but for their tokens and schedules: 32 digits of a hash."""
    recipe = {name: value for name, value in trial.recipe.items() if name not in ("tokens", "schedule")}
    return replace(trial, recipe=recipe).key[:32]


def beginning(recipe: Recipe, step: int) -> str:
    """16 digits of a hash of the learning rates and rows of the first `step` steps."""
    found = hashlib.sha256()
    for each in range(step):
        found.update(struct.pack("<dq", recipe.lr_at(each), recipe.rows_before(each + 1)))
    return found.hexdigest()[:16]


def fitting(root: Path, trial: Trial, recipe: Recipe) -> list[tuple[int, Path]]:
    """The steps and places from which a trial could go on, on one machine or another, the last step first."""
    folder = root / kind(trial)
    if recipe.stages or not folder.is_dir():
        return []
    places = [(int(place.name.partition("-")[0]), place) for place in folder.iterdir()]
    own = {step: beginning(recipe, step) for step in {step for step, _ in places} if step < recipe.steps}
    return sorted((each for each in places if each[1].name.split("-")[1] == own.get(each[0])), reverse=True)


class Prefixes:
    """Those in `root` of the kind of a trial without stages, of machines and layouts like its loop's."""

    def __init__(self, root: Path, trial: Trial, loop: Loop) -> None:
        """`step` is that after which the trial keeps its state: the last one that a longer trial can share; 0: none."""
        self.root, self.trial, self.loop = root, trial, loop
        self.step = loop.recipe.schedule.stable(loop.recipe.steps)
        alike = {name: value for name, value in loop.fingerprint.items() if name not in ("commit", "platform")}
        self.machine = hashlib.sha256(canonical_json(alike).encode()).hexdigest()[:16]

    def keep(self, state: dict[str, Any], journal: Journal) -> None:
        """Keeps the state after `step`, unless one is there; not of a trial that has moved between machines."""
        loop = self.loop
        if any(event.get("changed") for event in events(loop.folder)):
            return
        folder = self.root / kind(self.trial) / f"{self.step}-{beginning(loop.recipe, self.step)}-{self.machine}"
        folder.mkdir(parents=True, exist_ok=True)
        windows = read_windows(loop.folder, len(loop.curve))
        added = {
            "lines": journal.lines(0, self.step),
            "windows": {step: torch.from_numpy(sums) for step, sums in windows.items()},
        }
        with lock_file(folder / ".lock", 0o666) as take:
            if take() and not checkpoint.steps_in(folder):
                checkpoint.save(folder, self.step, state | added)

    def load(self) -> dict[str, Any] | None:
        """What `keep` was given, of the longest trial that is whole; None if there is none."""
        for _, place in fitting(self.root, self.trial, self.loop.recipe):
            if place.name.endswith(f"-{self.machine}"):
                with lock_file(place / ".lock", 0o666) as take:
                    state = checkpoint.load_newest(place).state if take(fcntl.LOCK_SH | fcntl.LOCK_NB) else None
                if state is not None:
                    return state
        return None


def take_over(state: dict[str, Any], loop: Loop, journal: Journal) -> None:
    """Has a loop go on from what a shorter trial kept; writes its lines, but for points that its curve lacks."""
    continued = {"key": state["key"], "step": state["step"]}
    loop.restore(state | {"key": loop.key, "continued": continued})
    if not loop.team.leads:
        return
    points = sorted(curve_points(loop.recipe.steps))
    shared = {step: sums for step, sums in state["windows"].items() if step in points and len(sums) == len(loop.curve)}
    for step, sums in shared.items():
        write_windows(loop.folder, 0, points.index(step), step, np.asarray(sums))
    for line in state["lines"]:
        if "validation_loss" not in line or line["step"] in shared:
            journal.write(**line | {"attempt": 0})  # no attempt of this trial has spent anything on it
