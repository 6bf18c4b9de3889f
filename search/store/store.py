"""The trial table: which trials exist, in which state, wanted by which study. It is the truth of a store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

from archlab.search.store.database import Changes, Found, StoreAway, StoreError, StoreFull, StoreRefused
from archlab.search.store.folders import Unfit, fault_of, folder_of, prepare
from archlab.search.store.opening import open_database
from archlab.search.store.rows import (
    KEY,
    SPEC_DAMAGED,
    TERMINAL,
    is_spec_of,
    keyed,
    sound_spec,
    state_and_result,
    trial_row,
)
from archlab.search.store.studies import Studies, forget_events, log_event
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json

__all__ = ["KEY", "TERMINAL", "Row", "StaleAttempt", "Store", "StoreAway", "StoreError", "StoreFull", "StoreRefused"]


class Row(NamedTuple):
    """One wanted trial of a study: as which variant, in which role ("tune", "repeat", "search", "screen"), at which
    settings.

    until: the optimizer step, counted over all stages, after which it pauses; None: it is trained to its end.
    """

    trial: Trial
    variant: str
    role: str
    settings: dict[str, Any]
    seed: int
    until: int | None = None


class StaleAttempt(Exception):
    """Someone who no longer holds the trial tried to change it; the newer attempt stands."""


class Store(Studies):
    """planned -> running(attempt) -> complete | pruned | failed | diverged.

    running -> planned on interruption; running -> paused at the step up to which a trial is wanted, and on from there.
    One transaction per transition. The attempt number is a fencing token: who doesn't hold the newest one changes
    nothing. A store may be used from several threads and processes at once.
    """

    @classmethod
    def open(cls, root: Path | str, create: bool = True) -> Store:
        """Opens a store, making it first if `create`. Raises StoreError for one that is absent, newer or damaged."""
        root = Path(root).absolute()
        store = cls(root, open_database(root, create))
        try:
            store._query("SELECT 1 AS one FROM study WHERE name = ''")
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Closes the connections of all threads."""
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # membership

    def add_trials(self, study: str, rows: Iterable[Row]) -> int:
        """Makes each row exist once, in the given order. Returns how many are new, back, or wanted to another step."""
        wanted = [(row, row.trial.key) for row in rows]
        present = self._members(study)
        fresh, changed, revived = [], [], 0
        for position, (row, key) in enumerate(wanted):
            values = (canonical_json(row.settings), row.seed, row.until, position, 0)
            member = (key, row.variant, row.role)
            if member not in present:
                fresh.append((row, key))
            elif present[member][-1] or present[member][2] != row.until:
                revived += 1
            if present.get(member) != values:
                changed.append((study, *member, *values))
        if not changed:
            return 0
        self._study_row(study)
        made = time.time()
        specs = sorted((key, row.trial.to_json()) for row, key in fresh)

        def add(db: Changes) -> None:
            db.many(
                "INSERT INTO trial (key, spec, state, updated) VALUES (?, ?, 'planned', ?) ON CONFLICT (key) "
                "DO UPDATE SET spec = excluded.spec WHERE trial.spec <> excluded.spec",
                ((key, spec, made) for key, spec in specs),
            )
            db.many(
                "INSERT INTO study_trial (study, key, variant, role, settings, seed, until, position, orphaned) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (study, key, variant, role) DO UPDATE SET "
                "settings = excluded.settings, seed = excluded.seed, until = excluded.until, "
                "position = excluded.position, orphaned = 0",
                changed,
            )

        self._write(add)
        return len(fresh) + revived

    def drop_others(self, study: str, rows: Iterable[Row]) -> int:
        """Marks the study's rows that are not among `rows` as orphaned; trials and results stay. Returns how many."""
        wanted = {(row.trial.key, row.variant, row.role) for row in rows}
        unwanted = [
            (study, *member)
            for member, values in self._members(study).items()
            if member not in wanted and not values[-1]
        ]
        if unwanted:
            drop = "UPDATE study_trial SET orphaned = 1 WHERE study = ? AND key = ? AND variant = ? AND role = ?"
            self._write(lambda db: db.many(drop, unwanted))
        return len(unwanted)

    def _members(self, study: str) -> dict[tuple[str, str, str], tuple[Any, ...]]:
        rows = self._query(
            "SELECT key, variant, role, settings, seed, until, position, orphaned FROM study_trial WHERE study = ?",
            (study,),
        )
        members = (tuple(row.values()) for row in rows)
        return {values[:3]: values[3:] for values in members}

    def study_trials(self, study: str, orphaned: bool = False) -> list[dict[str, Any]]:
        """The study's rows in planned order (the no longer wanted ones if `orphaned`).

        Keys: key, variant, role, settings, seed, until, state, attempt, reused (finished by another study's run),
        reason, result (what result.json holds; where a trial paused last, also while it goes on; or None), folder
        (str), owner (the study whose driver ran it last), updated. A row that is damaged, or whose trial is not in the
        table, is that of a failed trial.
        """
        rows = self._query(
            "SELECT study_trial.key, variant, role, settings, seed, until, state, attempt, reason, result, owner, "
            "trial.updated, study FROM study_trial LEFT JOIN trial ON trial.key = study_trial.key "
            "WHERE study = ? AND orphaned = ? ORDER BY position, study_trial.key, variant, role",
            (study, int(orphaned)),
        )
        trials = self.root / "trials"
        return [trial_row(row, f"{trials}/{row['key'][:2]}/{row['key']}") for row in keyed(rows)]

    def known(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """key -> {state, result} of those trials that exist, whichever study made them; a damaged one has failed."""
        rows = self._query_many("SELECT key, state, result FROM trial WHERE key IN", keys)
        return {row["key"]: state_and_result(row) for row in rows}

    def keys_from(self, start: str) -> list[str]:
        """The keys that start so, whichever study made their trials."""
        rows = self._query("SELECT key FROM trial WHERE substr(key, 1, ?) = ? ORDER BY key", (len(start), start))
        return [row["key"] for row in keyed(rows)]

    def everything(self) -> list[dict[str, Any]]:
        """key, state, spec (the text of trial.json; None where it is damaged) and studies (those that want it) of every
        trial of the store."""
        wanted: dict[str, list[str]] = {}
        for row in self._query("SELECT DISTINCT key, study FROM study_trial WHERE orphaned = 0 ORDER BY key, study"):
            wanted.setdefault(row["key"], []).append(row["study"])
        rows = self._query("SELECT key, state, spec FROM trial ORDER BY key")
        specs = {row["key"]: row["spec"] if is_spec_of(row["spec"], row["key"]) else None for row in keyed(rows)}
        return [
            {**row, "spec": specs[row["key"]], "studies": wanted.get(row["key"], [])}
            for row in rows
            if row["key"] in specs
        ]

    def spec(self, key: str) -> str:
        """The text of a trial's trial.json, which is there from its first launch on. Raises StoreRefused where it is
        damaged: its sha256 is not the key."""
        return sound_spec(key, self._query("SELECT spec FROM trial WHERE key = ?", (key,))[0]["spec"])

    # transitions

    def claim(self, key: str, study: str, gpus: float = 0.0) -> int | None:
        """planned or paused -> running for the driver of `study`: the attempt number, or None: not ours to start.

        The event about it keeps how many GPUs the trial has. One whose spec is damaged, or whose folder holds what no
        trial leaves there, becomes failed instead. Raises Unfit, which says what to do.
        """

        def take(db: Changes) -> Found:
            waiting = db.execute("SELECT spec FROM trial WHERE key = ? AND state IN ('planned', 'paused')", (key,))
            if not waiting:
                return []
            if fault := fault_of(self.trial_folder(key)) if is_spec_of(waiting[0]["spec"], key) else SPEC_DAMAGED:
                refuse = "UPDATE trial SET state = 'failed', owner = ?, reason = ?, updated = ? WHERE key = ?"
                db.execute(refuse, (study, fault, time.time(), key))
                log_event(db, "failed", study, key, detail={"reason": fault})
                return [{"unfit": fault}]
            rows = db.execute(
                "UPDATE trial SET state = 'running', attempt = attempt + 1, owner = ?, reason = NULL, updated = ? "
                "WHERE key = ? RETURNING attempt, spec",
                (study, time.time(), key),
            )
            prepare(self.trial_folder(key), rows[0]["spec"])  # before anybody sees that it runs
            log_event(db, "running", study, key, rows[0]["attempt"], {"gpus": gpus} if gpus else {})
            return rows

        rows = self._write(take)
        if rows and "unfit" in rows[0]:
            raise Unfit(rows[0]["unfit"])
        return int(rows[0]["attempt"]) if rows else None

    def finish(
        self,
        key: str,
        attempt: int,
        state: str,
        result: dict[str, Any] | None,
        reason: str | None = None,
        spent: dict[str, Any] | None = None,
    ) -> None:
        """running -> paused or a terminal state. Raises StaleAttempt when `attempt` no longer holds the trial.

        The event about it keeps what the attempt has `spent`, in `release` too.
        """
        if state not in (*TERMINAL, "paused"):
            raise ValueError(f"a trial finishes as one of {', '.join((*TERMINAL, 'paused'))}, not as {state!r}")
        text = None if result is None else json.dumps(result)
        self._leave_running(key, attempt, state, "?, result = ?", (state, text), reason, spent)

    def release(self, key: str, attempt: int, reason: str | None = None, spent: dict[str, Any] | None = None) -> None:
        """running -> planned, or paused where it was: to go on from its checkpoint. Raises StaleAttempt."""
        back = "CASE WHEN result IS NULL THEN 'planned' ELSE 'paused' END"
        self._leave_running(key, attempt, "planned", back, (), reason, spent)

    def _leave_running(
        self,
        key: str,
        attempt: int,
        state: str,
        becomes: str,
        values: tuple[Any, ...],
        reason: str | None,
        spent: dict[str, Any] | None,
    ) -> None:
        detail = {name: value for name, value in (("reason", reason), ("spent", spent)) if value}

        def leave(db: Changes) -> None:
            left = db.execute(
                f"UPDATE trial SET state = {becomes}, reason = ?, updated = ? "
                "WHERE key = ? AND attempt = ? AND state = 'running' RETURNING owner, state",
                (*values, reason, time.time(), key, attempt),
            )
            if not left:
                now = db.execute("SELECT state, attempt FROM trial WHERE key = ?", (key,))
                stands = f"it is {now[0]['state']} at attempt {now[0]['attempt']}" if now else "there is no such trial"
                raise StaleAttempt(f"trial {key[:12]}: attempt {attempt} can't make it {state}, {stands}")
            log_event(db, left[0]["state"], left[0]["owner"], key, attempt, detail)

        self._write(leave)

    def reset_failed(self, study: str, variant: str | None = None) -> int:
        """failed -> planned for the wanted rows of a study, or of one of its variants. Returns how many."""
        if variant is None:
            return len(self._plan_again(study, "state = 'failed'"))
        return len(self._plan_again(study, "state = 'failed' AND variant = ?", variant))

    def reset_pruned(self, study: str) -> int:
        """pruned -> planned for the wanted rows of a study that does not prune, whoever pruned. Returns how many."""
        return len(self._plan_again(study, "state = 'pruned'"))

    def reset_foreign(self, study: str, but: Iterable[str] = ()) -> list[str]:
        """pruned or failed -> planned for the wanted rows that only other studies' runs ended so. Returns their keys.

        Those which the study itself has once pruned or failed stay, and so do the keys in `but`.
        """
        others = (
            "state IN ('pruned', 'failed') AND key NOT IN "
            "(SELECT key FROM event WHERE study = ? AND key IS NOT NULL AND kind IN ('pruned', 'failed'))"
        )
        return self._plan_again(study, others, study, but=set(but))

    def _plan_again(self, study: str, which: str, *values: str, but: AbstractSet[str] = frozenset()) -> list[str]:
        found = self._query(
            "SELECT DISTINCT key, state FROM study_trial JOIN trial USING (key) "
            f"WHERE study_trial.study = ? AND orphaned = 0 AND {which} ORDER BY key",
            (study, *values),
        )
        candidates = [row for row in found if row["key"] not in but]
        if not candidates:
            return []

        def plan(db: Changes) -> list[str]:
            keys = []
            for row in candidates:
                if db.execute(
                    "UPDATE trial SET state = 'planned', reason = NULL, result = NULL, updated = ? "
                    "WHERE key = ? AND state = ? RETURNING key",
                    (time.time(), row["key"], row["state"]),
                ):
                    log_event(db, "reset", study, row["key"])
                    keys.append(row["key"])
            return keys

        return self._write(plan)

    def wanted_elsewhere(self, study: str, keys: Iterable[str]) -> set[str]:
        """Those of the trials that another study has a row for, also one that it no longer wants."""
        asked = "SELECT DISTINCT key, study FROM study_trial WHERE key IN"
        return {row["key"] for row in self._query_many(asked, keys) if row["study"] != study}

    def forget_study(self, study: str, keys: Iterable[str], memories: Iterable[tuple[str, str | None]]) -> None:
        """Removes a study and the trials of these keys, which must be its own, with what is remembered as (kind,
        key; None: all of the kind). What happened to other trials while it ran stays, and so do folders."""
        own, kept = [(key,) for key in keys], list(memories)

        def forget(db: Changes) -> None:
            db.execute("DELETE FROM study_trial WHERE study = ?", (study,))
            db.execute("DELETE FROM decision WHERE place = ?", (study,))
            db.execute("DELETE FROM event WHERE study = ? AND key IS NULL", (study,))
            forget_events(db, [key for (key,) in own])
            db.many("DELETE FROM trial WHERE key = ?", own)
            db.many("DELETE FROM memory WHERE place = ?", [(kind,) for kind, key in kept if key is None])
            db.many("DELETE FROM memory WHERE place = ? AND name = ?", [each for each in kept if each[1] is not None])
            db.execute("DELETE FROM study WHERE name = ?", (study,))

        self._write(forget)

    def orphans(self, study: str) -> list[dict[str, Any]]:
        """key, attempt, folder (Path) of what the study's driver left running; orphans only under its lock."""
        rows = self._query(
            "SELECT key, attempt FROM trial WHERE state = 'running' AND owner = ? ORDER BY key", (study,)
        )
        return [
            {"key": row["key"], "attempt": row["attempt"], "folder": self.trial_folder(row["key"])}
            for row in keyed(rows)
        ]

    # files and connections

    def trial_folder(self, key: str) -> Path:
        """trials/<first two digits>/<key>. Raises StoreRefused for what is no key: it could name another folder."""
        return folder_of(self.root, key)
