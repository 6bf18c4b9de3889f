"""Trains one trial from `trial.json` to `result.json`, from its newest checkpoint, on a CUDA device when there is one.

A trial that is interrupted and continued ends with the same bits as one that never was: tested on CPUs alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from archlab.search.data.dataset import Dataset
from archlab.search.executors.executor import named
from archlab.search.hardware.compiler import cannot_compile
from archlab.search.hardware.determinism import deterministic
from archlab.search.hardware.load import FILE as LOAD
from archlab.search.hardware.load import of_gpu, sampled
from archlab.search.recipe.curve import rungs, tokens_at
from archlab.search.recipe.initial_weights import load_start
from archlab.search.recipe.recipe import Recipe, load_recipe
from archlab.search.recipe.stages import Part, parts
from archlab.search.store.plugins import load_kept
from archlab.search.training.compiling import compile_blocks, compiled_with, compiling
from archlab.search.training.ends import Interrupted, Paused
from archlab.search.training.loop import Before, Loop
from archlab.search.training.module import build_model, seeds_of, slower
from archlab.search.training.outcome import ShouldStop, outcome, stage_record
from archlab.search.training.shared_beginnings import FOLDER, Prefixes, shared_stage, take_over
from archlab.search.training.team import ALONE, Team
from archlab.search.trial import checkpoint
from archlab.search.trial.journal import Journal, events, note_event
from archlab.search.trial.kept_weights import told
from archlab.search.trial.outcome_files import read_result
from archlab.search.trial.rough_start import read_signs
from archlab.search.trial.trial import Trial

if TYPE_CHECKING:
    from archlab.search.executors.process_group import Gang

__all__ = ["Interrupted", "train"]

TOGETHER = "archlab.search.training.parallel.team:Together"  # by its name: a trial of one process loads none of it

Build = Callable[[Trial, Recipe, torch.device], nn.Module]


def train(
    folder: Path,
    data_root: Path,
    attempt: int,
    should_stop: ShouldStop,
    *,
    until: int | None = None,
    gang: Gang | None = None,
    build: Build = build_model,
    checkpoint_s: float | None = None,
) -> dict[str, Any]:
    """Trains the trial of `folder/trial.json` from its newest checkpoint to its end; returns what `result.json` says.

    With `until` it pauses after that step of the trial, one of `rungs`, with a whole checkpoint, and returns
    {"state": "paused", "step", "tokens", "validation": {"loss": that of the curve}}; at once where it has been there.

    A checkpoint is due every `checkpoint_s` seconds, after every step if that is 0, and without it as `Pace` says.
    `should_stop` is asked after every step. Raises Interrupted after a checkpoint, OSError when the disk is full (the
    earlier checkpoint is whole then), and whatever is wrong with the trial or its data. A run whose loss or gradients
    are not finite is a result: its state is `diverged`. One process at a time may train in a folder, or the processes
    of one `gang`, which all call this with the same arguments; rank 0 writes, and its `should_stop` counts.
    """
    finished = folder / "result.json"
    if (ended := read_result(folder)) is not None:
        return ended
    trial = Trial.from_json((folder / "trial.json").read_text())
    load_kept(trial.model, data_root.parent)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with deterministic(device), team_of(gang, device) as team, load_of(folder, team):
        found = checkpoint.load_newest(folder) if team.leads else checkpoint.Loaded(None)
        found = checkpoint.Loaded(team.given(found.state), found.discarded)
        started = found.state["step"] if found.state else 0
        with team.journal(folder / "metrics.jsonl", attempt, started) as journal:
            run = Run(folder, data_root, attempt, trial, device, build, team, journal, should_stop, checkpoint_s, until)
            try:
                with compiling(trial.recipe, data_root.parent, journal.pulse):
                    result = run.through(found)
            except Paused:
                return team.given(run.paused() if team.leads else {})
            journal.sync()
        if team.leads:
            if result["state"] == "complete":
                result["signs"] = list(read_signs(folder))
            text = json.dumps(result, indent=1, allow_nan=False).encode()
            checkpoint.write_atomically(finished, lambda file: file.write(text))
            checkpoint.remove_older(folder, keep=int(result["state"] == "complete" and told(folder)["final"]))
    return result


def load_of(folder: Path, team: Team) -> AbstractContextManager[None]:
    """Samples how busy the machine is, once for all processes of a trial."""
    return sampled(folder / LOAD, of_gpu()) if team.leads else nullcontext()


@contextmanager
def team_of(gang: Gang | None, device: torch.device) -> Iterator[Team]:
    """The processes that train the trial, once all are there."""
    team: Team = ALONE if gang is None else named(TOGETHER)(gang, device)
    try:
        yield team
    finally:
        team.leave()


@dataclass(frozen=True)
class Run:
    """One attempt at a trial: the arguments of `train`, and what it found."""

    folder: Path
    data_root: Path
    attempt: int
    trial: Trial
    device: torch.device
    build: Build
    team: Team
    journal: Journal
    should_stop: ShouldStop
    checkpoint_s: float | None = None
    until: int | None = None

    def through(self, found: checkpoint.Loaded) -> dict[str, Any]:
        """How the trial ended: its stages one after another, from that of the checkpoint on. Raises Paused."""
        recipe = load_recipe(self.trial.recipe, "recipe")
        if self.until is not None and self.until not in rungs(recipe):
            raise ValueError(f"this trial pauses after one of the steps {rungs(recipe)}, not after {self.until}")
        past = found.state.get("stages", []) if found.state else []
        step = found.state["step"] if found.state else 0
        before, weights, result = Before(), dict[str, Tensor](), dict[str, Any]()
        for index, part in enumerate(parts(recipe, self.trial)):
            if self.until is not None and max(step, before.steps) >= self.until:
                raise Paused
            if index < len(past):
                before = before.then(part.recipe, past[index], 0.0)
                continue
            own = found if index == len(past) else None
            if index == len(recipe.stages):
                loop = self.loop(part, recipe, before, weights, own)
                if not recipe.stages:
                    self.go_on(loop)
                result = self.stage(loop)
                break
            with self.place(index) as place:
                kept = checkpoint.load_newest(place).state if place else None
                if kept is None:
                    loop = self.loop(part, recipe, before, weights, own)
                    result = self.stage(loop)
                    if result["state"] != "complete":
                        break
                    kept = self.keep(place, index, loop, result)
                else:
                    self.take_over(kept, index, own.state["step"] if own and own.state else 0)
            weights = kept["weights"]
            before = before.then(part.recipe, kept["ended"], kept["train_s"])
        ended = [*before.stages, stage_record(len(before.stages), result)]
        return result | {"stages": ended} if recipe.stages else result

    def go_on(self, loop: Loop) -> None:
        """Has a trial that begins go on from the longest shorter one, and leave what longer ones can go on from."""
        prefixes = Prefixes(self.data_root.parent / FOLDER, self.trial, loop)
        loop.prefix_step, loop.keep_prefix = prefixes.step, prefixes.keep
        if loop.step or self.until is not None or loop.log2:
            return
        state = self.team.given(prefixes.load() if self.team.leads else None)
        if state is not None:
            take_over(state, loop, self.journal)
            if self.team.leads:
                note_event(self.folder, self.attempt, "continued", **loop.continued or {})

    def stage(self, loop: Loop) -> dict[str, Any]:
        return outcome(loop, self.journal, self.should_stop, self.checkpoint_s, self.until)

    def paused(self) -> dict[str, Any]:
        """What is told of a trial that waits after step `until`. Raises ValueError without the curve's point there.

        One that went on from a shorter trial has no loss where that one was not validated.
        """
        step = self.until or 0
        self.journal.sync()
        losses = [line["validation_loss"] for line in self.journal.lines(step - 1, step) if "validation_loss" in line]
        if not losses and any(event["event"] == "continued" for event in events(self.folder)):
            losses = [None]
        if not losses:
            raise ValueError(f"{self.folder}/metrics.jsonl has no validation loss at step {step}, though it was there")
        tokens = tokens_at(load_recipe(self.trial.recipe, "recipe"), step)
        return {"state": "paused", "step": step, "tokens": tokens, "validation": {"loss": losses[0]}}

    def place(self, index: int) -> AbstractContextManager[Path | None]:
        """Where the end of a stage is kept for other trials. None: for no other one."""
        if not self.team.shares_stages:
            return nullcontext()
        return shared_stage(self.data_root.parent / "stages", self.trial, index, self.device.type, self.tick)

    def tick(self) -> None:
        """Called while another trial trains what this one waits for. Raises Interrupted if the trial is to stop."""
        if self.should_stop():
            raise Interrupted("stopped while another trial trained a stage that both have")
        self.journal.pulse()

    def keep(self, place: Path | None, index: int, loop: Loop, result: dict[str, Any]) -> dict[str, Any]:
        """Keeps the end of a stage for all trials that begin alike; returns what is kept."""
        weights = self.team.given(self.team.model_state(loop.model))
        kept = {"weights": weights, "ended": stage_record(index, result), "train_s": loop.train_s}
        self.journal.sync()
        if place:
            checkpoint.save(place, loop.step, kept | {"lines": self.journal.lines(loop.before.steps, loop.step)})
        return kept

    def take_over(self, kept: dict[str, Any], index: int, step: int) -> None:
        """Notes that another trial has trained a stage, and writes its lines after `step`."""
        for line in kept["lines"]:
            if line["step"] > step:
                self.journal.write(**line | {"attempt": 0})  # no attempt of this trial has spent anything on it
        note_event(self.folder, self.attempt, "taken_over", stage=index, step=kept["ended"]["step"])

    def loop(
        self, part: Part, recipe: Recipe, before: Before, weights: dict[str, Tensor], found: checkpoint.Loaded | None
    ) -> Loop:
        """The loop of a stage, with the weights of the one before as far as its model has them."""
        seeds = seeds_of(self.trial, part.recipe)
        dataset = Dataset.open(self.data_root, part.data)
        model = self.build(replace(self.trial, model=part.model), part.recipe, self.device)
        model.separator = dataset.eod  # type: ignore[assignment]
        if not before.stages and recipe.init:
            load_start(model, recipe.init, self.data_root)
        part.take_over(model, weights)
        torch.manual_seed(seeds.noise + len(before.stages))
        if part.recipe.compile == "blocks" and not cannot_compile():
            compile_blocks(model, part.recipe.micro_batch)
        key = self.trial.key
        order = seeds.data + len(before.stages)  # else a stage would read again what the first one read first
        loop = Loop(self.folder, key, self.attempt, part.recipe, dataset, model, order, before, self.team)
        loop.fingerprint |= compiled_with(part.recipe) | slower(model)
        if found is not None:
            loop.resume(found)
        return loop
