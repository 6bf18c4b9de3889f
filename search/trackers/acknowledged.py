"""What each tracker has acknowledged, in the table `shipped`: losing it costs a replay, never a point."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from archlab.search.store.addresses import server_of
from archlab.search.store.database import Database, Sqlite, StoreDamaged
from archlab.search.trackers.tracked import START, Position, Tracked, new_lines, position_of, values_of
from archlab.search.utils.canonical import canonical_json

log = logging.getLogger(__name__)

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


def news_of(trial: Tracked) -> str:
    """What is told apart from the metrics; when it changes the run is told again."""
    told = [trial.state, trial.attempt, trial.variant, trial.roles, trial.reused, trial.wanted]
    return canonical_json([*told, *([trial.measured] if trial.measured else [])])


def unsent_of(trials: Sequence[Tracked], known: Mapping[str, Shipped]) -> list[tuple[Tracked, Shipped]]:
    """The trials with news or with a file that has changed. One that has not begun to write is no news."""
    found = []
    for trial in trials:
        shipped = known.get(trial.key, Shipped())
        news = shipped.told != news_of(trial)
        if trial.attempt > 0 and (news or not trial.finished):
            size = trial.metrics.stat().st_size if trial.metrics.exists() else 0
            if (news and (size > 0 or trial.finished)) or size != shipped.position.offset:
                found.append((trial, shipped))
    return found


def pending_of(unsent: Sequence[tuple[Tracked, Shipped]]) -> int:
    """How many points and news of states these have."""
    return sum(
        sum(len(values_of(line.record)) for line in new_lines(trial.metrics, shipped.position))
        + (shipped.told != news_of(trial))
        for trial, shipped in unsent
    )


def _opened(path: Path) -> Sqlite:
    """The table in a file, made if need be. Raises StoreDamaged for a file that SQLite finds anything wrong with."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    database = Sqlite(path, version=0)
    try:
        database.query("PRAGMA journal_mode = WAL")
        database.write(lambda db: db.execute(_SCHEMA))
        if (found := database.query("PRAGMA quick_check")) != [{"quick_check": "ok"}]:
            raise StoreDamaged(f"{path} is damaged ({next(iter(found[0].values()))})")
    except StoreDamaged:
        database.close()
        raise
    return database


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
        try:
            self._db = _opened(path)
        except StoreDamaged:
            log.warning("%s is damaged: it is set aside, and everything is sent to the trackers again", path)
            for end in ("", "-wal", "-shm"):
                if (old := path.with_name(f"{path.name}{end}")).exists():
                    os.replace(old, path.with_name(f"{path.name}.damaged{end}"))
            self._db = _opened(path)

    def all(self, target: str, study: str) -> dict[str, Shipped]:
        """Key to what was acknowledged."""
        rows = self._db.query(
            "SELECT key, place, position, told FROM shipped WHERE target = ? AND study = ?", (target, study)
        )
        places = {row["key"]: position_of(row["position"]) for row in rows}
        if None in places.values():
            log.warning("what %s was sent of %s is damaged for some trials: they are sent again", target, study)
        return {
            row["key"]: Shipped(row["place"], place, row["told"])
            for row in rows
            if (place := places[row["key"]]) is not None
        }

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
