"""How far the studies of a store are. Needs neither torch nor Ray."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from search.lock import holder_of
from search.store import Store

_ORDER = ("complete", "running", "planned", "diverged", "pruned", "failed")


def status_of(root: Path, study: str | None = None) -> list[dict[str, Any]]:
    """name, question, counts by state, updated (unix s) and holder (who runs it, or None), newest first.

    Raises StoreError if there is no store, or no such study in it.
    """
    with Store.open(root, create=False) as store:
        if study:
            store.study(study)
        found = [row for row in store.studies() if study in (None, row["name"])]
    return [{**row, "holder": holder_of(root, row["name"])} for row in found]


def lines(found: list[dict[str, Any]]) -> list[str]:
    """The same as text, a line per study."""
    if not found:
        return ["no studies yet; archlab run STUDY.yaml"]
    width = max(len(row["name"]) for row in found)
    return [f"{row['name']:<{width}}  {_counts(row['counts'])}  {_who(row)}" for row in found]


def _counts(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    parts = [f"{counts[state]} {state}" for state in _ORDER if counts.get(state)]
    return f"{total} trials: {', '.join(parts)}"


def _who(row: dict[str, Any]) -> str:
    holder = row["holder"]
    if holder:
        return f"running on {holder.get('host')} (process {holder.get('pid')})"
    minutes = (time.time() - row["updated"]) / 60
    return f"started {minutes:.0f} min ago" if minutes < 120 else f"started {minutes / 60:.0f} h ago"
