"""Data frames as plain records, with missing values as None."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


NAN = float("nan")


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame, each by the names of its columns."""
    found: list[dict[str, Any]] = frame.to_dict("records")  # type: ignore[assignment]  # names of columns are texts
    return found


def inert(value: Any) -> Any:
    """A text that a spreadsheet shows and never runs: before what begins like a formula stands an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
