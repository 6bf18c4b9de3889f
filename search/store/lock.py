"""One driver per study: a lock that names its holder and is freed, by kernel or server, when the holder dies; and one
of the whole store, so that what its runs are about to use stays."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.store.addresses import server_of, shown
from archlab.search.store.database import Database, StoreError
from archlab.search.utils.files import NO_JSON, lock_file

if TYPE_CHECKING:
    from archlab.search.store.postgres import PostgresLock

STUDY_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PATIENCE_S = 0.3  # a status probe holds the lock for microseconds; a driver holds it for hours


class StudyLocked(Exception):
    """Another driver runs this study. `holder` has host, pid and since (ISO 8601, UTC), or is empty."""

    def __init__(self, study: str, path: Path | str, holder: dict[str, Any]) -> None:
        self.study, self.path, self.holder = study, path, holder
        super().__init__(
            f"study '{study}' is already being run by {name_of(holder)} (lock: {path}); wait for it or stop it first"
        )


class StudyLost(StoreError):
    """The lock was lost with its connection, and another driver took the study."""


def name_of(holder: dict[str, Any]) -> str:
    """A lock's holder in words."""
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}" if holder else "another process"


def is_study_name(text: object) -> bool:
    """Whether a study may be called so; nothing else becomes a part of a path."""
    return isinstance(text, str) and bool(STUDY_NAME.fullmatch(text)) and ".." not in text


def lock_path(root: Path, study: str) -> Path:
    """The lock file of a study. Raises ValueError for a name that could leave the folder."""
    if not is_study_name(study):
        raise ValueError(
            f"study name {study!r}: 1 to 63 of a-z, 0-9, '.', '_', '-' are allowed, "
            "the first a letter or digit, without '..'"
        )
    return root / "locks" / f"{study}.lock"


def holder_of(root: Path, study: str, database: Database | None = None) -> dict[str, Any] | None:
    """Who runs the study now: {host, pid, since}, {} when unknown, None when nobody does.

    Where the trial table is on a server, so is the lock; `database` is a connection to it if the caller has one.
    """
    path = lock_path(root, study)
    if url := server_of(root):
        from archlab.search.store.postgres import READ_PATIENCE_S, Postgres, holder_in

        if isinstance(database, Postgres):
            return holder_in(database, study)
        with closing(Postgres(url, READ_PATIENCE_S)) as own:
            return holder_in(own, study)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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


def states_of(rows: Iterable[dict[str, Any]], holder_of: Callable[[str], object]) -> dict[str, str]:
    """State by trial; one that is `running` in the table and has no driver any more is `interrupted`: `holder_of` says
    who runs a study, None for nobody."""
    found = {row["key"]: row for row in rows}
    owners = {row["owner"] for row in found.values() if row["state"] == "running"}
    dead = {owner for owner in owners if owner is None or holder_of(owner) is None}
    return {
        key: "interrupted" if row["state"] == "running" and row["owner"] in dead else row["state"]
        for key, row in found.items()
    }


@contextmanager
def in_use(root: Path, alone: bool = False) -> Iterator[bool]:
    """Held by every run of a store, which waits for it. With `alone` it is had only while nobody else has it, without
    waiting; True when it was had."""
    (root / "locks").mkdir(mode=0o700, exist_ok=True)
    with lock_file(root / "locks" / ".in-use") as take:
        yield take() if alone else take(fcntl.LOCK_SH)


class StudyLock:
    """`with StudyLock(root, study):` owns the study, or raises StudyLocked within a second.

    It is a lock of the server that has the trial table, if one has; else of a file in the store. Either ends with the
    process, however that ends. The file is never removed: removing it would let two drivers lock two different files
    of one name.
    """

    def __init__(self, root: Path, study: str) -> None:
        self.study, self.path, self._root = study, lock_path(root, study), root
        self._held: _FileLock | PostgresLock | None = None

    @property
    def held(self) -> bool:
        """True between `acquire` and `release`."""
        return self._held is not None

    def acquire(self) -> None:
        """Takes the lock and writes who we are. Raises StudyLocked when another driver has it."""
        lock: _FileLock | PostgresLock
        where: Path | str = self.path
        if url := server_of(self._root):
            from archlab.search.store.postgres import PostgresLock

            lock, where = PostgresLock(url, self.study), shown(url)
        else:
            lock = _FileLock(self.path)
        holder = lock.acquire(_PATIENCE_S)
        if holder is not None:
            raise StudyLocked(self.study, where, holder)
        self._held = lock

    def check(self) -> None:
        """Waits for a server that is away. Raises StudyLost when another driver has had the study meanwhile.

        Ask before anything is committed or started, in the thread that took the lock.
        """
        if self._held is not None and not self._held.check():
            raise StudyLost(
                f"the connection that locked study '{self.study}' was lost, and somebody else has taken the study: "
                "nothing more is committed here; what is finished is safe"
            )

    def release(self) -> None:
        """Gives the lock back; harmless when it is not held."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def __enter__(self) -> StudyLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _FileLock:
    """An exclusive flock, which belongs to the open file and so to the process."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1

    def acquire(self, patience_s: float) -> dict[str, Any] | None:
        """None when it is ours now; else who holds it, {} when that is not known."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = _read(descriptor)
                    os.close(descriptor)
                    return holder
                time.sleep(0.02)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0
        )
        self._descriptor = descriptor
        return None

    def check(self) -> bool:
        """It can't be lost."""
        return True

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    """The holder as written in the file; {} when it has not been written yet or is not ours."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except NO_JSON:
        return {}
    return holder if isinstance(holder, dict) and {"host", "pid", "since"} <= holder.keys() else {}
