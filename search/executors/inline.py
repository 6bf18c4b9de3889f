"""Trials in this process, one after another: the executor of tests and of `--inline`."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from archlab.search.executors.executor import Failure, Finished


class InlineExecutor:
    """One trial at a time in this very process: for tests and for debugging a trainer. It can't survive a crash."""

    def __init__(self, entry: str, data_root: Path, checkpoint_s: float | None = None) -> None:
        self._entry, self._data_root, self._checkpoint_s = entry, data_root, checkpoint_s
        self._queue: deque[tuple[str, Path, int, int | None, str]] = deque()
        self._cancelled: set[str] = set()

    @property
    def slots(self) -> int:
        return 1

    @property
    def gpus(self) -> float:
        return 0.0

    def start(self) -> None:
        """Nothing to get ready."""

    def submit(self, key: str, folder: Path, attempt: int, until: int | None = None, entry: str | None = None) -> None:
        """Remembers the attempt; `wait` trains it."""
        self._queue.append((key, folder, attempt, until, entry or self._entry))

    def wait(self, timeout: float) -> list[Finished]:
        """Trains the attempt submitted first, however long it takes."""
        from archlab.search.executors.attempt import run_trial

        if not self._queue:
            return []
        key, folder, attempt, until, entry = self._queue.popleft()
        if key in self._cancelled:
            self._cancelled.discard(key)
            return [Finished(key, attempt, Failure("cancelled", "cancelled before it started"))]
        pace = self._checkpoint_s if entry == self._entry else None
        outcome = run_trial(entry, folder, self._data_root, attempt, until, checkpoint_s=pace)
        return [Finished(key, attempt, outcome)]

    def cancel(self, key: str) -> None:
        """Drops an attempt that has not started."""
        self._cancelled.add(key)

    def close(self) -> None:
        """Forgets what has not started."""
        self._queue.clear()
