"""Before a study starts: every variant is tried out; what does not fit is divided for all alike, or stops the study."""

import json

import pytest

from archlab.arch_dsl import SpecError
from archlab.cli.main import main
from archlab.search.planning.plan import plan
from archlab.search.recipe.recipe import load_recipe
from archlab.search.running import smoke as smoking
from archlab.search.running.run import run
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.training.smoke_trial import STEPS, Interrupted
from archlab.search.training.smoke_trial import train as real
from archlab.search.training.step_times import step_time_key
from archlab.search.trial.trial import Trial
from tests.search.study_files import write_study

__all__ = ["Interrupted"]  # what a trainer's module must have

TWO = "variants:\n  baseline: {}\n  wide: {block.ffn.width: 512}"


def is_wide(trial):
    return '"width": 512' in json.dumps(trial.model)


def starved(folder, data_root, attempt, should_stop):
    """Has memory for 4 sequences at a time of the baseline, and for 2 of the wide variant."""
    trial = Trial.from_json((folder / "trial.json").read_text())
    fits = 2 if is_wide(trial) else 4
    if load_recipe(trial.recipe).micro_batch > fits:
        raise MemoryError
    return {"state": "complete", "reason": None, "step_s": 0.5, "peak_memory_bytes": 1}


def always_starved(folder, data_root, attempt, should_stop):
    """Has no memory at all."""
    raise MemoryError


def broken(folder, data_root, attempt, should_stop):
    """Cannot train the wide variant."""
    trial = Trial.from_json((folder / "trial.json").read_text())
    if is_wide(trial):
        raise ValueError("no kernel for this width")
    return {"state": "diverged", "reason": "step 1: the loss is not finite", "step_s": 0.1, "peak_memory_bytes": 1}


def rehearse(path, root, monkeypatch, trainer):
    """`run --smoke` in this process with the trial trainer of this name; the events."""
    if trainer:
        monkeypatch.setattr(smoking, "ENTRY", f"{__name__}:{trainer}")
    told = []
    summary = run(path, root, executor="inline", track=False, smoke=True, on_event=told.append)
    return summary, [event for event in told if event["event"] == "smoke"]


@pytest.mark.parametrize(
    ("recipe", "rows", "counts"),
    [
        ({"batch": 16}, 16, [1]),
        ({"batch": 16}, 8, [2]),
        ({"batch": 12}, 5, [3]),
        ({"batch": 7}, 6, [7]),
        ({"batch": 16, "accumulate": 4}, 8, [4]),
        ({"batch": 4, "stages": [{"tokens": 512, "lr": 0.1, "batch": 16}]}, 4, [1, 4]),
        ({"batch": 16, "stages": [{"tokens": 512, "lr": 0.1, "batch": 4}]}, 4, [4, 1]),
    ],
    ids=["fits", "half", "divisor", "prime", "given", "larger stage", "smaller stage"],
)
def test_micro_batches_are_as_large_as_can_be_and_batches_stay(recipe, rows, counts):
    given = load_recipe({"tokens": 512, "context": 16, "lr": 0.1, **recipe})
    found = given.in_rows(rows)
    assert [each.accumulate for each in found.whole] == counts
    assert [each.sequences for each in found.whole] == [each.sequences for each in given.whole]
    assert not found.problems()
    assert (found == given) == (rows >= max(each.micro_batch for each in given.whole))


def test_all_variants_get_the_micro_batch_at_which_all_fit_and_later_runs_replay_it(tmp_path, monkeypatch):
    path, root = write_study(tmp_path, variants=TWO, components=None, seeds="seeds: 1"), tmp_path / "store"
    text = path.read_text().replace("batch: 4", "batch: 8")
    path.write_text(text)
    summary, told = rehearse(path, root, monkeypatch, "starved")
    assert summary.exit_code == 0
    assert [(each["variant"], each["verdict"], each["micro_batch"]) for each in told] == [
        ("baseline", "out of memory", 8),
        ("wide", "out of memory", 8),
        ("baseline", "fits", 4),
        ("wide", "out of memory", 4),
        ("wide", "fits", 2),
    ]
    with Store.open(root) as store:
        rows = store.study_trials("gates")
        recipes = [json.loads(store.spec(row["key"]))["recipe"] for row in rows]
        assert store.study("gates")["recipe"]["accumulate"] == 4
        (wide,) = [each for each in plan(load_study(path), root / "data", 2).variants if each.name == "wide"]
        assert store.recall("step_time", step_time_key(wide.timed, 1)) == {"seconds": 0.5}
    assert {(each["batch"], each["accumulate"]) for each in recipes} == {(8, 4)}
    assert not (root / "smoke" / "gates").exists()
    again = run(path, root, executor="inline", track=False)
    assert again.counts == {"complete": 2, "reused": 2}


