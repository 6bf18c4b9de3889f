"""Watches one running trial through the files that it writes: whether it moves, and how its validation loss goes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from archlab.search.trial.outcome_files import read_attempt
from archlab.search.utils.files import NO_JSON, whole_lines
from archlab.search.utils.shapes import Check, both, count, mapping, mapping_of, maybe, number

LINE: Check = both(mapping_of(maybe(number)), mapping({"step": count}, {"tokens": count, "attempt": count}))
"""A line of metrics.jsonl; a number that was not finite is null."""
_TAIL_BYTES = 8192  # holds dozens of lines
GAP_S = 5.0  # between two looks; for the rest of a longer one we were stopped or asleep, and so perhaps was the trial


class Watch:
    """The clock starts when the attempt has a process; every change of metrics.jsonl starts it again.

    It counts the time that we have watched: not that of a suspended laptop, of Ctrl-Z or of a machine that was paused.
    """

    def __init__(self, folder: Path, attempt: int, hang_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._folder, self._attempt, self._hang_s = folder / "metrics.jsonl", folder, attempt, hang_s
        self._clock, self._looked = clock, clock()
        self._still_s: float | None = None
        self._seen = (-1, -1)
        self.hung = False
        self.pruned = False

    def hangs(self) -> bool:
        """True when nothing was written for `hang_s` seconds of watching, and again if it lasts."""
        now = self._clock()
        since, self._looked = min(now - self._looked, GAP_S), now
        if self._still_s is None:
            if read_attempt(self._folder).get("attempt") != self._attempt:
                return False
            self._still_s = since = 0.0
        seen = self._look()
        self._still_s = self._still_s + since if seen == self._seen else 0.0
        self._seen = seen
        if self._still_s <= self._hang_s:
            return False
        self.hung, self._still_s = True, 0.0
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
    """The lines of metrics.jsonl so far; what is being written is left for the next look."""
    return [line for _, line in whole_lines(folder / "metrics.jsonl", LINE)]


def last_training_line(folder: Path) -> dict[str, Any] | None:
    """The newest whole training line of metrics.jsonl, None before the first."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        if line.startswith(b"{") and b'"tokens"' in line:
            with suppress(*NO_JSON):
                found: dict[str, Any] = json.loads(line)
                if not LINE(found):
                    return found
    return None
