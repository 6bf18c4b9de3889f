"""The store on disk: its schema, its version, and its creation whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from search.lock import holder_of, name_of

VERSION = 2
BUSY_TIMEOUT_S = 60.0

_TRIAL = """(
  key TEXT PRIMARY KEY, spec TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('planned', 'running', 'paused', 'complete', 'pruned', 'failed', 'diverged')),
  attempt INTEGER NOT NULL DEFAULT 0, owner TEXT, reason TEXT, result TEXT, updated REAL NOT NULL)"""
_KEPT = """
CREATE TABLE decision (place TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, updated REAL NOT NULL,
  PRIMARY KEY (place, name)) WITHOUT ROWID;
CREATE TABLE memory (place TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, updated REAL NOT NULL,
  PRIMARY KEY (place, name)) WITHOUT ROWID;
"""
SCHEMA = f"""
CREATE TABLE study (
  name TEXT PRIMARY KEY, record TEXT NOT NULL, yaml TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL);
CREATE TABLE trial {_TRIAL};
CREATE TABLE study_trial (
  study TEXT NOT NULL REFERENCES study (name), key TEXT NOT NULL REFERENCES trial (key),
  variant TEXT NOT NULL, role TEXT NOT NULL CHECK (role IN ('tune', 'repeat', 'search')),
  settings TEXT NOT NULL, seed INTEGER NOT NULL, position INTEGER NOT NULL, orphaned INTEGER NOT NULL DEFAULT 0,
  until INTEGER,
  PRIMARY KEY (study, key, variant, role)) WITHOUT ROWID;
CREATE INDEX study_trial_key ON study_trial (key);
CREATE TABLE event (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, study TEXT, key TEXT, attempt INTEGER, kind TEXT NOT NULL,
  detail TEXT NOT NULL);
{_KEPT}"""
# from a version to the next; a table whose constraint changes is copied, as SQLite alters none
MIGRATIONS = {
    1: f"""
CREATE TABLE trial_2 {_TRIAL};
INSERT INTO trial_2 SELECT key, spec, state, attempt, owner, reason, result, updated FROM trial;
DROP TABLE trial;
ALTER TABLE trial_2 RENAME TO trial;
ALTER TABLE study_trial ADD COLUMN until INTEGER;
{_KEPT}"""
}


class StoreError(Exception):
    """The store can't be used; the message names the file and what to do."""


class StoreRefused(StoreError):
    """There is no such store or study, or a newer archlab made it: the same command will never work."""


class StoreFull(StoreError):
    """The disk under the store is full; what is committed is safe."""


def open_folder(root: Path, create: bool) -> Path:
    """Checks (or makes) a store folder and returns the path of its trial table. Raises StoreError."""
    marker, table = root / "store.json", root / "trials.db"
    if not marker.exists():
        if not create:
            raise StoreRefused(f"no store at {root}: run a study first, or name the right folder with --store")
        try:
            _create(root, marker, table)
        except OSError as error:
            raise _os_error(root, error) from error
    version = _version(marker)
    if not table.is_file():
        raise StoreError(
            f"{table} is missing though {marker} exists: put it back from a copy, or move {root} away and run again "
            "(finished trials lie in its trials/ folder)"
        )
    if version < VERSION:
        _migrate(table)
        write_whole(marker, json.dumps({"version": VERSION}) + "\n")
    return table


def connect(table: Path) -> sqlite3.Connection:
    """A connection that waits up to a minute for other writers.

    A commit survives the death of any process. A power cut may undo the newest commits, never half of one; then the
    result files, which are synced, are committed again.
    """
    with sqlite_errors(table):
        connection = sqlite3.connect(table, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
        except BaseException:
            connection.close()
            raise
    if found != VERSION:
        connection.close()
        raise StoreError(
            f"{table} is not a whole trial table (version {found}, expected {VERSION}): move it away, or restore a copy"
        )
    return connection


@contextmanager
def sqlite_errors(table: Path) -> Iterator[None]:
    """Says in the store's words what SQLite reports: locked, full, damaged."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "locked" in text or "busy" in text:
            raise StoreError(
                f"{table} is locked by another process for more than {BUSY_TIMEOUT_S:.0f} s: "
                "close the program that holds it (a backup or a database browser?) and run the same command again"
            ) from error
        if "full" in text or "disk I/O error" in text:
            raise StoreFull(
                f"{table} can't be written ({text}): free some space and run the same command again"
            ) from error
        raise StoreError(f"{table} can't be used ({text}): check that it is readable and writable for you") from error
    except sqlite3.IntegrityError:
        raise
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{table} is damaged ({error}): move it away or restore a copy; "
            "finished trials lie in the trials/ folder beside it"
        ) from error


def write_whole(path: Path, text: str, durable: bool = True) -> None:
    """Writes a file of mode 0600 so that readers see the old text or the new one. Raises OSError.

    Without `durable` a power cut may leave an empty file: for what can be written again.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _create(root: Path, marker: Path, table: Path) -> None:
    """Table first, marker last, both moved into place; a kill at any point leaves nothing or a part that is reused."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("locks", "trials"):
        (root / name).mkdir(mode=0o700, exist_ok=True)
    with open(os.open(root / "locks" / ".create", os.O_RDWR | os.O_CREAT, 0o600), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if marker.exists():
            return
        if not table.exists():
            temporary = root / ".trials.db.tmp"
            temporary.unlink(missing_ok=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with sqlite_errors(temporary):
                connection = sqlite3.connect(temporary)
                try:
                    connection.executescript(f"PRAGMA journal_mode = WAL; {SCHEMA} PRAGMA user_version = {VERSION};")
                finally:
                    connection.close()  # the last connection folds the log into the file
            os.replace(temporary, table)
        write_whole(marker, json.dumps({"version": VERSION}) + "\n")


def _migrate(table: Path) -> None:
    """Brings the table of an older version to this one, in one transaction."""
    with sqlite_errors(table):
        db = sqlite3.connect(table, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:  # foreign keys are off in a new connection, or the copied table would take its references with it
            db.execute("BEGIN IMMEDIATE")
            for (study,) in db.execute("SELECT name FROM study ORDER BY name").fetchall():
                if (holder := holder_of(table.parent, study)) is not None:
                    raise StoreError(
                        f"{table} is of an older version, and study '{study}' is being run by "
                        f"{name_of(holder)}: run this again when that has ended"
                    )
            version = db.execute("PRAGMA user_version").fetchone()[0]
            while version in MIGRATIONS:
                for statement in MIGRATIONS[version].split(";"):
                    db.execute(statement)
                version += 1
                db.execute(f"PRAGMA user_version = {version}")
            db.execute("COMMIT")
        finally:
            db.close()


def _version(marker: Path) -> int:
    """What the marker says. Raises StoreError where that is no version that can be read."""
    try:
        found = json.loads(marker.read_text())["version"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StoreError(f'{marker} can\'t be read ({error}): it should say {{"version": {VERSION}}}') from error
    if not isinstance(found, int) or found < 1:
        raise StoreError(f"{marker} says version {found!r}: it should be a whole number from 1 to {VERSION}")
    if found > VERSION:
        raise StoreRefused(
            f"{marker} says version {found}, this archlab supports up to {VERSION}: "
            "upgrade archlab or use another --store"
        )
    return found


def _os_error(root: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no space left to make a store at {root}: free some and run the same command again")
    return StoreError(f"can't make a store at {root}: {error.strerror or error}")
