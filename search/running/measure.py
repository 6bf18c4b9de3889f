"""Measures finished trials: what of a study's `evaluate:` is missing, and its evaluation. Nothing here trains.

Every evaluation is a job of the executor that trains, in a process of its own. What was found is kept as soon as a job
ends, so that a kill loses only the jobs that ran, and the same command goes on with the others.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from archlab.arch_dsl.tree.identity import canonical
from archlab.search.evaluation.job import ASKED, FOUND
from archlab.search.executors.executor import Executor, ExecutorError, Failure, request_stop
from archlab.search.running.ending import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TRY_AGAIN, Summary, on_signals
from archlab.search.running.stop_and_retry import stop_requests
from archlab.search.sections.evaluate.wanted import Wanted, standing, wanted, without_weights
from archlab.search.store.findings import keep_finding
from archlab.search.store.store import Store
from archlab.search.study.study import Study
from archlab.search.trackers.shipper import sync
from archlab.search.trial.metrics import Watch
from archlab.search.utils.files import read_json
from archlab.search.variants.asks import Events

ENTRY = "archlab.search.evaluation.job:evaluate"
FOLDER = "evaluations"  # of a store: where the jobs write
HANG_S = 300.0
_TICK_S = 0.5
_DEATHS = ("crash", "oom", "cancelled")  # of a process, rather than that nothing could be asked
_GO_ON = "the same command goes on from here"


@dataclass
class Outcome:
    """How an evaluation went: how many findings were kept, and what went wrong."""

    kept: int = 0
    wrong: list[str] = field(default_factory=list)
    stopped: int | None = None  # the exit code of who stopped it
    left: int = 0  # findings that nobody looked for, as it was stopped

    @property
    def code(self) -> int:
        """The exit code of a command that did nothing else."""
        return self.stopped or (EXIT_FAILED if self.wrong else 0)

    def sentence(self, summary: Summary, missing: Sequence[Wanted]) -> str:
        """What is said of it, after what a run says of its training."""
        if self.stopped is not None:
            return f"interrupted while measuring; {_GO_ON}"
        parts = [summary.message]
        parts += [f"{_times(self.kept, 'measure')} evaluated"] if self.kept else []
        parts += [f"{_times(len(self.wrong), 'evaluation')} went wrong: {self.wrong[0]}"] if self.wrong else []
        return "; ".join([*parts, *without_weights(missing)])


def _times(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def evaluate(
    store: Store, study: str | None, missing: Sequence[Wanted], workers: Executor, tell: Events | None = None
) -> Outcome:
    """Evaluates what has weights, as many trials at once as the executor has places, and keeps what was found.

    A first signal, or `archlab stop` on the study, lets what runs end with the measures that it has; a second signal
    ends at once. Raises ExecutorError when the machine is to blame: what was kept stays.
    """
    jobs = _Jobs(store, study, deque(each for each in missing if each.why is None), workers, tell or (lambda _: None))
    with on_signals(jobs.stop) as take_signals:
        take_signals()
        jobs.run()
    return jobs.outcome


def measure_study(
    store: Store, study: Study, workers: Executor, summary: Summary, tell: Events, track: bool
) -> Summary:
    """Evaluates what is missing of a study that has just run, unless that was stopped; how it all ended."""
    name = study.study
    if summary.exit_code not in (0, EXIT_FAILED) or not study.evaluate.evaluated:
        return summary
    missing = wanted(store, study.evaluate, standing(store.study(name), store.study_trials(name)))
    if not missing:
        return summary
    try:
        outcome = evaluate(store, name, missing, workers, tell)
    except ExecutorError as error:
        return replace(summary, exit_code=EXIT_TRY_AGAIN, message=f"measuring stopped: {error}; {_GO_ON}")
    if track and outcome.kept:
        sync(store.root, name)
    return replace(summary, exit_code=outcome.code or summary.exit_code, message=outcome.sentence(summary, missing))


@dataclass
class _Jobs:
    """Evaluations that wait, and those that run: key to what is wanted, and the watch over its folder."""

    store: Store
    study: str | None
    waiting: deque[Wanted]
    workers: Executor
    tell: Events
    running: dict[str, tuple[Wanted, Path, Watch]] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)
    heard: int = 0  # requests to stop

    def run(self) -> None:
        try:
            while self.running or (self.waiting and self.outcome.stopped is None):
                while self.waiting and self.outcome.stopped is None and len(self.running) < self.workers.slots:
                    self.submit(self.waiting.popleft())
                for ended in self.workers.wait(_TICK_S):
                    if ended.key in self.running:
                        self.commit(*self.running.pop(ended.key)[:2], ended.outcome)
                for key, (_, _, watch) in self.running.items():
                    if watch.hangs():
                        self.workers.cancel(key)
                self.hear_requests()
        finally:
            self.outcome.left += sum(len(each.measures) for each in self.waiting)
            for _, folder, _ in self.running.values():
                shutil.rmtree(folder, ignore_errors=True)

    def submit(self, job: Wanted) -> None:
        folder = self.store.root / FOLDER / f"{job.key}-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700, parents=True)
        (folder / "trial.json").write_text(self.store.spec(job.key))
        asked = {"step": job.step, "measures": [canonical(measure) for measure in job.measures]}
        (folder / ASKED).write_text(json.dumps(asked))
        self.running[job.key] = job, folder, Watch(folder, 1, HANG_S)
        self.workers.submit(job.key, folder, 1, entry=ENTRY)

    def commit(self, job: Wanted, folder: Path, outcome: dict[str, Any] | Failure) -> None:
        """Keeps what a job found, that of one without an end too, and says what went wrong."""
        failure = outcome if isinstance(outcome, Failure) else None
        ended = (read_json(folder / FOUND) or {"found": {}, "wrong": {}}) if isinstance(outcome, Failure) else outcome
        shutil.rmtree(folder, ignore_errors=True)
        found, wrong = ended["found"], [f"{label}: {message}" for label, message in ended["wrong"].items()]
        self.keep(job, found)
        if failure and failure.kind in ("node", "infra", "disk"):
            raise ExecutorError(failure.message)
        rest = job.measures[len(found) + len(wrong) :]  # they are computed in their order
        if failure is None or failure.kind == "interrupted":
            self.outcome.left += len(rest)
        else:
            hung = f"no progress for {HANG_S:.0f} s" if failure.kind == "cancelled" else failure.message
            died = failure.kind in _DEATHS and rest
            wrong.append(f"{rest[0].label}: {hung}" if died else hung)
            if died and rest[1:]:
                self.waiting.appendleft(replace(job, measures=rest[1:]))
        self.outcome.wrong += [f"{job.name}: {text}" for text in wrong]
        if failure is None or failure.kind != "interrupted":
            event = {"event": "evaluation", "key": job.key, "name": job.name, "found": [*found]}
            self.tell(event | {"wrong": "; ".join(wrong) or None})

    def hear_requests(self) -> None:
        """`archlab stop` on another host is what a signal is here: the second time ends it."""
        asked, before = stop_requests(self.store.root, self.study) if self.study is not None else 0, self.heard
        self.heard = asked
        for _ in range(asked - before):  # both may come between two looks
            self.stop(EXIT_INTERRUPTED)

    def keep(self, job: Wanted, found: dict[str, Any]) -> None:
        for measure in job.measures:
            if measure.label in found:
                about = {"measure": measure.label, "version": measure.numbers(), "data": job.data}
                finding = about | found[measure.label] | {"time": round(time.time(), 3)}
                keep_finding(self.store, job.key, measure.digest(job.data), finding)
        self.outcome.kept += len(found)

    def stop(self, exit_code: int) -> None:
        """Starts no more jobs and asks what runs to end; the second time, ends at once."""
        if self.outcome.stopped is not None:
            raise KeyboardInterrupt
        self.outcome.stopped = exit_code
        for _, folder, _ in self.running.values():
            with suppress(OSError):
                request_stop(folder, 1)
