"""The lines that a trial leaves while it runs: measures in `metrics.jsonl`, what happened to it in `events.jsonl`."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Self

from archlab.search.trial.checkpoint import write_atomically
from archlab.search.trial.metrics import LINE
from archlab.search.utils.files import whole_lines
from archlab.search.utils.shapes import Check, anything, count, mapping, text

FLUSH_S = 1.0
_HAPPENED: Check = mapping({"event": text}, {"step": count, "changed": anything, "checkpoint": text, "reason": text})


class Journal:
    """Appends measures to a trial's `metrics.jsonl`, at most one write per second.

    Opened at a step, it first drops the lines past it, so that a continued trial has every step once. The file is
    replaced for that, not cut: what a process of an earlier attempt might still write goes nowhere.
    """

    def __init__(self, path: Path, attempt: int, step: int) -> None:
        self._path, self._attempt = path, attempt
        kept = "".join(f"{text}\n" for text, line in whole_lines(path, LINE) if line["step"] <= step)
        write_atomically(path, lambda file: file.write(kept.encode()))
        self._file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []
        self._flushed = time.monotonic()

    def write(self, step: int, **measures: float | None) -> None:
        """Adds a line about the state after `step` optimizer steps; a number that is not finite becomes null."""
        numbers = {k: v if v is not None and math.isfinite(v) else None for k, v in measures.items()}
        line = {"step": step, "time": round(time.time(), 3), "attempt": self._attempt, **numbers}
        self._waiting.append(json.dumps(line, allow_nan=False).encode() + b"\n")
        self.pulse()

    def pulse(self) -> None:
        """Writes out what has waited for a second; without anything to write, the file's time says: still moving."""
        if time.monotonic() - self._flushed < FLUSH_S:
            return
        if self._waiting:
            self.flush()
        else:
            os.utime(self._path)
            self._flushed = time.monotonic()

    def flush(self) -> None:
        """Writes out what waits. Raises OSError when the disk is full."""
        data = b"".join(self._waiting)
        while data:
            data = data[self._file.write(data) :]
        self._waiting.clear()
        self._flushed = time.monotonic()

    def sync(self) -> None:
        """Writes out what waits and makes it outlive the machine."""
        self.flush()
        self.persist()

    def persist(self) -> None:
        """Makes what is written outlive the machine; another thread may do so meanwhile."""
        os.fsync(self._file.fileno())

    def lines(self, after: int, upto: int) -> list[dict[str, Any]]:
        """The lines of the steps after one step up to another, as `write` was called; what waits is not among them."""
        mine = (line for _, line in whole_lines(self._path, LINE) if after < line["step"] <= upto)
        return [{name: value for name, value in line.items() if name not in ("time", "attempt")} for line in mine]

    def close(self) -> None:
        """Closes the file; what waits is written only by `flush`."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def note_event(folder: Path, attempt: int, event: str, **detail: Any) -> None:
    """Appends one line about what happened to a trial to its `events.jsonl`, synced."""
    line = {"time": round(time.time(), 3), "attempt": attempt, "event": event, **detail}
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def events(folder: Path) -> list[dict[str, Any]]:
    """What happened to a trial so far, in order."""
    return [line for _, line in whole_lines(folder / "events.jsonl", _HAPPENED)]
