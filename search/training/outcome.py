"""How a trial ends: trained, measured, and written down as `result.json` has it."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from archlab.search.hardware import low_memory
from archlab.search.training.ends import Diverged, Interrupted
from archlab.search.training.held_out import Arrays, evaluate
from archlab.search.training.loop import Loop
from archlab.search.trial import checkpoint
from archlab.search.trial.journal import Journal, events
from archlab.search.trial.writer import spent

ShouldStop = Callable[[], bool]


def stage_record(index: int, result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a stage that another one follows."""
    return {"stage": index, **{name: result[name] for name in ("step", "tokens", "validation", "test")}}


def outcome(
    loop: Loop, journal: Journal, should_stop: ShouldStop, checkpoint_s: float | None, until: int | None
) -> dict[str, Any]:
    """Trains, evaluates, and says how the trial ended. Raises Paused."""
    try:
        with loop.writer:
            loop.run(journal, should_stop, checkpoint_s, until)
            started = time.perf_counter()
            measures, documents = _measure(loop, journal, should_stop)
            evaluate_s = round(time.perf_counter() - started, 3)
    except Diverged as end:
        loop.log_diverged(journal, end.step)
        return _result(loop, "diverged", end.step, end.reason, dict.fromkeys(("validation", "test")))
    if loop.team.leads:
        packed = io.BytesIO()
        np.savez(packed, **documents)  # type: ignore[arg-type]
        checkpoint.write_atomically(loop.folder / "test_documents.npz", lambda file: file.write(packed.getvalue()))
    return _result(loop, "complete", loop.step, None, measures) | {"evaluate_s": evaluate_s}


def _measure(loop: Loop, journal: Journal, should_stop: ShouldStop) -> tuple[dict[str, dict[str, float]], Arrays]:
    """Summaries of validation and test, and the documents of test. Raises Diverged when one is not finite."""

    def tick() -> None:
        if any(loop.team.agree(should_stop())):
            raise Interrupted("stopped while evaluating the trained model")
        journal.pulse()

    recipe, measures, documents = loop.recipe, {}, Arrays()
    sizes = recipe.context, recipe.micro_batch, recipe.precision
    for split in ("validation", "test"):
        measures[split], documents = evaluate(
            loop.model, loop.dataset, split, *sizes, tick, recipe.objective, loop.team
        )
        if not all(map(math.isfinite, measures[split].values())):
            raise Diverged(loop.step, f"the {split} loss or perplexity is not finite")
    return measures, documents


def _result(loop: Loop, state: str, step: int, reason: str | None, measures: dict[str, Any]) -> dict[str, Any]:
    """What `result.json` says. `bit_exact` is False when a continuation ran on other hardware or software."""
    tokens = loop.tokens_at(step)
    happened = events(loop.folder)
    peak = peak_memory(loop.device)
    resumed = [event for event in happened if event["event"] == "resumed"]
    return {
        "state": state,
        "reason": reason,
        "step": step,
        "tokens": tokens,
        "parameters": loop.size,
        **measures,
        "train_s": round(loop.train_s, 3),
        "tokens_per_s": round(tokens / loop.train_s, 1) if loop.train_s > 0 else None,
        "checkpoints": spent(loop.folder),
        "peak_memory_bytes": loop.writer.without_copies(peak) if loop.device.type == "cpu" else peak,
        "fingerprint": loop.fingerprint,
        "bit_exact": not any(event["changed"] for event in resumed),
        "resumed_from": [event["step"] for event in resumed],
        "discarded_checkpoints": [
            {"name": event["checkpoint"], "reason": event["reason"]}
            for event in happened
            if event["event"] == "discarded"
        ],
        **({"continued": loop.continued} if loop.continued else {}),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes: what this process took of a CUDA device for tensors, or all of its resident memory on a CPU.

    On CUDA what was reserved: of a graph's memory little counts as allocated once it is captured.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return low_memory.peak()
