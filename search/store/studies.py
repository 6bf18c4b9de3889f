"""The studies of a store: the record and the text that each was run with, and who runs it now."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from archlab.search.store.database import Database, StoreRefused
from archlab.search.store.decisions import Kept
from archlab.search.store.lock import holder_of


class Studies(Kept):
    """One row per study."""

    def __init__(self, root: Path, database: Database) -> None:
        super().__init__(database)
        self.root = root

    def save_study(self, name: str, record: dict[str, Any], yaml_text: str) -> None:
        """Stores what `run` is about to run, replacing what an earlier run of that name stored."""
        now = time.time()
        self._write(
            lambda db: db.execute(
                "INSERT INTO study (name, record, yaml, created, updated) VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) "
                "DO UPDATE SET record = excluded.record, yaml = excluded.yaml, updated = excluded.updated",
                (name, json.dumps(record), yaml_text, now, now),
            )
        )

    def studies(self) -> list[dict[str, Any]]:
        """name, question, created, updated (unix s) and counts {state: wanted trials} per study, newest first."""
        counts: dict[str, dict[str, int]] = {}
        for each in self._query(
            "SELECT study, state, count(DISTINCT key) AS n FROM study_trial JOIN trial USING (key) "
            "WHERE orphaned = 0 GROUP BY study, state"
        ):
            counts.setdefault(each["study"], {})[each["state"]] = each["n"]
        return [
            {
                **{name: row[name] for name in ("name", "created", "updated")},
                "question": json.loads(row["record"]).get("question"),
                "counts": counts.get(row["name"], {}),
            }
            for row in self._query("SELECT name, record, created, updated FROM study ORDER BY updated DESC, name")
        ]

    def study(self, name: str) -> dict[str, Any]:
        """The record stored with a study. Raises StoreError naming the known studies."""
        return dict(json.loads(self._study_row(name)["record"]))

    def study_yaml(self, name: str) -> str:
        """The study file's text as it was run."""
        return str(self._study_row(name)["yaml"])

    def holder(self, study: str) -> dict[str, Any] | None:
        """Who runs a study now: {host, pid, since}, {} when unknown, None when nobody does."""
        return holder_of(self.root, study, self.database)

    def _study_row(self, name: str) -> dict[str, Any]:
        rows = self._query("SELECT record, yaml FROM study WHERE name = ?", (name,))
        if not rows:
            from archlab.arch_dsl.language.errors import nearest  # whose package imports torch

            known = [row["name"] for row in self._query("SELECT name FROM study ORDER BY name")]
            meant = nearest(name, known)
            hint = f"did you mean '{meant}'?" if meant else "archlab run makes one of a study file"
            told = ", ".join(known) or "none"
            raise StoreRefused(f"{self.database.name} has no study '{name}'; {hint} (known: {told})")
        return rows[0]
