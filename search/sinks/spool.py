"""What each tracker has acknowledged, in `shipped.db`: losing it costs a replay, never a point."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from search.sinks.tracked import START, Position

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS shipped (
  target TEXT NOT NULL, study TEXT NOT NULL, key TEXT NOT NULL, place TEXT, position TEXT NOT NULL, told TEXT NOT NULL,
  PRIMARY KEY (target, study, key)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Shipped:
    """Of one trial: its `place` at the tracker (a run's id), how far its metrics went, and which news it was told."""

    place: str | None = None
    position: Position = START
    told: str = ""


class Spool:
    """A small table per store; `target` names a tracker, so that another one starts from nothing."""

    def __init__(self, store_root: Path) -> None:
        self._db = sqlite3.connect(Path(store_root) / "shipped.db", timeout=60.0, isolation_level=None)
        self._db.executescript(_SCHEMA)

    def all(self, target: str, study: str) -> dict[str, Shipped]:
        """Key to what was acknowledged."""
        rows = self._db.execute(
            "SELECT key, place, position, told FROM shipped WHERE target = ? AND study = ?", (target, study)
        )
        return {key: Shipped(place, Position(*json.loads(position)), told) for key, place, position, told in rows}

    def put(self, target: str, study: str, key: str, shipped: Shipped) -> None:
        """Remembers an acknowledgement."""
        self._db.execute(
            "INSERT OR REPLACE INTO shipped VALUES (?, ?, ?, ?, ?, ?)",
            (target, study, key, shipped.place, json.dumps(shipped.position), shipped.told),
        )

    def forget(self, target: str, study: str | None = None) -> None:
        """The tracker (or this study there) begins anew: everything is sent again."""
        self._db.execute("DELETE FROM shipped WHERE target = ?1 AND (?2 IS NULL OR study = ?2)", (target, study))

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
