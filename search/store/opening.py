"""The store on disk or on a server: its schema, its version, and its creation whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from archlab.search.store import database
from archlab.search.store.addresses import DATABASE, address, server_of
from archlab.search.store.database import Changes, Database, Sqlite, StoreError, StoreFull, StoreRefused, sqlite_errors
from archlab.search.store.lock import holder_of, name_of
from archlab.search.utils.files import NO_JSON, write_whole
from archlab.search.utils.untrusted import read_regular

VERSION = 3

_TRIAL = """(
  key TEXT PRIMARY KEY, spec TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('planned', 'running', 'paused', 'complete', 'pruned', 'failed', 'diverged')),
  attempt BIGINT NOT NULL DEFAULT 0, owner TEXT, reason TEXT, result TEXT, updated DOUBLE PRECISION NOT NULL)"""
_ROLES = "CHECK (role IN ('tune', 'repeat', 'search', 'screen'))"
_MEMBER = f"""(
  study TEXT NOT NULL REFERENCES study (name), key TEXT NOT NULL REFERENCES trial (key),
  variant TEXT NOT NULL, role TEXT NOT NULL {_ROLES},
  settings TEXT NOT NULL, seed BIGINT NOT NULL, position BIGINT NOT NULL, orphaned BIGINT NOT NULL DEFAULT 0,
  until BIGINT,
  PRIMARY KEY (study, key, variant, role))"""
_KEPT = """
CREATE TABLE decision (place TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
  updated DOUBLE PRECISION NOT NULL, PRIMARY KEY (place, name));
CREATE TABLE memory (place TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
  updated DOUBLE PRECISION NOT NULL, PRIMARY KEY (place, name));
"""
# one text for both databases, but for how a row gets its number
SCHEMA = f"""
CREATE TABLE study (name TEXT PRIMARY KEY, record TEXT NOT NULL, yaml TEXT NOT NULL,
  created DOUBLE PRECISION NOT NULL, updated DOUBLE PRECISION NOT NULL);
CREATE TABLE trial {_TRIAL};
CREATE TABLE study_trial {_MEMBER};
CREATE INDEX study_trial_key ON study_trial (key);
CREATE TABLE event (
  id NUMBERED, time DOUBLE PRECISION NOT NULL, study TEXT, key TEXT, attempt BIGINT, kind TEXT NOT NULL,
  detail TEXT NOT NULL);
CREATE INDEX event_study ON event (study, kind);
{_KEPT}"""
_SQLITE_NUMBERED = "INTEGER PRIMARY KEY"
# from a version to the next; a table whose constraint changes is copied, as SQLite alters none
MIGRATIONS = {
    1: f"""
CREATE TABLE trial_2 {_TRIAL};
INSERT INTO trial_2 SELECT key, spec, state, attempt, owner, reason, result, updated FROM trial;
DROP TABLE trial;
ALTER TABLE trial_2 RENAME TO trial;
ALTER TABLE study_trial ADD COLUMN until BIGINT;
CREATE INDEX event_study ON event (study, kind);
{_KEPT}""",
    2: f"""
CREATE TABLE study_trial_3 {_MEMBER};
INSERT INTO study_trial_3 SELECT study, key, variant, role, settings, seed, position, orphaned, until FROM study_trial;
DROP TABLE study_trial;
ALTER TABLE study_trial_3 RENAME TO study_trial;
CREATE INDEX study_trial_key ON study_trial (key)""",
}
_SERVER_MIGRATION = f"""
ALTER TABLE study_trial DROP CONSTRAINT IF EXISTS study_trial_role_check;
ALTER TABLE study_trial ADD CONSTRAINT study_trial_role_check {_ROLES};
UPDATE store SET version = {VERSION}"""  # from version 2, the first one on a server
# what only a server has: which folder it belongs to, who runs a study, and what trackers have acknowledged
_SERVER_ONLY = """
CREATE TABLE store (id TEXT NOT NULL, version BIGINT NOT NULL, folder TEXT NOT NULL);
CREATE TABLE holder (name TEXT PRIMARY KEY, host TEXT NOT NULL, pid BIGINT NOT NULL, since TEXT NOT NULL,
  token TEXT NOT NULL);
CREATE TABLE shipped (
  target TEXT NOT NULL, study TEXT NOT NULL, key TEXT NOT NULL, place TEXT, position TEXT NOT NULL, told TEXT NOT NULL,
  PRIMARY KEY (target, study, key));
