"""Rows of the trial table as they may be: a bad block, an editor or somebody else may have left what no run writes.

A trial with a damaged row is read as a failed one whose reason says so, and the others go on. What can be done is the
matter of `archlab check`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from functools import cache
from operator import itemgetter
from types import NoneType
from typing import Any

from archlab.search.store.database import StoreRefused
from archlab.search.store.kept import fault_of_detail, fault_of_record, fault_of_settings
from archlab.search.store.lock import is_study_name
from archlab.search.trial.outcome_files import fault_of_result
from archlab.search.utils.files import NO_JSON
from archlab.search.utils.shapes import DEEPEST, is_too_deep

log = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-f]{8,64}")
"""A trial's key, or so much of its beginning as names it."""
_SEAL = "sha256"
_of_row = itemgetter("variant", "role", "seed", "until", "state", "attempt", "reason", "owner", "updated")
_OF_EVENT: dict[str, tuple[type, ...]] = {
    "time": (int, float),
    "study": (str, NoneType),
    "key": (str, NoneType),
    "attempt": (int, NoneType),
    "kind": (str,),
}
_USUAL = {(float, str, str, str, int, str), (float, str, str, str, NoneType, str)}  # of most events
_NEVER = 1e11  # unix seconds: the year 5138
# of each column of JSON what it has to be, given the value of another column
_CHECKS = {"settings": (fault_of_settings, "role"), "result": (fault_of_result, "state")}
STATES = ("planned", "running", "paused", "complete", "pruned", "failed", "diverged")
TERMINAL = ("complete", "pruned", "failed", "diverged")
WHAT_NOW = "archlab check says what can be done"
_TOO_DEEP = "it is nested too deeply"
SPEC_DAMAGED = "its spec in the trial table is damaged: `archlab check --repair`, and run its study again"
"""Why a trial has failed that could not be started."""

_ALLOWED: dict[str, tuple[Any, ...]] = {"state": STATES, "orphaned": (0, 1)}
# of each column the types it may have, and what stands for a value that has none of them
_COLUMNS: dict[str, tuple[tuple[type, ...], Any]] = {
    "variant": ((str,), "?"),
    "role": ((str,), "repeat"),
    "seed": ((int,), 0),
    "until": ((int, NoneType), None),
    "position": ((int,), 0),
    "orphaned": ((int,), 0),
    "state": ((str,), "failed"),
    "attempt": ((int,), 0),
    "reason": ((str, NoneType), None),
    "owner": ((str, NoneType), None),
    "updated": ((int, float), 0.0),
}


def parsed(text: Any, kind: type) -> tuple[Any, str | None]:
    """The value of a text that should be the JSON of a `kind`, and what is wrong with it (None: nothing is)."""
    found, fault = _loaded(text, kind)
    if fault is None and _brackets(text) > DEEPEST and is_too_deep(found):
        return None, _TOO_DEEP
    return found, fault


def _brackets(text: Any) -> int:
    """How many are opened: what has no more of them is no deeper either, and needs no look at its values."""
    if isinstance(text, bytes):
        return text.count(b"{") + text.count(b"[")
    return int(text.count("{") + text.count("["))


def _loaded(text: Any, kind: type) -> tuple[Any, str | None]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return None, f"it is no JSON from character {error.pos} on"
    except (*NO_JSON, TypeError) as error:
        return None, _TOO_DEEP if isinstance(error, RecursionError) else "it is no text"
    if isinstance(found, kind):
        return found, None
    return None, "it is not a mapping"


def fault_in(text: Any, kind: type) -> str | None:
    """What is wrong with a text that should be the JSON of a `kind`; None where nothing is."""
    return parsed(text, kind)[1]


def sealed(record: dict[str, Any]) -> str:
    """The JSON of a study's record, with a digest of it."""
    return json.dumps({**record, _SEAL: _digest(json.dumps(record))})


