"""Makes a tracker's SQLite database whole or not at all: built aside under a lock, then moved into place.

Both trackers create their tables in dozens of migrations. Killed in the middle, or raced by a second process, that
leaves a file that neither can use again. Each has a file of its own, as both keep their version in a table of one name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

BUSY_TIMEOUT_S = 60


def create_whole(path: Path, make: Callable[[str], None]) -> None:
    """Unless `path` exists, lets `make(url)` build it beside its place, in WAL mode so that readers block no writer.

    Raises OSError and whatever `make` raises; then there is no file at `path`.
    """
    if path.exists():
        return
    guard = path.parent / "locks" / ".trackers"
    guard.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if path.exists():
            return
        temporary = path.with_name(f".{path.name}.tmp")
        for leftover in (*path.parent.glob(f"{temporary.name}*"), *path.parent.glob(f"{path.name}-*")):
            leftover.unlink()
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        make(f"sqlite:///{temporary}")
        connection = sqlite3.connect(temporary)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()  # the last connection folds the log into the file
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)


def open_optuna(store_root: Path) -> RDBStorage:
    """The Optuna storage of a store, made first where there is none."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    path = Path(store_root).absolute() / "optuna.db"
    create_whole(path, _make_optuna)
    return _optuna_storage(f"sqlite:///{path}")


def _optuna_storage(url: str) -> RDBStorage:
    from optuna.storages import RDBStorage

    return RDBStorage(url, engine_kwargs={"connect_args": {"timeout": BUSY_TIMEOUT_S}})


def _make_optuna(url: str) -> None:
    storage = _optuna_storage(url)
    storage.remove_session()
    storage.engine.dispose()
