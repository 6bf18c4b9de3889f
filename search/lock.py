"""One driver per study: an exclusive flock whose file names the holder, freed by the kernel when the holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

STUDY_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PATIENCE_S = 0.3  # a status probe holds the lock for microseconds; a driver holds it for hours


class StudyLocked(Exception):
    """Another driver runs this study. `holder` has host, pid and since (ISO 8601, UTC), or is empty."""

    def __init__(self, study: str, path: Path, holder: dict[str, Any]) -> None:
        self.study, self.path, self.holder = study, path, holder
        super().__init__(
            f"study '{study}' is already being run by {name_of(holder)} (lock: {path}); wait for it or stop it first"
        )


def name_of(holder: dict[str, Any]) -> str:
    """A lock's holder in words."""
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}" if holder else "another process"


def lock_path(root: Path, study: str) -> Path:
    """The lock file of a study. Raises ValueError for a name that could leave the folder."""
    if not STUDY_NAME.fullmatch(study) or ".." in study:
        raise ValueError(
            f"study name {study!r}: 1 to 63 of a-z, 0-9, '.', '_', '-' are allowed, "
            "the first a letter or digit, without '..'"
        )
    return root / "locks" / f"{study}.lock"


def holder_of(root: Path, study: str) -> dict[str, Any] | None:
    """Who runs the study now: {host, pid, since}, {} when unknown, None when nobody does."""
    try:
        descriptor = os.open(lock_path(root, study), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


class StudyLock:
    """`with StudyLock(root, study):` owns the study, or raises StudyLocked within a second.

    The file is never removed: removing it would let two drivers lock two different files of one name. The lock
    belongs to the open file, so it ends with the process, however that ends.
    """

    def __init__(self, root: Path, study: str) -> None:
        self.study, self.path = study, lock_path(root, study)
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """True between `acquire` and `release`."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Takes the lock and writes who we are. Raises StudyLocked when another driver has it."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = _read(descriptor)
                    os.close(descriptor)
                    raise StudyLocked(self.study, self.path, holder) from None
                time.sleep(0.02)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0
        )
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the lock back; harmless when it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> StudyLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _read(descriptor: int) -> dict[str, Any]:
    """The holder as written in the file; {} when it has not been written yet or is not ours."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and {"host", "pid", "since"} <= holder.keys() else {}
