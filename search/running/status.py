"""How far the studies of a store are. Needs neither torch nor Ray."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from archlab.search.store.store import Store
from archlab.search.utils.names import ROUND

_ORDER = ("complete", "running", "interrupted", "paused", "planned", "diverged", "pruned", "failed")


def status_of(root: Path, study: str | None = None) -> list[dict[str, Any]]:
    """name, question, counts by state, updated (unix s), holder (who runs it, or None) and left_s, newest first.

    A trial whose driver has died is `interrupted`, not running. left_s, the seconds that a running study still takes,
    is None where nothing tells. `refused` is how many proposals of a study without trials were refused. Raises
    StoreError if there is no store, or no such study in it.
    """
    with Store.open(root, create=False) as store:
        if study:
            store.study(study)
        found = [row for row in store.studies() if study in (None, row["name"])]
        for row in found:
            row["holder"] = store.holder(row["name"])
            row["left_s"] = None
            if not row["counts"]:
                row["refused"] = sum(event["kind"] == "refused" for event in store.events(row["name"]))
            if row["holder"] is not None or row["counts"].get("running"):
                _look_closer(store, row)
    return found


def _look_closer(store: Store, row: dict[str, Any]) -> None:
    """Counts what really runs, and says how long the rest will take."""
    from archlab.search.running.progress import Progress
    from archlab.search.running.watch import Follower

    follower = Follower(store, row["name"])
    row["counts"] = dict(Counter(follower.states.values()))
    if row["holder"] is None:
        return
    record = store.study(row["name"])
    progress = Progress()
    progress.plan(record, int(record.get("trials") or sum(row["counts"].values())), follower.rows)
    for event in follower.news():
        progress.event(event)
    row["left_s"] = progress.left_s()


def lines(found: list[dict[str, Any]]) -> list[str]:
    """The same as text, a line per study."""
    if not found:
        return ["no studies yet; archlab run STUDY.yaml"]
    width = max(len(row["name"]) for row in found)
    why = ", {refused} proposals refused (they break a constraint, or make no sense)"  # of a search without trials
    counts = (told(row["counts"]) + (why.format(**row) if row.get("refused") else "") for row in found)
    return [f"{row['name']:<{width}}  {counted}  {_who(row)}" for row, counted in zip(found, counts, strict=True)]


def told(counts: dict[str, int]) -> str:
    """Such as `4 trials: 3 complete, 1 failed`."""
    total = sum(counts[state] for state in _ORDER if state in counts)
    parts = [f"{counts[state]} {state}" for state in _ORDER if counts.get(state)]
    return f"{total} trial{'' if total == 1 else 's'}: {', '.join(parts) or 'none yet'}"


def _who(row: dict[str, Any]) -> str:
    from archlab.search.formatting.numbers import duration_in_words

    holder = row["holder"]
    if holder is not None:
        who = f"running on {holder['host']} (process {holder['pid']})" if holder else "running"
        return who if row["left_s"] is None else f"{who}, about {duration_in_words(row['left_s'])} left"
    minutes = (time.time() - row["updated"]) / 60
    when = f"started {minutes:.0f} min ago" if minutes < 120 else f"started {minutes / 60:.0f} h ago"
    waits = any(row["counts"].get(state) for state in ("interrupted", "planned"))
    verb = "challenge" if ROUND in row["name"] else "run"
    return f"{when}; archlab {verb} goes on" if waits else when
