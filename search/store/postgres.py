"""The trial table on a PostgreSQL server: waits out a restart, commits once, and frees the locks of the dead.

Needs `psycopg` (the extra `postgres`), which is imported when the first connection is made.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from archlab.search.store.addresses import UNREADABLE, shown
from archlab.search.store.database import Changes, Found, StoreAway, StoreError, StoreFull, StoreRefused

if TYPE_CHECKING:
    import psycopg

SCHEMA = "archlab"
PATIENCE_S = 120.0  # for a server that restarts
READ_PATIENCE_S = 5.0  # of commands that only look
BUSY_TIMEOUT_S = 60
RETURN_S = 15.0
LONGEST_WAIT_S = 5.0
# Who vanishes without a word (a host lost power, a cable was cut) is given up by the other side after 25 s: by us, who
# then ask again, and by the server, who then frees our locks. TCP alone would wait for a quarter of an hour.
_VANISHED = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 25_000}
# One that was suspended inside a transaction blocks the others for a minute.
_SESSION = (
    f"SELECT set_config('search_path', '{SCHEMA}', false), set_config('lock_timeout', '{BUSY_TIMEOUT_S}s', false), "
    "set_config('idle_in_transaction_session_timeout', '60s', false), set_config('tcp_keepalives_idle', '10', false), "
    "set_config('tcp_keepalives_interval', '5', false), set_config('tcp_keepalives_count', '3', false), "
    "set_config('tcp_user_timeout', '25s', false)"
)
_ENDED = ("08", "57P", "25P03")  # the states in which the server has ended the session
_PASSING = ("starting up", "shutting down", "recovery", "too many clients", "connection slots", "consistent")

_log = logging.getLogger("archlab.store")
T = TypeVar("T")


def connect(url: str) -> psycopg.Connection[dict[str, Any]]:
    """A connection of its own, without a transaction open. Raises psycopg.Error, StoreRefused for what is no URL."""
    library = _psycopg()
    try:
        if shown(url) == UNREADABLE:  # errors of the library would tell parts of it
            raise library.ProgrammingError
        how = options_of(url)
    except library.ProgrammingError:  # its text repeats the URL
        raise StoreRefused(
            f"{shown(url)} is no address of PostgreSQL: postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with % for "
            "special characters of the password"
        ) from None
    connection: psycopg.Connection[dict[str, Any]] = library.connect(
        autocommit=True, row_factory=library.rows.dict_row, fallback_application_name="archlab", **how
    )
    try:
        connection.execute(_SESSION)
    except BaseException:
        connection.close()
        raise
    return connection


def options_of(url: str) -> dict[str, Any]:
    """What a URL says for the library, and how long to wait where it does not say. Raises psycopg.ProgrammingError."""
    return {"connect_timeout": 5, **_VANISHED, **_psycopg().conninfo.conninfo_to_dict(url)}


class Postgres:
    """A schema of a server's database. Each thread has a connection of its own."""

    def __init__(self, url: str, patience_s: float | None = None) -> None:
        self._url, self.name = url, shown(url)
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._local = threading.local()
        self._connections: list[psycopg.Connection[dict[str, Any]]] = []
        weakref.finalize(self, _close, self._connections)  # one that is forgotten leaves no session on the server

    def query(self, sql: str, values: Sequence[Any] = ()) -> Found:
        return self.lasting(lambda connection: _PostgresChanges(connection).execute(sql, values))

    def write(self, body: Callable[[Changes], T]) -> T:
        """One transaction at a time. Where the server went away while it committed, it is asked which way that went."""
        unsure: list[tuple[str, T]] = []

        def attempt(connection: psycopg.Connection[dict[str, Any]]) -> T:
            if unsure:
                number, found = unsure[-1]
                if _committed(connection, number):
                    return found
                unsure.clear()
            changes = _PostgresChanges(connection)
            with connection.transaction():
                begun = changes.execute(
                    "SELECT pg_advisory_xact_lock(?), pg_current_xact_id()::text AS number", (key_of("write"),)
                )
                found = body(changes)
                unsure.append((begun[0]["number"], found))
            return found

        return self.lasting(attempt)

    def lasting(self, attempt: Callable[[psycopg.Connection[dict[str, Any]]], T]) -> T:
        """`attempt(connection)`, again with another connection while the server is away. Raises StoreError."""
        psycopg = _psycopg()
        deadline, wait_s = time.monotonic() + self._patience_s, 0.05
        told = False
        while True:
            try:
                return attempt(self._connection())
            except psycopg.IntegrityError:
                raise
            except psycopg.Error as error:
                away = self._is_away(error)
                if not away and error.sqlstate != "40P01":  # deadlock: the other one goes first
                    raise _in_words(self.name, error) from error
                if time.monotonic() + wait_s > deadline:
                    raise StoreAway(
                        f"{self.name} has not answered for {self._patience_s:.0f} s ({_brief(error)}): "
                        "nothing is lost; run the same command again when the server is back"
                    ) from error
                if not told and wait_s > 0.05:
                    _log.warning("waiting for %s: %s", self.name, _brief(error))
                    told = True
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def close(self) -> None:
        _close(self._connections)
        self._local = threading.local()

    def _connection(self) -> psycopg.Connection[dict[str, Any]]:
        connection: psycopg.Connection[dict[str, Any]] | None = getattr(self._local, "connection", None)
        if connection is None or connection.closed:
            connection = self._local.connection = connect(self._url)
            self._connections[:] = [each for each in self._connections if not each.closed] + [connection]
        return connection

    def _is_away(self, error: psycopg.Error) -> bool:
        """Whether another connection may help. A server that was reached and refuses us will go on doing so."""
        connection = getattr(self._local, "connection", None)
        if connection is not None and (error.sqlstate or "").startswith(_ENDED):
            connection.close()  # it may not know yet
        if connection is not None and connection.closed:
            return True
        if connection is not None and error.sqlstate is not None:
            return False
        if not isinstance(error, _psycopg().OperationalError):
            return False
        return "FATAL" not in str(error) or any(word in str(error) for word in _PASSING)


