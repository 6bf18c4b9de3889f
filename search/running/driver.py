"""The loop that brings a study from planned rows to results: plan, launch, wait, commit, until nothing is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from archlab.search.executors.executor import Executor, ExecutorError, Failure, Finished, request_stop
from archlab.search.recipe.steps import is_whole
from archlab.search.running.ending import (
    EXIT_BUDGET,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_TRY_AGAIN,
    Stop,
    Summary,
    count,
    on_signals,
    summarise,
)
from archlab.search.running.queue import Planner, Running, Table
from archlab.search.running.recovery import settle, take_over
from archlab.search.running.retries import MOST_BUSY, NEVER_CHARGED, RETRIES, TOLD, Breaker
from archlab.search.running.shipping import AnyShipper, Shipping
from archlab.search.running.stop_and_retry import forget_request, stop_requests
from archlab.search.sections.budget.spec import Account, Budget, attempt_spent, spent_of
from archlab.search.store.folders import Unfit
from archlab.search.store.lock import StudyLock
from archlab.search.store.store import StaleAttempt, Store, StoreFull
from archlab.search.trial.kept_weights import Keep, tell
from archlab.search.trial.metrics import Watch, validation_history
from archlab.search.trial.outcome_files import read_result
from archlab.search.trial.rough_start import signs_of
from archlab.search.variants.asks import Events, NextRows

TICK_S, HANG_S = 0.5, 300.0

ShouldPrune = Callable[[str, int, list[tuple[int, float]]], bool]
TokensOf = Callable[[str, int | None], int]


def drive(
    store: Store,
    study: str,
    next_rows: NextRows,
    executor: Executor,
    *,
    shipper: AnyShipper | None = None,
    on_event: Events | None = None,
    limits: Budget | None = None,
    tokens_of: TokensOf | None = None,
    should_prune: ShouldPrune | None = None,
    lock: StudyLock | None = None,
    hang_s: float = HANG_S,
    keep: Keep | None = None,
) -> Summary:
    """Runs what is missing of a stored study and returns when nothing is left, or when it has to stop.

    next_rows maps all rows so far (as `Store.study_trials` gives them) to the rows that should exist; it is asked
    again when trials ended: at once where nothing else waits for a place, else so rarely that it takes a twentieth of
    the time at most. tokens_of(key, until) says what a trial still takes, for a budget of tokens.
    should_prune(key, step, [(step, validation loss), ...]) ends a trial early; without it none is, and what was pruned
    before is trained to its end. on_event gets {"event": ...} dicts: study, launched, paused, finished, retry, stop,
    tick, shipping, summary. `lock` is the study's lock if the caller holds it. The caller starts the executor early if
    it likes, and closes it. Raises StudyLocked, StoreError and whatever next_rows raises.
    """
    with ExitStack() as stack:
        if lock is None or not lock.held:
            lock = stack.enter_context(StudyLock(store.root, study))
        planner, account = Planner(store, study, next_rows, should_prune is not None), Account(limits or Budget())
        trackers = Shipping(shipper)
        driver = _Driver(store, study, planner, executor, trackers, on_event, should_prune, hang_s, account, tokens_of)
        driver.keep, driver.holds = (keep or Keep()).record(), lock.check
        driver.take_signals = stack.enter_context(on_signals(driver.interrupt))
        return driver.run()


@dataclass
class _Driver:
    """The state of one run: what is running, why it stops, what it may still spend."""

    store: Store
    study: str
    planner: Planner
    executor: Executor
    shipping: Shipping
    on_event: Events | None
    should_prune: ShouldPrune | None
    hang_s: float
    account: Account
    tokens_of: TokensOf | None = None
    take_signals: Callable[[], None] = lambda: None
    holds: Callable[[], None] = lambda: None  # raises StudyLost when the study is another driver's by now
    keep: dict[str, bool] = field(default_factory=Keep().record)
    stop: Stop | None = None
    heard: int = 0  # requests to stop
    running: dict[str, Running] = field(default_factory=dict)
    table: Table = field(default_factory=Table)
    before: set[str] = field(default_factory=set)
    pruned: set[str] = field(default_factory=set)
    charged: Counter[tuple[str, str]] = field(default_factory=Counter)  # failures by trial and kind
    breaker: Breaker = field(default_factory=Breaker)

    def run(self) -> Summary:
        """The loop. The order within a pass matters: commit before plan, plan before launch."""
        self.shipping.start()
        try:
            self.executor.start()
            forget_request(self.store, self.study)
            self.shipping.notice(*settle(self.store, self.study))
            if self.account.limits.of_life:
                self.account.spent = spent_of(self.store, self.study)
            self.table = self.planner.ask(self.running)
            self.before = self.table.ended()
            counts = count(self.table.states, self.before)
            self.emit("study", study=self.study, counts=counts, started=len(self.account.spent.trials))
            while self.step():
                pass
        except KeyboardInterrupt:
            self.shipping.leave()
            code = self.stop.exit_code if self.stop and self.stop.exit_code == EXIT_TERMINATED else EXIT_INTERRUPTED
            self.stop = Stop(code, "stopped at once; the same command goes on from the last checkpoints")
        except StoreFull as error:
            self.ask_stop(EXIT_TRY_AGAIN, str(error))
        except ExecutorError as error:
            self.ask_stop(EXIT_TRY_AGAIN, f"{error}; the same command goes on")
        finally:
            self.shipping.finish(self.stop is not None, lambda: self.emit("shipping"))
        return self.summary()

    def step(self) -> bool:
        """One pass; False when there is nothing left to do or to wait for."""
        if self.stop is None:
            if self.planner.due(self.table):
                self.table = self.planner.ask(self.running)
            self.launch()
        elsewhere = self.table.elsewhere if self.stop is None else {}
        if not self.running and not elsewhere:
            return False
        if not self.running:
            time.sleep(TICK_S)
        ended = self.executor.wait(TICK_S) if self.running else []
        self.holds()
        for each in ended:
            self.commit(each)
        if elsewhere:
            owners = {owner for owner in elsewhere.values() if owner not in (None, self.study)}
            self.shipping.notice(*take_over(self.store, owners))
        if self.study in elsewhere.values():  # started by a driver that had lost the study, and nobody's now
            self.shipping.notice(*settle(self.store, self.study, but=self.running))
            self.planner.changed = True
        self.watch()
        self.emit("tick", running={key: each.folder for key, each in self.running.items()})
        return True

    # launching

    def launch(self) -> None:
        """Fills the free slots in the planned order."""
        waiting = self.table.waiting
        while waiting and self.stop is None and len(self.running) < self.executor.slots:
            row = waiting[0]
            until = self.table.until[row["key"]]
            tokens = self.tokens_of(row["key"], until) if self.tokens_of else 0
            if refused := self.account.refuses(row["key"], tokens):
                if not self.running:
                    self.ask_stop(EXIT_BUDGET, refused)
                return
            waiting.popleft()
            self.launch_one(row, until, tokens)

    def launch_one(self, row: dict[str, Any], until: int | None, tokens: int) -> None:
        """Claims a trial and submits it, unless another study was faster."""
        key, folder = row["key"], Path(row["folder"])
        self.holds()  # planning may have taken long
        shown = {name: row[name] for name in ("variant", "role", "settings", "seed")}
        try:
            attempt = self.store.claim(key, self.study, self.executor.gpus)
        except Unfit as error:
            attempt = None
            self.shipping.notice(key)
            self.emit("finished", key=key, state="failed", reason=str(error), result=None, signs=[], **shown)
        if attempt is None:
            self.table.elsewhere[key], self.planner.changed = None, True
            return
        tell(folder, self.keep)
        self.running[key] = Running(attempt, row, folder, Watch(folder, attempt, self.hang_s))
        self.account.launched(key, tokens, self.executor.gpus)
        self.take_signals()  # the executor is up by now, and may have taken them
        self.executor.submit(key, folder, attempt, until)
        self.shipping.notice(key)
        self.emit("launched", key=key, attempt=attempt, folder=str(folder), until=until, **shown)

    # endings

    def commit(self, finished: Finished) -> None:
        """Brings an attempt's end into the table: a result, another try, or a failure."""
        running = self.running.pop(finished.key, None)
        self.planner.changed = True
        if running is None or running.attempt != finished.attempt or running.watch.pruned:
            return
        outcome: dict[str, Any] | Failure | None = finished.outcome
        if isinstance(outcome, Failure) and outcome.kind != "interrupted":
            outcome = read_result(running.folder) or outcome  # it may have died after its last act
        try:
            if isinstance(outcome, Failure):
                self.fail(finished.key, running, outcome)
            elif outcome is not None and outcome["state"] == "paused":
                spent = self.spent(finished.key, running)
                self.store.finish(finished.key, running.attempt, "paused", outcome, spent=spent)
                self.shipping.notice(finished.key)
                self.emit("paused", key=finished.key, attempt=running.attempt, result=outcome)
            elif outcome is not None:
                self.finish(finished.key, running, outcome["state"], outcome, outcome.get("reason"))
                self.breaker.success()
        except StaleAttempt as error:
            self.stale(finished.key, running, error)

    def stale(self, key: str, running: Running, error: StaleAttempt) -> None:
        """Someone else holds the trial by now: what we know of it is noted, and changes nothing."""
        self.store.add_event("stale", self.study, key, running.attempt, message=str(error))

    def finish(self, key: str, running: Running, state: str, result: dict[str, Any] | None, reason: str | None) -> None:
        """running -> terminal, told to the trackers and to whoever watches."""
        self.store.finish(key, running.attempt, state, result, reason, self.spent(key, running))
        self.shipping.notice(key)
        told = list(signs_of(running.folder, result)) if result and state == "complete" else []
        self.emit("finished", key=key, attempt=running.attempt, state=state, reason=reason, result=result, signs=told)

    def release(self, key: str, running: Running, reason: str, last: bool = False) -> None:
        """running -> planned, or paused: it waits for a place again, if it is still wanted, as first or last."""
        self.store.release(key, running.attempt, reason, self.spent(key, running))
        if key in self.table.until:
            (self.table.waiting.append if last else self.table.waiting.appendleft)(running.row)

    def spent(self, key: str, running: Running) -> dict[str, Any]:
        """What an attempt that ended took, which the account notes."""
        found = attempt_spent(running.folder, running.attempt, self.account.gpus, running.seconds)
        self.account.ended(key, found)
        return found

    def fail(self, key: str, running: Running, failure: Failure) -> None:
        """Tells the trial's own failures from those of the machine, which are never charged to it."""
        kind, message, attempt = failure.kind, failure.message, running.attempt
        if kind == "cancelled" and running.watch.hung:
            kind, message = "hang", f"no progress for {self.hang_s:.0f} s"
        if kind == "infra":
            self.running[key] = running
            raise ExecutorError(message)
        self.charged[key, kind] += 1
        if kind in NEVER_CHARGED or self.charged[key, kind] <= RETRIES[kind]:  # it goes on from its checkpoint
            self.release(key, running, f"{kind}: {message}" if kind in TOLD else message, last=kind == "busy")
            if kind in TOLD:
                self.emit("retry", key=key, attempt=attempt, kind=kind, message=message)
            if kind == "disk" or self.charged[key, "busy"] >= MOST_BUSY:
                self.ask_stop(EXIT_TRY_AGAIN, f"{message}; run the same command again")
        else:
            self.finish(key, running, "failed", None, f"{kind}: {message}")
            if self.breaker.failure(key):
                self.ask_stop(EXIT_FAILED, f"stopped after several failures in a row, the last one: {message}")

    # while trials run

    def watch(self) -> None:
        """Hung trials, pruned trials, a spent budget, and trials that don't stop when asked."""
        for key, running in list(self.running.items()):
            if running.watch.pruned:
                continue  # killed already; its end is on the way
            if running.watch.hangs():
                self.executor.cancel(key)
            elif self.should_prune is not None and self.stop is None:
                self.prune(key, running, self.should_prune)
        self.hear_requests()
        if self.stop is None and (over := self.account.over(each.seconds for each in self.running.values())):
            self.ask_stop(EXIT_BUDGET, over)
        if self.stop is None:
            return
        self.stop_running()
        if not self.stop.announced:
            self.stop.announced = True
            self.emit("stop", exit_code=self.stop.exit_code, message=self.stop.message)
        if self.stop.overdue():
            for key in self.running:
                self.executor.cancel(key)

    def prune(self, key: str, running: Running, should_prune: ShouldPrune) -> None:
        """Stores the decision before the deed, as it depends on timing and must not be made twice."""
        history = validation_history(running.folder)
        if not history or key in self.pruned or not should_prune(key, history[-1][0], history):
            return
        if is_whole(running.folder):
            return  # its result stands, or is on the way
        self.pruned.add(key)  # planned again by a study that wants it whole, it is left alone
        running.watch.pruned = True
        self.store.add_event("prune", self.study, key, running.attempt, history=history)
        try:
            self.finish(key, running, "pruned", None, f"pruned at step {history[-1][0]}")
        except StaleAttempt as error:
            self.stale(key, running, error)
        self.executor.cancel(key)

    def interrupt(self, exit_code: int = EXIT_INTERRUPTED) -> None:
        """A signal: the first asks for checkpoints, the second ends it."""
        if self.stop is not None or self.shipping.finishing:
            raise KeyboardInterrupt
        how = "terminated" if exit_code == EXIT_TERMINATED else "interrupted"
        self.ask_stop(exit_code, f"{how}; the same command goes on from here")

    def hear_requests(self) -> None:
        """`archlab stop` on another host is what a signal is here: the second time ends it."""
        asked, before = stop_requests(self.store.root, self.study), self.heard
        self.heard = asked
        if asked > before and (self.stop is not None or asked > 1):
            raise KeyboardInterrupt
        if asked > before:
            self.ask_stop(EXIT_INTERRUPTED, "asked to stop by archlab stop; the same command goes on from here")

    def ask_stop(self, exit_code: int, message: str) -> None:
        """Starts nothing more and asks what runs to write a checkpoint and end. The first reason stands."""
        if self.stop is None:
            self.stop = Stop(exit_code, message)
            self.stop_running()

    def stop_running(self) -> None:
        """Asks each running trial once; called again for one that was being launched when a signal came.

        One that can't be asked, on a full disk, is asked again at the next pass, and killed when the grace is over.
        """
        for running in list(self.running.values()):
            if not running.asked:
                with suppress(OSError):
                    request_stop(running.folder, running.attempt)
                    running.asked = True

    def emit(self, event: str, **detail: Any) -> None:
        if self.on_event is not None:
            self.on_event({"event": event, **detail})

    def summary(self) -> Summary:
        table = self.table = Table.of(self.store.study_trials(self.study))
        found = summarise(table.states, self.before, self.stop, len(table.waiting) + len(table.elsewhere))
        self.emit("summary", exit_code=found.exit_code, counts=found.counts, message=found.message)
        return found
