"""Follows a study that another process runs: what changes in the store, as the events that its driver tells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.running.ending import EXIT_TRY_AGAIN, Summary, count, summarise
from archlab.search.running.queue import goes_on
from archlab.search.running.retries import TOLD
from archlab.search.store.lock import is_study_name, states_of
from archlab.search.store.store import TERMINAL, Store
from archlab.search.trial.outcome_files import read_attempt

if TYPE_CHECKING:
    from archlab.search.running.progress import Progress

POLL_S = 2.0


def follow(root: Path, study: str, shown: Progress, poll_s: float = POLL_S) -> Summary:
    """Shows a study until nobody runs it any more, and returns how it stands then; what runs it is left alone.

    Raises StoreRefused for a study that is neither known nor being planned.
    """
    with Store.open(root, create=False) as store:
        while not any(each["name"] == study for each in store.studies()):
            if not is_study_name(study) or store.holder(study) is None:
                store.study(study)  # says which there are
            time.sleep(poll_s)
        follower = Follower(store, study)
        record = store.study(study)
        held = store.holder(study) is not None
        wanted = len({row["key"] for row in follower.rows})
        over = not held and not follower.left()  # what a plan took at most was not needed
        shown.plan(record, wanted if over else int(record.get("trials") or wanted), follower.rows)
        while True:
            for event in follower.news():
                shown.event(event)
            if not held:
                return follower.summary()
            time.sleep(poll_s)
            held = store.holder(study) is not None
            follower.read()


class Follower:
    """The rows of a study at the last two looks."""

    def __init__(self, store: Store, study: str) -> None:
        self.store, self.study = store, study
        self.before: dict[str, tuple[str, int]] | None = None  # state and attempt by trial
        self.rows: list[dict[str, Any]] = []
        self.read()

    def read(self) -> None:
        self.rows = self.store.study_trials(self.study)
        self.states = states_of(self.rows, self.store.holder)

    def news(self) -> Iterator[dict[str, Any]]:
        """What changed since the last call, in events of `drive`; at first how the study stands and what runs."""
        rows, before = {row["key"]: row for row in self.rows}, self.before
        if before is None:
            ended = {key for key, state in self.states.items() if state in TERMINAL}
            yield {"event": "study", "study": self.study, "counts": count(self.states, ended)}
        for key, row in rows.items():
            now = (self.states[key], row["attempt"])
            was = ("planned", 0) if before is None else before.get(key, ("planned", 0))
            if now != was and (before is not None or now[0] == "running"):
                yield from _change(row, now[0], was[0])
        self.before = {key: (self.states[key], row["attempt"]) for key, row in rows.items()}
        running = {key: Path(row["folder"]) for key, row in rows.items() if self.states[key] == "running"}
        yield {"event": "tick", "running": running}

    def left(self) -> set[str]:
        """The trials that go on when the study is run again."""
        waiting = {row["key"] for row in self.rows if goes_on(row, row["until"])}
        return waiting | {key for key, state in self.states.items() if state == "interrupted"}

    def summary(self) -> Summary:
        """How the study stands with nobody running it."""
        left = self.left()
        found = summarise(self.states, set(), None, len(left))
        if not left:
            return found
        return Summary(EXIT_TRY_AGAIN, found.counts, "nobody runs it; archlab run goes on with what is left")


def _change(row: dict[str, Any], state: str, was: str) -> Iterator[dict[str, Any]]:
    """What the driver told when a trial went from one state to another."""
    reason = row["reason"]
    detail = {"key": row["key"], "attempt": row["attempt"]}
    if state == "running":
        shown = {name: row[name] for name in ("folder", "variant", "role", "settings", "seed")}
        since = read_attempt(Path(row["folder"])).get("started", time.time())
        yield {"event": "launched", **detail, **shown, "since": since}
    elif state in TERMINAL:
        yield {"event": "finished", **detail, "state": state, "reason": reason, "result": row["result"]}
    elif state == "paused":
        yield {"event": "paused", **detail, "result": row["result"]}
    elif was == "running" and (kind := (reason or "").partition(":")[0]) in TOLD:
        yield {"event": "retry", **detail, "kind": kind, "message": (reason or "").partition(": ")[2]}
