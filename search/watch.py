"""Watches one running trial through the files that it writes: whether it moves, and how its validation loss goes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from search.worker import read_attempt


class Watch:
    """The clock starts when the attempt has a process; every change of metrics.jsonl starts it again."""

    def __init__(self, folder: Path, attempt: int, hang_s: float) -> None:
        self._metrics, self._folder, self._attempt, self._hang_s = folder / "metrics.jsonl", folder, attempt, hang_s
        self._moved: float | None = None
        self._seen = (-1, -1)
        self.hung = False
        self.pruned = False

    def hangs(self) -> bool:
        """True when nothing was written for `hang_s` seconds on the monotonic clock, and again if it lasts."""
        now = time.monotonic()
        if self._moved is None:
            if read_attempt(self._folder).get("attempt") != self._attempt:
                return False
            self._moved = now
        seen = self._look()
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if now - self._moved <= self._hang_s:
            return False
        self.hung, self._moved = True, now
        return True

    def _look(self) -> tuple[int, int]:
        """Size and time of change (only compared with itself, so that a clock that jumps does no harm)."""
        try:
            found = self._metrics.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_size, found.st_mtime_ns


def validation_history(folder: Path) -> list[tuple[int, float]]:
    """(step, validation loss in nats per token) of a trial so far, in order of steps; nan where it was not finite."""
    found = {
        line["step"]: math.nan if line["validation_loss"] is None else line["validation_loss"]
        for line in read_metrics(folder)
        if "validation_loss" in line
    }
    return sorted(found.items())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl so far; what is being written is left for the next look."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
