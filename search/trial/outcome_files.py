"""What a trial's process leaves for its driver: its result and the attempt it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a trial that ended, None while there is none. It is written whole, and last."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("state") in ("complete", "diverged") else None


def read_attempt(folder: Path) -> dict[str, Any]:
    """attempt, pid, host, started (unix s) of the newest attempt that got as far as starting; {} when none did."""
    try:
        found: dict[str, Any] = json.loads((folder / "attempt.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found
