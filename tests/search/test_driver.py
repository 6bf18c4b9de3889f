"""The loop with the inline executor: what runs, what is reused, what a failure costs, and how a study ends early."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from search.budget import Limits
from search.driver import drive
from search.executor import Failure, Finished, InlineExecutor
from search.faults import Breaker, Retries
from search.lock import StudyLock, StudyLocked, StudyLost
from search.store import Row, StoreFull
from search.worker import run_trial
from tests.search.study_kit import ENTRY, ROOT, Driver, go, make_store, results, rows_of, steps_run, toy, until


def drive_inline(store, rows, study="s", **options):
    """Drives fixed rows, or what a function plans."""
    plan = rows if callable(rows) else lambda _: rows
    return drive(store, study, plan, InlineExecutor(ENTRY, store.root), **options)


def made(folder):
    """The folder, which is there."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_every_row_gets_its_result_and_a_second_run_trains_nothing(tmp_path):
    store, rows = make_store(tmp_path), rows_of(*(toy(x) for x in range(1, 6)), toy(6, diverges=True))
    first = drive_inline(store, rows)
    assert (first.exit_code, first.counts) == (0, {"complete": 5, "diverged": 1, "reused": 0})
    ran = steps_run(tmp_path)
    assert set(ran[0].values()) == set(ran[1].values()) == {1}
    second = drive_inline(store, rows)
    assert (second.exit_code, second.counts) == (0, {"complete": 5, "diverged": 1, "reused": 6})
    assert steps_run(tmp_path) == ran


def test_the_planner_is_asked_again_as_results_come_in(tmp_path):
    store = make_store(tmp_path)
    tuning = [Row(toy(1, lr=lr), "v", "tune", {"lr": lr}, 0) for lr in (0.1, 0.2, 0.3)]

    def plan(rows):
        done = [row for row in rows if row["role"] == "tune" and row["state"] == "complete"]
        if len(done) < 3:
            return tuning
        best = min(done, key=lambda row: row["result"]["validation"]["loss"])["settings"]
        return [*tuning, *(Row(toy(1, seed, **best), "v", "repeat", best, seed) for seed in range(3))]

    assert drive_inline(store, plan).counts == {"complete": 5, "reused": 0}  # the best tuning trial is the first repeat
    assert [row["role"] for row in store.study_trials("s")] == ["tune"] * 3 + ["repeat"] * 3
    assert not any(row["reused"] for row in store.study_trials("s"))


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


