"""What a store can do without: what goes, what never goes, and that nobody who works loses anything."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.running.garbage import clean, look
from archlab.search.store.lock import in_use
from archlab.search.store.store import Store
from archlab.search.trial.checkpoint import steps_in
from tests.cli.test_cli import TINY
from tests.search.study_files import write_study
from tests.search.study_kit import done, make_store, rows_of, toy


def archlab(*arguments):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def run(folder, *more):
    return archlab("run", folder / "study.yaml", "--inline", "--no-track", "--store", folder / "store", *more)


def rows(folder, study="gates"):
    with Store.open(folder / "store", create=False) as store:
        return store.study_trials(study)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of two variants and one seed, with its corpus, and no private folders of others in sight."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    write_study(tmp_path, **TINY, seeds="seeds: 1")
    return tmp_path


def test_a_study_says_which_weights_stay(study):
    run(study, "--set", "keep={final: false, log2: true}")
    folders = [Path(row["folder"]) for row in rows(study)]
    assert [steps_in(folder) for folder in folders] == [[], []]
    assert [steps_in(folder / "weights") for folder in folders] == [[4, 2, 1]] * 2  # 4 steps in all
    exported = study / "early.safetensors"
    archlab("export", folders[0] / "weights" / "checkpoint-2.pt", "-o", exported)
    assert exported.stat().st_size > 0


def test_what_is_kept_is_no_part_of_a_trial(study):
    run(study)
    before = {row["key"]: steps_in(Path(row["folder"])) for row in rows(study)}
    told = run(study, "--set", "keep.log2=true", "--json").splitlines()
    assert json.loads(told[-1])["counts"] == {"complete": 2, "reused": 2}
    assert {row["key"]: steps_in(Path(row["folder"])) for row in rows(study)} == before


def test_gc_changes_nothing_until_it_is_told_to(study):
    run(study)
    run(study, "--set", "train.lr=2e-2")  # the trials of before are wanted no longer
    files = sorted(path for path in study.rglob("*") if "db" not in path.name)
    told = archlab("gc", "--store", study / "store")
    assert "of trials that no study wants any more" in told and "nothing was removed" in told
    assert sorted(path for path in study.rglob("*") if "db" not in path.name) == files

    with Store.open(study / "store", create=False) as store:
        orphans = [Path(row["folder"]) for row in store.study_trials("gates", orphaned=True)]
    kept = {path: path.read_bytes() for folder in orphans for path in folder.iterdir() if "checkpoint" not in path.name}
    done = json.loads(archlab("gc", "--store", study / "store", "--apply", "--json"))
    assert done["applied"] and not done["kept"] and sum(each["bytes"] for each in done["what"]) > 1000
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert not any(steps_in(folder) for folder in orphans)
    assert all(steps_in(Path(row["folder"])) == [4] for row in rows(study))
    nothing, weights = archlab("gc", "--store", study / "store").splitlines()
    assert nothing == "nothing can go"
    assert weights.startswith("2 complete trials have their final weights, 0.")
    assert json.loads(run(study, "--json").splitlines()[-1])["counts"]["reused"] == 2  # results are still there


def test_weights_that_a_study_keeps_no_more_go_unless_another_one_keeps_them(study):
    run(study)
    run(study, "--set", "keep.final=false")
    with Store.open(study / "store", create=False) as store:
        assert sum(len(waste.paths) for waste in look(store).waste) == 4  # two checkpoints with their digests
    run(study, "--set", "study=other")
    with Store.open(study / "store", create=False) as store:
        assert look(store).waste == []


def test_prepared_data_goes_when_no_wanted_trial_reads_it_and_no_run_is_under_way(study):
    run(study)
    before = {path.parent.name for path in (study / "store/data").glob("*/data.json")}
    (study / "corpus.txt").write_text((study / "corpus.txt").read_text().replace("stream", "river"))
    run(study)
    with Store.open(study / "store", create=False) as store:
        with in_use(store.root):
            _, stayed = clean(store)
            assert [reason for waste, reason in stayed if waste.kind == "data"] == ["a run of this store is under way"]
        gone, stayed = clean(store)
    assert (stayed, [path.name for waste in gone.waste for path in waste.paths]) == ([], list(before))
    assert json.loads(run(study, "--json").splitlines()[-1])["counts"]["reused"] == 2


def test_a_trial_that_someone_writes_to_is_left(tmp_path):
    store = make_store(tmp_path, rows=rows_of(toy(1), toy(2)))
    for trial in (toy(1), toy(2)):
        store.trial_folder(trial.key).mkdir(parents=True, exist_ok=True)
        (store.trial_folder(trial.key) / "checkpoint-4.pt").write_text("state")
    store.drop_others("s", [])
    with open(store.trial_folder(toy(1).key) / "writer.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gone, stayed = clean(store)
    assert [waste.trial[0] for waste in gone.waste if waste.trial] == [toy(2).key]
    assert [(waste.trial[0], reason) for waste, reason in stayed] == [(toy(1).key, "a process writes to it")]
    assert (store.trial_folder(toy(1).key) / "checkpoint-4.pt").exists()


@pytest.mark.parametrize(
    ("state", "goes"), [("planned", False), ("running", False), ("failed", False), ("pruned", True)]
)
def test_checkpoints_that_a_trial_would_go_on_from_stay(tmp_path, state, goes):
    store = make_store(tmp_path, rows=rows_of(toy()))
    if state != "planned":
        attempt = store.claim(toy().key, "s")
    if state in ("failed", "pruned"):
        store.finish(toy().key, attempt, state, done() if state == "complete" else None)
    store.trial_folder(toy().key).mkdir(parents=True, exist_ok=True)
    (store.trial_folder(toy().key) / "checkpoint-4.pt").write_text("state")
    assert any(waste.kind == "checkpoints" for waste in look(store).waste) == goes


def test_what_killed_processes_left_goes_when_it_is_old(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    folder = store.trial_folder(toy().key)
    old, new = folder / "checkpoint-4.pt.tmp", folder / "result.json.tmp"
    unfinished = tmp_path / "store/data/.new-1-abcd"
    unfinished.mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (old, new):
        path.write_text("half")
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    private, ours = tmp_path / f"archlab-ray-{dead}-x", tmp_path / f"archlab-ray-{os.getpid()}-x"
    private.mkdir(), ours.mkdir()
    for path in (old, unfinished):
        os.utime(path, (time.time() - 7200,) * 2)
    clean(store)
    assert [path.exists() for path in (old, new, unfinished, private, ours)] == [False, True, False, False, True]


def test_plugin_copies_and_stages_go_when_no_trial_names_them(tmp_path):
    store = make_store(tmp_path, rows=rows_of(toy()))
    used = toy(2, stages=[{}])
    store.add_trials("s", rows_of(used))
    from archlab.search.training.shared_beginnings import stages_key

    kept, left = tmp_path / "stages" / f"{stages_key(used, 0)}-0123", tmp_path / "stages" / f"{'0' * 32}-0123"
    copy = tmp_path / "plugins" / "gate-0123456789abcdef.py"
    for path in (kept / "checkpoint-4.pt", left / "checkpoint-4.pt", copy):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    clean(store)
    assert (kept.exists(), left.exists(), copy.exists()) == (True, False, False)


def test_compiled_layers_go_when_no_trial_is_still_to_run_them(tmp_path):
    trial = toy(compile="blocks")
    store = make_store(tmp_path, rows=rows_of(trial))
    own, others = tmp_path / "compiled" / str(os.getuid()), tmp_path / "compiled" / "other"
    for folder in (own, others):
        (folder / "fxgraph").mkdir(parents=True)
        (folder / "fxgraph" / "layer.so").write_bytes(bytes(3_000_000))
    assert not look(store).waste
    told = archlab("gc", "--store", tmp_path, "--apply")
    assert told.splitlines() == ["nothing can go", "compiled layers, 3.0 MB, wait for trials that are still to train"]
    store.finish(trial.key, store.claim(trial.key, "s"), "complete", done())
    with in_use(tmp_path):
        assert [(each.kind, reason) for each, reason in clean(store)[1]] == [
            ("compiled", "a run of this store is under way")
        ]
    listed = json.loads(archlab("gc", "--store", tmp_path, "--json"))
    assert [(each["kind"], each["bytes"]) for each in listed["what"]] == [("compiled", 3_000_000)]
    assert listed["compiled_layers"] == {"bytes": 3_000_000} and own.is_dir()
    assert "freed 3.0 MB" in archlab("gc", "--store", tmp_path, "--apply")
    assert (own.exists(), others.exists()) == (False, True)
