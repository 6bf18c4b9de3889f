"""What a store keeps besides its trials: its studies, with who runs each now, what happened, what was decided once, and
what all studies may use."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from archlab.search.store.database import Changes, Database, Found, StoreRefused
from archlab.search.store.kept import fault_of
from archlab.search.store.lock import holder_of, is_study_name
from archlab.search.store.rows import (
    STATES,
    WHAT_NOW,
    event_row,
    is_time,
    parsed,
    sealed,
    tell_left_out,
    unsealed,
)

T = TypeVar("T")
MANY = 500  # values in one question
_REMEMBER = (
    "INSERT INTO memory (place, name, value, updated) VALUES (?, ?, ?, ?) ON CONFLICT (place, name) "
    "DO UPDATE SET value = excluded.value, updated = excluded.updated"
)


class Studies:
    """Studies, their events and decisions, and memory, in any database."""

    def __init__(self, root: Path, database: Database) -> None:
        self.root, self.database = root, database

    # studies

    def save_study(self, name: str, record: dict[str, Any], yaml_text: str) -> None:
        """Stores what `run` is about to run, replacing what an earlier run of that name stored."""
        now = time.time()
        self._write(
            lambda db: db.execute(
                "INSERT INTO study (name, record, yaml, created, updated) VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) "
                "DO UPDATE SET record = excluded.record, yaml = excluded.yaml, updated = excluded.updated",
                (name, sealed(record), yaml_text, now, now),
            )
        )

    def studies(self) -> list[dict[str, Any]]:
        """name, question, created, updated (unix s) and counts {state: wanted trials} per study, newest first. A
        name that none may have is left out: it could lead elsewhere. A trial that has no row, or whose row says no
        state, counts as failed."""
        counts: dict[str, dict[str, int]] = {}
        for each in self._query(
            "SELECT study, state, count(DISTINCT study_trial.key) AS n "
            "FROM study_trial LEFT JOIN trial ON trial.key = study_trial.key WHERE orphaned = 0 GROUP BY study, state"
        ):
            own, state = counts.setdefault(each["study"], {}), each["state"] if each["state"] in STATES else "failed"
            own[state] = own.get(state, 0) + each["n"]
        return [
            {
                "name": row["name"],
                **{name: row[name] if is_time(row[name]) else 0.0 for name in ("created", "updated")},
                "question": _question(row["record"]),
                "counts": counts.get(row["name"], {}),
            }
            for row in self._studies()
        ]

    def _studies(self) -> Found:
        """The rows of the studies that have a study's name, newest first; that there are others is told."""
        rows = self._query("SELECT name, record, created, updated FROM study ORDER BY updated DESC, name")
        found = [row for row in rows if is_study_name(row["name"])]
        if len(found) < len(rows):
            tell_left_out("a study whose name is none")
        return found

    def study(self, name: str) -> dict[str, Any]:
        """The record stored with a study. Raises StoreRefused, naming the known studies or what is damaged."""
        record, fault = unsealed(self._study_row(name)["record"])
        if fault:
            raise StoreRefused(f"the record of study '{name}' is damaged in the trial table: {fault}; {WHAT_NOW}")
        return record

    def records(self) -> dict[str, dict[str, Any]]:
        """name -> record of every study whose record is sound, newest first."""
        found = {row["name"]: unsealed(row["record"]) for row in self._studies()}
        for name in (name for name, (_, fault) in found.items() if fault):
            tell_left_out(f"a damaged record of study '{name}'")
        return {name: record for name, (record, fault) in found.items() if not fault}

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
            known = [each for each in known if is_study_name(each)]
            meant = nearest(name, known)
            hint = f"did you mean '{meant}'?" if meant else "archlab run makes one of a study file"
            told = ", ".join(known) or "none"
            raise StoreRefused(f"{self.database.name} has no study '{name}'; {hint} (known: {told})")
        return rows[0]

    def extent(self, study: str, keys: Iterable[str]) -> dict[str, int]:
        """How many rows, decisions and events are a study's own, those of its own trials (`keys`) among them."""
        counted = "SELECT count(*) AS n FROM"
        alone = f"{counted} event WHERE study = ? AND key IS NULL"
        of_trials = self._query_many("SELECT count(*) AS n FROM event WHERE key IN", keys)
        return {
            "rows": self._query(f"{counted} study_trial WHERE study = ?", (study,))[0]["n"],
            "decisions": self._query(f"{counted} decision WHERE place = ?", (study,))[0]["n"],
            "events": self._query(alone, (study,))[0]["n"] + sum(row["n"] for row in of_trials),
        }

    # decisions, memory, events

    def decide(self, study: str, name: str, compute: Callable[[], Any]) -> Any:
        """The study's decision of that name, JSON: computed and stored when first asked for, replayed ever after."""
        found = self._decisions(study, name)
        if not found:
            decided = (study, name, json.dumps(compute()), time.time())
            self._write(
                lambda db: db.execute(
                    "INSERT INTO decision (place, name, value, updated) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    decided,
                )
            )
            found = self._decisions(study, name)
        return found[0]

    def decided(self, study: str, name: str) -> Any:
        """The study's decision of that name; None where none was made."""
        return next(iter(self._decisions(study, name)), None)

    def recall(self, kind: str, key: str) -> Any:
        """What was remembered last under this kind and key, by whichever study; None where nothing was, or where it is
        damaged: then it is measured again, which is told."""
        rows = self._query("SELECT value FROM memory WHERE place = ? AND name = ?", (kind, key))
        return next((value for row in rows if (value := self._sound(kind, key, row["value"])) is not None), None)

    def remember(self, kind: str, key: str, value: Any) -> None:
        """Keeps JSON for all studies of the store, such as a noise floor; the newest stands."""
        values = (kind, key, json.dumps(value), time.time())
        self._write(lambda db: db.execute(_REMEMBER, values))

    def amend(self, kind: str, key: str, name: str, value: Any) -> None:
        """Sets one entry of a remembered mapping, and leaves those that others set meanwhile."""

        def change(db: Changes) -> None:
            rows = db.execute("SELECT value FROM memory WHERE place = ? AND name = ?", (kind, key))
            whole = {**((self._sound(kind, key, rows[0]["value"]) if rows else None) or {}), name: value}
            db.execute(_REMEMBER, (kind, key, json.dumps(whole), time.time()))

        self._write(change)

    def names(self, kinds: Iterable[str]) -> dict[str, dict[str, float]]:
        """kind -> {key: when (unix s)} of all that is remembered under these kinds."""
        return self._remembered("updated", kinds)

    def recall_all(self, kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
        """kind -> {key: value} of all that is remembered under these kinds, but for what is damaged."""
        found = self._remembered("value", kinds)
        texts = {
            kind: {key: self._sound(kind, key, text) for key, text in kept.items()} for kind, kept in found.items()
        }
        return {kind: {k: value for k, value in kept.items() if value is not None} for kind, kept in texts.items()}

    def _sound(self, kind: str, key: str, text: Any) -> Any:
        """A remembered value, None of a damaged one, which is told."""
        value, fault = parsed(text, object)
        if fault or fault_of("memory", kind, key, value):
            tell_left_out(f"a damaged value of '{kind} {key}'")
            return None
        return value

    def _remembered(self, column: str, kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for row in self._query_many(
            f"SELECT place, name, {column} FROM memory WHERE place IN", kinds, "ORDER BY place, name"
        ):
            found.setdefault(row["place"], {})[row["name"]] = row[column]
        return found

    def _decisions(self, study: str, name: str) -> list[Any]:
        rows = self._query("SELECT value FROM decision WHERE place = ? AND name = ?", (study, name))
        found = [parsed(row["value"], object) for row in rows]
        for value, fault in found:
            if fault := fault or fault_of("decision", study, name, value):
                whose = f"what study '{study}' decided as '{name}'"
                raise StoreRefused(f"{whose} is damaged in the trial table: {fault}; {WHAT_NOW}")
        return [value for value, _ in found]

    def add_event(
        self, kind: str, study: str | None = None, key: str | None = None, attempt: int | None = None, **detail: Any
    ) -> None:
        """Records a decision or a mishap; `detail` must be JSON."""
        self._write(lambda db: log_event(db, kind, study, key, attempt, detail))

    def events(self, study: str | None = None, key: str | None = None) -> list[dict[str, Any]]:
        """id, time (unix s), study, key, attempt, kind, detail; oldest first, of one study or trial if given. A damaged
        detail is empty, and an event with another damage is left out, which is told."""
        asked = [(name, value) for name, value in (("study", study), ("key", key)) if value is not None]
        where = " AND ".join(["id > 0", *(f"{name} = ?" for name, _ in asked)])
        rows = self._query(f"SELECT * FROM event WHERE {where} ORDER BY id", [value for _, value in asked])
        found = [event for row in rows if (event := event_row(row)) is not None]
        if len(found) < len(rows):
            tell_left_out("a damaged event")
        return found

    def began(self, keys: Iterable[str]) -> dict[str, float]:
        """When the trials of these keys were first started (unix s), by whichever study; those that were."""
        wanted, first = set(keys), "SELECT key, min(time) AS time FROM event WHERE kind = 'running'"
        if len(wanted) > MANY:  # events have no index by key: each question for some of them would read all
            rows = self._query(f"{first} GROUP BY key")
        else:
            rows = list(self._query_many(f"{first} AND key IN", wanted, "GROUP BY key"))
        return {row["key"]: float(row["time"]) for row in rows if row["key"] in wanted and is_time(row["time"])}

    def _query(self, sql: str, values: Sequence[Any] = ()) -> Found:
        return self.database.query(sql, values)

    def _query_many(self, sql: str, values: Iterable[Any], end: str = "") -> Iterator[dict[str, Any]]:
        """The rows of a question that ends `IN`, for some of the values at a time."""
        wanted = list(values)
        for start in range(0, len(wanted), MANY):
            some = wanted[start : start + MANY]
            yield from self._query(f"{sql} ({', '.join('?' * len(some))}) {end}", some)

    def _write(self, body: Callable[[Changes], T]) -> T:
        return self.database.write(body)


def log_event(
    db: Changes,
    kind: str,
    study: str | None,
    key: str | None,
    attempt: int | None = None,
    detail: dict[str, Any] | None = None,
) -> None:
    """Records what happened, in the transaction in which it happens."""
    db.execute(
        "INSERT INTO event (time, study, key, attempt, kind, detail) VALUES (?, ?, ?, ?, ?, ?)",
        (time.time(), study, key, attempt, kind, json.dumps(detail or {})),
    )


def forget_events(db: Changes, keys: Sequence[str]) -> None:
    """Removes what happened to trials, of many at a time: events have no index by key, and each question reads all."""
    for start in range(0, len(keys), MANY):
        some = keys[start : start + MANY]
        db.execute(f"DELETE FROM event WHERE key IN ({', '.join('?' * len(some))})", some)


def _question(record: Any) -> str | None:
    """The question of a study's record; of a damaged one, that it is."""
    found, fault = unsealed(record)
    question = f"its record is damaged: {fault}" if fault else found.get("question")
    return None if question is None else str(question)
