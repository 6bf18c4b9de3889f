"""What is damaged in the trial table alone, and whether anything is: rows that no run writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from archlab.search.store.kept import fault_of
from archlab.search.store.lock import is_study_name
from archlab.search.store.rows import event_faults, faults_of, is_key, is_spec_of, is_time, parsed, unsealed
from archlab.search.store.store import Store

Mend = Literal[
    "study", "unlist", "relist", "decision", "memory", "key", "drop", "spec", "members", "columns", "trial.json",
    "result", "result.json", "plan", "aside", "data", "event", "detail", "dates",
]  # fmt: skip
REPAIRED = "repaired"
"""The kind under which a store remembers which studies must run again before it is known what they want."""


@dataclass(frozen=True)
class Damage:
    """Something damaged: a file, whose `place` is its path in the store, or a column of the trial table.

    `mend` names what repairing does about it (None: nothing), `then` says it. `row` are the values by which a row of
    the table is found: the key of a trial, study, key, variant and role of what a study wants, place and name of what
    is kept. `studies` depend on it, and `train_s` is what training it again costs, in seconds, where that is known.
    """

    place: str
    fault: str
    then: str
    mend: Mend | None = None
    row: tuple[Any, ...] = ()
    studies: tuple[str, ...] = ()
    train_s: float = 0.0


def of_studies(store: Store) -> Iterator[Damage]:
    """Names and records."""
    for row in store.database.query("SELECT name, record, created, updated FROM study ORDER BY name"):
        if not is_study_name(row["name"]):
            then = "its rows go; the next run of its file stores it anew, and finds its trials"
            place = f"trial table: study {str(row['name'])[:40]!r}"
            yield Damage(place, "it is no study's name", then, "study", (row["name"],))
        elif fault := unsealed(row["record"])[1]:
            then = "run its file again, which stores it anew; no trial is trained again"
            yield Damage(f"trial table: study '{row['name']}' record", fault, then, studies=(row["name"],))
        for column in ("created", "updated"):
            if is_study_name(row["name"]) and not is_time(row[column]):
                place, fault = f"trial table: study '{row['name']}' {column}", f"it is {str(row[column])[:40]!r}"
                yield Damage(place, fault, "it is set to now", "dates", (row["name"],), (row["name"],))


def of_events(store: Store) -> Iterator[Damage]:
    """What happened. Nothing that is computed depends on it but for costs and the proposals that were refused."""
    for row in store.database.query("SELECT id, time, study, key, attempt, kind, detail FROM event ORDER BY id"):
        faults = event_faults(row)
        if gone := next((name for name in faults if name != "detail"), None):
            then, of = "the row goes", (str(row["study"]),) if is_study_name(row["study"]) else ()
            yield Damage(f"trial table: event {row['id']} {gone}", faults[gone], then, "event", (row["id"],), of)
        elif faults:
            then = "it is emptied: what the attempt has spent is not known any more"
            yield Damage(f"trial table: event {row['id']} detail", faults["detail"], then, "detail", (row["id"],))


def of_members(store: Store) -> Iterator[Damage]:
    """Which study wants which trial."""
    studies = {row["name"] for row in store.database.query("SELECT name FROM study")}
    trials = store.database.query("SELECT key, spec FROM trial")
    keys = {row["key"] if is_key(row["key"]) else key_of(row["spec"]) for row in trials}
    columns = "study, key, variant, role, settings, seed, until, position, orphaned"
    for row in store.database.query(f"SELECT {columns} FROM study_trial"):
        if not is_study_name(row["study"]):
            if row["study"] not in studies:
                yield _member(row, "study", "there is no such study", whole=False)
            continue
        faults = faults_of(row)
        if row["key"] not in keys:
            faults["key"] = "there is no such trial"
        for column, fault in faults.items():
            yield _member(row, column, fault, whole=not faults.keys() & {"key", "variant", "role"})


def _member(row: dict[str, Any], column: str, fault: str, whole: bool) -> Damage:
    place = f"trial table: study_trial {str(row['key'])[:12]!r} {column}"
    values = tuple(row[name] for name in ("study", "key", "variant", "role"))
    then = "the next run of the study sets it right" if whole else "the row goes; the next run of the study adds it"
    return Damage(place, fault, then, "relist" if whole else "unlist", values, (str(row["study"]),))


def of_kept(store: Store) -> Iterator[Damage]:
    """Decisions, and what all studies may use."""
    tables: tuple[Mend, ...] = ("decision", "memory")
    then = "it goes, and is found anew when it is asked for"
    for table in tables:
        for row in store.database.query(f"SELECT place, name, value FROM {table}"):
            value, fault = parsed(row["value"], object)
            if fault := fault or fault_of(table, row["place"], row["name"], value):
                place = f"trial table: {table} '{row['place']}' '{row['name']}'"
                yield Damage(place, fault, then, table, (row["place"], row["name"]))


def key_of(spec: Any) -> str | None:
    """The key that a trial of this spec has."""
    return hashlib.sha256(spec.encode(errors="replace")).hexdigest() if isinstance(spec, str) else None


def is_whole(store: Store) -> bool:
    """Whether it is known what the studies want: no row is damaged, and those whose rows were mended have run since."""
    if any(True for _ in of_studies(store)) or any(True for _ in of_members(store)):
        return False
    for row in store.database.query("SELECT key, spec, state, attempt, owner, reason, result, updated FROM trial"):
        if not is_key(row["key"]) or not is_spec_of(row["spec"], row["key"]) or faults_of(row):
            return False
    ran = {each["name"]: each["updated"] for each in store.studies()}
    newest = max(ran.values(), default=0.0)
    return all(when < ran.get(study, newest) for study, when in store.names([REPAIRED]).get(REPAIRED, {}).items())
