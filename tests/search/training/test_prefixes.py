"""Longer trials go on from shorter ones where the rates are the same up to there, to the bits of one that never did."""

import fcntl
import json

import pytest
from click.testing import CliRunner

from archlab.arch_dsl import canonical
from archlab.cli.main import main
from archlab.search.executors.process_group import Parallel
from archlab.search.recipe.recipe import load_recipe
from archlab.search.running.garbage import clean, look
from archlab.search.store.store import Store
from archlab.search.training.loop import Loop
from archlab.search.training.shared_beginnings import beginning, fitting, kind
from archlab.search.training.train import Interrupted
from archlab.search.trial.checkpoint import steps_in
from archlab.search.trial.fingerprint import fingerprint
from archlab.search.trial.journal import events
from archlab.search.trial.kept_weights import tell
from archlab.search.trial.trial import Trial
from tests.cli.test_cli import TINY
from tests.search import gang_kit
from tests.search.study_files import write_study
from tests.search.training.test_train import (  # noqa: F401  # fixtures
    RECIPE,
    data_root,
    lines,
    make,
    measures,
    one_thread,
    run,
    stop_after,
    weights,
)

CONSTANT = {"type": "constant", "warmup": 0}
WSD = {"type": "wsd", "warmup": 0, "decay": 0.25}


@pytest.fixture
def store(tmp_path, data_root):  # noqa: F811
    """The folder of data sets of a store of its own, in which nothing was trained."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "data").symlink_to(data_root)
    return tmp_path / "store" / "data"


@pytest.fixture
def computed(monkeypatch):
    """The optimizer steps that were computed, by trial."""
    found: dict[str, list[int]] = {}
    update = Loop.update

    def counted(loop, step):
        found.setdefault(loop.folder.name, []).append(step)
        update(loop, step)

    monkeypatch.setattr(Loop, "update", counted)
    return found


def of_steps(steps, schedule=CONSTANT, **recipe):
    return {"tokens": steps * 64, "schedule": schedule, **recipe}


@pytest.fixture
def alone(tmp_path, data_root):  # noqa: F811
    """Trains a trial in a store without a shorter one."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").symlink_to(data_root)

    def trained(**recipe):
        folder = make(tmp_path / "alone", **recipe)
        run(folder, tmp_path / "other" / "data")
        return folder

    return trained


def key(folder):
    return Trial.from_json((folder / "trial.json").read_text()).key


@pytest.mark.parametrize(
    ("schedule", "longer", "step"),
    [
        pytest.param(CONSTANT, CONSTANT, 20, id="constant"),
        pytest.param(WSD, WSD, 15, id="wsd before its decay"),
        pytest.param({"type": "constant", "warmup": 0.2}, {"type": "constant", "warmup": 0.1}, 20, id="same warm-up"),
        pytest.param(CONSTANT, WSD, 20, id="constant, then decay"),
    ],
)
def test_a_longer_trial_goes_on_with_the_bits_of_one_that_never_did(
    tmp_path, store, alone, computed, schedule, longer, step
):
    short, long = make(tmp_path / "short", **of_steps(20, schedule)), make(tmp_path / "long", **of_steps(40, longer))
    run(short, store)
    result = run(long, store)
    assert computed["long"] == list(range(step, 40))
    assert result["continued"] == {"key": key(short), "step": step}
    assert [(e["event"], e["key"], e["step"]) for e in events(long)] == [("continued", key(short), step)]
    assert (result["bit_exact"], result["resumed_from"], result["tokens"]) == (True, [], 40 * 64)
    whole = alone(**of_steps(40, longer))
    assert (weights(long), lines(long), measures(long)) == (weights(whole), lines(whole), measures(whole))
    assert (long / "windows-0.f32").read_bytes() == (whole / "windows-0.f32").read_bytes()


def test_points_that_the_longer_curve_lacks_are_left_out(tmp_path, store, alone):
    short, long = make(tmp_path / "short", **of_steps(20)), make(tmp_path / "long", **of_steps(30))
    run(short, store)
    run(long, store)
    whole = alone(**of_steps(30))
    assert weights(long) == weights(whole)
    assert [line for line in lines(long) if "loss" in line] == [line for line in lines(whole) if "loss" in line]
    curve = {line["step"]: line["validation_loss"] for line in lines(whole) if "validation_loss" in line}
    own = {line["step"]: line["validation_loss"] for line in lines(long) if "validation_loss" in line}
    assert own == {step: curve[step] for step in (6, 12, 18, 21, 24, 27, 30)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"schedule": {"type": "cosine", "warmup": 0}}, {}, id="cosine"),
        pytest.param({"schedule": {"type": "constant", "warmup": 0.2}}, {}, id="a warm-up that grows with the trial"),
        pytest.param({"schedule": WSD | {"decay": 1}}, {}, id="wsd that decays from the start"),
        pytest.param({}, {"seed": 1}, id="another seed"),
        pytest.param({}, {"lr": 0.01}, id="another rate"),
        pytest.param({}, {"clip": None}, id="another recipe"),
    ],
)
def test_what_differs_from_the_start_is_trained_from_the_start(tmp_path, store, computed, first, second):
    run(make(tmp_path / "short", **of_steps(20, **first)), store)
    result = run(make(tmp_path / "long", **of_steps(40, **first) | second), store)
    assert computed["long"] == list(range(40))
    assert "continued" not in result and not events(tmp_path / "long")


