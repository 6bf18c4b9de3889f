"""What the trial table needs of a database: to ask, and to change all or nothing. SQLite here, `postgres` beside it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

BUSY_TIMEOUT_S = 60.0

Found = list[dict[str, Any]]
T = TypeVar("T")


class StoreError(Exception):
    """The store can't be used; the message names the file or server and what to do."""


class StoreRefused(StoreError):
    """There is no such store or study, or a newer archlab made it: the same command will never work."""


class StoreFull(StoreError):
    """The disk under the store is full; what is committed is safe."""


class StoreAway(StoreError):
    """The database's server did not answer for as long as it is waited for; what is committed is safe."""


class Changes(Protocol):
    """A transaction. Values stand for the question marks of the SQL, which both databases understand."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Found:
        """What the statement returns, by column."""

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """The statement once per row of values."""


class Database(Protocol):
    """May be used by several threads and processes at once."""

    name: str  # of the file, or the server's address without its password

    def query(self, sql: str, values: Sequence[Any] = ()) -> Found:
        """Rows by column; nothing stays open. Raises StoreError."""

    def write(self, body: Callable[[Changes], T]) -> T:
        """`body(changes)` as one transaction, alone among writers from its start, so that what it reads still holds
        when it commits. It may be called again when the database went away meanwhile. Raises StoreError."""

    def close(self) -> None:
        """Closes the connections of all threads."""


class StoreDamaged(StoreError):
    """A database file that SQLite can't read."""


class Sqlite:
    """A table in a file. It waits up to a minute for other writers.

    A commit survives the death of any process. A power cut may undo the newest commits, never half of one; then the
    result files, which are synced, are committed again.
    """

    def __init__(self, path: Path, version: int) -> None:
        self.path, self.name, self._version = path, str(path), version
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    def query(self, sql: str, values: Sequence[Any] = ()) -> Found:
        with sqlite_errors(self.path):
            return _SqliteChanges(self._connection()).execute(sql, values)

    def write(self, body: Callable[[Changes], T]) -> T:
        """One transaction; the write lock is taken at its start."""
        with sqlite_errors(self.path):
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                found = body(_SqliteChanges(connection))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        return found

    def close(self) -> None:
        """Closes the connections of all threads."""
        while self._connections:
            self._connections.pop().close()
        self._local = threading.local()

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = connect(self.path, self._version)
            self._connections.append(connection)
        return connection


class _SqliteChanges:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Found:
        try:
            return [dict(row) for row in self._connection.execute(sql, values).fetchall()]
        except sqlite3.OperationalError as error:
            if "decode" not in str(error) or not sql.startswith("SELECT"):
                raise
        # a damaged row of a sound table: what is no UTF-8 is read as escapes, and the row fails its own checks
        self._connection.text_factory = lambda raw: raw.decode(errors="backslashreplace")
        return [dict(row) for row in self._connection.execute(sql, values).fetchall()]

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._connection.executemany(sql, rows)


def connect(path: Path, version: int) -> sqlite3.Connection:
    """A connection to a table of that version. Raises StoreError for one of another, sqlite3.Error for trouble."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        if (found := connection.execute("PRAGMA user_version").fetchone()[0]) != version:
            told = f"{path} is not a whole trial table (version {found}, expected {version})"
            raise StoreError(f"{told}: move it away, or restore a copy")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Says in the store's words what SQLite reports: locked, full, damaged."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "locked" in text or "busy" in text:
            raise StoreError(
                f"{path} is locked by another process for more than {BUSY_TIMEOUT_S:.0f} s: "
                "close the program that holds it (a backup or a database browser?) and run the same command again"
            ) from error
        if "full" in text or "disk I/O error" in text:
            raise StoreFull(
                f"{path} can't be written ({text}): free some space and run the same command again"
            ) from error
        raise StoreError(f"{path} can't be used ({text}): check that it is readable and writable for you") from error
    except sqlite3.IntegrityError as error:
        if "CHECK" not in str(error):
            raise
        # what archlab writes keeps to the rules that it made
        raise StoreDamaged(f"{path} is damaged (its rules are not archlab's: {error}): restore a copy") from error
    except sqlite3.DatabaseError as error:
        raise StoreDamaged(
            f"{path} is damaged ({error}): move it away or restore a copy; "
            "finished trials lie in the trials/ folder beside it"
        ) from error
