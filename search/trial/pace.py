"""How often a trial writes a checkpoint: as often as costs at most a fiftieth of its time, or as its study says."""

from __future__ import annotations

import time

LEAST_S = 20.0
SHARE = 0.02


class Pace:
    """`every_s` is the study's interval; without it, it follows from what the last checkpoint cost the training."""

    def __init__(self, every_s: float | None = None) -> None:
        self._every_s, self._cost_s = every_s, 0.0
        self._last = time.monotonic()

    @property
    def interval_s(self) -> float:
        """Seconds from the end of one checkpoint to the next, never below `LEAST_S` where the study says nothing."""
        return max(LEAST_S, self._cost_s / SHARE) if self._every_s is None else self._every_s

    @property
    def every_step(self) -> bool:
        """Whether each step is followed by a checkpoint that is written before the next step begins."""
        return self._every_s == 0

    def due(self) -> bool:
        """Whether the next one is to be written."""
        return time.monotonic() - self._last >= self.interval_s

    def begins_anew(self) -> None:
        """A checkpoint has been taken now."""
        self._last = time.monotonic()

    def note(self, cost_s: float) -> None:
        """What the last one cost: seconds in which there was no training."""
        self._cost_s = cost_s
