"""The state of each trial of a study: interrupted is running without a driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def states_of(rows: Iterable[dict[str, Any]], holder_of: Callable[[str], object]) -> dict[str, str]:
    """State by trial; one that is `running` in the table and has no driver any more is `interrupted`: `holder_of` says
    who runs a study, None for nobody."""
    found = {row["key"]: row for row in rows}
    owners = {row["owner"] for row in found.values() if row["state"] == "running"}
    dead = {owner for owner in owners if owner is None or holder_of(owner) is None}
    return {
        key: "interrupted" if row["state"] == "running" and row["owner"] in dead else row["state"]
        for key, row in found.items()
    }
