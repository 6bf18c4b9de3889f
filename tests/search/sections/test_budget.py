"""Budgets are hard: what all runs of a study have spent counts, and a trial that would exceed is not launched."""

import json
import time

import pytest

from archlab.search.executors.inline import InlineExecutor
from archlab.search.planning.page import plan_json, print_plan
from archlab.search.planning.plan import plan
from archlab.search.running.driver import drive
from archlab.search.running.run import run, tokens_left
from archlab.search.sections.budget.spec import Account, Budget, Spent, attempt_spent, spent_of, standing
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.utils.quantities import Duration
from tests.search.study_files import write_study
from tests.search.study_kit import ENTRY, make_store, rows_of, steps_run, toy


def drive_inline(store, rows, study="s", **limits):
    """Drives rows of toy trials, whose steps are their tokens."""
    lengths = {row.trial.key: row.trial.recipe["steps"] for row in rows}

    def tokens_of(key, until):
        done = store.trial_folder(key) / "checkpoint.json"
        return (until or lengths[key]) - (json.loads(done.read_text())["step"] if done.exists() else 0)

    executor = InlineExecutor(ENTRY, store.root)
    return drive(store, study, lambda _: rows, executor, limits=Budget(**limits), tokens_of=tokens_of)


def test_a_trial_that_would_exceed_the_tokens_is_not_launched_in_any_run(tmp_path):
    store, rows = make_store(tmp_path), rows_of(*(toy(x, steps=4) for x in range(1, 6)))
    for _ in range(2):
        summary = drive_inline(store, rows, tokens=11)
        assert summary.exit_code == 3
        assert (summary.counts["complete"], summary.counts["planned"]) == (2, 3)
        assert "11 tokens is spent (2 trials, 8 tokens, 0.00 GPU hours so far); the next trial takes 4 more" in (
            summary.message
        )
    assert drive_inline(store, rows, tokens=12).counts["complete"] == 3
    assert spent_of(store, "s").tokens == 12
    assert drive_inline(store, rows, tokens=20).exit_code == 0


def test_what_a_trial_repeated_counts_and_what_it_has_is_not_asked_for_again(tmp_path):
    """A pause, then a failure that costs a retry: the second attempt's tokens are those after the checkpoint."""
    store = make_store(tmp_path)
    trial = toy(steps=4, fault={"kind": "memory", "step": 3, "attempts": 2})
    assert drive_inline(store, rows_of(trial, until=2), tokens=2).exit_code == 0
    assert drive_inline(store, rows_of(trial), tokens=4).exit_code == 0
    assert spent_of(store, "s") == Spent(frozenset({trial.key}), 4, 0.0)
    assert [event["detail"]["spent"]["tokens"] for event in store.events("s") if "spent" in event["detail"]] == [
        2, 1, 1
    ]  # fmt: skip


def test_what_another_study_trained_is_free(tmp_path):
    store = make_store(tmp_path, "other")
    make_store(tmp_path, "s").close()
    drive_inline(store, rows_of(toy(1), toy(2)), "other")
    assert drive_inline(store, rows_of(toy(1), toy(2), toy(3)), tokens=4, trials=1).exit_code == 0
    assert spent_of(store, "s") == Spent(frozenset({toy(3).key}), 4, 0.0)


