"""Commands that a reader starts by a click: `archlab run` as a process of its own, which outlives the dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from archlab.dashboards.trials import tail

LOGS = "drivers"
"""Where in a store what such processes print is kept, a file per study."""
_LAST_LINES = 20


@dataclass(frozen=True)
class Started:
    """A process that was started here: where it prints to, when it began (unix s), its exit code once it has one."""

    log: Path
    since: float
    pid: int
    code: int | None

    def last_lines(self) -> str:
        """What it printed last."""
        return tail(self.log, _LAST_LINES)


class Launcher:
    """Starts the runs of a store, one of each study at a time; the study's own lock keeps out those of others."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._started: dict[str, tuple[subprocess.Popen[bytes], Started]] = {}

    def run(self, study: str, file: str, folder: Path, more: Sequence[str] = ()) -> Started:
        """Starts `archlab run` of a study's file, with `more` options, in a folder, from which paths in the file may
        lead on; one that still goes on is returned as it is. Raises OSError."""
        with self._lock:
            before = self._now(study)
            if before is not None and before.code is None:
                return before
            words = ("archlab", "run", file, "--store", str(self._root), *more)
            logs = self._root / LOGS
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = logs / f"{study}.txt"
            with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", *words],  # -P: a file of the folder may be called like a module
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C here, or the end of this process, is none of its business
                )
            started = Started(log, time.time(), process.pid, None)
            self._started[study] = process, started
            return started

    def of(self, study: str) -> Started | None:
        """What was started of a study last, None where nothing was."""
        with self._lock:
            return self._now(study)

    def _now(self, study: str) -> Started | None:
        if study not in self._started:
            return None
        process, told = self._started[study]
        return replace(told, code=process.poll())
