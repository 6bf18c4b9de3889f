"""What a failed attempt costs: retries per kind of failure, and the breaker that ends a study which only fails."""

from __future__ import annotations

import time
from collections.abc import Callable

RETRIES = {"crash": 2, "oom": 1, "hang": 1, "user": 0}
NEVER_CHARGED = ("interrupted", "cancelled", "disk", "node", "busy")
TOLD = (*RETRIES, "node", "busy")
"""Of the kinds that are tried again: what whoever watches is told."""
MOST_BUSY = 10
"""How often a trial waits in vain, half a minute each time, for a process that writes to its folder."""


class Breaker:
    """Open after `limit` failed trials in a row within `window_s` seconds: then the cause is not the trial."""

    def __init__(self, limit: int = 5, window_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._window_s, self._clock = limit, window_s, clock
        self._failed: dict[str, float] = {}

    def success(self) -> None:
        """A trial ended with a result: the row of failures is broken."""
        self._failed.clear()

    def failure(self, key: str) -> bool:
        """A trial failed for good. True when it is time to stop."""
        now = self._clock()
        self._failed[key] = now
        return sum(now - when <= self._window_s for when in self._failed.values()) >= self._limit