class _PostgresChanges:
    def __init__(self, connection: psycopg.Connection[dict[str, Any]]) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Found:
        cursor = self._connection.execute(_own(sql), [_storable(value) for value in values])
        return cursor.fetchall() if cursor.description else []

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_own(sql), [[_storable(value) for value in row] for row in rows])


class PostgresLock:
    """A session's advisory lock: the server frees it when the connection ends, however that ends.

    The table `holder` says whose it is, with a token by which one who lost it for a moment knows that nobody else had
    it meanwhile. When the server itself was restarted, whoever had the lock has some seconds to come back for it.
    """

    def __init__(self, url: str, name: str) -> None:
        self._url, self.name, self._token = url, name, secrets.token_hex(16)
        self._database: Postgres | None = None
        self._holding: psycopg.Connection[dict[str, Any]] | None = None

    def acquire(self, patience_s: float) -> dict[str, Any] | None:
        """None when it is ours now; else who holds it, {} when that is not known, after `patience_s`."""
        self._database = Postgres(self._url)
        deadline = time.monotonic() + patience_s
        while not self._database.lasting(self._take):
            if time.monotonic() > deadline:
                rows = self._database.query("SELECT host, pid, since FROM holder WHERE name = ?", (self.name,))
                self._database.close()
                self._database = None
                return rows[0] if rows else {}
            time.sleep(0.05)
        mine = (self.name, socket.gethostname(), os.getpid(), now(), self._token)
        self._database.query(
            "INSERT INTO holder (name, host, pid, since, token) VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
            "SET host = excluded.host, pid = excluded.pid, since = excluded.since, token = excluded.token",
            mine,
        )
        return None

    def check(self) -> bool:
        """Whether it is still ours; taken again after the server went away, if nobody else had it in between."""
        database = self._database
        if database is None:
            return False
        deadline = time.monotonic() + PATIENCE_S
        while not database.lasting(self._hold):
            rows = database.query("SELECT token FROM holder WHERE name = ?", (self.name,))
            # with our token there, it is our own dead session that the server has not given up yet
            if not rows or rows[0]["token"] != self._token or time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        rows = database.query("SELECT token FROM holder WHERE name = ?", (self.name,))
        return bool(rows) and rows[0]["token"] == self._token

    def release(self) -> None:
        """Gives it back; where the server is away it has done so itself."""
        if self._database is not None:
            self._database._patience_s = 0.0
            with suppress(StoreError):
                self._database.query("DELETE FROM holder WHERE name = ? AND token = ?", (self.name, self._token))
            self._database.close()
            self._database = None

    def _take(self, connection: psycopg.Connection[dict[str, Any]]) -> bool:
        key, changes = key_of(f"lock {self.name}"), _PostgresChanges(connection)
        self._holding = None
        if not changes.execute("SELECT pg_try_advisory_lock(?) AS got", (key,))[0]["got"]:
            return False
        before = changes.execute(
            "SELECT host, pid, clock_timestamp() - pg_postmaster_start_time() < make_interval(secs => ?) AS young "
            "FROM holder WHERE name = ? AND token <> ?",
            (RETURN_S, self.name, self._token),
        )
        if before and before[0]["young"] and _may_live(before[0]["host"], before[0]["pid"]):
            changes.execute("SELECT pg_advisory_unlock(?)", (key,))
            return False
        self._holding = connection
        return True

    def _hold(self, connection: psycopg.Connection[dict[str, Any]]) -> bool:
        """On the connection that has it, it is enough that this one lives; it would be counted twice otherwise."""
        if connection is self._holding:
            connection.execute("SELECT 1")
            return True
        return self._take(connection)


