"""What each tracker has acknowledged, in the table `shipped`: losing it costs a replay, never a point."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from archlab.search.store.addresses import server_of
from archlab.search.store.database import Database, Sqlite
from archlab.search.trackers.tracked import START, Position

_SCHEMA = """
CREATE TABLE IF NOT EXISTS shipped (
  target TEXT NOT NULL, study TEXT NOT NULL, key TEXT NOT NULL, place TEXT, position TEXT NOT NULL, told TEXT NOT NULL,
  PRIMARY KEY (target, study, key)) WITHOUT ROWID
"""


@dataclass(frozen=True)
class Shipped:
    """Of one trial: its `place` at the tracker (a run's id), how far its metrics went, and which news it was told."""

    place: str | None = None
    position: Position = START
    told: str = ""


class Spool:
    """A small table per store; `target` names a tracker, so that another one starts from nothing.

    It is a file of its own, or stands beside the trial table where that is on a server.
    """

    def __init__(self, store_root: Path) -> None:
        if url := server_of(Path(store_root)):
            from archlab.search.store.postgres import Postgres

            self._db: Database = Postgres(url)
            return
        path = Path(store_root) / "shipped.db"
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._db = Sqlite(path, version=0)
        self._db.query("PRAGMA journal_mode = WAL")
        self._db.write(lambda db: db.execute(_SCHEMA))

    def all(self, target: str, study: str) -> dict[str, Shipped]:
        """Key to what was acknowledged."""
        rows = self._db.query(
            "SELECT key, place, position, told FROM shipped WHERE target = ? AND study = ?", (target, study)
        )
        return {row["key"]: Shipped(row["place"], Position(*json.loads(row["position"])), row["told"]) for row in rows}

    def put(self, target: str, study: str, key: str, shipped: Shipped) -> None:
        """Remembers an acknowledgement."""
        values = (target, study, key, shipped.place, json.dumps(shipped.position), shipped.told)
        self._db.write(
            lambda db: db.execute(
                "INSERT INTO shipped (target, study, key, place, position, told) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (target, study, key) DO UPDATE SET place = excluded.place, position = excluded.position, "
                "told = excluded.told",
                values,
            )
        )

    def forget(self, target: str, study: str | None = None) -> None:
        """The tracker (or this study there) begins anew: everything is sent again."""
        which, values = ("", (target,)) if study is None else (" AND study = ?", (target, study))
        self._db.write(lambda db: db.execute(f"DELETE FROM shipped WHERE target = ?{which}", values))

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
