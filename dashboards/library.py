"""The store as the pages see it: what `search` wrote, read again only where it changed, or why it can't be read."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.dashboards.curves import CurveFile, stamp_of
from archlab.dashboards.load import LoadFiles
from archlab.search.challenge.ledger import Ledger, ledgers
from archlab.search.results.selection import is_over, tuned_paths
from archlab.search.sections.rooms import select
from archlab.search.store.addresses import kind_of
from archlab.search.store.findings import measured
from archlab.search.store.lock import STUDY_NAME, holder_of, states_of
from archlab.search.store.notes import Note, Notes, checked, read_notes, write_note
from archlab.search.store.store import Store, StoreError
from archlab.search.study.files import from_here

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison

STATES = ("complete", "running", "interrupted", "paused", "planned", "failed", "diverged", "pruned")
_SEEN = "SELECT pg_current_snapshot()::text AS seen"
_SHOWN = itemgetter("key", "role", "state", "attempt", "reason", "measured")
_PROBE_S = 1.0  # a page says "locked" rather than wait for a minute, as a run does


class NotFound(Exception):
    """There is no study of that name; `known` are those that exist."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name, self.known = name, known
        super().__init__(f"there is no study {name!r}")


@dataclass(frozen=True)
class Study:
    """One study at one moment. `version` changes when anything that a page shows of it does: the part
    before the colon with a trial's state or the study itself, the rest with its curves and its driver.

    `holder` says who runs it now ({} if unknown, None if nobody), `problem` why there is no comparison. The state of a
    trial that runs in the table and whose driver is gone is `interrupted`. `note` is what people wrote beside it; a
    trial's `note` has what they wrote beside that. `file` is what its file is called from the current folder.
    """

    name: str
    version: str
    record: dict[str, Any]
    trials: list[dict[str, Any]]
    holder: dict[str, Any] | None
    comparison: Comparison | None
    problem: str | None
    curves: dict[str, CurveFile]
    note: Note
    file: str = ""

    @cached_property
    def variants(self) -> list[str]:
        """Names in the order of the study."""
        return [variant["name"] for variant in self.record["variants"]]

    @property
    def updated(self) -> float:
        """When a trial last changed its state (unix s), 0 without trials."""
        return max((trial["updated"] for trial in self.trials), default=0.0)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Distinct trials by state, in the order in which they are shown; states without a trial are left out."""
        found = Counter({trial["key"]: trial["state"] for trial in self.trials}.values())
        return {state: found[state] for state in STATES if found[state]}

    @cached_property
    def done(self) -> int:
        """Trials that have come as far as every row of theirs wants them: to an end, or to where values stop."""
        waiting = {trial["key"] for trial in self.trials if not is_over(trial)}
        return len({trial["key"] for trial in self.trials} - waiting)

    @cached_property
    def expected(self) -> int:
        """Trials in all: those that are known, or what the grid and the seeds add up to while the tuning goes on.

        A variant that is given up, as all its values were lost or a seed was pruned, gets no more than it has, and one
        that a screen left out nothing; each has a probe there.
        """
        least = (self.record.get("sequential") or {}).get("min")
        tuned, seeds = tuned_paths(self.record), least or len(self.record["seeds"])
        per_variant = math.prod(map(len, tuned.values())) + seeds - 1 if tuned else seeds
        selections = select(self.record, self.trials)
        ended = (each for each in selections if each.settled and not each.missing_seeds)
        over = [each for each in ended if each.has_no_mean or each.left_out]
        given_up = sum(len(each.trials) for each in over)
        probes = sum("probe" in variant for variant in self.record["variants"])
        return max(sum(self.counts.values()), per_variant * (len(selections) - len(over)) + given_up + probes)


class Library:
    """Reads one store for any number of requests. Its methods raise StoreError for a store that can't be read."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._lock = threading.RLock()
        self._stamp: object = None
        self._listing: list[dict[str, Any]] = []
        self._notes = Notes({}, {})
        self._ledgers: dict[str, Ledger] = {}
        self._rows: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._specs: dict[str, str] = {}
        self._comparisons: dict[str, tuple[str, Comparison | None, str | None]] = {}
        self._contrasts: dict[str, tuple[object, Comparison]] = {}
        self._studies: dict[str, Study] = {}
        self._trials: dict[str, tuple[Any, Any, list[dict[str, Any]], str]] = {}
        self.loads = LoadFiles()

    def listing(self) -> list[dict[str, Any]]:
        """name, question, created, updated and counts of every study, newest first."""
        with self._lock:
            self._refresh()
            return self._listing

    def summary(self, name: str) -> Study:
        """The study without its curves, for a list of many. Raises NotFound."""
        with self._lock:
            return self._study(name, {})

    def study(self, name: str) -> Study:
        """The study as it is now; what hasn't changed since the last call is not read again. Raises NotFound."""
        with self._lock:
            before = self._studies.get(name)
            study = self._study(name, None)
            if before is not None and before.version == study.version:
                return before
            self._studies[name] = study
            return study

    def prepare(self) -> None:
        """Compares the newest study before a reader asks for it. What is wrong with the store, its pages say."""
        with suppress(StoreError, NotFound, OSError):
            if newest := self.listing()[:1]:
                self.study(newest[0]["name"])

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a study in the trial table."""
        with self._lock:
            self._refresh()
            return self._rows_of(name)[1]

    def events(self, name: str) -> list[dict[str, Any]]:
        """What happened to the trials of a study, oldest first."""
        with self._lock:
            self._refresh()
            if name not in self._events:
                with self.open() as store:
                    self._events[name] = store.events(name)
            return self._events[name]

    def notes(self) -> Notes:
        """What people wrote beside the studies and trials of the store."""
        with self._lock:
            self._refresh()
            return self._notes

    def ledgers(self) -> dict[str, Ledger]:
        """The newest ledger of each study that has one."""
        with self._lock:
            self._refresh()
            return self._ledgers

    def tags(self, study: str = "", trial: str = "") -> list[str]:
        """The tags of a study or a trial as they are kept."""
        notes = self.notes()
        return [*(notes.trials if trial else notes.studies).get(trial or study, Note()).tags]

    def knows(self, study: str = "", trial: str = "") -> bool:
        """Whether the store has that study, or that trial by its whole key."""
        if not trial:
            return study in [row["name"] for row in self.listing()]
        with self._lock, self.open() as store:
            return store.keys_from(trial) == [trial]

    def write(self, text: str | None, tags: Iterable[str] | None, study: str = "", trial: str = "") -> None:
        """Keeps the text and the tags of a study's or a trial's note; None leaves either as it is by now. Raises
        ValueError for what is none."""
        with self._lock, self.open() as store:
            notes = read_notes(store)
            now = (notes.trials if trial else notes.studies).get(trial or study, Note())
            note = checked(now.text if text is None else text, now.tags if tags is None else tags)
            write_note(store, note, study, trial)

    def contrasts(self, study: Study, first: str, others: Sequence[str]) -> Comparison:
        """The comparison with the differences of the `others` to the `first` as its contrasts, among all pairs of the
        table. It is made again when a result changes, not with each curve."""
        # with pandas and scipy, which a server starts without
        from archlab.search.comparison.compare import load_comparison

        asked = study.version.partition(":")[0], first, *others
        with self._lock:
            known = self._contrasts.get(study.name)
            if known is None or known[0] != asked:
                rows = len(study.record["variants"])
                pairs = [(other, first) for other in others]
                with self.open() as store:
                    found = load_comparison(store, study.name, contrasts=pairs, among=rows * (rows - 1) // 2)
                known = self._contrasts[study.name] = asked, found
            return known[1]

    def spec(self, key: str) -> str:
        """The content of a trial's trial.json, which never changes."""
        with self._lock:
            if key not in self._specs:
                with self.open() as store:
                    self._specs[key] = store.spec(key)
            return self._specs[key]

    def _study(self, name: str, curves: dict[str, CurveFile] | None) -> Study:
        known = [row["name"] for row in self.listing()]
        if not STUDY_NAME.fullmatch(name) or name not in known:
            raise NotFound(name, known)
        record, rows = self._rows_of(name)
        trials, told = self._trials_of(name, rows)
        if curves is None:
            files = self._studies[name].curves if name in self._studies else {}
            curves = {t["key"]: files.get(t["key"]) or CurveFile(Path(t["folder"]) / "metrics.jsonl") for t in trials}
            for file in curves.values():
                file.look()
        holder = holder_of(self.root, name)
        others = self._listing if record.get("search") else []  # which a search is held against
        results = _digest(record, told, others)
        note = self._notes.studies.get(name, Note())
        said = note, [trial["note"] for trial in trials if trial["note"]]
        version = f"{results}:{_digest([(key, file.stamp) for key, file in curves.items()], holder, said)}"
        if name not in self._comparisons or self._comparisons[name][0] != results:
            self._comparisons[name] = (results, *self._compare(name, rows))
        _, comparison, problem = self._comparisons[name]
        file = from_here(record.get("file") or f"{name}.yaml", self.root)
        return Study(name, version, record, trials, holder, comparison, problem, curves, note, file)

    def _trials_of(self, name: str, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The trials of a study, and what changes when a result does. They are made again when the rows, a state or a
        note are others: of very many trials that takes longer than all else."""
        states, noted = states_of(rows, partial(holder_of, self.root)), self._notes.trials
        known = self._trials.get(name)
        if known is None or known[0] is not rows or known[1] != (states, noted):
            trials = [{**row, "state": states[row["key"]], "note": noted.get(row["key"], Note())} for row in rows]
            told = _digest([_SHOWN(trial) for trial in trials])
            known = self._trials[name] = rows, (states, noted), trials, told
        return known[2], known[3]

    def reading(self) -> AbstractContextManager[Any]:
        """Holds the curves still while a figure is made of them."""
        return self._lock

    @contextmanager
    def open(self) -> Iterator[Store]:
        """The store itself, for one reader. Raises StoreError, also for a database that another program has locked."""
        table = self.root / "trials.db"
        if table.is_file():
            _probe(table)
        with Store.open(self.root, create=False) as store:
            yield store

    def _refresh(self) -> None:
        """Forgets what the table says no more. Of one on a server that is known by its transactions: where the same
        ones can be seen, so can the same rows."""
        on_server = kind_of(self.root) != "sqlite"
        stamp: list[object] = [stamp_of(self.root / name) for name in ("store.json", "trials.db", "trials.db-wal")]
        if not on_server and stamp == self._stamp and None not in stamp[:2]:
            return
        with self.open() as store:
            stamp += store.database.query(_SEEN) if on_server else []
            if on_server and stamp == self._stamp:
                return
            self._rows.clear()
            self._events.clear()
            self._stamp = None
            self._listing, self._notes, self._ledgers = store.studies(), read_notes(store), ledgers(store)
        self._stamp = stamp

    def _rows_of(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if name not in self._rows:
            with self.open() as store:
                record, trials = store.study(name), store.study_trials(name)
                found = measured(store, {trial["key"] for trial in trials})
                self._rows[name] = (record, [{**t, "measured": found.get(t["key"], {})} for t in trials])
        return self._rows[name]

    def _compare(self, name: str, rows: list[dict[str, Any]]) -> tuple[Comparison | None, str | None]:
        """The comparison, or the sentence that says what is wrong with a result; the page stands either way."""
        # with pandas and scipy, which a server starts without
        from archlab.search.comparison.compare import load_comparison

        with self.open() as store:
            try:
                read = [{column: row[column] for column in row if column != "measured"} for row in rows]
                return load_comparison(store, name, trials=read), None
            except (OSError, ValueError, KeyError) as error:
                return None, f"The results can't be compared: {type(error).__name__}: {error}"


def _probe(table: Path) -> None:
    try:
        with closing(sqlite3.connect(f"{table.as_uri()}?mode=rw", uri=True, timeout=_PROBE_S)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise StoreError(
                f"{table} is locked by another program (a backup or a database browser?): close it; "
                "this page tries again by itself"
            ) from error
        raise StoreError(f"{table} can't be opened ({error}): check that you may read and write it") from error
    except sqlite3.DatabaseError as error:
        said = f"{table} is damaged ({error}): restore a copy, or move the store away and run again"
        raise StoreError(said) from error


def _digest(*parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()[:16]
