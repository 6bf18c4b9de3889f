"""The journal of a process that does not lead: what it would write, the leader writes."""

from __future__ import annotations

from typing import Any

from archlab.search.trial.journal import Journal


class Silent(Journal):
    """Writes nothing."""

    def __init__(self) -> None: ...

    def write(self, step: int, **measures: float | None) -> None: ...

    def pulse(self) -> None: ...

    def flush(self) -> None: ...

    def sync(self) -> None: ...

    def lines(self, after: int, upto: int) -> list[dict[str, Any]]:
        return []

    def close(self) -> None: ...
