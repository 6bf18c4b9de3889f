"""What was measured of finished trials, as a store keeps it.

A finding is kept under its trial and the digest of the measure, its options and version, and the data. It is JSON:
measure (label), version, data, values {name: number}, curves {name: {x, y, n}}, grids {name: {rows, columns, row,
column, values, n}} (earlier ones have none), seconds it took, fingerprint, time (unix s).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from archlab.search.store.kept import MEASURE
from archlab.search.store.store import Store
from archlab.search.utils.files import read_json, write_whole

_KIND, _ASKED = MEASURE, "asked "


def kind_of(key: str) -> str:
    """Under which a store remembers the findings of a trial."""
    return _KIND + key


def measured(store: Store, keys: Iterable[str]) -> dict[str, dict[str, float]]:
    """key -> {digest: when (unix s)} of the trials of which something was measured."""
    found = store.names(map(kind_of, keys))
    return {kind.removeprefix(_KIND): names for kind, names in found.items()}


def sound(store: Store, keys: Iterable[str]) -> dict[str, set[str]]:
    """key -> the digests of what was measured of a trial, but for what is damaged."""
    return {kind.removeprefix(_KIND): {*kept} for kind, kept in store.recall_all(map(kind_of, keys)).items()}


def findings(store: Store, keys: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """key -> what was measured of it, each measure by its newest version, by name."""
    found = {}
    for kind, kept in store.recall_all(map(kind_of, keys)).items():
        newest = sorted(kept.values(), key=lambda each: each["version"])
        by_label = {each["measure"]: each for each in newest}
        found[kind.removeprefix(_KIND)] = [by_label[label] for label in sorted(by_label)]
    return found


def places_of(study: str, trials: Iterable[str]) -> list[tuple[str, None]]:
    """(kind, None) under which a store remembers what was measured of trials, and what was asked for of a study."""
    return [(_ASKED + study, None), *((kind_of(key), None) for key in trials)]


def ask(store: Store, study: str, labels: Iterable[str]) -> None:
    """Keeps in the store which measures somebody has asked for of a study, beside those of its `evaluate:`."""
    for label in labels:
        store.remember(_ASKED + study, label, {})


def findings_of(store: Store, record: dict[str, Any], keys: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """`findings` of trials of a study: those that were asked for, and what all of these trials have. What another study
    has measured of the trials that both share is no column of this one's table."""
    found = findings(store, keys)
    kind = _ASKED + record["study"]
    asked = {*record.get("measures", ()), *store.names([kind]).get(kind, ())}
    labels = [{each["measure"] for each in found.get(key, ())} for key in keys]
    shown = asked.union(set.intersection(*labels) if labels else ())
    return {key: [each for each in mine if each["measure"] in shown] for key, mine in found.items()}


def keep_finding(store: Store, key: str, digest: str, finding: dict[str, Any]) -> None:
    """Keeps a finding in the store, and its numbers in the trial's result.json too, for whoever looks there."""
    store.remember(kind_of(key), digest, finding)
    path = store.trial_folder(key) / "result.json"
    if (result := read_json(path)) is not None:
        told = {each["measure"]: each["values"] for each in findings(store, [key])[key]}
        write_whole(path, json.dumps(result | {"measures": told}, indent=1, allow_nan=False))
