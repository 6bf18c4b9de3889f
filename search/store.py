"""The trial table: which trials exist, in which state, wanted by which study. It is the truth of a store."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from search.store_files import StoreError, StoreFull, StoreRefused, connect, open_folder, sqlite_errors, write_whole
from search.trial import Trial, canonical_json

__all__ = ["TERMINAL", "Row", "StaleAttempt", "Store", "StoreError", "StoreFull", "StoreRefused"]

TERMINAL = ("complete", "pruned", "failed", "diverged")


class Row(NamedTuple):
    """One wanted trial of a study: as which variant, in which role ("tune", "repeat", "search"), at which settings.

    until: the optimizer step, counted over all stages, after which it pauses; None: it is trained to its end.
    """

    trial: Trial
    variant: str
    role: str
    settings: dict[str, Any]
    seed: int
    until: int | None = None


class StaleAttempt(Exception):
    """Someone who no longer holds the trial tried to change it; the newer attempt stands."""


class Store:
    """planned -> running(attempt) -> complete | pruned | failed | diverged.

    running -> planned on interruption; running -> paused at the step up to which a trial is wanted, and on from there.
    One transaction per transition. The attempt number is a fencing token: who doesn't hold the newest one changes
    nothing. A store may be used from several threads and processes at once.
    """

    def __init__(self, root: Path, table: Path) -> None:
        self.root, self._table = root, table
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    @classmethod
    def open(cls, root: Path | str, create: bool = True) -> Store:
        """Opens a store, making it first if `create`. Raises StoreError for one that is absent, newer or damaged."""
        root = Path(root).absolute()
        store = cls(root, open_folder(root, create))
        store._connection()
        return store

    def close(self) -> None:
        """Closes the connections of all threads."""
        while self._connections:
            self._connections.pop().close()
        self._local = threading.local()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # studies

    def save_study(self, name: str, record: dict[str, Any], yaml_text: str) -> None:
        """Stores what `run` is about to run, replacing what an earlier run of that name stored."""
        now = time.time()
        with self._transaction() as db:
            db.execute(
                "INSERT INTO study VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "record = excluded.record, yaml = excluded.yaml, updated = excluded.updated",
                (name, json.dumps(record), yaml_text, now, now),
            )

    def studies(self) -> list[dict[str, Any]]:
        """name, question, created, updated (unix s) and counts {state: wanted trials} per study, newest first."""
        found = []
        for row in self._query("SELECT name, record, created, updated FROM study ORDER BY updated DESC, name"):
            record = json.loads(row["record"])
            counts = {
                each["state"]: each["n"]
                for each in self._query(
                    "SELECT state, count(DISTINCT key) AS n FROM study_trial JOIN trial USING (key) "
                    "WHERE study = ? AND NOT orphaned GROUP BY state",
                    (row["name"],),
                )
            }
            shown = {name: row[name] for name in ("name", "created", "updated")}
            found.append({**shown, "question": record.get("question"), "counts": counts})
        return found

    def study(self, name: str) -> dict[str, Any]:
        """The record stored with a study. Raises StoreError naming the known studies."""
        record: dict[str, Any] = json.loads(self._study_row(name)["record"])
        return record

    def study_yaml(self, name: str) -> str:
        """The study file's text as it was run."""
        text: str = self._study_row(name)["yaml"]
        return text

    def _study_row(self, name: str) -> sqlite3.Row:
        rows = self._query("SELECT record, yaml FROM study WHERE name = ?", (name,))
        if not rows:
            known = ", ".join(row["name"] for row in self._query("SELECT name FROM study ORDER BY name")) or "none"
            raise StoreRefused(f"{self._table} has no study '{name}' (known: {known})")
        return rows[0]

    # membership

    def add_trials(self, study: str, rows: Iterable[Row]) -> int:
        """Makes each row exist once, in the given order, and its trial.json.

        Returns how many are new, back, or wanted up to another step.
        """
        wanted = [(row, row.trial.key) for row in rows]
        present = self._members(study)
        fresh, changed, revived = [], [], 0
        for position, (row, key) in enumerate(wanted):
            values = (canonical_json(row.settings), row.seed, row.until, position, 0)
            member = (key, row.variant, row.role)
            if member not in present:
                fresh.append((row, key))
            elif present[member][-1] or present[member][2] != row.until:
                revived += 1
            if present.get(member) != values:
                changed.append((study, *member, *values))
        if not changed:
            return 0
        self._study_row(study)
        for row, key in fresh:
            self._write_trial_json(key, row.trial.to_json())
        now = time.time()
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO trial (key, spec, state, updated) VALUES (?, ?, 'planned', ?) ON CONFLICT DO NOTHING",
                [(key, row.trial.to_json(), now) for row, key in fresh],
            )
            db.executemany(
                "INSERT INTO study_trial (study, key, variant, role, settings, seed, until, position, orphaned) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (study, key, variant, role) DO UPDATE SET "
                "settings = excluded.settings, seed = excluded.seed, until = excluded.until, "
                "position = excluded.position, orphaned = 0",
                changed,
            )
        return len(fresh) + revived

    def drop_others(self, study: str, rows: Iterable[Row]) -> int:
        """Marks the study's rows that are not among `rows` as orphaned; trials and results stay. Returns how many."""
        wanted = {(row.trial.key, row.variant, row.role) for row in rows}
        unwanted = [
            (study, *member)
            for member, values in self._members(study).items()
            if member not in wanted and not values[-1]
        ]
        if unwanted:
            with self._transaction() as db:
                db.executemany(
                    "UPDATE study_trial SET orphaned = 1 WHERE study = ? AND key = ? AND variant = ? AND role = ?",
                    unwanted,
                )
        return len(unwanted)

    def _members(self, study: str) -> dict[tuple[str, str, str], tuple[Any, ...]]:
        rows = self._query(
            "SELECT key, variant, role, settings, seed, until, position, orphaned FROM study_trial WHERE study = ?",
            (study,),
        )
        return {(row[0], row[1], row[2]): tuple(row)[3:] for row in rows}

    def study_trials(self, study: str, orphaned: bool = False) -> list[dict[str, Any]]:
        """The study's rows in planned order (the no longer wanted ones if `orphaned`).

        Keys: key, variant, role, settings, seed, until, state, attempt, reused (finished by another study's run),
        reason, result (what result.json holds; where a trial paused last, also while it goes on; or None), folder
        (str), owner (the study whose driver ran it last), updated.
        """
        rows = self._query(
            "SELECT key, variant, role, settings, seed, until, state, attempt, reason, result, owner, trial.updated, "
            "study FROM study_trial JOIN trial USING (key) WHERE study = ? AND orphaned = ? "
            "ORDER BY position, key, variant, role",
            (study, int(orphaned)),
        )
        trials = self.root / "trials"
        return [_row_dict(row, f"{trials}/{row['key'][:2]}/{row['key']}") for row in rows]

    def known(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """key -> {state, result} of those trials that exist, whichever study made them."""
        found = {}
        for key in keys:
            for row in self._query("SELECT state, result FROM trial WHERE key = ?", (key,)):
                result = json.loads(row["result"]) if row["result"] else None
                found[key] = {"state": row["state"], "result": result}
        return found

    # transitions

    def claim(self, key: str, study: str) -> int | None:
        """planned or paused -> running for the driver of `study`: the attempt number, or None: not ours to start."""
        with self._transaction() as db:
            row = db.execute(
                "UPDATE trial SET state = 'running', attempt = attempt + 1, owner = ?, reason = NULL, updated = ? "
                "WHERE key = ? AND state IN ('planned', 'paused') RETURNING attempt, spec",
                (study, time.time(), key),
            ).fetchone()
            if row is None:
                return None
            _event(db, "running", study, key, row["attempt"])
        self._write_trial_json(key, row["spec"])
        attempt: int = row["attempt"]
        return attempt

    def finish(
        self, key: str, attempt: int, state: str, result: dict[str, Any] | None, reason: str | None = None
    ) -> None:
        """running -> paused or a terminal state. Raises StaleAttempt when `attempt` no longer holds the trial."""
        if state not in (*TERMINAL, "paused"):
            raise ValueError(f"a trial finishes as one of {', '.join((*TERMINAL, 'paused'))}, not as {state!r}")
        text = None if result is None else json.dumps(result)
        self._leave_running(key, attempt, state, "?, result = ?", (state, text), reason)

    def release(self, key: str, attempt: int, reason: str | None = None) -> None:
        """running -> planned, or paused where it was: to go on from its checkpoint. Raises StaleAttempt."""
        back = "CASE WHEN result IS NULL THEN 'planned' ELSE 'paused' END"
        self._leave_running(key, attempt, "planned", back, (), reason)

    def _leave_running(
        self, key: str, attempt: int, state: str, becomes: str, values: tuple[Any, ...], reason: str | None
    ) -> None:
        with self._transaction() as db:
            row = db.execute(
                f"UPDATE trial SET state = {becomes}, reason = ?, updated = ? "
                "WHERE key = ? AND attempt = ? AND state = 'running' RETURNING owner, state",
                (*values, reason, time.time(), key, attempt),
            ).fetchone()
            if row is None:
                now = db.execute("SELECT state, attempt FROM trial WHERE key = ?", (key,)).fetchone()
                stands = f"it is {now['state']} at attempt {now['attempt']}" if now else "there is no such trial"
                raise StaleAttempt(f"trial {key[:12]}: attempt {attempt} can't make it {state}, {stands}")
            _event(db, row["state"], row["owner"], key, attempt, {"reason": reason} if reason else {})

    def reset_failed(self, study: str, variant: str | None = None) -> int:
        """failed -> planned for the wanted rows of a study, or of one of its variants. Returns how many."""
        if variant is None:
            return len(self._plan_again(study, "state = 'failed'"))
        of_variant = "key IN (SELECT key FROM study_trial WHERE study = ? AND variant = ? AND NOT orphaned)"
        return len(self._plan_again(study, f"state = 'failed' AND {of_variant}", study, variant))

    def reset_pruned(self, study: str) -> int:
        """pruned -> planned for the wanted rows of a study that does not prune, whoever pruned. Returns how many."""
        return len(self._plan_again(study, "state = 'pruned'"))

    def reset_foreign(self, study: str, but: Iterable[str] = ()) -> list[str]:
        """pruned or failed -> planned for the wanted rows that only other studies' runs ended so. Returns their keys.

        Those which the study itself has once pruned or failed stay, and so do the keys in `but`.
        """
        return self._plan_again(
            study,
            "state IN ('pruned', 'failed') AND key NOT IN (SELECT value FROM json_each(?)) AND key NOT IN "
            "(SELECT key FROM event WHERE study = ? AND key IS NOT NULL AND kind IN ('pruned', 'failed'))",
            json.dumps(list(but)),
            study,
        )

    def _plan_again(self, study: str, which: str, *values: str) -> list[str]:
        with self._transaction() as db:
            rows = db.execute(
                "UPDATE trial SET state = 'planned', reason = NULL, result = NULL, updated = ? WHERE key IN "
                f"(SELECT key FROM study_trial WHERE study = ? AND NOT orphaned) AND {which} RETURNING key",
                (time.time(), study, *values),
            )
            keys = [row["key"] for row in rows]
            for key in keys:
                _event(db, "reset", study, key)
        return keys

    def orphans(self, study: str) -> list[dict[str, Any]]:
        """key, attempt, folder (Path) of what the study's driver left running; orphans only under its lock."""
        rows = self._query(
            "SELECT key, attempt FROM trial WHERE state = 'running' AND owner = ? ORDER BY key", (study,)
        )
        return [{"key": row["key"], "attempt": row["attempt"], "folder": self.trial_folder(row["key"])} for row in rows]

    # what was decided and measured

    def decide(self, study: str, name: str, compute: Callable[[], Any]) -> Any:
        """The study's decision of that name, JSON: computed and stored when first asked for, replayed ever after."""
        found = self._value("decision", study, name)
        if found is None:
            text = json.dumps(compute())
            with self._transaction() as db:
                db.execute(
                    "INSERT INTO decision (place, name, value, updated) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (study, name, text, time.time()),
                )
            found = self._value("decision", study, name)
            assert found is not None
        return json.loads(found)

    def recall(self, kind: str, key: str) -> Any:
        """What was remembered last under this kind and key, by whichever study; None where nothing was."""
        found = self._value("memory", kind, key)
        return None if found is None else json.loads(found)

    def remember(self, kind: str, key: str, value: Any) -> None:
        """Keeps JSON for all studies of the store, such as a noise floor; the newest stands."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO memory (place, name, value, updated) VALUES (?, ?, ?, ?) ON CONFLICT (place, name) "
                "DO UPDATE SET value = excluded.value, updated = excluded.updated",
                (kind, key, json.dumps(value), time.time()),
            )

    def _value(self, table: str, place: str, name: str) -> str | None:
        rows = self._query(f"SELECT value FROM {table} WHERE place = ? AND name = ?", (place, name))
        return rows[0]["value"] if rows else None

    # events

    def add_event(
        self, kind: str, study: str | None = None, key: str | None = None, attempt: int | None = None, **detail: Any
    ) -> None:
        """Records a decision or a mishap; `detail` must be JSON."""
        with self._transaction() as db:
            _event(db, kind, study, key, attempt, detail)

    def events(self, study: str | None = None, key: str | None = None) -> list[dict[str, Any]]:
        """id, time (unix s), study, key, attempt, kind, detail; oldest first, of one study or trial if given."""
        rows = self._query(
            "SELECT * FROM event WHERE (?1 IS NULL OR study = ?1) AND (?2 IS NULL OR key = ?2) ORDER BY id",
            (study, key),
        )
        return [{**dict(row), "detail": json.loads(row["detail"])} for row in rows]

    # files and connections

    def trial_folder(self, key: str) -> Path:
        """trials/<first two digits>/<key>."""
        return self.root / "trials" / key[:2] / key

    def _write_trial_json(self, key: str, text: str) -> None:
        """Not synced, as there may be thousands; so it is compared, not trusted, when the trial starts."""
        folder = self.trial_folder(key)
        path = folder / "trial.json"
        if path.exists() and path.read_text() == text:
            return
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, text, durable=False)

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = connect(self._table)
            self._connections.append(connection)
        return connection

    def _query(self, sql: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with sqlite_errors(self._table):
            return self._connection().execute(sql, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; the write lock is taken at the start, so that what is read inside still holds at commit."""
        db = self._connection()
        with sqlite_errors(self._table):
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise


def _event(
    db: sqlite3.Connection,
    kind: str,
    study: str | None,
    key: str | None,
    attempt: int | None = None,
    detail: dict[str, Any] | None = None,
) -> None:
    db.execute(
        "INSERT INTO event (time, study, key, attempt, kind, detail) VALUES (?, ?, ?, ?, ?, ?)",
        (time.time(), study, key, attempt, kind, json.dumps(detail or {})),
    )


def _row_dict(row: sqlite3.Row, folder: str) -> dict[str, Any]:
    found = dict(row)
    study = found.pop("study")
    found["settings"] = json.loads(found["settings"])
    found["result"] = json.loads(found["result"]) if found["result"] else None
    found["reused"] = found["state"] in TERMINAL and found["owner"] != study
    found["folder"] = folder
    return found
