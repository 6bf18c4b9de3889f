"""Mends what is damaged in a store. Nothing is thrown away: what is replaced lies in `damaged/` afterwards."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from archlab.search.data.checksums import DAMAGED
from archlab.search.running.damage import DOCUMENTS, Looked, look
from archlab.search.running.table_damage import REPAIRED, Damage
from archlab.search.store.database import Changes, StoreError
from archlab.search.store.folders import DISPUTED
from archlab.search.store.lock import in_use, is_study_name
from archlab.search.store.rows import SPEC_DAMAGED, faults_of, is_owner, is_time, parsed
from archlab.search.store.store import Store
from archlab.search.store.studies import log_event
from archlab.search.utils.files import lock_file, make_private, write_whole
from archlab.search.utils.untrusted import has_link

ASIDE = "damaged"
_MEMBER = "study = ? AND key = ? AND variant = ? AND role = ?"
_GOES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "study": (("study_trial", "study = ?"), ("decision", "place = ?"), ("study", "name = ?")),
    "unlist": (("study_trial", _MEMBER),),
    "members": (("study_trial", "key = ?"),),
    "drop": (("study_trial", "key = ?"), ("trial", "key = ?")),
    "decision": (("decision", "place = ? AND name = ?"),),
    "memory": (("memory", "place = ? AND name = ?"),),
    "event": (("event", "id = ?"),),
}
_START_AGAIN = "UPDATE trial SET state = 'planned', reason = NULL WHERE key = ? AND reason = ?"
_NEUTRAL = {"settings": "{}", "seed": 0, "until": None, "position": 0, "orphaned": 0}
_OF_RESULT = ("result.json", DOCUMENTS)


def repair(store: Store) -> tuple[list[Damage], Looked, list[Damage], Path]:
    """Looks at a store, and mends what can be. Returns what was damaged, how much was read, what is mended, and the
    folder in which the replaced files and rows are now.

    Damaged trials become planned; nothing is trained here. Raises StoreError while a run of the store is under way, or
    where a process writes to one of the trials.
    """
    with in_use(store.root, alone=True) as alone:
        if not alone:
            raise StoreError("a run of this store is under way, which may write what is damaged: wait for its end")
        found, looked = look(store)
        mending = _Mending(store)
        mended = [damage for damage in found if damage.mend is not None]
        for damage in mended:
            mending.mend(damage)
    return found, looked, mended, mending.aside


class _Mending:
    """Mends one thing after the other."""

    def __init__(self, store: Store) -> None:
        self.store = store
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
        places = (store.root / ASIDE / (f"{now}-{number}" if number > 1 else now) for number in count(1))
        self.aside = next(place for place in places if not place.exists())

    def mend(self, damage: Damage) -> None:
        """Raises StoreError, OSError."""
        if damage.mend in _GOES:
            self._remove_rows(damage)
        elif damage.mend == "detail":
            self._keep_row("event", "id = ?", damage.row)
            self._write("UPDATE event SET detail = '{}' WHERE id = ?", damage.row)
        elif damage.mend == "dates":
            self._set_dates(damage.row[0])
        elif damage.mend == "relist":
            self._relist(damage)
        elif damage.mend == "key":
            self._keep_row("trial", "key = ?", damage.row[:1])
            self._write("UPDATE trial SET key = ? WHERE key = ?", (damage.row[1], damage.row[0]))
        elif damage.mend == "data":
            path = self.store.root / damage.place / DAMAGED
            if not has_link(path, self.store.root):
                write_whole(path, f"{damage.fault}\n")
        elif damage.row:
            self._mend_trial(damage, self.store.trial_folder(damage.row[0]))
        else:
            self._put_aside(self.store.root / damage.place)

    def _mend_trial(self, damage: Damage, folder: Path) -> None:
        make_private(folder)
        with lock_file(folder / "writer.lock") as take:
            if not take():
                raise StoreError(f"a process writes to trial {folder.name[:12]}: wait for its end")
            row = self._keep_row("trial", "key = ?", damage.row)[0]
            if damage.mend == "aside":
                self._put_aside(self.store.root / damage.place)
            elif damage.mend == "spec":
                self._write(_START_AGAIN, (folder.name, SPEC_DAMAGED))
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
            elif damage.mend == "columns":
                self._set_columns(folder, row)
            else:
                self._plan(folder, damage.fault)

    def _plan(self, folder: Path, fault: str) -> None:
        """Of two results that differ neither stands: while `disputed` is there, `look` finds that this did not end."""
        write_whole(folder / DISPUTED, f"{fault}\n")
        for name in _OF_RESULT:
            self._put_aside(folder / name)
        self._set(folder.name, "state = 'planned', owner = NULL, reason = NULL, result = NULL")
        (folder / DISPUTED).unlink()

    def _set_columns(self, folder: Path, row: dict[str, Any]) -> None:
        """Anew what no result depends on, where it is damaged; state and reason are those of the result."""
        faults = faults_of(row)
        now: dict[str, Any] = {"attempt": 0, "owner": self._ran(folder.name), "updated": time.time()}
        if row["state"] == "running":  # which nobody does any more
            faults |= dict.fromkeys(("state", "owner"), "")
            now |= {"state": "planned", "owner": None, "reason": None, "result": None}
        elif held := parsed(row["result"], dict)[0]:
            now |= {"state": held.get("state", row["state"]), "reason": held.get("reason")}
            faults |= {"reason": ""} if now["state"] in ("complete", "diverged") else {}
        else:
            now["reason"] = None
        wrong = [name for name in now if name in faults]
        if wrong:
            self._set(folder.name, ", ".join(f"{name} = ?" for name in wrong), *(now[name] for name in wrong))

    def _ran(self, key: str) -> str | None:
        """The study that last ran a trial, by what happened to it; None where nothing is known of that."""
        of = "SELECT study FROM event WHERE key = ? AND study IS NOT NULL ORDER BY id DESC"
        return next((row["study"] for row in self.store.database.query(of, (key,)) if is_owner(row["study"])), None)

    def _set(self, key: str, columns: str, *values: Any) -> None:
        def change(db: Changes) -> None:
            db.execute(f"UPDATE trial SET {columns} WHERE key = ?", (*values, key))
            log_event(db, "repaired", None, key)

        self.store.database.write(change)

    def _set_dates(self, study: str) -> None:
        row, now = self._keep_row("study", "name = ?", (study,))[0], time.time()
        dates = [row[name] if is_time(row[name]) else now for name in ("created", "updated")]
        self._write("UPDATE study SET created = ?, updated = ? WHERE name = ?", (*dates, study))

    def _relist(self, damage: Damage) -> None:
        row = self._keep_row("study_trial", _MEMBER, damage.row)[0]
        wrong = [name for name in faults_of(row) if name in _NEUTRAL]
        if wrong:
            columns = ", ".join(f"{name} = ?" for name in wrong)
            values = (*(_NEUTRAL[name] for name in wrong), *damage.row)
            self._write(f"UPDATE study_trial SET {columns} WHERE {_MEMBER}", values)

    def _remove_rows(self, damage: Damage) -> None:
        goes = _GOES[damage.mend or ""]
        for table, where in goes:
            self._keep_row(table, where, damage.row)
        if damage.mend not in ("decision", "memory", "event"):  # until these have run, nobody knows what they want
            for study in damage.studies or ("",):
                self.store.remember(REPAIRED, study if is_study_name(study) else "", {})

        def remove(db: Changes) -> None:
            for table, where in goes:
                db.execute(f"DELETE FROM {table} WHERE {where}", damage.row)
            if damage.mend == "members":
                db.execute(_START_AGAIN, (*damage.row, SPEC_DAMAGED))

        self.store.database.write(remove)

    def _write(self, sql: str, values: tuple[Any, ...]) -> None:
        self.store.database.write(lambda db: db.execute(sql, values))

    def _keep_row(self, table: str, where: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
        """The rows as they are, which are written down first."""
        rows = self.store.database.query(f"SELECT * FROM {table} WHERE {where}", values)
        make_private(self.aside)
        with open(os.open(self.aside / "rows.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            for row in rows:
                file.write(json.dumps({"table": table, **row}, default=repr) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return rows

    def _put_aside(self, path: Path) -> None:
        """Moves a file, and the sha256 beside it, to the same path below `damaged/`."""
        for each in (path, path.with_name(path.name + ".sha256")):
            if each.exists() and not has_link(each, self.store.root):
                target = self.aside / each.relative_to(self.store.root)
                make_private(target.parent)
                os.replace(each, target)
