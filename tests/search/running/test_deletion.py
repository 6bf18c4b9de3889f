"""Deleting a study: what goes is its own alone, and nothing goes by itself."""

import os

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.running import deletion
from archlab.search.running.garbage import DELETED, find, remove
from archlab.search.store.addresses import DATABASE
from archlab.search.store.findings import kind_of
from archlab.search.store.lock import StudyLock, StudyLocked, in_use
from archlab.search.store.notes import Note, read_notes, write_note
from archlab.search.store.store import Store, StoreError, StoreRefused
from tests.search.study_kit import make_store, rows_of, toy

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
        store.finish(trial.key, store.claim(trial.key, "s"), "complete", {"state": "complete", "train_s": 60.0})
        (store.trial_folder(trial.key) / "result.json").write_text("{}")
    store.decide("s", "micro-batch", lambda: 4)
    store.remember(kind_of(OWN.key), "digest", {"measure": "m"})
    write_note(store, Note("mine"), study="s")
    write_note(store, Note("odd"), trial=OWN.key)
    write_note(store, Note("shared"), trial=SHARED.key)
    return store


def test_what_would_go_is_told_and_stays(store):
    going = deletion.found(store, "s")
    assert (going.keys, going.complete, going.train_s, going.stay) == ((OWN.key,), 1, 60.0, 1)
    assert going.size > 0 and len(store.studies()) == 2 and len(store.study_trials("s")) == 2


def test_a_study_goes_with_its_own_trials_and_nothing_of_another(store):
    before = store.study_trials("t")
    assert deletion.delete(store, "s").keys == (OWN.key,)
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


def test_what_a_kill_leaves_is_found_by_gc(store, monkeypatch):
    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(deletion.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        deletion.delete(store, "s")
    monkeypatch.undo()
    assert os.listdir(store.root / DELETED) == [OWN.key]
    assert any(store.root / DELETED / OWN.key in waste.paths for waste in find(store))
    remove(store)
    assert os.listdir(store.root / DELETED) == []


def test_the_command_lists_and_removes(tmp_path):
    root = tmp_path / "store"
    make_store(root, rows=rows_of(OWN)).close()

    def archlab(*words):
        return CliRunner().invoke(main, ["delete", "s", "--store", str(root), *words])

    assert "with s would go: 1 trial, 0 of them complete" in archlab().output
    assert '"applied": false' in archlab("--json").output
    assert "s is deleted" in archlab("--apply").output
    assert archlab().exit_code == 2
    with Store.open(root, create=False) as opened:
        assert opened.studies() == []
