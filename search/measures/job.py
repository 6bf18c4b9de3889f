"""An evaluation, in a process of its own as a trial is: measures of one finished trial, from its final weights.

Its folder holds the trial's `trial.json` and what is `asked`; nothing is written to the trial's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arch_dsl.parse import parse
from search import checkpoint
from search.fingerprint import fingerprint
from search.journal import Journal
from search.loop import Interrupted
from search.measures.family import About, Measure, Subject
from search.plugin_files import load_kept
from search.train import deterministic
from search.trial import Trial

if TYPE_CHECKING:
    from search.gang import Gang

__all__ = ["ASKED", "Interrupted", "evaluate"]

ASKED = "asked.json"


def evaluate(
    folder: Path,
    data_root: Path,
    attempt: int,
    should_stop: Callable[[], bool],
    *,
    gang: Gang | None = None,
) -> dict[str, Any]:
    """{"state": "complete", "found": {label: finding}, "wrong": {label: message}} of the measures that are asked.

    A finding is what a store keeps of it: values, curves, seconds and fingerprint. One that goes wrong does not keep
    the others from being found; asked to stop, it returns those that are done. Of several processes the first one
    evaluates. Raises ValueError for weights that are not whole, or another trial's.
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
        weights = final_weights(data_root.parent / "trials" / trial.key[:2] / trial.key, trial)
        subject = Subject(About.of(trial, data_root), device, weights, tick)
        for plain in asked:
            measure = parse(Measure, plain)
            started = time.perf_counter()
            try:
                told = measure.compute(subject).plain()
            except Interrupted:
                if not found["found"]:
                    raise
                break
            except (MemoryError, torch.OutOfMemoryError, OSError):
                raise
            except Exception as error:  # the other measures are not to blame for what this one makes of the model
                found["wrong"][measure.label] = f"{type(error).__name__}: {error}"
                continue
            spent = {"seconds": round(time.perf_counter() - started, 3), "fingerprint": fingerprint(str(device))}
            found["found"][measure.label] = told | spent
    return found


def final_weights(folder: Path, trial: Trial) -> dict[str, torch.Tensor]:
    """The weights at the end of a trial. Raises ValueError where the checkpoint is another's, or is not whole."""
    state = checkpoint.load(folder, checkpoint.steps_in(folder)[0])
    if state["key"] != trial.key:
        raise ValueError(f"the checkpoint in {folder} belongs to trial {state['key']}, this is {trial.key}")
    weights: dict[str, torch.Tensor] = state["model"]
    return weights
