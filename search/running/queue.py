"""A study's rows for its driver: asks the planner for them, and knows which wait, pause, or run elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archlab.search.store.store import TERMINAL, Row, Store
from archlab.search.trial.metrics import Watch
from archlab.search.variants.asks import NextRows

REST = 20.0  # while trials wait for a place, the planner rests so many times as long as it took


@dataclass
class Table:
    """What a driver needs of the rows, by trial: one in two roles is one, and goes as far as either wants it.

    `states` has the state of each; `until` the step after which it pauses, None at its end; `waiting` one row of each
    that is to be launched, in the planned order; `elsewhere` the study whose driver is training it.
    """

    states: dict[str, str] = field(default_factory=dict)
    until: dict[str, int | None] = field(default_factory=dict)
    waiting: deque[dict[str, Any]] = field(default_factory=deque)
    elsewhere: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: list[dict[str, Any]], running: Collection[str] = ()) -> Table:
        """Of a study's rows, while its own driver trains `running`."""
        table, seen = cls({row["key"]: row["state"] for row in rows}), set(running)
        for row in rows:
            wanted, other = table.until.setdefault(row["key"], row["until"]), row["until"]
            table.until[row["key"]] = None if wanted is None or other is None else max(wanted, other)
        for row in rows:
            key = row["key"]
            if key in seen:
                continue
            seen.add(key)
            if row["state"] == "running":
                table.elsewhere[key] = row["owner"]
            elif goes_on(row, table.until[key]):
                table.waiting.append(row)
        return table

    def ended(self) -> set[str]:
        """The trials that will not be trained any more."""
        return {key for key, state in self.states.items() if state in TERMINAL}


@dataclass
class Running:
    """A trial that this driver trains: its attempt, and the row that it was launched for."""

    attempt: int
    row: dict[str, Any]
    folder: Path
    watch: Watch
    started: float = field(default_factory=time.monotonic)
    asked: bool = False  # to stop

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def goes_on(row: dict[str, Any], until: int | None) -> bool:
    """Whether a row waits to be launched: it is planned, or paused before the step that is wanted by now."""
    if row["state"] == "paused":
        return until is None or row["result"]["step"] < until
    return bool(row["state"] == "planned")


@dataclass
class Planner:
    """Asks for a study's rows again and again: planning reads the whole table, which may have thousands of rows."""

    store: Store
    study: str
    next_rows: NextRows
    prunes: bool
    changed: bool = False  # something ended since it was asked
    _rest_until: float = 0.0
    _wanted: list[tuple[Any, ...]] | None = None
    _reset: set[str] = field(default_factory=set)

    def due(self, table: Table) -> bool:
        """Whether it is time to ask: at once when nothing waits for a place that is free, else after a rest."""
        if self.changed and not table.waiting:
            return True
        return (self.changed or bool(table.elsewhere)) and time.monotonic() >= self._rest_until

    def ask(self, running: Collection[str]) -> Table:
        """Asks until that changes nothing: a reused result may call for rows at once.

        What other studies gave up is planned again for us, once in a run; without pruning no trial stays pruned.
        """
        began, asked = time.monotonic(), list[set[tuple[Any, ...]]]()
        while True:
            rows = self.store.study_trials(self.study)
            members, changed = self._add(self.next_rows(rows))
            if not changed:
                break
            if members in asked:  # a planner that goes in circles is left
                rows = self.store.study_trials(self.study)
                break
            asked.append(members)
        self.changed, now = False, time.monotonic()
        self._rest_until = now + REST * (now - began)
        return Table.of(rows, running)

    def _add(self, wanted: Sequence[Row]) -> tuple[set[tuple[Any, ...]], bool]:
        """Brings the table to what is wanted. Returns that, and whether it was something else before."""
        described = [(row.trial.key, *row[1:]) for row in wanted]
        changed = 0
        if described != self._wanted:
            changed = self.store.add_trials(self.study, wanted) + self.store.drop_others(self.study, wanted)
            self._wanted = described
        if not self.prunes:
            changed += self.store.reset_pruned(self.study)
        foreign = self.store.reset_foreign(self.study, but=self._reset)
        self._reset.update(foreign)
        members = {(key, variant, role, until) for key, variant, role, _, _, until in described}
        return members, bool(changed or foreign)