def test_what_a_dead_driver_has_trained_is_spent(tmp_path):
    store = make_store(tmp_path, rows=rows_of(toy()))
    folder = store.trial_folder(toy().key)
    attempt = store.claim(toy().key, "s", gpus=2.0)
    (folder / "attempt.json").write_text(json.dumps({"attempt": attempt, "started": 1000.0}))
    lines = [{"step": n, "attempt": attempt, "time": 1000.0 + 50 * n, "tokens": 7 * n} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "tok')
    assert attempt_spent(folder, attempt, gpus=2.0) == {"tokens": 14, "gpu_s": 200.0}
    drive_inline(store, rows_of(toy()))
    released = next(event for event in store.events("s") if event["kind"] == "planned")
    assert released["detail"] == {"reason": "its driver ended", "spent": {"tokens": 14, "gpu_s": 200.0}}


def test_what_is_taken_over_is_spent_by_who_started_it(tmp_path):
    store = make_store(tmp_path, "other", rows=rows_of(toy()))
    make_store(tmp_path, "s", rows=rows_of(toy())).close()
    folder, attempt = store.trial_folder(toy().key), store.claim(toy().key, "other", gpus=4.0)
    (folder / "attempt.json").write_text(json.dumps({"attempt": attempt, "started": 1000.0}))
    line = {"step": 1, "attempt": attempt, "time": 1050.0, "tokens": 7}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert drive_inline(store, rows_of(toy()), "s").exit_code == 0
    assert (spent_of(store, "other").gpu_s, spent_of(store, "s").gpu_s) == (200.0, 0.0)


def test_running_trials_are_stopped_at_a_checkpoint_when_the_gpu_hours_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(InlineExecutor, "gpus", 2.0)
    store, rows = make_store(tmp_path), rows_of(*(toy(x, step_s=0.05) for x in range(1, 4)))
    summary = drive_inline(store, rows, gpu_hours=0.5 / 3600)
    assert summary.exit_code == 3
    assert "GPU hours is spent" in summary.message
    spent = spent_of(store, "s").gpu_s
    assert spent >= 0.5
    launched = steps_run(tmp_path)[1]
    assert drive_inline(store, rows, gpu_hours=0.5 / 3600).exit_code == 3  # the count goes on: nothing is launched
    assert (steps_run(tmp_path)[1], spent_of(store, "s").gpu_s) == (launched, spent)
    assert drive_inline(store, rows, gpu_hours=1.0).exit_code == 0
    assert set(steps_run(tmp_path)[0].values()) == {1}


@pytest.mark.parametrize(
    ("limits", "spent", "asked", "refused"),
    [
        pytest.param(Budget(), Spent(frozenset("ab"), 10**9, 1e9), ("c", 5), None, id="no limit"),
        pytest.param(Budget(trials=2), Spent(frozenset("ab")), ("b", 5), None, id="a trial of before goes on"),
        pytest.param(Budget(trials=2), Spent(frozenset("ab")), ("c", 5), "2 trials", id="a trial too many"),
        pytest.param(Budget(tokens=100), Spent(tokens=89), ("c", 10), None, id="the last tokens"),
        pytest.param(Budget(tokens=100), Spent(tokens=91), ("c", 10), "100 tokens", id="a token too many"),
        pytest.param(Budget(gpu_hours=2), Spent(gpu_s=7199.0), ("c", 10), None, id="a second left"),
        pytest.param(Budget(gpu_hours=2), Spent(gpu_s=7200.0), ("c", 10), "2 GPU hours", id="no time left"),
    ],
)
def test_an_account_refuses_what_would_exceed_it(limits, spent, asked, refused):
    account = Account(limits, spent)
    told = account.refuses(*asked)
    assert told is None if refused is None else told.startswith(f"the budget of {refused} is spent (")


def test_what_running_trials_may_still_take_is_reserved():
    account = Account(Budget(tokens=100))
    account.launched("a", 60, 0.5)
    assert account.refuses("b", 60)
    account.ended("a", {"tokens": 10, "gpu_s": 1800.0})  # it paused early
    assert not account.refuses("b", 60)
    assert Account(Budget(gpu_hours=1), account.spent, gpus=0.5).over([3000.0, 599.0]) is None
    assert "1 GPU hours" in Account(Budget(gpu_hours=1), account.spent, gpus=0.5).over([3000.0, 600.0])


def test_a_study_stops_at_its_tokens_and_a_longer_budget_goes_on(tmp_path):
    """Of the real trainer's trials of 1,024 tokens two fit in 2,100."""
    path = write_study(tmp_path, budget="budget: {tokens: 2100}")
    study = load_study(path)
    assert study.budget == Budget(tokens=2100)
    summary = run(study, tmp_path / "store", executor="inline", track=False)
    assert summary.exit_code == 3
    with Store.open(tmp_path / "store") as store:
        spent = spent_of(store, study.study)
        row = next(row for row in store.study_trials(study.study) if row["state"] == "planned")
        assert (spent.tokens, tokens_left(store)(row["key"], None)) == (2048, 1024)
        done = next(row for row in store.study_trials(study.study) if row["state"] == "complete")
        assert tokens_left(store)(done["key"], None) == 0
    options = {"overrides": {"budget.tokens": 10**6}, "executor": "inline", "track": False}
    assert run(path, tmp_path / "store", **options).exit_code == 0


def test_a_plan_says_what_of_the_budget_is_spent(tmp_path, capsys):
    path = write_study(tmp_path, budget="budget: {tokens: 2100, trials: 3, gpu_hours: 0.5, wall: 30m}")
    planned, root = plan(load_study(path), tmp_path / "store" / "data"), tmp_path / "store"
    line = "budget: {} of 3 trials, {} of 2,100 tokens, 0.00 of 0.5 GPU hours are spent; 1800 s for each run"
    print_plan(planned, root)
    assert line.format(0, 0) in capsys.readouterr().out
    run(path, root, executor="inline", track=False)
    print_plan(planned, root)
    assert line.format(2, "2,048") in capsys.readouterr().out
    assert plan_json(planned, root)["spent"] == {"trials": 2, "tokens": 2048, "gpu_hours": 0.0}
    assert standing(Budget(), Spent()) == ""
    assert standing(Budget(wall=Duration(90.0)), Spent()) == "budget: 90 s for each run"


def test_wall_time_is_that_of_one_run():
    account = Account(Budget(wall=Duration(10.0)), started=time.monotonic() - 11.0)
    assert account.over([]).startswith("the budget of 10 s for one run is spent")
    assert Account(Budget(wall=Duration(10.0))).over([]) is None