def test_a_study_whose_trials_were_begun_keeps_its_micro_batch(tmp_path, monkeypatch):
    path, root = write_study(tmp_path, variants="variants: {baseline: {}}", components=None), tmp_path / "store"
    run(path, root, executor="inline", track=False)
    path = write_study(tmp_path, variants=TWO, components=None)
    with pytest.raises(SpecError, match=r"fits only in micro-batches of 2, and 2 trials of this study were begun"):
        rehearse(path, root, monkeypatch, "starved")
    assert smoking.decided(root, "gates") is None


def test_a_variant_that_cannot_run_stops_the_study_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    path, root = write_study(tmp_path, variants=TWO, components=None), tmp_path / "store"
    with pytest.raises(SpecError) as caught:
        rehearse(path, root, monkeypatch, "broken")
    assert [problem.path for problem in caught.value.problems] == ["variants.wide"]
    assert "ValueError: no kernel for this width" in str(caught.value)
    with Store.open(root) as store:
        assert store.studies() == []
    with pytest.raises(SystemExit) as ended:
        main(["run", str(path), "--store", str(root), "--inline", "--no-track", "--smoke"], standalone_mode=False)
    assert ended.value.code == 2
    assert "nothing was trained" in capsys.readouterr().err


def test_what_fits_at_no_micro_batch_stops_the_study(tmp_path, monkeypatch):
    path = write_study(tmp_path, variants=TWO, components=None)
    with pytest.raises(SpecError, match="out of memory, even one sequence at a time"):
        rehearse(path, tmp_path / "store", monkeypatch, "always_starved")


@pytest.mark.slow
def test_the_first_steps_of_real_trials_are_measured_and_leave_the_study_as_it_would_be(tmp_path, monkeypatch):
    path, root = write_study(tmp_path, seeds="seeds: 1"), tmp_path / "store"
    summary, told = rehearse(path, root, monkeypatch, None)
    assert summary.exit_code == 0
    assert [each["verdict"] for each in told] == ["fits", "fits"]
    assert all(each["step_s"] > 0 and each["peak_memory_bytes"] > 0 for each in told)
    run(path, tmp_path / "other", executor="inline", track=False)
    with Store.open(root) as one, Store.open(tmp_path / "other") as other:
        losses = [[row["result"]["test"] for row in store.study_trials("gates")] for store in (one, other)]
    assert losses[0] == losses[1]


def test_stages_and_divergence_show_in_the_first_steps(tmp_path):
    train = "train:\n  data: {text: corpus.txt}\n  tokens: 1k\n  context: 32\n  batch: 4\n  lr: 1e-3\n"
    train += "  stages: [{tokens: 1k, lr: 1e12, context: 64, optimizer: {type: adamw}, clip: null}]"
    path, root = write_study(tmp_path, train=train), tmp_path / "store"
    planned = plan(load_study(path), root / "data")
    trial = planned.variants[0].trial(0)
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "trial.json").write_text(trial.to_json())
    steps = []
    found = real(tmp_path / "trial", root / "data", 1, lambda: bool(steps.append(1)))
    assert len(steps) >= STEPS
    assert found["state"] == "complete" or found["reason"].startswith("step")
    assert {each.name for each in (tmp_path / "trial").iterdir()} <= {"trial.json", "lines", "windows-0.f32"}


@pytest.mark.slow
def test_a_variant_that_needs_more_memory_than_a_trial_may_have_is_divided(tmp_path):
    """Real allocations beyond a real limit, under Ray."""
    train = "train:\n  data: {text: corpus.txt}\n  tokens: 16k\n  context: 64\n  batch: 64\n  lr: 1e-3"
    wide = "variants:\n  baseline: {}\n  wide: {block.ffn.width: 8192}"
    path = write_study(
        tmp_path, variants=wide, components=None, train=train, seeds="seeds: 1\nresources: {memory: 900MB}"
    )
    told = []
    summary = run(path, tmp_path / "store", track=False, smoke=True, on_event=told.append)
    assert (summary.exit_code, summary.counts["complete"]) == (0, 2)
    smoked = [(each["variant"], each["verdict"], each["micro_batch"]) for each in told if each["event"] == "smoke"]
    assert sorted(smoked[:2]) == [("baseline", "fits", 64), ("wide", "out of memory", 64)]
    assert smoked[-1][:2] == ("wide", "fits")
    with Store.open(tmp_path / "store") as store:
        recipes = [json.loads(store.spec(row["key"]))["recipe"] for row in store.study_trials("gates")]
    assert {64 // each["accumulate"] for each in recipes} == {smoked[-1][2]}
