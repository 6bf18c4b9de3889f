"""Moves the trial table of a store from its file to a PostgreSQL server: whole, or not at all."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from archlab.search.store.addresses import DATABASE, address, kind_of
from archlab.search.store.database import Changes, StoreRefused, connect, sqlite_errors
from archlab.search.store.lock import holder_of, name_of
from archlab.search.store.opening import SCHEMA, VERSION, create_on_server
from archlab.search.utils.files import write_whole

TABLES = tuple(line.split()[2] for line in SCHEMA.splitlines() if line.startswith("CREATE TABLE"))


def to_server(root: Path) -> dict[str, int]:
    """Copies every row, then says in store.json where they are. Returns the rows of each table.

    The file stays, as `trials.db.moved`. Interrupted, it is done again from the start. Raises StoreError: where no
    server is named, the table is on one already, or a study is being run.
    """
    from archlab.search.store.postgres import Postgres

    url, table = address(root, DATABASE), root / "trials.db"
    if url is None:
        raise StoreRefused(f"no server is named: set {DATABASE}, or write its URL into {root}/database.url (mode 0600)")
    if kind_of(root) == "postgresql" or not table.is_file():
        raise StoreRefused(f"{root} has no trials.db that could be moved")
    with sqlite_errors(table), closing(connect(table, VERSION)) as source:
        source.execute("BEGIN EXCLUSIVE")  # nobody writes meanwhile
        for row in source.execute("SELECT name FROM study ORDER BY name").fetchall():
            if (holder := holder_of(root, row["name"])) is not None:
                raise StoreRefused(f"study '{row['name']}' is being run by {name_of(holder)}: move when that has ended")
        rows = {name: [tuple(row) for row in source.execute(f"SELECT * FROM {name}")] for name in TABLES}
        columns = {name: [column["name"] for column in source.execute(f"PRAGMA table_info({name})")] for name in TABLES}
        identity = create_on_server(root, url)

        def copy(db: Changes) -> None:
            for name in reversed(TABLES):  # of a move that was interrupted
                db.execute(f"DELETE FROM {name}")
            for name in TABLES:
                first = int(name == "event")  # its number is given there, in the same order
                kept = columns[name][first:]
                marks = ", ".join("?" * len(kept))
                insert = f"INSERT INTO {name} ({', '.join(kept)}) VALUES ({marks})"
                db.many(insert, (row[first:] for row in sorted(rows[name])))

        with closing(Postgres(url)) as server:
            server.write(copy)
        says = {"version": VERSION, "database": "postgresql", "id": identity}
        write_whole(root / "store.json", json.dumps(says) + "\n")
        source.execute("ROLLBACK")
        source.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    table.replace(table.with_name("trials.db.moved"))
    return {name: len(found) for name, found in rows.items()}
