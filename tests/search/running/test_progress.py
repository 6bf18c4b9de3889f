"""What a running study says of itself: counts and rates in view, a line per event in a log, JSON for programs."""

import io
import json

import pytest
from rich.console import Console

from archlab.search.formatting.numbers import duration_in_words
from archlab.search.recipe.steps import total_steps
from archlab.search.running.progress import JsonProgress, LineProgress, LiveProgress
from archlab.search.trial.metrics import last_training_line

LINES = (
    '{"step": 10, "tokens": 2560, "loss": 5.0, "tokens_per_s": 900.0}\n'
    '{"step": 20, "tokens": 5120, "loss": 4.25, "tokens_per_s": 1234.5}\n'
    '{"step": 20, "validation_loss": 4.5}\n'
    '{"step": 30, "tok'
)


@pytest.fixture
def folder(tmp_path):
    """A trial of 100 steps that has done 20."""
    (tmp_path / "trial.json").write_text(json.dumps({"recipe": {"tokens": 25_590, "batch": 4, "context": 64}}))
    (tmp_path / "metrics.jsonl").write_text(LINES)
    return tmp_path


def launched(folder, key="k"):
    shown = {"variant": "G1", "role": "tune", "settings": {"lr": 0.002}, "seed": 0}
    return {"event": "launched", "key": key, "attempt": 1, "folder": str(folder), **shown}


def ended(state, reason=None, result=None):
    return {"event": "finished", "key": "k", "attempt": 1, "state": state, "reason": reason, "result": result}


def begin(progress):
    progress.plan({"study": "gates"}, 12)
    progress.event({"event": "study", "study": "gates", "counts": {"complete": 3, "reused": 3, "planned": 9}})


def test_steps_and_the_newest_whole_line_are_read_from_the_trials_folder(folder):
    assert total_steps(folder) == 100
    assert last_training_line(folder)["step"] == 20
    (folder / "metrics.jsonl").unlink()
    assert last_training_line(folder) is None


def test_the_live_view_has_a_line_per_running_trial_under_the_studys_own(folder):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with LiveProgress(console) as progress:
        begin(progress)
        progress.event(launched(folder))
        progress.event({"event": "tick", "running": {"k": folder}})
        progress.running["k"].first_step, progress.running["k"].started = 10, progress.running["k"].started - 40
        with console.capture() as captured:
            console.print(progress.view())
    shown = captured.get()
    assert "gates: 3/12 trials, 1 running, about" in shown
    for part in ("G1 lr=0.002 seed 0", "20/100", "loss 4.250", "1,234 tok/s", "5 min left"):
        assert part in shown


def test_a_log_gets_a_line_per_event_and_no_control_characters(folder):
    file = io.StringIO()
    progress = LineProgress(file)
    begin(progress)
    for event in (
        launched(folder),
        {"event": "retry", "key": "k", "attempt": 1, "kind": "crash", "message": "killed"},
        launched(folder),
        ended("complete", result={"validation": {"loss": 4.5}}),
        {"event": "stop", "exit_code": 3, "message": "the budget is spent"},
        {"event": "summary", "exit_code": 3, "counts": {}, "message": "x"},
    ):
        progress.event(event)
    assert file.getvalue().splitlines() == [
        "start     G1 lr=0.002 seed 0 (attempt 1)",
        "retry     G1 lr=0.002 seed 0: crash: killed",
        "start     G1 lr=0.002 seed 0 (attempt 1)",
        "complete  G1 lr=0.002 seed 0: validation loss 4.5000",
        "stopping: the budget is spent (trials write a checkpoint first; Ctrl-C stops at once)",
    ]
    assert (progress.done, progress.headline().split(",")[0]) == (4, "gates: 4/12 trials")


def test_a_trial_that_paused_goes_on_from_its_step_and_has_not_failed(folder):
    file = io.StringIO()
    progress = LineProgress(file)
    begin(progress)
    settings = {"number": 3, "lr": 0.0079048901, "train.lr": 0.0079048901, "block.ffn.width": 64}
    first = {**launched(folder), "settings": settings}
    failed = {"event": "retry", "key": "k", "attempt": 2, "kind": "crash", "message": "killed"}
    pause = {"event": "paused", "key": "k", "attempt": 1, "result": {"state": "paused", "step": 20}}
    for event in (first, pause, {**first, "attempt": 2}, failed, {**first, "attempt": 3}):
        progress.event(event)
    name = "G1 lr=0.0079 width=64 seed 0"
    assert file.getvalue().splitlines() == [
        f"start     {name} (attempt 1)",
        f"start     {name} (from step 20)",
        f"retry     {name}: crash: killed",
        f"start     {name} (attempt 3)",
    ]


def test_trials_beyond_the_plan_count_when_a_grid_grows(folder):
    variants = [{"name": name, "flops_per_token": 1, "tokens": 10} for name in ("G1", "G2")]
    record = {"study": "gates", "variants": variants, "seeds": [0, 1], "tune": {"lr": [1, 2]}}
    progress = LineProgress(io.StringIO())
    progress.plan(
        record, 6, [{"role": "tune", "variant": "G1", "settings": {"lr": lr}, "state": "planned"} for lr in (1, 2)]
    )
    assert progress.total == 6
    for number, lr in enumerate((2, 4, 4)):
        progress.event({**launched(folder, f"k{number}"), "settings": {"lr": lr}})
    assert progress.total == 7, "the rate of 4 is one more, whichever attempt"
    progress.plan(record, 7)
    assert progress.total == 7, "which a later plan knows"


def test_json_progress_is_one_object_per_line(folder):
    file = io.StringIO()
    progress = JsonProgress(file)
    begin(progress)
    progress.event(launched(folder))
    progress.event({"event": "tick", "running": {"k": folder}})
    progress.event(ended("failed", "user: ValueError"))
    found = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [each["event"] for each in found] == ["plan", "study", "launched", "progress", "finished"]
    assert found[3]["running"]["k"]["loss"] == 4.25


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (89.4, "89 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_are_rounded_for_people(seconds, text):
    assert duration_in_words(seconds) == text
