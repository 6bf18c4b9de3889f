"""What is stored of the trials of one challenger: losses by seed, curves, spikes, speed.

Of validation alone: the test set is looked at when a challenger is kept, and the ledger has what it said.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from archlab.search.challenge.ledger import Entry
from archlab.search.store.store import Store
from archlab.search.trial.metrics import read_metrics, validation_history
from archlab.search.trial.rough_start import signs_of
from archlab.search.trial.spikes import spikes

_POINTS = 12  # of a curve
_LAST = 2000  # characters of an error


def diagnosed(store: Store, entry: Entry, round_name: str) -> dict[str, Any]:
    """The trials of a round as JSON; a row for each variant, recipe and seed. One without a round has none."""
    known = {row["name"] for row in store.studies()}
    rows = store.study_trials(round_name) if round_name in known else []
    return {
        "entry": entry.number,
        "name": entry.name,
        "verdict": entry.verdict,
        "against": entry.against,
        "study": round_name,
        "trials": [_trial(row) for row in rows],
        "curve": "pairs of optimizer step and validation loss, nats per token",
    }


def _trial(row: dict[str, Any]) -> dict[str, Any]:
    """One trial: its validation loss in nats per token, its curve and what its journal says."""
    folder, result = Path(row["folder"]), row["result"] or {}
    lines = [line for line in read_metrics(folder) if line.get("loss") is not None]
    found = {
        "variant": row["variant"],
        "seed": row["seed"],
        "state": row["state"],
        "reason": row["reason"] or result.get("reason"),
        "validation_loss": (result.get("validation") or {}).get("loss"),
        "train_seconds": result.get("train_s"),
        "tokens_per_second": result.get("tokens_per_s"),
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "curve": _thinned(validation_history(folder)),
        "last_training_loss": lines[-1]["loss"] if lines else None,
        "loss_spikes": spikes([line["loss"] for line in lines]),
        "signs": [*signs_of(folder, result)] if row["state"] == "complete" else [],
        "error": _error(folder) if row["state"] == "failed" else None,
    }
    return {name: value for name, value in found.items() if value not in (None, [], "")}


def _thinned(curve: list[tuple[int, float]]) -> list[list[float | None]]:
    """Some points of a curve, its last among them; None for a loss that was not finite."""
    stride = max(1, math.ceil(len(curve) / _POINTS))
    points = [*curve[::-1][::stride]][::-1]
    return [[step, round(loss, 5) if math.isfinite(loss) else None] for step, loss in points]


def _error(folder: Path) -> str | None:
    """The end of what a failed trial said."""
    file = folder / "error.txt"
    return file.read_text(errors="replace")[-_LAST:] if file.is_file() else None
