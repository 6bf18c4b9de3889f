"""The loop with the inline executor: what runs, what is reused, and what it shares with other studies."""

import json
import math
import subprocess
import sys
import threading

import pytest

from archlab.search.executors.executor import Failure, Finished
from archlab.search.executors.inline import InlineExecutor
from archlab.search.running.driver import drive
from archlab.search.sections.budget.spec import Budget
from archlab.search.store.lock import StudyLock, StudyLocked, StudyLost
from archlab.search.store.store import Row
from archlab.search.utils.quantities import Duration
from tests.search.study_kit import ENTRY, ROOT, ByHand, done, drive_inline, make_store, results, rows_of, steps_run, toy


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
    assert summary.message == "every trial that is needed has a result"
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


def test_a_spent_budget_of_trials_ends_the_run_and_the_next_one_goes_on(tmp_path):
    store, rows = make_store(tmp_path), rows_of(*(toy(x) for x in range(1, 6)))
    first = drive_inline(store, rows, limits=Budget(trials=2))
    assert (first.exit_code, first.counts) == (3, {"complete": 2, "planned": 3, "reused": 0})
    assert "2 trials" in first.message
    assert drive_inline(store, rows, limits=Budget(trials=2)).counts == {"complete": 2, "planned": 3, "reused": 2}
    assert drive_inline(store, rows, limits=Budget(trials=5)).exit_code == 0


def test_a_spent_budget_of_time_starts_nothing_more(tmp_path):
    store, rows = make_store(tmp_path), rows_of(*(toy(x, step_s=0.05) for x in range(1, 4)))
    summary = drive_inline(store, rows, limits=Budget(wall=Duration(0.1)))
    assert summary.exit_code == 3
    assert summary.counts["planned"] >= 2, "a trial was started when the time was spent"


def test_a_result_that_a_dead_driver_left_is_committed_and_not_trained_again(tmp_path):
    store, rows = make_store(tmp_path, rows=rows_of(toy(1), toy(2))), rows_of(toy(1), toy(2))
    for trial in (toy(1), toy(2)):
        store.claim(trial.key, "s")
    (store.trial_folder(toy(1).key) / "result.json").write_text(json.dumps(done(x=5)))
    (store.trial_folder(toy(2).key) / "result.json").write_text('{"state": "comp')  # torn: not a result
    assert drive_inline(store, rows).exit_code == 0
    found = store.study_trials("s")
    assert (found[0]["result"], found[0]["attempt"]) == (done(x=5), 1)
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
            store.finish(found[0].key, 2, "complete", done(**{"from": "the other"}))
            return found

    assert drive(store, "s", lambda _: rows_of(toy()), Late(ENTRY, tmp_path)).exit_code == 0
    assert store.study_trials("s")[0]["result"] == done(**{"from": "the other"})
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
    monkeypatch.setattr("archlab.search.running.queue.REST", math.inf)
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


def test_a_trial_that_is_not_wanted_any_more_does_not_come_back(tmp_path, monkeypatch):
    """Its process is lost while another trial's result has changed what the planner wants, and the planner rests."""
    monkeypatch.setattr("archlab.search.running.queue.REST", math.inf)
    store, rows = make_store(tmp_path), rows_of(toy(1), toy(2))
    endings = [done(), Failure("node", "gone"), done()]

    class InTurn(ByHand):
        def wait(self, timeout):
            key, _, attempt = self.submitted.pop(0)
            return [Finished(key, attempt, endings.pop(0))]

    def plan(known):
        return rows[:1] if any(row["state"] == "complete" for row in known) else rows

    assert drive(store, "s", plan, InTurn()).counts == {"complete": 1, "reused": 0}
    (dropped,) = store.study_trials("s", orphaned=True)
    assert (dropped["key"], dropped["state"], dropped["attempt"]) == (toy(2).key, "planned", 1)


def test_events_tell_a_run_from_start_to_summary(tmp_path):
    seen = []
    drive_inline(make_store(tmp_path), rows_of(toy()), on_event=seen.append)
    assert [event["event"] for event in seen if event["event"] != "tick"] == [
        "study",
        "launched",
        "finished",
        "summary",
    ]


@pytest.mark.slow
def test_ten_thousand_trials_of_a_planned_study_end_once_each():
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--parts", "inline"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["trials"], found["once"]) == (10_000, True)