def unsealed(text: Any) -> tuple[dict[str, Any], str | None]:
    """The record that a text holds, and what is wrong with it. One of an older archlab has no digest."""
    found, fault = _loaded(text, dict)
    if fault:
        return {}, fault
    seal = found.pop(_SEAL, None)
    if seal is None:
        fault = parsed(text, dict)[1] or fault_of_record(found)
    elif seal != _digest(json.dumps(found)):
        fault = "it is not what a run stored there"
    return ({}, fault) if fault else (found, None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_key(found: Any) -> bool:
    """Whether it can be a trial's key: anything else could name a folder elsewhere."""
    return isinstance(found, str) and KEY.fullmatch(found) is not None


def keyed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that have a trial's key; that there are others is told."""
    found = [row for row in rows if is_key(row["key"])]
    if len(found) < len(rows):
        tell_left_out("a row whose key is no trial's")
    return found


@cache
def tell_left_out(what: str) -> None:
    """Warns that something damaged is left out, once in a process."""
    log.warning("the trial table has %s: it is left out; %s", what, WHAT_NOW)


def is_spec_of(text: Any, key: str) -> bool:
    """Whether a text is the `trial.json` of a trial: its sha256 is the key."""
    return isinstance(text, str) and hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() == key


def sound_spec(key: str, spec: Any) -> str:
    """The text, if it is that of the trial. Raises StoreRefused."""
    if not is_spec_of(spec, key):
        raise StoreRefused(f"the spec of trial {key[:12]} is damaged in the trial table; {WHAT_NOW}")
    return str(spec)


def faults_of(row: dict[str, Any]) -> dict[str, str]:
    """column -> what is wrong with it, of those that the row of a trial has."""
    faults = _wrong_types(row)
    for name in _CHECKS:
        if name in row and (fault := _json_column(name, row)[1]):
            faults[name] = fault
    return faults


def _json_column(name: str, row: dict[str, Any]) -> tuple[Any, str | None]:
    """The value of a column of JSON, and what is wrong with it; the state or role says what it has to be."""
    if row[name] == "{}" and name == "settings" and row["role"] != "search":
        return {}, None
    value, fault = parsed(row[name], dict) if row[name] is not None else (None, None)
    check, of = _CHECKS[name]
    return value, fault or check(value, row.get(of))


def _wrong_types(row: dict[str, Any]) -> dict[str, str]:
    if _is_right(row):
        return {}
    faults = {}
    for name, (types, _) in _COLUMNS.items():
        if name in row and (not isinstance(row[name], types) or row[name] not in _ALLOWED.get(name, (row[name],))):
            faults[name] = f"it is {str(row[name])[:40]!r}"
    if "updated" in row and not is_time(row["updated"]):
        faults["updated"] = f"it is {str(row['updated'])[:40]!r}"
    if isinstance(row.get("owner"), str) and not is_study_name(row["owner"]):
        faults["owner"] = f"{row['owner'][:40]!r} is no study's name"
    if row.get("state") == "running" and row.get("owner", "") is None:
        faults["owner"] = "it runs, and no study runs it"  # who waits for its end would wait for ever
    return faults


def _is_right(row: dict[str, Any]) -> bool:
    """Whether nothing can be wrong with a whole row of a wanted trial: asked first, as of most nothing is."""
    try:
        variant, role, seed, until, state, attempt, reason, owner, updated = _of_row(row)
    except KeyError:
        return False
    types = (type(variant), type(role), type(seed), type(attempt), type(updated))
    return bool(
        types == (str, str, int, int, float)
        and (until is None or type(until) is int)
        and (reason is None or type(reason) is str)
        and state in STATES
        and (is_owner(owner) if owner is not None else state != "running")
        and 0 <= updated < _NEVER
        and row.get("orphaned", 0) in (0, 1)
        and type(row.get("position", 0)) is int
    )


@cache
def is_owner(name: Any) -> bool:
    """Whether a study may be named so; of few names very many trials are asked."""
    return isinstance(name, str) and is_study_name(name)


def is_time(found: Any) -> bool:
    """Whether it is a moment that a clock of ours could say, in unix seconds."""
    return isinstance(found, int | float) and 0 <= found < _NEVER


def event_faults(row: dict[str, Any]) -> dict[str, str]:
    """column -> what is wrong with it, of those that the row of an event has. Most have no detail."""
    return _event(row)[1]


def _event(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The detail of an event, and the faults of its row by column."""
    wrong = [name for name, types in _OF_EVENT.items() if not isinstance(row[name], types)]
    if not is_time(row["time"]) and "time" not in wrong:
        wrong.append("time")
    faults = {name: f"it is {str(row[name])[:40]!r}" for name in wrong}
    if row["detail"] == "{}":
        return {}, faults
    detail, fault = parsed(row["detail"], dict)
    if fault := fault or fault_of_detail(detail):
        faults["detail"] = fault
    return detail, faults


def event_row(row: dict[str, Any]) -> dict[str, Any] | None:
    """An event as `Store.events` gives it; a damaged detail is empty, and of another damage there is none."""
    kept = row["time"], row["kind"], row["study"], row["key"], row["attempt"], row["detail"]
    if kept[-1] == "{}" and tuple(map(type, kept)) in _USUAL and is_time(kept[0]):
        return {**row, "detail": {}}
    detail, faults = _event(row)
    if faults.keys() - {"detail"}:
        return None
    return {**row, "detail": {} if faults else detail}


def trial_row(row: dict[str, Any], folder: str) -> dict[str, Any]:
    """A row as `Store.study_trials` gives it; a damaged one as that of a failed trial, which is never trained."""
    found = dict(row)
    study = found.pop("study")
    lost = all(found[name] is None for name in ("state", "attempt", "updated"))
    faults = {"key": "there is no such trial"} if lost else {}
    faults |= (wrong := _wrong_types(found))
    for name in wrong:
        found[name] = _COLUMNS[name][1]
    for name, instead in (("settings", {}), ("result", None)):
        value, fault = _json_column(name, found)
        found[name] = value if fault is None else instead
        if fault and not lost:
            faults[name] = fault
    found["reused"] = found["state"] in TERMINAL and found["owner"] not in (None, study)  # None: nobody knows any more
    found["folder"] = folder
    if faults:
        found |= {"state": "failed", "result": None, "reason": reason_of(faults)}
    return found


def state_and_result(row: dict[str, Any]) -> dict[str, Any]:
    """The two of a trial's row; a damaged one has failed."""
    result, fault = _json_column("result", row)
    fault = fault or _wrong_types({"state": row["state"]}).get("state")
    return {"state": row["state"], "result": result} if not fault else {"state": "failed", "result": None}


def reason_of(faults: dict[str, str]) -> str:
    """Why a trial with these damaged columns counts as failed."""
    name, fault = next(iter(faults.items()))
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return f"its row in the trial table is damaged ({name}: {fault}{more}); {WHAT_NOW}"
