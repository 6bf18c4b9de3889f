"""Makes a tracker's database whole or not at all: built aside under a lock, then moved into place.

Both trackers create their tables in dozens of migrations. Killed in the middle, or raced by a second process, that
leaves a file that neither can use again. Each has a file of its own, as both keep their version in a table of one name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.store.addresses import server_of

if TYPE_CHECKING:
    import psycopg
    from optuna.storages import RDBStorage

BUSY_TIMEOUT_S = 60
OPTUNA_SCHEMA = "archlab_optuna"  # where the trial table is on a server, Optuna's tables are there too


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
        with closing(sqlite3.connect(temporary)) as connection:  # the last one to close folds the log into the file
            connection.execute("PRAGMA journal_mode = WAL")
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def open_optuna(store_root: Path) -> RDBStorage:
    """The Optuna storage of a store, made first where there is none."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    root = Path(store_root).absolute()
    if url := server_of(root):
        _create_on_server(url)
        return _storage_on_server(url, OPTUNA_SCHEMA)
    path = root / "optuna.db"
    create_whole(path, lambda url: close_optuna(_optuna_storage(url)))
    return _optuna_storage(f"sqlite:///{path}")


def has_optuna(store_root: Path) -> bool:
    """Whether a store has Optuna's tables."""
    if url := server_of(store_root):
        from archlab.search.store.postgres import Postgres

        with closing(Postgres(url)) as server:
            return bool(server.query("SELECT to_regnamespace(?) IS NOT NULL AS there", (OPTUNA_SCHEMA,))[0]["there"])
    return (store_root / "optuna.db").exists()


def _optuna_storage(url: str) -> RDBStorage:
    from optuna.storages import RDBStorage

    return RDBStorage(url, engine_kwargs={"connect_args": {"timeout": BUSY_TIMEOUT_S}})


def _storage_on_server(url: str, schema: str) -> RDBStorage:
    """The address with its password goes to the driver alone: what Optuna knows of it, it may repeat in an error."""
    from optuna.storages import RDBStorage

    from archlab.search.store.postgres import options_of

    address = options_of(url)
    address["options"] = f"{address.get('options') or ''} -c search_path={schema}".strip()
    return RDBStorage("postgresql+psycopg://", engine_kwargs={"connect_args": address, "pool_pre_ping": True})


def _create_on_server(url: str) -> None:
    """A schema of another name, renamed when it is whole."""
    from archlab.search.store.postgres import Postgres, key_of

    def make(connection: psycopg.Connection[dict[str, Any]]) -> None:
        there = "SELECT to_regnamespace(%s) IS NOT NULL AS there"
        held = [key_of("optuna")]
        if connection.execute(there, [OPTUNA_SCHEMA]).fetchall()[0]["there"]:
            return
        connection.execute("SELECT pg_advisory_lock(%s)", held)
        try:
            if not connection.execute(there, [OPTUNA_SCHEMA]).fetchall()[0]["there"]:
                connection.execute(f"DROP SCHEMA IF EXISTS {OPTUNA_SCHEMA}_new CASCADE")
                connection.execute(f"CREATE SCHEMA {OPTUNA_SCHEMA}_new")
                close_optuna(_storage_on_server(url, f"{OPTUNA_SCHEMA}_new"))
                connection.execute(f"ALTER SCHEMA {OPTUNA_SCHEMA}_new RENAME TO {OPTUNA_SCHEMA}")
        finally:
            if not connection.closed:
                connection.execute("SELECT pg_advisory_unlock(%s)", held)

    with closing(Postgres(url)) as server:
        server.lasting(make)


def close_optuna(storage: RDBStorage) -> None:
    """Ends the connections of a storage."""
    storage.remove_session()
    storage.engine.dispose()
