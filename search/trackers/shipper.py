"""Ships trials to their trackers from a thread of the driver: a tracker that is down costs delay and nothing else.

The trial table and the trials' own files are what is sent, and `shipped.db` remembers what was acknowledged. So
there is nothing to lose: whatever did not arrive is sent by the next run of the study, or by `sync`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from archlab.search.store.addresses import TENSORBOARD, WANDB, server_of
from archlab.search.store.lock import lock_path
from archlab.search.store.store import Store, StoreAway, StoreError
from archlab.search.trackers.acknowledged import Spool
from archlab.search.trackers.mlflow_sink import MlflowSink
from archlab.search.trackers.optuna_sink import OptunaSink
from archlab.search.trackers.tensorboard_sink import TensorboardSink
from archlab.search.trackers.tracked import Tracked, tracked
from archlab.search.trackers.wandb_sink import WandbSink

INTERVAL_S = 15.0  # between two looks at what has grown, if nobody gives notice: a look takes 0.07 s
SHORTEST_S = 1.0  # between two looks however much notice is given
CLOCK_GRAIN_S = 0.05  # a file's time is taken from a coarser clock
LONGEST_START_S = 60.0  # after this even a study without a step is shipped
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 300.0  # between two attempts at a tracker that is down
CLOSE_S = 30.0  # for what is left when the trials are done

_log = logging.getLogger("archlab.track")


class Sink(Protocol):
    """A tracker. Both methods are called by one thread."""

    name: str

    def pending(self, trials: Sequence[Tracked]) -> int:
        """How many points and news were not acknowledged; needs neither the tracker nor its library."""

    def ship(self, trials: Sequence[Tracked]) -> None:
        """Sends them. May raise anything; what was acknowledged by then is remembered."""


class Showcase(Sink, Protocol):
    """A tracker that shows a study's table too."""

    def table(self, texts: Mapping[str, str]) -> None:
        """Sends the table, by format (md, csv), if it is another than was acknowledged. May raise anything."""


class Shipper:
    """Ships one study while its driver runs. `record` is the study's record; None reads it from the store."""

    def __init__(
        self, store_root: Path, study: str, record: dict[str, Any] | None = None, interval_s: float = INTERVAL_S
    ) -> None:
        self._root, self._study, self._record = Path(store_root).absolute(), study, record
        self._interval_s = interval_s
        self._started = 0.0  # unix s
        self._closing, self._left = threading.Event(), False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ship {study}", daemon=True)
        self.trouble: str | None = None  # what keeps points from arriving, for the progress display

    def start(self) -> None:
        """Begins to ship. A tracker's library is imported in the thread, when there is something to send."""
        self._started = time.time() - CLOCK_GRAIN_S
        self._thread.start()

    def notice(self, trial: object = None) -> None:
        """A trial changed its state: look now. The table says which."""
        self._woken.set()

    def leave(self) -> None:
        """Ends without sending what is left; the next run does."""
        self._left = True
        self._closing.set()
        self._woken.set()

    def close(self, timeout: float = CLOSE_S) -> int | None:
        """Sends what is left, for at most `timeout` seconds. Returns how many points and news are left for `sync`;
        None where the store can't say, as on a full disk."""
        deadline = time.monotonic() + timeout
        self._closing.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return left_for_sync(self._root, self._study)

    def _run(self) -> None:
        """Ships to the end. Where the store is away, or another process still ships the study, it tries again."""
        last = False
        while not self._shipped() and not last:
            last = self._closing.wait(FIRST_RETRY_S)

    def _shipped(self) -> bool:
        """Whether the study was shipped to its end."""
        try:
            with _one_shipper(self._root, self._study) as alone:
                if alone:
                    self._loop()
                return alone
        except Exception as error:  # the store can't be read: the driver will say so if that lasts; shipping must not
            self._complain(f"nothing is sent to the trackers for now: {_reason(error)}")
            return False

    def _loop(self) -> None:
        with Store.open(self._root, create=False) as store, Spool(self._root) as spool:
            record = store.study(self._study) if self._record is None else self._record
            sinks = [_Patient(sink) for sink in _sinks(self._root, self._study, spool, record)]
            self._await_first_step(store)
            while not self._closing.is_set():
                self._woken.clear()
                try:
                    self._ship(sinks, tracked(store, self._study), now=time.monotonic())
                except StoreAway as error:
                    self._complain(f"nothing is sent to the trackers for now: {_reason(error)}")
                self._closing.wait(min(self._interval_s, SHORTEST_S))
                self._woken.wait(self._interval_s)
            if not self._left:
                self._ship(sinks, tracked(store, self._study, closing=True), now=None)

    def _await_first_step(self, store: Store) -> None:
        """Keeps the processor free for what leads to the first step: the trackers' libraries take seconds to import."""

        deadline = time.monotonic() + LONGEST_START_S
        while not self._closing.wait(min(self._interval_s, SHORTEST_S)) and time.monotonic() < deadline:
            files = [trial.metrics for trial in tracked(store, self._study)]
            if any(file.stat().st_mtime >= self._started for file in files if file.exists()):
                return

    def _ship(self, sinks: list[_Patient], trials: list[Tracked], now: float | None) -> None:
        for sink in sinks:
            if (trouble := sink.ship(trials, now)) is not None:
                self._complain(trouble)
        if all(sink.well for sink in sinks):
            self.trouble = None

    def _complain(self, message: str) -> None:
        """One warning per outage."""
        if self.trouble is None:
            _log.warning("%s", message)
        self.trouble = message