@pytest.mark.parametrize(
    ("kind", "state", "starts", "reason"),
    [
        pytest.param("raise", "failed", 1, "user: ValueError: the toy broke", id="its own exception: no retry"),
        pytest.param("system_exit", "failed", 1, "user: SystemExit: 0", id="sys.exit: no retry"),
        pytest.param("unpicklable", "failed", 1, "user: Local: ", id="an exception no pickle takes: no retry"),
        pytest.param("memory", "failed", 2, "oom: out of memory", id="out of memory: one retry"),
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
        "import resource, sys; from pathlib import Path; from search.worker import run_trial\n"
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


def test_trials_pause_where_their_rows_say_and_go_on_as_the_planner_decides(tmp_path):
    """Three trials to step 2, the best of them on to step 3 and the best of all to its end: successive halving."""
    store, trials = make_store(tmp_path), [toy(x) for x in (1, 2, 3)]
    told = []

    def plan(rows):
        paused = [row for row in rows if row["state"] != "planned" and row["result"]]
        if len(paused) < 3:
            return rows_of(*trials, until=2)
        best = min(paused, key=lambda row: row["key"])["key"]
        further = 3 if all(row["result"]["step"] <= 2 for row in rows) else None
        return [row for t in trials for row in rows_of(t, until=further if t.key == best else 2)]

    summary = drive_inline(store, plan, on_event=lambda event: told.append(event["event"]))
    assert (summary.exit_code, summary.counts) == (0, {"complete": 1, "paused": 2, "reused": 0})
    assert told.count("paused") == 4
    assert drive_inline(store, plan).counts == {"complete": 1, "paused": 2, "reused": 1}
    assert sorted(steps_run(tmp_path)[1].values()) == [1, 1, 3]
    assert set(steps_run(tmp_path)[0].values()) == {1}
    assert drive_inline(store, rows_of(*trials)).counts == {"complete": 3, "reused": 1}
    alone = make_store(tmp_path / "alone")
    drive(alone, "s", lambda _: rows_of(*trials), InlineExecutor(ENTRY, tmp_path / "alone"))
    assert results(alone) == results(store)


def test_a_trial_in_two_rows_goes_as_far_as_either_wants(tmp_path):
    store = make_store(tmp_path)
    both = [*rows_of(toy(), role="tune", until=2), *rows_of(toy(), role="repeat", until=3)]
    assert drive_inline(store, both).counts == {"paused": 1, "reused": 0}
    assert [row["result"]["step"] for row in store.study_trials("s")] == [3, 3]
    assert drive_inline(store, [*both[:1], *rows_of(toy())]).counts == {"complete": 1, "reused": 0}


def test_a_study_that_another_one_paused_goes_on_with_its_trial(tmp_path):
    store = make_store(tmp_path, "other")
    make_store(tmp_path, "s").close()
    drive_inline(store, rows_of(toy(), until=2), "other")
    assert drive_inline(store, rows_of(toy())).counts == {"complete": 1, "reused": 0}
    assert set(steps_run(tmp_path)[0].values()) == {1}


def test_a_retried_trial_goes_on_from_its_checkpoint(tmp_path):
    trial = toy(fault={"kind": "memory", "step": 2, "attempts": 1})
    store = make_store(tmp_path)
    assert drive_inline(store, rows_of(trial)).exit_code == 0
    assert set(steps_run(tmp_path)[0].values()) == {1}


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


def test_retries_are_counted_by_trial_and_kind():
    retries = Retries()
    assert [retries.charge("a", "crash") for _ in range(3)] == [True, True, False]
    assert [retries.charge("a", "oom") for _ in range(2)] == [True, False]
    assert retries.charge("b", "crash")
    assert not retries.charge("b", "user")


def test_a_spent_budget_of_trials_ends_the_run_and_the_next_one_goes_on(tmp_path):
    store, rows = make_store(tmp_path), rows_of(*(toy(x) for x in range(1, 6)))
    first = drive_inline(store, rows, limits=Limits(trials=2))
    assert (first.exit_code, first.counts) == (3, {"complete": 2, "planned": 3, "reused": 0})
    assert "2 trials" in first.message
    assert drive_inline(store, rows, limits=Limits(trials=2)).counts == {"complete": 2, "planned": 3, "reused": 2}
    assert drive_inline(store, rows, limits=Limits(trials=5)).exit_code == 0


def test_a_spent_budget_of_time_starts_nothing_more(tmp_path):
    store, rows = make_store(tmp_path), rows_of(*(toy(x, step_s=0.05) for x in range(1, 4)))
    summary = drive_inline(store, rows, limits=Limits(wall_s=0.1))
    assert summary.exit_code == 3
    assert summary.counts["planned"] >= 2, "a trial was started when the time was spent"


def test_a_result_that_a_dead_driver_left_is_committed_and_not_trained_again(tmp_path):
    store, rows = make_store(tmp_path, rows=rows_of(toy(1), toy(2))), rows_of(toy(1), toy(2))
    for trial in (toy(1), toy(2)):
        store.claim(trial.key, "s")
    (store.trial_folder(toy(1).key) / "result.json").write_text('{"state": "complete", "x": 5}')
    (store.trial_folder(toy(2).key) / "result.json").write_text('{"state": "comp')  # torn: not a result
    assert drive_inline(store, rows).exit_code == 0
    found = store.study_trials("s")
    assert (found[0]["result"], found[0]["attempt"]) == ({"state": "complete", "x": 5}, 1)
    assert found[1]["attempt"] == 2
    assert steps_run(tmp_path)[1] == {"2/0": 1}


def test_a_driver_that_lost_its_trial_commits_nothing(tmp_path):
    """Someone took the trial over while it ran (a driver that slept through its lock): the newer attempt stands."""
    store = make_store(tmp_path)

    class Late(InlineExecutor):
        def wait(self, timeout):
            found = super().wait(timeout)
            store.release(found[0].key, found[0].attempt)
            store.claim(found[0].key, "s")
            store.finish(found[0].key, 2, "complete", {"from": "the other"})
            return found

    assert drive(store, "s", lambda _: rows_of(toy()), Late(ENTRY, tmp_path)).exit_code == 0
    assert store.study_trials("s")[0]["result"] == {"from": "the other"}
    assert "stale" in [event["kind"] for event in store.events("s")]


def test_two_studies_train_a_trial_they_share_once(tmp_path):
    shared, own = toy(1, step_s=0.05), {"a": toy(2), "b": toy(3)}
    stores = {name: make_store(tmp_path, name) for name in own}
    found = {}

    def run(name):
        found[name] = drive_inline(stores[name], rows_of(shared, own[name]), name)

    threads = [threading.Thread(target=run, args=(name,)) for name in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert {name: summary.exit_code for name, summary in found.items()} == {"a": 0, "b": 0}
    assert steps_run(tmp_path)[1] == {"1/0": 1, "2/0": 1, "3/0": 1}
    assert sorted(stores[name].study_trials(name)[0]["reused"] for name in own) == [False, True]


def test_the_planner_rests_while_trials_wait_and_is_asked_at_once_where_none_does(tmp_path, monkeypatch):
    monkeypatch.setattr("search.table.REST", math.inf)
    store, asked = make_store(tmp_path), []
    first, more = rows_of(*(toy(x, steps=1) for x in range(1, 41))), rows_of(*(toy(x, steps=1) for x in range(41, 44)))

    def plan(rows):
        done = {row["key"] for row in rows if row["state"] == "complete"}
        asked.append(len(done))
        return [*first, *(row for n, row in enumerate(more) if len(done) >= 40 + n)]

    assert drive_inline(store, plan).counts == {"complete": 43, "reused": 0}
    assert asked == [0, 0, 40, 40, 41, 41, 42, 42, 43]  # again where it wanted something else


def test_a_trial_that_a_dead_study_left_running_is_taken_over(tmp_path):
    store = make_store(tmp_path, "dead", rows_of(toy()))
    store.claim(toy().key, "dead")
    make_store(tmp_path, "s").close()
    assert drive_inline(store, rows_of(toy())).exit_code == 0
    assert store.study_trials("s")[0]["attempt"] == 2


def test_a_trial_that_a_driver_started_after_it_had_lost_the_study_is_planned_again(tmp_path):
    store = make_store(tmp_path)
    lost = []

    def plan(rows):
        if rows and not lost:
            lost.append(store.claim(toy(1).key, "s"))
        return rows_of(toy(1), toy(2))

    assert drive_inline(store, plan).exit_code == 0
    assert [row["attempt"] for row in store.study_trials("s")] == [2, 1]


def test_who_has_lost_a_study_while_planning_starts_nothing(tmp_path):
    class Lost(StudyLock):
        def check(self):
            raise StudyLost("somebody else has it")

    store = make_store(tmp_path)
    with Lost(tmp_path, "s") as lock, pytest.raises(StudyLost):
        drive_inline(store, rows_of(toy()), lock=lock)
    assert results(store)[toy().key] == ("planned", None)


def test_a_study_is_driven_once_at_a_time(tmp_path):
    store = make_store(tmp_path)
    with StudyLock(tmp_path, "s") as lock:
        with pytest.raises(StudyLocked):
            drive_inline(store, rows_of(toy()))
        assert drive_inline(store, rows_of(toy()), lock=lock).exit_code == 0


class ByHand:
    """An executor whose attempts end when the test says so."""

    slots, gpus = 2, 0.5

    def __init__(self):
        self.submitted, self.cancelled, self.ended = [], [], []

    def start(self):
        pass

    def submit(self, key, folder, attempt, until=None):
        self.submitted.append((key, folder, attempt))

    def wait(self, timeout):
        time.sleep(0.01)
        ended, self.ended = self.ended, []
        return ended

    def cancel(self, key):
        self.cancelled.append(key)
        attempt = next(attempt for each, _, attempt in reversed(self.submitted) if each == key)
        self.ended.append(Finished(key, attempt, Failure("cancelled", "killed")))

    def close(self):
        pass


def test_pruning_stores_its_decision_and_is_not_made_again(tmp_path):
    store, executor, rows = make_store(tmp_path), ByHand(), rows_of(toy())
    store.add_trials("s", rows)
    (made(store.trial_folder(toy().key)) / "metrics.jsonl").write_text(
        '{"step": 2, "loss": 3.0}\n{"step": 2, "validation_loss": 3.5}\n{"step": 4, "validation_loss": 3.4}\n{"step"'
    )
    asked = []

    def should_prune(key, step, history):
        asked.append((key, step, history))
        return True

    summary = drive(store, "s", lambda _: rows, executor, should_prune=should_prune)
    assert (summary.exit_code, summary.counts) == (0, {"pruned": 1, "reused": 0})
    assert asked == [(toy().key, 4, [(2, 3.5), (4, 3.4)])]
    assert executor.cancelled == [toy().key]
    (event,) = (event for event in store.events("s") if event["kind"] == "prune")
    assert event["detail"] == {"history": [[2, 3.5], [4, 3.4]]}
    drive(store, "s", lambda _: rows, executor, should_prune=should_prune)
    assert len(asked) == len(executor.submitted) == 1


def test_rows_that_are_wanted_again_and_done_already_let_the_planner_go_on(tmp_path):
    """Each step of the plan is orphaned and finished: nothing is ever launched that would ask the planner again."""
    store, rows = make_store(tmp_path), rows_of(toy(1), toy(2), toy(3))
    drive_inline(store, rows)
    store.drop_others("s", [])

    def plan(known):
        return rows[: 1 + sum(row["state"] == "complete" for row in known)]

    assert drive_inline(store, plan).counts == {"complete": 3, "reused": 3}
    assert drive_inline(store, rows[:1]).counts == {"complete": 1, "reused": 1}


def test_a_planner_that_goes_in_circles_is_left(tmp_path):
    store, both = make_store(tmp_path), rows_of(toy(1), toy(2))
    summary = drive_inline(store, lambda known: both[1:] if known and known[0]["variant"] == "v1" else both[:1])
    assert summary.exit_code == 0


@pytest.mark.parametrize(
    ("owner", "state", "pruning", "after"),
    [
        pytest.param("other", "pruned", False, "complete", id="pruned by another study"),
        pytest.param("other", "pruned", True, "complete", id="pruned by another study, and this one prunes too"),
        pytest.param("other", "failed", False, "complete", id="failed in another study"),
        pytest.param("s", "pruned", False, "complete", id="pruned by itself when it still pruned"),
        pytest.param("s", "pruned", True, "pruned", id="pruned by itself"),
        pytest.param("s", "failed", False, "failed", id="failed by itself"),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["a row before", "a new row"])
def test_what_another_study_gave_up_is_tried_again(tmp_path, owner, state, pruning, after, known):
    rows = rows_of(toy())
    store = make_store(tmp_path, owner, rows)
    make_store(tmp_path, "s", rows if known else ()).close()
    store.finish(toy().key, store.claim(toy().key, owner), state, None, "because")
    drive_inline(store, rows, should_prune=(lambda *_: False) if pruning else None)
    assert store.study_trials("s")[0]["state"] == after
    assert [event["study"] for event in store.events() if event["kind"] == "reset"] == ["s"] * (after == "complete")


def test_a_trial_pruned_elsewhere_while_this_study_waits_for_it_is_trained(tmp_path):
    rows = rows_of(toy())
    store = make_store(tmp_path, "other", rows)
    make_store(tmp_path, "s").close()
    attempt = store.claim(toy().key, "other")
    ticks = []

    def on_event(event):
        ticks.extend([1] if event["event"] == "tick" else [])
        if event["event"] == "tick" and len(ticks) == 1:
            store.finish(toy().key, attempt, "pruned", None, "because")

    with StudyLock(tmp_path, "other"):
        assert drive_inline(store, rows, on_event=on_event).counts == {"complete": 1, "reused": 0}


def prunable(folder):
    """A store with one planned trial that has a validation loss already."""
    store = make_store(folder, rows=rows_of(toy()))
    (made(store.trial_folder(toy().key)) / "metrics.jsonl").write_text('{"step": 2, "validation_loss": 3.5}\n')
    return store


@pytest.mark.parametrize("last", ["line", "result"])
def test_a_trial_that_came_to_its_end_while_it_was_judged_is_not_pruned(tmp_path, last):
    trial = replace(toy(), recipe={**toy().recipe, "tokens": 8, "batch": 1, "context": 2})
    store, executor, asked = make_store(tmp_path, rows=rows_of(trial)), ByHand(), []
    folder = made(store.trial_folder(trial.key))
    (folder / "metrics.jsonl").write_text('{"step": 2, "validation_loss": 3.5}\n')

    def should_prune(key, step, history):
        asked.append(step)
        if last == "line":
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 4, "tokens": 8, "loss": 3.4}\n')
        else:
            (folder / "result.json").write_text('{"state": "complete"}')
        executor.ended.append(Finished(key, 1, {"state": "complete"}))
        return True

    summary = drive(store, "s", lambda _: rows_of(trial), executor, should_prune=should_prune)
    assert (summary.counts, asked, executor.cancelled) == ({"complete": 1, "reused": 0}, [2], [])
    assert "prune" not in [event["kind"] for event in store.events("s")]


def test_pruning_a_trial_that_someone_took_over_kills_ours_and_leaves_theirs(tmp_path):
    store, executor = prunable(tmp_path), ByHand()

    def should_prune(key, step, history):
        store.finish(key, 1, "complete", {"from": "the other"})
        return True

    summary = drive(store, "s", lambda _: rows_of(toy()), executor, should_prune=should_prune)
    assert (summary.exit_code, executor.cancelled) == (0, [toy().key])
    assert store.study_trials("s")[0]["result"] == {"from": "the other"}
    assert "stale" in [event["kind"] for event in store.events("s")]


def test_a_trial_is_pruned_once_in_a_run_and_then_trained_for_who_wants_it_whole(tmp_path):
    store, executor, asked = prunable(tmp_path), ByHand(), []

    def on_event(event):
        if event["event"] == "finished" and event["state"] == "pruned":
            make_store(tmp_path, "whole", rows_of(toy())).reset_pruned("whole")
        if event["event"] == "tick" and len(executor.submitted) == 2:
            executor.ended.append(Finished(toy().key, 2, {"state": "complete"}))

    summary = drive(
        store, "s", lambda _: rows_of(toy()), executor, on_event=on_event, should_prune=lambda *_: not asked.append(1)
    )
    assert (summary.counts, len(asked)) == ({"complete": 1, "reused": 0}, 1)


def test_a_full_disk_that_takes_no_request_to_stop_ends_the_study_in_order(tmp_path, monkeypatch):
    def no_space(folder, attempt):
        raise OSError(28, "No space left on device")

    store, executor = make_store(tmp_path), ByHand()

    def finish(*_):
        raise StoreFull("the table can't be written")

    monkeypatch.setattr("search.driver.request_stop", no_space)
    monkeypatch.setattr(store, "finish", finish)
    executor.wait = lambda timeout: [Finished(toy(1).key, 1, {"state": "complete"})]
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
        fault = Failure(kind, "gone") if attempt < 9 else {"state": "complete"}
        executor.ended.append(Finished(key, attempt, fault))

    executor.submit = start
    assert drive(store, "s", lambda _: rows, executor).exit_code == 0
    assert store.study_trials("s")[0]["attempt"] == 9


def test_a_trial_that_is_not_wanted_any_more_does_not_come_back(tmp_path, monkeypatch):
    """Its process is lost while another trial's result has changed what the planner wants, and the planner rests."""
    monkeypatch.setattr("search.table.REST", math.inf)
    store, rows = make_store(tmp_path), rows_of(toy(1), toy(2))
    endings = [{"state": "complete"}, Failure("node", "gone"), {"state": "complete"}]

    class InTurn(ByHand):
        def wait(self, timeout):
            key, _, attempt = self.submitted.pop(0)
            return [Finished(key, attempt, endings.pop(0))]

    def plan(known):
        return rows[:1] if any(row["state"] == "complete" for row in known) else rows

    assert drive(store, "s", plan, InTurn()).counts == {"complete": 1, "reused": 0}
    (dropped,) = store.study_trials("s", orphaned=True)
    assert (dropped["key"], dropped["state"], dropped["attempt"]) == (toy(2).key, "planned", 1)


def test_when_the_executor_dies_rows_stay_running_and_nothing_is_charged(tmp_path):
    store, executor, rows = make_store(tmp_path), ByHand(), rows_of(toy(1), toy(2), toy(3))
    executor.wait = lambda timeout: [Finished(toy(1).key, 1, Failure("infra", "the raylet died"))]
    summary = drive(store, "s", lambda _: rows, executor)
    assert (summary.exit_code, summary.counts) == (75, {"running": 2, "planned": 1, "reused": 0})
    assert "raylet" in summary.message
    assert drive_inline(store, rows).exit_code == 0


def test_the_shipper_hears_of_every_start_and_end_and_is_closed(tmp_path):
    heard = []

    class Shipper:
        def start(self):
            heard.append("start")

        def notice(self, key):
            heard.append(key)

        def close(self, timeout):
            heard.append("close")

    drive_inline(make_store(tmp_path), rows_of(toy(1), toy(2)), shipper=Shipper())
    assert heard == ["start", *[toy(1).key] * 2, *[toy(2).key] * 2, "close"]


def test_a_signal_while_the_trackers_are_waited_for_leaves_them_and_not_the_result(tmp_path):
    heard, seen = [], []

    class Shipper:
        def start(self):
            heard.append("start")

        def notice(self, key):
            heard.append("notice")

        def close(self, timeout):
            signal.raise_signal(signal.SIGINT)
            heard.append("close")

        def leave(self):
            heard.append("leave")

    summary = drive_inline(make_store(tmp_path), rows_of(toy()), shipper=Shipper(), on_event=seen.append)
    assert heard == ["start", "notice", "notice", "leave"]
    assert summary.exit_code == 0 and summary.counts["complete"] == 1
    assert seen[-1]["event"] == "summary"


def test_a_run_that_was_asked_to_stop_hardly_waits_for_the_trackers(tmp_path):
    given = []

    class Shipper:
        def __init__(self, stops):
            self.stops = stops

        def start(self):
            pass

        def notice(self, key):
            if self.stops:
                self.stops = False
                signal.raise_signal(signal.SIGINT)

        def close(self, timeout):
            given.append(timeout)

    for stops in (False, True):
        drive_inline(make_store(tmp_path / str(stops)), rows_of(toy()), shipper=Shipper(stops))
    assert given[1] < given[0] / 5


def test_events_tell_a_run_from_start_to_summary(tmp_path):
    seen = []
    drive_inline(make_store(tmp_path), rows_of(toy()), on_event=seen.append)
    assert [event["event"] for event in seen if event["event"] != "tick"] == [
        "study",
        "launched",
        "finished",
        "summary",
    ]


TRIALS = [toy(x, step_s=0.05, steps=6) for x in range(1, 5)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What the four trials give when nothing happens."""
    store = make_store(tmp_path_factory.mktemp("whole"))
    drive_inline(store, rows_of(*TRIALS))
    return results(store)


@pytest.mark.parametrize("steps", [1, 8, 17])
def test_a_study_killed_at_any_moment_ends_with_the_same_results(tmp_path, uninterrupted, steps):
    driver = Driver(tmp_path, TRIALS)
    until(lambda: sum(steps_run(tmp_path)[0].values()) >= steps)
    driver.process.kill()
    driver.end()
    finished = {row["key"] for row in make_store(tmp_path).study_trials("s") if row["state"] == "complete"}
    starts = steps_run(tmp_path)[1]
    assert Driver(tmp_path, TRIALS).end()[0] == 0
    assert results(make_store(tmp_path)) == uninterrupted
    again = steps_run(tmp_path)[1]
    assert all(
        again[f"{trial.model['x']}/0"] == starts[f"{trial.model['x']}/0"] for trial in TRIALS if trial.key in finished
    )
    assert sum(steps_run(tmp_path)[0].values()) <= 4 * 6 + 1  # at most the step that was not yet in a checkpoint


@pytest.mark.parametrize("steps", [2, 7])
def test_a_study_killed_while_its_trials_go_to_their_pauses_repeats_at_most_a_step(tmp_path, uninterrupted, steps):
    driver = Driver(tmp_path, TRIALS, until=3)
    until(lambda: sum(steps_run(tmp_path)[0].values()) >= steps)
    driver.process.kill()
    driver.end()
    code, output = Driver(tmp_path, TRIALS, until=3).end()
    assert (code, json.loads(output)["counts"]) == (0, {"paused": 4, "reused": 0})
    assert max(step for _, step in steps_run(tmp_path)[0]) == 2  # the third step
    assert Driver(tmp_path, TRIALS).end()[0] == 0
    assert results(make_store(tmp_path)) == uninterrupted
    assert sum(steps_run(tmp_path)[0].values()) <= 4 * 6 + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_leaves_checkpoints_and_planned_rows(tmp_path, uninterrupted, number):
    trials = [toy(x, step_s=0.05, steps=6, holds=[3] if x == 2 else []) for x in range(1, 5)]
    driver = Driver(tmp_path, trials)
    until(lambda: sum(steps_run(tmp_path)[0].values()) >= 8)
    driver.process.send_signal(number)
    code, output = driver.end()
    assert code == 128 + number, output
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} == {"complete", "planned"}
    go(tmp_path, 3)
    assert drive_inline(store, rows_of(*trials)).exit_code == 0
    assert list(results(store).values()) == list(uninterrupted.values())
    assert set(steps_run(tmp_path)[0].values()) == {1}


def test_the_second_signal_ends_it_at_once_and_it_can_be_resumed(tmp_path):
    slow = [toy(1, step_s=1000.0)]
    driver = Driver(tmp_path, slow)
    until(lambda: steps_run(tmp_path)[1])
    driver.process.send_signal(signal.SIGINT)
    until(lambda: list(tmp_path.glob("trials/*/*/stop-*")), what="the driver to ask its trial to stop")
    assert driver.process.poll() is None
    driver.process.send_signal(signal.SIGINT)
    code, output = driver.end()
    assert code == 130, output
    assert "at once" in output
    assert [row["state"] for row in make_store(tmp_path).study_trials("s")] == ["running"]


@pytest.mark.slow
def test_ten_thousand_trials_of_a_planned_study_end_once_each():
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--parts", "inline"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["trials"], found["once"]) == (10_000, True)
