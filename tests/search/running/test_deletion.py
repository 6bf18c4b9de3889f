"""Deleting a study: what goes is its own alone, and nothing goes by itself."""

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.running import deletion
from archlab.search.running.deletion import DELETED
from archlab.search.running.garbage import clean, look
from archlab.search.store.addresses import DATABASE
from archlab.search.store.findings import kind_of
from archlab.search.store.lock import StudyLock, StudyLocked, in_use
from archlab.search.store.notes import Note, read_notes, write_note
from archlab.search.store.store import Store, StoreError, StoreRefused
from archlab.search.utils.files import lock_file
from tests.search.study_kit import done, make_store, rows_of, toy

OWN, SHARED = toy(1), toy(2)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store(request, tmp_path, monkeypatch):
    """Study s has two trials, one of which study t has too; both are complete."""
    if request.param == "postgresql":
        monkeypatch.setenv(DATABASE, request.getfixturevalue("postgres").emptied())
    store = make_store(tmp_path / "store", rows=rows_of(OWN, SHARED))
    store.save_study("t", {"study": "t"}, "study: t")
    store.add_trials("t", rows_of(SHARED))
    for trial in (OWN, SHARED):
        store.finish(trial.key, store.claim(trial.key, "s"), "complete", done(train_s=60.0))
        (store.trial_folder(trial.key) / "result.json").write_text("{}")
    store.decide("s", "micro-batch", lambda: 4)
    store.remember(kind_of(OWN.key), "digest", {"measure": "m"})
    write_note(store, Note("mine"), study="s")
    write_note(store, Note("odd"), trial=OWN.key)
    write_note(store, Note("shared"), trial=SHARED.key)
    return store


def test_what_would_go_is_told_and_stays(store):
    going = deletion.found(store, "s")
    assert (going.keys, going.complete, going.train_s, going.stay) == ([OWN.key], 1, 60.0, 1)
    assert (going.rows, going.events, going.decisions) == (2, 2, 1)
    assert going.size > 0 and len(store.studies()) == 2 and len(store.study_trials("s")) == 2


def test_a_study_goes_with_its_own_trials_and_nothing_of_another(store):
    before = store.study_trials("t")
    assert deletion.delete(store, "s").keys == [OWN.key]
    assert [each["name"] for each in store.studies()] == ["t"] and store.study_trials("t") == before
    assert not store.trial_folder(OWN.key).exists() and (store.trial_folder(SHARED.key) / "result.json").exists()
    assert store.known([OWN.key, SHARED.key]).keys() == {SHARED.key} and store.events(key=SHARED.key)
    assert store.decided("s", "micro-batch") is None and store.recall(kind_of(OWN.key), "digest") is None
    notes = read_notes(store)
    assert not notes.studies and notes.trials == {SHARED.key: Note("shared")}
    assert not (store.root / DELETED).exists()
    store.save_study("s", {"study": "s"}, "study: s")
    assert store.add_trials("s", rows_of(OWN, SHARED)) == 2, "it can be run again"
    with pytest.raises(StoreRefused):
        deletion.delete(store, "nope")


def test_nothing_goes_while_a_study_runs(store):
    with StudyLock(store.root, "s"), pytest.raises(StudyLocked):
        deletion.delete(store, "s")
    with in_use(store.root), pytest.raises(StoreError, match="under way"):
        deletion.delete(store, "s")
    assert len(store.studies()) == 2


class Killed(BaseException):
    """What ends a deletion in the middle."""


def killed(*_):
    raise Killed


MOMENTS = {
    "before the table": (Store, "forget_study", killed),
    "before the folders": (deletion, "os", SimpleNamespace(replace=killed)),
    "among the folders": (deletion, "shutil", SimpleNamespace(rmtree=killed)),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_kill_leaves_is_whole_and_found_by_gc(store, monkeypatch, moment):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(*MOMENTS[moment])
        deletion.delete(store, "s")
    assert [each for each in look(store).waste if each.kind == "deleted"], "gc finds it"
    began = moment != "before the table"
    assert (store.known([OWN.key]) == {}) == began
    with in_use(store.root):
        _, stayed = clean(store)
    assert "deleted" in {waste.kind for waste, _ in stayed}, "a run may be about to want it"
    clean(store)
    assert store.trial_folder(OWN.key).exists() != began
    assert store.trial_folder(SHARED.key).exists()
    assert not (store.root / DELETED).exists() and not [each for each in look(store).waste if each.kind == "deleted"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_study_that_is_run_and_deleted_again_after_a_kill_goes(store, monkeypatch, moment):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(*MOMENTS[moment])
        deletion.delete(store, "s")
    store.save_study("s", {"study": "s"}, "study: s")
    store.add_trials("s", rows_of(OWN, SHARED))
    store.claim(OWN.key, "s")
    assert deletion.delete(store, "s").keys == [OWN.key]
    assert not store.trial_folder(OWN.key).exists() and not (store.root / DELETED).exists()


def test_a_folder_that_the_table_lacks_for_another_reason_stays(store):
    lost = store.trial_folder(toy(3).key)
    lost.mkdir(parents=True)
    deletion.delete(store, "s")
    clean(store)
    assert lost.exists(), "the table may be an older copy that was put back"


def test_a_trial_that_its_driver_left_behind_keeps_its_folder(store):
    with lock_file(store.trial_folder(OWN.key) / "writer.lock") as take:
        assert take()
        with pytest.raises(StoreError, match="a process still trains it"):
            deletion.delete(store, "s")
    assert len(store.studies()) == 2 and store.trial_folder(OWN.key).exists()


def test_the_command_lists_and_removes(tmp_path):
    root = tmp_path / "store"
    store = make_store(root, rows=rows_of(OWN))
    store.claim(OWN.key, "s")
    store.close()

    def archlab(*words, study="s"):
        return CliRunner().invoke(main, ["delete", study, "--store", str(root), *words])

    told = archlab().output
    assert "1 row of the trial table, 1 event, 0 decisions" in told
    assert f"1 trial that no other study has: 0 complete, 0s of training, 0.0 MB\n          {root}/trials/" in told
    assert "copies in MLflow, Optuna, Weights & Biases and TensorBoard stay" in told
    assert "nothing was removed: archlab delete s --apply" in told and "is running" not in told
    found = json.loads(archlab("--json").output)
    assert found["applied"] is False and [each["key"] for each in found["trials"]] == [OWN.key]
    with StudyLock(root, "s"):
        refused = archlab("--apply")
        assert refused.exit_code == 3 and "is already being run" in refused.output
        assert "s is running: it can't be deleted until that ends" in archlab().output
    assert archlab("--apply", study="S t u d y").exit_code == 2
    assert "s is deleted" in archlab("--apply").output
    assert archlab().exit_code == 2
    with Store.open(root, create=False) as opened:
        assert opened.studies() == []


def test_many_trials_are_not_all_named(tmp_path):
    root = tmp_path / "store"
    make_store(root, rows=rows_of(*(toy(x) for x in range(12)))).close()
    told = CliRunner().invoke(main, ["delete", "s", "--store", str(root)]).output
    assert told.count("/trials/") == 10 and "and 2 more, which --json lists" in told