def test_the_longest_one_that_is_whole_is_taken(tmp_path, store, computed):
    for steps in (10, 20):
        run(make(tmp_path / f"{steps}", **of_steps(steps)), store)
    assert computed["20"] == list(range(10, 20))
    (kept,) = store.parent.glob("prefixes/*/20-*/checkpoint-20.pt")
    kept.write_bytes(kept.read_bytes()[:-9])
    result = run(make(tmp_path / "damaged", **of_steps(40)), store)
    assert result["continued"] == {"key": key(tmp_path / "10"), "step": 10}
    (tmp_path / "20" / "result.json").unlink()
    for path in (tmp_path / "20").glob("checkpoint*"):
        path.unlink()
    run(tmp_path / "20", store, 2)  # leaves it again
    assert run(make(tmp_path / "long", **of_steps(50)), store)["continued"]["step"] == 40
    assert kept.exists()


def test_one_that_somebody_writes_is_not_waited_for(tmp_path, store, computed):
    run(make(tmp_path / "short", **of_steps(20)), store)
    (lock,) = store.parent.glob("prefixes/*/20-*/.lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run(make(tmp_path / "long", **of_steps(40)), store)
    assert computed["long"] == list(range(40))


def test_other_machines_and_what_moved_between_machines_are_left_out(tmp_path, store, computed, monkeypatch):
    run(make(tmp_path / "short", **of_steps(20)), store)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("archlab.search.training.loop.fingerprint", lambda device: {"cpu": "another"})
        moved = make(tmp_path / "moved", **of_steps(40))
        with pytest.raises(Interrupted):
            run(moved, store, 1, stop_after(3))
    assert computed["moved"] == [0, 1, 2]
    assert run(moved, store, 2)["bit_exact"] is False
    assert not list(store.parent.glob("prefixes/*/40-*"))


def test_another_commit_of_this_code_goes_on(tmp_path, store, computed, monkeypatch):
    run(make(tmp_path / "short", **of_steps(20)), store)
    monkeypatch.setattr(
        "archlab.search.training.loop.fingerprint", lambda device: fingerprint(device) | {"commit": "another"}
    )
    run(make(tmp_path / "long", **of_steps(40)), store)
    assert computed["long"] == list(range(20, 40))


@pytest.mark.parametrize("stops", [[3], [1, 7]], ids=str)
def test_a_longer_trial_that_is_killed_goes_on_from_its_own_checkpoint(tmp_path, store, alone, computed, stops):
    run(make(tmp_path / "short", **of_steps(20)), store)
    long = make(tmp_path / "long", **of_steps(40))
    for attempt, steps in enumerate(stops, start=1):
        with pytest.raises(Interrupted):
            run(long, store, attempt, stop_after(steps))
    for path in store.parent.glob("prefixes/*/20-*/*.pt"):
        path.unlink()
    result = run(long, store, len(stops) + 1)
    assert computed["long"] == list(range(20, 40))
    assert result["continued"] == {"key": key(tmp_path / "short"), "step": 20}
    whole = alone(**of_steps(40))
    assert (weights(long), lines(long), measures(long)) == (weights(whole), lines(whole), measures(whole))


def test_one_that_is_to_wait_where_the_shorter_one_was_not_validated_waits_without_a_loss(tmp_path, store):
    run(make(tmp_path / "short", **of_steps(20)), store)
    long = make(tmp_path / "long", **of_steps(30))
    with pytest.raises(Interrupted):
        run(long, store, 1, stop_after(3))
    waiting = run(long, store, 2, until=9)
    assert (waiting["state"], waiting["step"], waiting["validation"]) == ("paused", 9, {"loss": None})
    assert run(long, store, 3)["state"] == "complete"


def test_lines_of_an_attempt_that_left_no_checkpoint_are_written_once(tmp_path, store):
    run(make(tmp_path / "short", **of_steps(20)), store)
    long = make(tmp_path / "long", **of_steps(40))
    (long / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "attempt": 1}) + "\n" for step in (1, 2)))
    run(long, store, 2)
    assert [line["step"] for line in lines(long) if "loss" in line] == list(range(1, 41))


def test_a_trial_that_pauses_or_keeps_early_weights_starts_anew(tmp_path, store, computed):
    run(make(tmp_path / "short", **of_steps(20)), store)
    paused, early = (make(tmp_path / name, **of_steps(40)) for name in ("paused", "early"))
    run(paused, store, until=24)
    tell(early, {"final": True, "log2": True})
    run(early, store)
    assert computed["paused"] == list(range(24)) and computed["early"] == list(range(40))
    assert steps_in(early / "weights") == [32, 16, 8, 4, 2, 1]