def _may_live(host: str, pid: int) -> bool:
    """Whether a process may still be there: known on this host only."""
    return host != socket.gethostname() or Path(f"/proc/{pid}").exists() or not Path("/proc").exists()


def holder_in(database: Postgres, name: str) -> dict[str, Any] | None:
    """Who holds the lock of that name: {host, pid, since}, {} when unknown, None when nobody does."""
    key = key_of(f"lock {name}") % 2**64
    rows = database.query(
        "SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted "
        "AND classid::bigint = ? AND objid::bigint = ? "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS held, "
        "host, pid, since FROM (SELECT 1) AS one LEFT JOIN holder ON name = ?",
        (key >> 32, key % 2**32, name),
    )
    (row,) = rows
    if not row.pop("held"):
        return None
    return row if row["host"] is not None else {}


def key_of(what: str) -> int:
    """The number by which PostgreSQL knows a lock of ours: 64 bits, signed."""
    return int.from_bytes(hashlib.sha256(f"archlab {what}".encode()).digest()[:8], "big", signed=True)


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _close(connections: list[psycopg.Connection[dict[str, Any]]]) -> None:
    while connections:
        connections.pop().close()


def _committed(connection: psycopg.Connection[dict[str, Any]], number: str) -> bool:
    """Whether a transaction whose answer was lost has been committed; one that is under way is waited for."""
    while True:
        try:
            row = connection.execute("SELECT pg_xact_status(%s::xid8) AS status", [number]).fetchone()
        except _psycopg().errors.InvalidParameterValue:  # a server that crashed has forgotten that it began
            return False
        if row is None or row["status"] != "in progress":
            return row is not None and row["status"] == "committed"
        time.sleep(0.05)


def _own(sql: str) -> str:
    """The SQL with this database's placeholders; ours has no other question mark or percent sign."""
    return sql.replace("?", "%s")


def _storable(value: Any) -> Any:
    """Text without the one character that PostgreSQL does not store; JSON writes it as an escape."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value


def _in_words(name: str, error: psycopg.Error) -> StoreError:
    """What the server reports, in the store's words."""
    state, brief = error.sqlstate or "", _brief(error)
    if state.startswith("53") and state != "53300":
        return StoreFull(f"{name} can't be written ({brief}): free some space there and run the same command again")
    if state == "55P03":
        return StoreError(
            f"{name} is locked by another session for more than {BUSY_TIMEOUT_S} s: "
            "close the program that holds it and run the same command again"
        )
    if state in ("42P01", "3F000", "42703"):
        return StoreError(f"{name} has no whole trial table ({brief}): restore a copy of its schema {SCHEMA}")
    if state.startswith(("28", "3D", "42501")) or "FATAL" in brief:
        return StoreRefused(f"{name} refuses us ({brief}): check the address and the rights of its user")
    return StoreError(f"{name} can't be used ({brief})")


def _brief(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _psycopg() -> Any:
    try:
        import psycopg
        import psycopg.conninfo
        import psycopg.rows
    except ImportError as error:
        raise StoreRefused(
            "a trial table on PostgreSQL needs psycopg, which is not installed: install archlab's extra `postgres`"
        ) from error
    return psycopg
