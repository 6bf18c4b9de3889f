"""Writes a trial's checkpoints in a thread, from a copy of its state: training waits for the copy alone.

At most one is being written. One that falls due meanwhile is taken when the writer is free, so that there is never
more than one copy, and what is written then is newer. The thread lives as long as its write: whoever has finished has
none, and may fork or exit.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from archlab.search.hardware import low_memory
from archlab.search.hardware.facts import usable_cores
from archlab.search.trial import checkpoint
from archlab.search.trial.pace import Pace
from archlab.search.trial.snapshot import Snapshot, bytes_of
from archlab.search.utils.files import whole_lines
from archlab.search.utils.shapes import Check, count, mapping, number

FILE = "checkpoints.jsonl"
"""Its name in a trial's folder: a line for each checkpoint, with what it cost."""
_LINE: Check = mapping({"waited_s": number, "writing_s": number, "bytes": count})


@dataclass
class _Write:
    """A checkpoint on its way: seconds that training waited, those of the thread, and how it ended."""

    folder: Path
    step: int
    keep: int
    persist: Callable[[], None]
    snapshot: Snapshot | None = None
    beside: bool = False  # written by the thread
    waited_s: float = 0.0
    writing_s: float = 0.0
    stolen_s: float = 0.0  # of them, those in which the thread computed
    size: int = 0
    error: BaseException | None = None

    def run(self) -> None:
        """What the thread does."""
        began, computed = time.perf_counter(), time.thread_time()
        try:
            assert self.snapshot is not None
            self.waited_s += self.snapshot.ready()
            self.write(self.snapshot.state)
        except BaseException as error:  # it belongs to the thread that trains, which raises it
            self.error = error
        self.snapshot = None
        self.writing_s, self.stolen_s = time.perf_counter() - began, time.thread_time() - computed

    def write(self, state: dict[str, Any]) -> None:
        """Writes a state, after what has to be on the disk before it. Raises OSError."""
        self.persist()
        self.size = checkpoint.save(self.folder, self.step, state, self.keep).stat().st_size


class Writer:
    """The checkpoints of one attempt at a trial. With `with` all of them are written at the end, whatever it is.

    Every method but `finish_quietly` raises what the write before ended with: OSError when the disk is full.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        self.pace = Pace()
        self._folder, self._attempt = folder, attempt
        self._write: _Write | None = None
        self._thread: threading.Thread | None = None
        self._said = False
        self._largest = self._peak_before = 0  # bytes: the largest copy, and the process at most before the first one

    def due(self) -> bool:
        """Whether a checkpoint is to be taken now: the time has come, and none is being written."""
        if self._thread is not None:
            if self._thread.is_alive() and not self.pace.every_step:
                return False
            self.finish()
        return self.pace.due()

    def put(
        self,
        folder: Path,
        step: int,
        state: dict[str, Any],
        persist: Callable[[], None],
        *,
        began: float,
        keep: int = 2,
        now: bool = False,
    ) -> None:
        """Takes a checkpoint after the one before is written; `now`: returns when it is written.

        `persist` is called before the write, and by its thread: it makes lasting what the checkpoint relies on. What
        training waits for is counted from `began`, a time of `perf_counter`.
        """
        self.finish()
        write = _Write(folder, step, keep, persist)
        write.snapshot = None if now or self.pace.every_step else self._copied(state)
        write.beside = write.snapshot is not None
        if not write.beside:
            start = time.perf_counter()
            write.write(state)
            write.writing_s = time.perf_counter() - start
        self._write, write.waited_s = write, time.perf_counter() - began
        if write.beside:
            thread = threading.Thread(target=write.run, name="checkpoint", daemon=True)
            thread.start()
            self._thread = thread
        else:
            self._note(write)
        if folder == self._folder:
            self.pace.begins_anew()

    def _copied(self, state: dict[str, Any]) -> Snapshot | None:
        """A copy, None without the memory for one."""
        size = bytes_of(state)
        self._peak_before = self._peak_before or low_memory.peak()
        if low_memory.has_room(size):
            try:
                found = Snapshot(state)
            except (RuntimeError, MemoryError) as error:
                if not isinstance(error, MemoryError) and "memory" not in str(error):
                    raise
            else:
                self._largest = max(self._largest, size)
                return found
        if not self._said:
            print(f"training waits for its checkpoints: no memory for a copy of {size / 1e6:,.0f} MB", file=sys.stderr)
            self._said = True
        return None

    def finish(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is None or self._write is None:
            return
        self._thread.join()
        self._thread, write = None, self._write
        if write.error is not None:
            raise write.error
        self._note(write)

    def finish_quietly(self) -> None:
        """The same, whatever became of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _note(self, write: _Write) -> None:
        """Has the pace follow from it, and leaves a line."""
        if write.folder == self._folder:
            no_core_free = write.beside and usable_cores() <= torch.get_num_threads()
            self.pace.note(write.waited_s + (write.stolen_s if no_core_free else 0.0))
        told = {"waited_s": round(write.waited_s, 4), "writing_s": round(write.writing_s, 4), "bytes": write.size}
        line = {"time": round(time.time(), 3), "attempt": self._attempt, "step": write.step, **told}
        with (self._folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def without_copies(self, peak: int) -> int:
        """Bytes that a process took at most, of its `peak` those that copies of the state did not.

        At least those that it took before the first copy; exact where it takes as much in every step.
        """
        return max(self._peak_before, peak - self._largest) if self._largest else peak

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):
            self.finish()
        else:
            self.finish_quietly()


def spent(folder: Path) -> dict[str, float]:
    """What the checkpoints of a trial cost so far, in all attempts: {"count", "waited_s" (seconds that training waited
    for them), "writing_s" (seconds that writing took, most of them beside training), "bytes"}."""
    lines = [line for _, line in whole_lines(folder / FILE, _LINE)]
    sums = {name: sum(line[name] for line in lines) for name in ("waited_s", "writing_s", "bytes")}
    return {"count": len(lines)} | {name: round(value, 3) for name, value in sums.items()}
