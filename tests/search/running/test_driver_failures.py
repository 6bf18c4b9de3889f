"""What a failure costs with the inline executor: the trial, a retry, or the run."""

import errno
import io
import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from archlab.search.executors import attempt
from archlab.search.executors.attempt import run_trial
from archlab.search.executors.executor import Failure, Finished, stop_flag
from archlab.search.running.driver import drive
from archlab.search.running.progress import LineProgress
from archlab.search.running.retries import MOST_BUSY, Breaker
from archlab.search.store.store import StoreFull
from archlab.search.utils.files import lock_file, write_whole
from tests.search.study_kit import ENTRY, ROOT, ByHand, done, drive_inline, make_store, rows_of, steps_run, toy, until


def test_a_failing_trial_is_a_failed_row_with_a_traceback_and_the_others_go_on(tmp_path):
    bad = toy(7, fault={"kind": "raise", "step": 2})
    store, rows = make_store(tmp_path), rows_of(toy(1), bad, toy(2))
    summary = drive_inline(store, rows)
    assert (summary.exit_code, summary.counts) == (1, {"complete": 2, "failed": 1, "reused": 0})
    failed = store.study_trials("s")[1]
    assert (failed["reason"], failed["attempt"]) == ("user: ValueError: the toy broke", 1)
    assert "in strike" in (store.trial_folder(bad.key) / "error.txt").read_text()
    assert drive_inline(store, rows).exit_code == 1
    assert steps_run(tmp_path)[1]["7/0"] == 1  # a failed trial is not tried again by itself
    assert store.reset_failed("s") == 1
    drive_inline(store, rows)
    assert steps_run(tmp_path)[1]["7/0"] == 2


TAKEN = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


@pytest.mark.parametrize(
    ("kind", "state", "starts", "reason"),
    [
        pytest.param("raise", "failed", 1, "user: ValueError: the toy broke", id="its own exception: no retry"),
        pytest.param("system_exit", "failed", 1, "user: SystemExit: 0", id="sys.exit: no retry"),
        pytest.param("unpicklable", "failed", 1, "user: Local: ", id="an exception no pickle takes: no retry"),
        pytest.param("memory", "failed", 2, "oom: out of memory", id="out of memory: one retry"),
        pytest.param("port", "failed", 3, f"crash: {TAKEN}", id="a taken port: two retries"),
    ],
)
def test_a_failure_costs_the_retries_of_its_kind(tmp_path, kind, state, starts, reason):
    trial = toy(fault={"kind": kind, "step": 1})
    store = make_store(tmp_path)
    assert drive_inline(store, rows_of(trial)).exit_code == 1
    (row,) = store.study_trials("s")
    assert (row["state"], row["reason"], row["attempt"]) == (state, reason, starts)
    assert steps_run(tmp_path)[1]["1/0"] == starts