"""


def open_database(root: Path, create: bool) -> Database:
    """The trial table of a store folder, checked, made (if `create`) or brought to this version. Raises StoreError."""
    marker, table = root / "store.json", root / "trials.db"
    url = address(root, DATABASE)
    if not marker.exists():
        if not create:
            raise StoreRefused(f"no store at {root}: run a study first, or name the right folder with --store")
        if url is not None and table.exists():
            raise _other_kind(root)
        try:
            _create(root, marker, table, url)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                told = f"no space left to make a store at {root}: free some and run the same command again"
                raise StoreFull(told) from error
            raise StoreError(f"can't make a store at {root}: {error.strerror or error}") from error
    version = _version(marker)
    if server := server_of(root):
        return _open_server(root, server, create)
    if url is not None:
        raise _other_kind(root)
    if not table.is_file():
        raise StoreError(
            f"{table} is missing though {marker} exists: put it back from a copy, or move {root} away and run again "
            "(finished trials lie in its trials/ folder)"
        )
    if version < VERSION:
        _migrate(table)
        write_whole(marker, json.dumps({"version": VERSION}) + "\n")
    return Sqlite(table, VERSION)


def _open_server(root: Path, url: str, create: bool) -> Database:
    from archlab.search.store.postgres import PATIENCE_S, READ_PATIENCE_S, Postgres

    server = Postgres(url, PATIENCE_S if create else READ_PATIENCE_S)
    rows = server.query("SELECT id, version, folder FROM store")
    found = rows[0] if rows else None
    marker: dict[str, Any] = json.loads((root / "store.json").read_text())
    if found is None or found["id"] != marker.get("id"):
        server.close()
        whose = f"belongs to the store at {found['folder']}" if found else "has no store"
        raise StoreRefused(f"{server.name} {whose}, and not to {root}: each store has a database of its own")
    if found["version"] > VERSION:
        server.close()
        raise StoreRefused(
            f"{server.name} says version {found['version']}, this archlab supports up to {VERSION}: upgrade archlab "
            "or use another --store"
        )
    if create and found["version"] < VERSION:  # who only reads needs no more rights than that
        server.write(lambda changes: [changes.execute(each) for each in _SERVER_MIGRATION.split(";")][-1])
        write_whole(root / "store.json", json.dumps(marker | {"version": VERSION}) + "\n")
    return server


def _create(root: Path, marker: Path, table: Path, url: str | None) -> None:
    """Table first, marker last, both moved into place; a kill at any point leaves nothing or a part that is reused."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("locks", "trials"):
        (root / name).mkdir(mode=0o700, exist_ok=True)
    with open(os.open(root / "locks" / ".create", os.O_RDWR | os.O_CREAT, 0o600), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if marker.exists():
            return
        says: dict[str, Any] = {"version": VERSION}
        if url is not None:
            says |= {"database": "postgresql", "id": create_on_server(root, url)}
        elif not table.exists():
            _create_table(root, table)
        write_whole(marker, json.dumps(says) + "\n")


def _create_table(root: Path, table: Path) -> None:
    temporary = root / ".trials.db.tmp"
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    schema = SCHEMA.replace("NUMBERED", _SQLITE_NUMBERED)
    # the last connection, when it is closed, folds the log into the file
    with sqlite_errors(temporary), closing(sqlite3.connect(temporary)) as connection:
        connection.executescript(f"PRAGMA journal_mode = WAL; {schema} PRAGMA user_version = {VERSION};")
    os.replace(temporary, table)


def create_on_server(root: Path, url: str) -> str:
    """Makes our schema in one transaction and returns its id. One that is there is taken if it is ours or empty."""
    from archlab.search.store.postgres import SCHEMA as NAME
    from archlab.search.store.postgres import Postgres

    def make(changes: Changes) -> dict[str, Any]:
        if changes.execute("SELECT to_regclass(?) AS there", (f"{NAME}.store",))[0]["there"] is None:
            if not changes.execute("SELECT 1 FROM pg_namespace WHERE nspname = ?", (NAME,)):
                changes.execute(f"CREATE SCHEMA {NAME}")
            numbered = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
            # bytes in order, as in SQLite: the same rows come in the same order
            schema = (SCHEMA + _SERVER_ONLY).replace(" TEXT", ' TEXT COLLATE "C"').replace("NUMBERED", numbered)
            for statement in filter(str.strip, schema.split(";")):
                changes.execute(statement)
            mine = (secrets.token_hex(16), VERSION, str(root))
            changes.execute("INSERT INTO store (id, version, folder) VALUES (?, ?, ?)", mine)
        return changes.execute("SELECT id, folder, (SELECT count(*) FROM study) AS studies FROM store")[0]

    with closing(Postgres(url)) as server:
        found = server.write(make)
    if found["folder"] != str(root) and found["studies"]:
        raise StoreRefused(
            f"{server.name} belongs to the store at {found['folder']}, and not to {root}: name that folder with "
            "--store where it is shared, or give this one a database of its own"
        )
    return str(found["id"])


def _migrate(table: Path) -> None:
    """Brings the table of an older version to this one, in one transaction."""
    with sqlite_errors(table):
        opened = sqlite3.connect(table, timeout=database.BUSY_TIMEOUT_S, isolation_level=None)
        with closing(opened) as db:  # foreign keys are off, or the copied table would take its references with it
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


def _version(marker: Path) -> int:
    """What the marker says. Raises StoreError where that is no version that can be read."""
    try:
        found = json.loads(read_regular(marker))["version"]
    except (*NO_JSON, KeyError, TypeError, OSError) as error:
        raise StoreError(f'{marker} can\'t be read ({error}): it should say {{"version": {VERSION}}}') from error
    if not isinstance(found, int) or found < 1:
        raise StoreError(f"{marker} says version {found!r}: it should be a whole number from 1 to {VERSION}")
    if found > VERSION:
        raise StoreRefused(
            f"{marker} says version {found}, this archlab supports up to {VERSION}: "
            "upgrade archlab or use another --store"
        )
    return found


def _other_kind(root: Path) -> StoreRefused:
    return StoreRefused(
        f"the trial table of {root} is the file trials.db, and a server is named as well: unset {DATABASE} (or remove "
        f"{root}/database.url), or move the table there with `archlab move`"
    )
