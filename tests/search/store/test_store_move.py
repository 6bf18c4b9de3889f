"""A trial table is moved to a server with every row, or stays where it was."""

import pytest

from archlab.search.store.addresses import DATABASE
from archlab.search.store.lock import StudyLock
from archlab.search.store.move import TABLES, to_server
from archlab.search.store.store import Store, StoreError, StoreRefused
from tests.search.study_kit import done, make_store, rows_of, toy

pytestmark = pytest.mark.slow


def everything(store):
    """All that the table says."""
    events = [{name: value for name, value in event.items() if name != "id"} for event in store.events()]
    return store.study_trials("s"), events, store.studies(), store.study_yaml("s"), store.recall("grain", "1M")


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A store in files, with trials in several states, and what it says."""
    monkeypatch.delenv(DATABASE, raising=False)
    with make_store(tmp_path / "store", rows=rows_of(*map(toy, range(4)), until=3)) as store:
        store.finish(toy(0).key, store.claim(toy(0).key, "s"), "complete", done(x=0.1))
        store.finish(toy(1).key, store.claim(toy(1).key, "s"), "failed", None, "nul \0 in it")
        store.finish(toy(2).key, store.claim(toy(2).key, "s"), "paused", {"state": "paused", "step": 3})
        store.decide("s", "rung", lambda: ["a"])
        store.remember("grain", "1M", {"sd": 0.1})
        said = everything(store)
    return tmp_path / "store", said


def test_every_row_arrives_and_the_study_goes_on_there(filled, postgres, monkeypatch):
    root, said = filled
    monkeypatch.setenv(DATABASE, postgres.emptied())
    with pytest.raises(StoreRefused, match="archlab move"):
        Store.open(root)
    assert to_server(root) == {"study": 1, "trial": 4, "study_trial": 4, "event": 6, "decision": 1, "memory": 1}
    assert set(TABLES) == {"study", "trial", "study_trial", "event", "decision", "memory"}
    assert not (root / "trials.db").exists() and (root / "trials.db.moved").exists()
    with Store.open(root) as store:
        assert store.database.name.startswith("postgresql://lab:***@")
        (*_, failed, _, _), *_ = [store.study_trials("s")]
        assert failed["reason"] == "nul \N{REPLACEMENT CHARACTER} in it"
        found = everything(store)
        assert str(found).replace("\N{REPLACEMENT CHARACTER}", "\\x00") == str(said)
        assert store.claim(toy(2).key, "s") == 2
        store.add_event("after", "s")
        assert [event["kind"] for event in store.events()][-2:] == ["running", "after"]
    with pytest.raises(StoreRefused, match=r"no trials.db"):
        to_server(root)


def test_a_move_that_was_interrupted_is_done_again(filled, postgres, monkeypatch):
    root, said = filled
    monkeypatch.setenv(DATABASE, postgres.emptied())
    before = (root / "store.json").read_text()
    to_server(root)
    (root / "trials.db.moved").rename(root / "trials.db")  # as if it had been killed before the last two steps
    (root / "store.json").write_text(before)
    assert to_server(root)["event"] == 6
    with Store.open(root) as store:
        assert len(everything(store)[1]) == len(said[1])


def test_nothing_is_moved_while_a_study_runs_or_to_the_database_of_another_store(
    filled, postgres, monkeypatch, tmp_path
):
    root, said = filled
    with pytest.raises(StoreRefused, match="no server is named"):
        to_server(root)
    monkeypatch.setenv(DATABASE, postgres.emptied())
    with StudyLock(root, "s"), pytest.raises(StoreRefused, match=r"'s' is being run by process \d+"):
        to_server(root)
    make_store(tmp_path / "other").close()
    with pytest.raises(StoreError, match="belongs to the store at"):
        to_server(root)
    monkeypatch.delenv(DATABASE)
    with Store.open(root) as store:
        assert everything(store) == said