class _Patient:
    """A sink that is left alone for a while after it failed, twice as long each time."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._wait_s, self._not_before = sink, 0.0, 0.0

    @property
    def well(self) -> bool:
        return self._wait_s == 0.0

    def ship(self, trials: list[Tracked], now: float | None) -> str | None:
        """What went wrong, if anything did. `now` None: try whatever happened before."""
        if now is not None and now < self._not_before:
            return None
        try:
            self._sink.ship(trials)
        except Exception as error:  # whatever it is, a tracker's failure is never a trial's
            self._wait_s = min(max(FIRST_RETRY_S, 2 * self._wait_s), LAST_RETRY_S)
            self._not_before = time.monotonic() + self._wait_s
            return f"{self._sink.name} takes nothing now, it is sent later: {_reason(error)}"
        self._wait_s = 0.0
        return None


def sync(store_root: Path, study: str | None = None) -> dict[str, int]:
    """Sends what earlier runs could not, of one study or all. Returns per study what is still unsent.

    A study that is being shipped by its driver is left to it. Raises StoreError when there is no such store or study.
    """
    root = Path(store_root).absolute()
    left = {}
    with Store.open(root, create=False) as store, Spool(root) as spool:
        for name in [study] if study else [each["name"] for each in store.studies()]:
            record = store.study(name)
            with _one_shipper(root, name) as alone:
                if alone:
                    trials = tracked(store, name, closing=True)
                    for sink in _sinks(root, name, spool, record):
                        if (trouble := _Patient(sink).ship(trials, now=None)) is not None:
                            _log.warning("%s: %s", name, trouble)
            left[name] = unsent(root, name)
    return left


def unsent(store_root: Path, study: str) -> int:
    """How many points and news of a study a tracker has not acknowledged. Raises StoreError without such a store."""
    with Store.open(store_root, create=False) as store, Spool(store_root) as spool:
        trials = tracked(store, study, closing=True)
        return sum(sink.pending(trials) for sink in _sinks(store_root, study, spool, {}))


def left_for_sync(store_root: Path, study: str) -> int | None:
    """What `unsent` counts; None where the store can't say, which whoever runs the study has been told."""
    try:
        return unsent(store_root, study)
    except (StoreError, OSError):
        return None


def shows_tables() -> bool:
    """Whether there is a tracker for the tables of studies."""
    return bool(os.environ.get(TENSORBOARD) or (os.environ.get(WANDB) and os.environ.get("WANDB_MODE") != "disabled"))


def send_table(store_root: Path, study: str, texts: Mapping[str, str]) -> None:
    """Sends a study's table, by format (md, csv), to the trackers that show one; what went wrong is a warning."""
    with Store.open(store_root, create=False) as store, Spool(store_root) as spool:
        for sink in _showcases(store_root, study, spool, store.study(study)):
            try:
                sink.table(texts)
            except Exception as error:  # whatever it is, a tracker's failure is never a study's
                _log.warning("%s has not got the table: %s; `archlab sync` sends it", sink.name, _reason(error))


def _sinks(root: Path, study: str, spool: Spool, record: dict[str, Any]) -> list[Sink]:
    others = _showcases(root, study, spool, record)
    return [OptunaSink(root, study, spool), MlflowSink(root, study, spool, record), *others]


def _showcases(root: Path, study: str, spool: Spool, record: dict[str, Any]) -> list[Showcase]:
    """The trackers that the environment names."""
    found: list[Showcase] = []
    if os.environ.get(TENSORBOARD):
        found.append(TensorboardSink(study, spool, record))
    if os.environ.get(WANDB) and os.environ.get("WANDB_MODE") != "disabled":
        found.append(WandbSink(root, study, spool, record))
    return found


@contextmanager
def _one_shipper(root: Path, study: str) -> Iterator[bool]:
    """True for the only one that ships this study; two would make two runs of a trial."""
    path = lock_path(root, study).with_suffix(".ship")
    if url := server_of(root):
        from archlab.search.store.postgres import PostgresLock

        lock = PostgresLock(url, f"{study} ship")
        try:
            yield lock.acquire(patience_s=0.0) is None
        finally:
            lock.release()
        return
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        yield alone


def _reason(error: BaseException) -> str:
    """The first line of an error and of what caused it, which the libraries hide; without passwords in URLs."""
    parts = [f"{type(error).__name__}: {error}".splitlines()[0]]
    if error.__cause__ is not None:
        parts.append(f"{type(error.__cause__).__name__}: {error.__cause__}".splitlines()[0])
    return re.sub(r"://\S*@", "://***@", " <- ".join(parts))[:500]
