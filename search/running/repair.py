"""Mends what is damaged in a store. Nothing is thrown away: what is replaced lies in `damaged/` afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from archlab.search.data.checksums import DAMAGED
from archlab.search.running.damage import Damage
from archlab.search.store.database import Changes, StoreError
from archlab.search.store.lock import in_use
from archlab.search.store.store import Store
from archlab.search.store.studies import log_event
from archlab.search.utils.files import lock_file, make_private, write_whole

ASIDE = "damaged"
_ROWS = {
    "study": (("study_trial", "study = ?"), ("decision", "place = ?"), ("study", "name = ?")),
    "member": (("study_trial", "study = ? AND key = ?"),),
    "forget": (("study_trial", "key = ?"), ("trial", "key = ?")),
    "decision": (("decision", "place = ? AND name = ?"),),
    "memory": (("memory", "place = ? AND name = ?"),),
}
_OF_RESULT = ("result.json", "test_documents.npz")


def repair(store: Store, found: Iterable[Damage]) -> tuple[list[Damage], Path]:
    """Mends what can be. Returns that, and the folder in which the replaced files and rows are now.

    Damaged trials become planned; nothing is trained here. Raises StoreError while a run of the store is under way, or
    where a process writes to one of the trials.
    """
    aside = store.root / ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    mended = []
    with in_use(store.root, alone=True) as alone:
        if not alone:
            raise StoreError("a run of this store is under way, which may write what is damaged: wait for its end")
        make_private(aside)
        for damage in found:
            if damage.mend is not None:
                _Mending(store, aside).mend(damage)
                mended.append(damage)
    return mended, aside


class _Mending:
    """Mends one thing."""

    def __init__(self, store: Store, aside: Path) -> None:
        self.store, self.aside = store, aside

    def mend(self, damage: Damage) -> None:
        """Raises StoreError, OSError."""
        if damage.mend in _ROWS:
            self._remove_rows(damage)
        elif damage.mend == "data":
            write_whole(self.store.root / damage.place / DAMAGED, f"{damage.fault}\n")
        elif damage.mend == "aside":
            self._put_aside(self.store.root / damage.place)
        else:
            self._mend_trial(damage, self.store.trial_folder(damage.row[0]))

    def _mend_trial(self, damage: Damage, folder: Path) -> None:
        make_private(folder)
        with lock_file(folder / "writer.lock") as take:
            if not take():
                raise StoreError(f"a process writes to trial {folder.name[:12]}: wait for its end")
            row = self._keep_row("trial", "key = ?", damage.row)[0]
            if damage.mend == "spec":
                self._set(folder.name, "spec = ?", (folder / "trial.json").read_text())
            elif damage.mend == "trial.json":
                self._put_aside(folder / "trial.json")
                write_whole(folder / "trial.json", row["spec"])
            elif damage.mend == "result":
                told = json.loads((folder / "result.json").read_text())
                told.pop("measures", None)
                self._set(folder.name, "result = ?", json.dumps(told))
            elif damage.mend == "result.json":
                self._put_aside(folder / "result.json")
                write_whole(folder / "result.json", json.dumps(json.loads(row["result"]), indent=1))
            else:
                for name in _OF_RESULT:
                    self._put_aside(folder / name)
                attempt = row["attempt"] if isinstance(row["attempt"], int) else 0
                columns = "state = 'planned', owner = NULL, reason = NULL, result = NULL, updated = ?, attempt = ?"
                self._set(folder.name, columns, datetime.now(UTC).timestamp(), attempt)

    def _set(self, key: str, columns: str, *values: Any) -> None:
        def change(db: Changes) -> None:
            db.execute(f"UPDATE trial SET {columns} WHERE key = ?", (*values, key))
            log_event(db, "repaired", None, key)

        self.store.database.write(change)

    def _remove_rows(self, damage: Damage) -> None:
        assert damage.mend is not None
        for table, where in _ROWS[damage.mend]:
            self._keep_row(table, where, damage.row)

        def remove(db: Changes) -> None:
            for table, where in _ROWS[damage.mend or ""]:
                db.execute(f"DELETE FROM {table} WHERE {where}", damage.row)

        self.store.database.write(remove)

    def _keep_row(self, table: str, where: str, values: tuple[str, ...]) -> list[dict[str, Any]]:
        """The rows as they are, which are written down first."""
        rows = self.store.database.query(f"SELECT * FROM {table} WHERE {where}", values)
        with open(os.open(self.aside / "rows.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            for row in rows:
                file.write(json.dumps({"table": table, **row}, default=repr) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return rows

    def _put_aside(self, path: Path) -> None:
        """Moves a file, and the sha256 beside it, to the same path below `damaged/`."""
        for each in (path, path.with_name(path.name + ".sha256")):
            if each.exists():
                target = self.aside / each.relative_to(self.store.root)
                make_private(target.parent)
                os.replace(each, target)