def test_places_are_those_of_equal_rates_and_rows(tmp_path):
    short, long = (
        load_recipe(RECIPE | {"tokens": steps * 64, "schedule": WSD | {"warmup": warmup}})
        for steps, warmup in ((20, 0.2), (40, 0.1))
    )
    assert beginning(short, 15) == beginning(long, 15) and beginning(short, 17) != beginning(long, 17)
    ramped = short.replace(
        ramp=load_recipe({"tokens": 1280, "lr": 1, "ramp": {"start": 1, "step": 1, "tokens": 300}}).ramp
    )
    assert beginning(ramped, 1) != beginning(short, 1)
    trial = Trial({}, canonical(short), "data", 0)
    assert kind(trial) == kind(Trial({}, canonical(long), "data", 0)) != kind(Trial({}, canonical(short), "data", 1))
    assert fitting(tmp_path, trial, short) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard", "pipeline"])
def test_processes_that_train_together_go_on_together(tmp_path, layout):
    root = gang_kit.write_store(tmp_path / "store" / "data")
    parallel = Parallel(**{layout: 2})
    whole, short, long = (
        gang_kit.make(tmp_path / name, tokens=steps * 128, schedule=CONSTANT)
        for name, steps in (("whole", 20), ("short", 10), ("long", 20))
    )
    results = gang_kit.run_together([gang_kit.Job(each, parallel) for each in (whole, short, long)], root)
    assert "continued" not in results[0][0]
    assert results[2][0]["continued"] == results[2][1]["continued"] == {"key": key(short), "step": 10}
    assert [line["step"] for line in gang_kit.lines(long) if "loss" in line] == list(range(1, 21))
    assert weights(long) == weights(whole) and measures(long) == measures(whole)
    one = gang_kit.make(tmp_path / "one", tokens=20 * 128, schedule=CONSTANT)
    gang_kit.run(gang_kit.Job(one, Parallel()), root)
    assert not events(one)  # another layout starts anew


# Studies


def archlab(*arguments):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of two variants and one seed that can be extended, run to its end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    train = TINY["train"].replace("lr: 1e-2", "lr: 1e-2, schedule: {type: constant, warmup: 0}")
    write_study(tmp_path, **{**TINY, "train": train}, seeds="seeds: 1")
    command(tmp_path, "run", "--inline", "--no-track")
    return tmp_path


def command(folder, verb, *more):
    return archlab(verb, folder / "study.yaml", "--store", folder / "store", *more)


def test_a_plan_says_which_trials_go_on(study):
    longer = "--set", "train.tokens=512", "--set", "seeds=2"
    assert "shorter" not in command(study, "plan") and json.loads(command(study, "plan", "--json"))["going_on"] is None
    said = "2 trials go on from shorter ones (at most to step 4, on machines alike); 2 are new"
    assert said in command(study, "plan", *longer)
    assert json.loads(command(study, "plan", *longer, "--json"))["going_on"] == {"trials": 2, "step": 4, "new": 2}
    assert "shorter" not in command(study, "plan", *longer, "--set", "keep.log2=true")
    assert "shorter" not in command(study, "plan", *longer, "--set", "train.schedule=cosine")
    command(study, "run", *longer, "--inline", "--no-track")
    assert "shorter" not in command(study, "plan", *longer)
    with Store.open(study / "store", create=False) as store:
        rows = {(row["variant"], row["seed"]): row["result"].get("continued") for row in store.study_trials("gates")}
        spent = sum((event["detail"].get("spent") or {}).get("tokens", 0) for event in store.events("gates"))
    assert {name: found and found["step"] for name, found in rows.items()} == {
        ("baseline", 0): 4,
        ("gated", 0): 4,
        ("baseline", 1): None,
        ("gated", 1): None,
    }
    assert spent == 2 * 256 + 2 * 256 + 2 * 512  # what was trained twice is paid twice, this was not
    told = archlab("report", "gates", "--store", study / "store")
    assert "2 trials went on from shorter ones" in " ".join(told.split())


def test_they_go_when_no_wanted_trial_is_of_their_kind(study):
    command(study, "run", "--set", "train.tokens=512", "--inline", "--no-track")
    with Store.open(study / "store", create=False) as store:
        assert not [waste for waste in look(store).waste if waste.kind == "prefixes"]
    command(study, "run", "--set", "train.lr=0.02", "--inline", "--no-track")
    with Store.open(study / "store", create=False) as store:
        gone, _ = clean(store)
    (waste,) = (waste for waste in gone.waste if waste.kind == "prefixes")
    assert len(waste.paths) == 2 and waste.size > 1000
    assert len(list((study / "store" / "prefixes").iterdir())) == 2
