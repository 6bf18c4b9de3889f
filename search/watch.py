"""Watches one running trial through the files that it writes: whether it moves, and how its validation loss goes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from search.worker import read_attempt


class Watch:
    """The clock starts when the attempt has a process; every line in metrics.jsonl starts it again."""

    def __init__(self, folder: Path, attempt: int, hang_s: float) -> None:
        self._metrics, self._folder, self._attempt, self._hang_s = folder / "metrics.jsonl", folder, attempt, hang_s
        self._moved: float | None = None
        self._size = -1
        self.hung = False
        self.pruned = False

    def hangs(self) -> bool:
        """True when nothing was written for `hang_s` seconds on the monotonic clock, and again if it lasts."""
        now = time.monotonic()
        if self._moved is None:
            if read_attempt(self._folder).get("attempt") != self._attempt:
                return False
            self._moved = now
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        if size != self._size:
            self._size, self._moved = size, now
        if now - self._moved <= self._hang_s:
            return False
        self.hung, self._moved = True, now
        return True

    def validation(self) -> list[tuple[int, float]]:
        """The trial's validation losses so far."""
        return validation_history(self._folder)


def validation_history(folder: Path) -> list[tuple[int, float]]:
    """(step, validation loss in nats per token) of a trial so far, in order of steps, whole lines only."""
    found: dict[int, float] = {}
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        for text in metrics.read_text().split("\n")[:-1]:
            line = json.loads(text)
            if line.get("validation_loss") is not None:
                found[line["step"]] = line["validation_loss"]
    return sorted(found.items())
