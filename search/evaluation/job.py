"""An evaluation, in a process of its own as a trial is: measures of one finished trial, from its final weights.

Its folder holds the trial's `trial.json` and what is `asked`: the trial's last step and the measures. What is found
is kept there too, one after another; nothing is written to the trial's own.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from archlab.arch_dsl.language.parse import parse
from archlab.search.data.checksums import DamagedData
from archlab.search.evaluation.measures import About, Measure, Subject
from archlab.search.hardware.determinism import deterministic
from archlab.search.store.plugins import load_kept
from archlab.search.training.ends import Interrupted
from archlab.search.trial import checkpoint
from archlab.search.trial.fingerprint import fingerprint
from archlab.search.trial.journal import Journal
from archlab.search.trial.trial import Trial
from archlab.search.utils.files import write_whole

if TYPE_CHECKING:
    from archlab.search.executors.process_group import Gang

__all__ = ["ASKED", "FOUND", "Interrupted", "evaluate"]

ASKED = "asked.json"
FOUND = "found.json"


def evaluate(
    folder: Path,
    data_root: Path,
    attempt: int,
    should_stop: Callable[[], bool],
    *,
    gang: Gang | None = None,
) -> dict[str, Any]:
    """{"state": "complete", "found": {label: finding}, "wrong": {label: message}} of the measures that are asked.

    A finding is what a store keeps of it: values, curves, grids, seconds and fingerprint. One that goes wrong does not
    keep the others from being found, nor does one that needs more memory than there is; asked to stop, it returns those
    that are done. Of several processes the first one evaluates. Raises ValueError for weights that are not whole, not
    the last ones, or another trial's.
    """
    found: dict[str, Any] = {"state": "complete", "found": {}, "wrong": {}}
    if gang is not None and not gang.leads:
        return found
    trial = Trial.from_json((folder / "trial.json").read_text())
    asked = json.loads((folder / ASKED).read_text())
    load_kept(trial.model, data_root.parent)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def tick() -> None:
        if should_stop():
            raise Interrupted("stopped while evaluating")
        journal.pulse()

    with deterministic(device), Journal(folder / "metrics.jsonl", attempt, 0) as journal:
        own = data_root.parent / "trials" / trial.key[:2] / trial.key
        weights = final_weights(own, trial, asked["step"])
        measures = tuple(parse(Measure, plain) for plain in asked["measures"])
        subject = Subject(About.of(trial, data_root), device, weights, tick, measures, own)
        for measure in measures:
            started = time.perf_counter()
            try:
                told = measure.compute(subject).plain()
            except Interrupted:
                if not found["found"]:
                    raise
                break
            except (OSError, DamagedData):
                raise
            except Exception as error:  # the other measures are not to blame for what this one makes of the model
                found["wrong"][measure.label] = f"{type(error).__name__}: {error}"
            else:
                seconds, made_by = time.perf_counter() - started, fingerprint(str(device)) | measure.facts
                found["found"][measure.label] = told | {"seconds": round(seconds, 3), "fingerprint": made_by}
            if measure.label in found["wrong"]:
                _free(device)  # here, where the error no longer holds what the measure had
            write_whole(folder / FOUND, json.dumps(found))
    return found


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def final_weights(folder: Path, trial: Trial, step: int) -> dict[str, torch.Tensor]:
    """The weights after the last `step` of a trial. Raises ValueError where they are not there or not whole, or
    another trial's."""
    if not checkpoint.path_of(folder, step).exists():
        raise ValueError(f"{folder} has no checkpoint of step {step}, with which the trial ended")
    state = checkpoint.load(folder, step)
    if state["key"] != trial.key:
        raise ValueError(f"the checkpoint in {folder} belongs to trial {state['key']}, this is {trial.key}")
    weights: dict[str, torch.Tensor] = state["model"]
    return weights
