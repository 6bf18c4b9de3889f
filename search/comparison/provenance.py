"""Where the numbers of a report come from: study, data, seeds, versions, machine, when, and what was trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from archlab.search.results.selection import Selection, tuned_paths
from archlab.search.store.roles import ROLE
from archlab.search.store.store import TERMINAL
from archlab.search.trial.trial import Trial, identity_of

VERSIONS = ("archlab", "commit", "torch", "python", "device", "cpu", "threads", "gpu", "compiler", "parallel")
"""What of the fingerprints of trials a report says."""


def provenance(
    record: Mapping[str, Any], selections: Iterable[Selection], trials: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Of a study with all of its rows, as far as its store knows: nothing about folders, hosts or users.

    `tokens` and `context` are lists of the distinct values of the variants, ascending; `precision` and `compile` of
    those that trials have; `versions` those of the reported trials. `trained` has the UTC dates of the first start and
    of the last end, `identities` by variant the hashes of its model and of its recipe.
    """
    chosen = [*selections]
    prints = [t["result"].get("fingerprint") or {} for s in chosen for t in s.complete.values()]
    versions = {name: sorted({str(p[name]) for p in prints if name in p}) for name in VERSIONS}
    variants = record["variants"]
    return {
        "study": record["study"],
        **{name: record[name] for name in ("scale", "overrides") if record.get(name)},
        "data": dict(record["data"]),
        **{name: sorted({v.get(name, record[name]) for v in variants}) for name in ("tokens", "context")},
        "seeds": sorted({n for s in chosen for n in s.reported}) if record.get("sequential") else record["seeds"],
        **{name: found for name in ("precision", "compile") if (found := _recipes(record, name))},
        "versions": {name: found for name, found in versions.items() if found},
        "trained": _dates(trials),
        "identities": {v["name"]: v["identity"] for v in variants if "identity" in v},
        "published": {name: table[name] for name in ("table", "source")}
        if (table := record.get("published"))
        else None,
        "match": record.get("match"),
        **({"ladder": record["ladder"]} if "ladder" in record else {}),
    }


def identified(
    record: dict[str, Any], trials: Iterable[Mapping[str, Any]], spec: Callable[[str], str]
) -> dict[str, Any]:
    """The record with the identity of every variant; where an older version did not keep it, from the text of one of
    its trials, unless these differ in what was tuned."""
    if all("identity" in variant for variant in record["variants"]):
        return record
    alike = tuned_paths(record).keys() <= {"lr"}
    keys = {t["variant"]: t["key"] for t in trials if t["role"] == "search" or (alike and t["role"] != ROLE)}
    variants = [
        {**v, "identity": identity_of(Trial.from_json(spec(keys[v["name"]])))}
        if "identity" not in v and v["name"] in keys
        else v
        for v in record["variants"]
    ]
    return {**record, "variants": variants}


def _recipes(record: Mapping[str, Any], name: str) -> list[str]:
    """What the recipes of the variants say of a field that a record's own says: the first variant's, or a change."""
    mine = record["recipe"].get(name, "off" if name == "compile" and "precision" in record["recipe"] else None)
    path = f"train.{name}"
    changed = [[after for at, _, after in v.get("changes") or () if at == path] for v in record["variants"]]
    return sorted({str(each[0] if each else mine) for each in changed if each or mine is not None})


def _dates(trials: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The days on which the first trial began and the last one ended; {} where nothing is known of that."""
    mine = [*trials]
    began = [trial["began"] for trial in mine if trial.get("began")]
    ended = [t["updated"] for t in mine if t.get("updated") and t["state"] in (*TERMINAL, "paused")]
    told = {"first": min(began, default=None), "last": max(ended, default=None)}
    return {name: datetime.fromtimestamp(when, UTC).date().isoformat() for name, when in told.items() if when}
