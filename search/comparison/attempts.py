"""The attempts of a study as its events tell them: when each trial ran, how that ended, and beside how many others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported when a frame is made: a quarter of a second
    import pandas as pd


COLUMNS = ["key", "attempt", "start", "end", "ended", "place"]
_ENDS = ("complete", "paused", "planned", "failed", "diverged", "pruned", "stale")


def attempts_frame(events: Iterable[dict[str, Any]], now: float, running: bool) -> pd.DataFrame:
    """A row per attempt, by its start (unix s): `ended` is the state that it left its trial in.

    An attempt without an end is `running` until `now`, or `interrupted` where nobody runs the study, at the last event
    of any trial. `planned` is one that was released and goes on later. What an attempt tells after the next one of its
    trial has begun ends nothing. `place` is the lowest number that no other attempt has at that time: how many ran at
    once.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    under_way: dict[str, dict[str, Any]] = {}
    last = 0.0
    for event in events:
        key, kind, last = event["key"], event["kind"], float(event["time"])
        if key is None or (kind != "running" and kind not in _ENDS):
            continue
        open_one = under_way.get(key)
        if open_one is not None and (kind == "running" or event["attempt"] == open_one["attempt"]):
            del under_way[key]
            open_one |= {"end": last, "ended": "interrupted" if kind == "running" else kind}
        if kind == "running":
            under_way[key] = {"key": key, "attempt": event["attempt"], "start": last, "end": now, "ended": "running"}
            rows.append(under_way[key])
    if not running:
        for each in under_way.values():
            each |= {"end": max(last, each["start"]), "ended": "interrupted"}
    ends: list[float] = []
    for row in rows:
        row["place"] = next((i for i, end in enumerate(ends) if end <= row["start"]), len(ends))
        ends[row["place"] : row["place"] + 1] = [row["end"]]
    return pd.DataFrame(rows, columns=COLUMNS)
