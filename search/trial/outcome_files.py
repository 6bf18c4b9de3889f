"""What a trial's process leaves for its driver: its result and the attempt it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archlab.search.utils.files import read_json


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a trial that ended, None while there is none. It is written whole, and last."""
    result = read_json(folder / "result.json")
    return result if isinstance(result, dict) and result.get("state") in ("complete", "diverged") else None


def read_attempt(folder: Path) -> dict[str, Any]:
    """attempt, pid, host, started (unix s) of the newest attempt that got as far as starting; {} when none did.

    On a cluster also `node`, Ray's number for the machine.
    """
    return read_json(folder / "attempt.json") or {}
