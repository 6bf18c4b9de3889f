"""Trials that are ended early, here or by another study, and what becomes of them."""

import json
from dataclasses import replace

import pytest

from archlab.search.executors.executor import Finished
from archlab.search.running.driver import drive
from archlab.search.store.lock import StudyLock
from tests.search.study_kit import ByHand, done, drive_inline, made, make_store, rows_of, toy


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
            (folder / "result.json").write_text(json.dumps(done()))
        executor.ended.append(Finished(key, 1, done()))
        return True

    summary = drive(store, "s", lambda _: rows_of(trial), executor, should_prune=should_prune)
    assert (summary.counts, asked, executor.cancelled) == ({"complete": 1, "reused": 0}, [2], [])
    assert "prune" not in [event["kind"] for event in store.events("s")]


def test_pruning_a_trial_that_someone_took_over_kills_ours_and_leaves_theirs(tmp_path):
    store, executor = prunable(tmp_path), ByHand()

    def should_prune(key, step, history):
        store.finish(key, 1, "complete", done(**{"from": "the other"}))
        return True

    summary = drive(store, "s", lambda _: rows_of(toy()), executor, should_prune=should_prune)
    assert (summary.exit_code, executor.cancelled) == (0, [toy().key])
    assert store.study_trials("s")[0]["result"] == done(**{"from": "the other"})
    assert "stale" in [event["kind"] for event in store.events("s")]


def test_a_trial_is_pruned_once_in_a_run_and_then_trained_for_who_wants_it_whole(tmp_path):
    store, executor, asked = prunable(tmp_path), ByHand(), []

    def on_event(event):
        if event["event"] == "finished" and event["state"] == "pruned":
            make_store(tmp_path, "whole", rows_of(toy())).reset_pruned("whole")
        if event["event"] == "tick" and len(executor.submitted) == 2:
            executor.ended.append(Finished(toy().key, 2, done()))

    summary = drive(
        store, "s", lambda _: rows_of(toy()), executor, on_event=on_event, should_prune=lambda *_: not asked.append(1)
    )
    assert (summary.counts, len(asked)) == ({"complete": 1, "reused": 0}, 1)