def test_a_trial_out_of_memory_says_what_it_was_allowed(tmp_path):
    store, rows = make_store(tmp_path), rows_of(toy(fault={"kind": "memory", "step": 1}))
    store.add_trials("s", rows)
    code = (
        "import resource, sys; from pathlib import Path; from archlab.search.executors.attempt import run_trial\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (900_000_000, 900_000_000))\n"
        "print(run_trial(sys.argv[1], *map(Path, sys.argv[2:]), 1).message)"
    )
    folder = store.trial_folder(rows[0].trial.key)
    store.claim(rows[0].trial.key, "s")
    told = subprocess.run(
        [sys.executable, "-c", code, ENTRY, folder, tmp_path], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert told.stdout == "out of memory (resources.memory allows 0.9 GB)\n", told.stderr


def test_a_trial_whose_folder_is_gone_fails_by_what_was_wrong(tmp_path):
    failure = run_trial(ENTRY, tmp_path / "gone", tmp_path, 1)
    assert failure.kind == "user" and "gone" in failure.message and "error.txt can't be written" in failure.message


def test_an_earlier_attempt_that_still_trains_on_a_lost_machine_stops_with_a_checkpoint(tmp_path):
    trial = toy(steps=6, holds=[2])
    store = make_store(tmp_path, rows=rows_of(trial))
    folder = store.trial_folder(trial.key)
    code = "import sys; from pathlib import Path; from archlab.search.executors.attempt import run_trial\n"
    code += "print(run_trial(sys.argv[1], *map(Path, sys.argv[2:]), 1).kind)"
    store.claim(trial.key, "s")
    command = [sys.executable, "-c", code, ENTRY, folder, tmp_path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as lost:
        until(lambda: steps_run(tmp_path)[0]["1/0", 1])
        result = run_trial(ENTRY, folder, tmp_path, 2)
        assert lost.communicate()[0] == "interrupted\n"
    assert result["state"] == "complete"
    assert steps_run(tmp_path)[0] == {("1/0", step): 1 for step in range(6)}


def test_an_earlier_attempt_that_neither_trains_nor_ends_is_no_fault_of_the_trial(tmp_path, monkeypatch):
    store = make_store(tmp_path, rows=rows_of(toy()))
    folder = store.trial_folder(toy().key)
    store.claim(toy().key, "s")
    write_whole(folder / "attempt.json", json.dumps({"attempt": 1, "pid": 7, "host": "frozen"}))
    monkeypatch.setattr(attempt, "_WRITER_WAIT_S", 0.0)
    with lock_file(folder / "writer.lock") as take:
        assert take()
        failure = run_trial(ENTRY, folder, tmp_path, 2)
    assert failure == Failure("busy", f"process 7 on frozen still writes to {folder}")
    assert stop_flag(folder, 1).exists()


def test_a_trial_whose_folder_is_held_lets_the_others_go_first_and_ends_the_run_at_last(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "_WRITER_WAIT_S", 0.0)
    store = make_store(tmp_path, rows=rows_of(toy(1), toy(2)))
    folder = store.trial_folder(toy(1).key)
    folder.mkdir(parents=True)
    events = []
    with lock_file(folder / "writer.lock") as take:
        assert take()
        summary = drive_inline(store, rows_of(toy(1), toy(2)), on_event=events.append)
    assert (summary.exit_code, summary.counts) == (75, {"complete": 1, "planned": 1, "reused": 0})
    assert f"another process still writes to {folder}" in summary.message
    kinds = [(event["event"], event.get("kind")) for event in events if event["event"] in ("retry", "finished")]
    assert Counter(kinds) == {("retry", "busy"): MOST_BUSY, ("finished", None): 1}
    assert kinds[-1] == ("retry", "busy"), "the other one did not wait for it"
    assert drive_inline(store, rows_of(toy(1), toy(2))).exit_code == 0


def test_a_trial_that_cannot_be_started_is_told(tmp_path):
    store = make_store(tmp_path, rows=rows_of(toy(1), toy(2)))
    folder = store.trial_folder(toy(1).key)
    folder.mkdir(parents=True)
    (folder / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    lines = io.StringIO()
    progress = LineProgress(lines)
    assert drive_inline(store, rows_of(toy(1), toy(2)), on_event=progress.event).exit_code == 1
    assert "v1 seed 0" in lines.getvalue() and "is no regular file: remove it" in lines.getvalue()


def test_a_full_disk_stops_the_study_with_what_it_has(tmp_path):
    full = toy(2, fault={"kind": "disk", "step": 1, "attempts": 1})
    store, rows = make_store(tmp_path), rows_of(toy(1), full, toy(3))
    summary = drive_inline(store, rows)
    assert (summary.exit_code, summary.counts) == (75, {"complete": 1, "planned": 2, "reused": 0})
    assert "No space left" in summary.message
    assert drive_inline(store, rows).exit_code == 0
    assert set(steps_run(tmp_path)[0].values()) == {1}


def test_five_failures_in_a_row_stop_the_study(tmp_path):
    rows = rows_of(*(toy(x, fault={"kind": "raise", "step": 0}) for x in range(1, 9)))
    store = make_store(tmp_path)
    summary = drive_inline(store, rows)
    assert (summary.exit_code, summary.counts) == (1, {"failed": 5, "planned": 3, "reused": 0})
    assert "in a row" in summary.message


@pytest.mark.parametrize(
    ("events", "opens"),
    [
        pytest.param([(0, "a"), (1, "b"), (2, "c")], True, id="three in a row"),
        pytest.param([(0, "a"), (1, "a"), (2, "a")], False, id="one trial, thrice"),
        pytest.param([(0, "a"), (1, "b"), (2, None), (3, "c")], False, id="a success between"),
        pytest.param([(0, "a"), (1, "b"), (12, "c")], False, id="too slowly"),
    ],
)
def test_the_breaker_opens_for_different_trials_that_fail_in_a_row_and_soon(events, opens):
    now = 0.0
    breaker = Breaker(limit=3, window_s=10.0, clock=lambda: now)
    opened = False
    for now, key in events:  # noqa: B007 (the clock reads it)
        opened = breaker.failure(key) if key else breaker.success() or False
    assert opened is opens


def test_retries_are_counted_by_trial_and_kind(tmp_path):
    one, two, three = toy(1), toy(2), toy(3)
    kinds = {
        one.key: iter(["crash", "oom", "crash", "crash"]),
        two.key: iter(["crash", "oom", "oom"]),
        three.key: iter(["crash", "user"]),
    }

    class Failing(ByHand):
        def submit(self, key, folder, attempt, until=None):
            super().submit(key, folder, attempt)
            self.ended.append(Finished(key, attempt, Failure(next(kinds[key]), "it died")))

    store = make_store(tmp_path)
    assert drive(store, "s", lambda _: rows_of(one, two, three), Failing()).exit_code == 1
    assert {row["key"]: row["attempt"] for row in store.study_trials("s")} == {one.key: 4, two.key: 3, three.key: 2}


def test_a_full_disk_that_takes_no_request_to_stop_ends_the_study_in_order(tmp_path, monkeypatch):
    def no_space(folder, attempt):
        raise OSError(28, "No space left on device")

    store, executor = make_store(tmp_path), ByHand()

    def finish(*_):
        raise StoreFull("the table can't be written")

    monkeypatch.setattr("archlab.search.running.driver.request_stop", no_space)
    monkeypatch.setattr(store, "finish", finish)
    executor.wait = lambda timeout: [Finished(toy(1).key, 1, done())]
    summary = drive(store, "s", lambda _: rows_of(toy(1), toy(2)), executor)
    assert (summary.exit_code, summary.message) == (75, "the table can't be written")


def test_a_trial_without_progress_is_killed_retried_once_and_fails_as_hung(tmp_path):
    store, executor, rows = make_store(tmp_path), ByHand(), rows_of(toy())
    submit = executor.submit

    def start(key, folder, attempt, until=None):
        submit(key, folder, attempt)
        (folder / "attempt.json").write_text(json.dumps({"attempt": attempt}))

    executor.submit = start
    assert drive(store, "s", lambda _: rows, executor, hang_s=0.1).exit_code == 1
    (row,) = store.study_trials("s")
    assert (row["state"], row["reason"], row["attempt"]) == ("failed", "hang: no progress for 0 s", 2)


@pytest.mark.parametrize("kind", ["node", "interrupted"])
def test_what_is_not_the_trials_fault_is_never_charged(tmp_path, kind):
    store, executor, rows = make_store(tmp_path), ByHand(), rows_of(toy())
    submit = executor.submit

    def start(key, folder, attempt, until=None):
        submit(key, folder, attempt)
        fault = Failure(kind, "gone") if attempt < 9 else done()
        executor.ended.append(Finished(key, attempt, fault))

    executor.submit = start
    assert drive(store, "s", lambda _: rows, executor).exit_code == 0
    assert store.study_trials("s")[0]["attempt"] == 9


def test_when_the_executor_dies_rows_stay_running_and_nothing_is_charged(tmp_path):
    store, executor, rows = make_store(tmp_path), ByHand(), rows_of(toy(1), toy(2), toy(3))
    executor.wait = lambda timeout: [Finished(toy(1).key, 1, Failure("infra", "the raylet died"))]
    summary = drive(store, "s", lambda _: rows, executor)
    assert (summary.exit_code, summary.counts) == (75, {"running": 2, "planned": 1, "reused": 0})
    assert "raylet" in summary.message
    assert drive_inline(store, rows).exit_code == 0
