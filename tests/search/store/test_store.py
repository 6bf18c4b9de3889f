"""The trial table on either database: every allowed transition, none other, and rows that come back as they went."""

import json
import os
import subprocess
import sys
import threading

import pytest

from archlab.search.store.addresses import DATABASE
from archlab.search.store.folders import DISPUTED, fault_of
from archlab.search.store.store import TERMINAL, Row, StaleAttempt, Store, StoreError
from archlab.search.store.studies import MANY
from tests.search.study_kit import ROOT, done, make_store, rows_of, toy


@pytest.fixture(autouse=True, params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request, monkeypatch):
    """Where the trial table is."""
    if request.param == "postgresql":
        monkeypatch.setenv(DATABASE, request.getfixturevalue("postgres").emptied())


STATES = ("planned", "running", "paused", *TERMINAL)
ACTIONS = {
    "claim": lambda store, key: store.claim(key, "s"),
    "finish": lambda store, key: store.finish(key, 1, "complete", done()),
    "pause": lambda store, key: store.finish(key, 1, "paused", {"state": "paused", "step": 3}),
    "release": lambda store, key: store.release(key, 1),
    "reset": lambda store, key: store.reset_failed("s"),
    "reset pruned": lambda store, key: store.reset_pruned("s"),
    "reset foreign": lambda store, key: store.reset_foreign("s"),
}
ALLOWED = {
    ("planned", "claim"): "running",
    ("paused", "claim"): "running",
    ("running", "finish"): "complete",
    ("running", "pause"): "paused",
    ("running", "release"): "planned",
    ("failed", "reset"): "planned",
    ("pruned", "reset pruned"): "planned",
}


def bring_to(store, key, state):
    """A trial in that state, by the front door, at attempt 1 unless planned."""
    if state != "planned":
        store.claim(key, "s")
    if state in (*TERMINAL, "paused"):
        results = {"paused": {"step": 2}, "complete": done(), "diverged": {"state": "diverged"}}
        store.finish(key, 1, state, results.get(state), "because")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("action", ACTIONS)
def test_only_the_allowed_transitions_change_a_trial(tmp_path, state, action):
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    bring_to(store, toy().key, state)
    before = store.study_trials("s")[0]
    try:
        ACTIONS[action](store, toy().key)
    except StaleAttempt as error:
        assert (state, action) not in ALLOWED
        assert f"it is {state}" in str(error)
    after = store.study_trials("s")[0]
    assert after["state"] == ALLOWED.get((state, action), state)
    if (state, action) not in ALLOWED:
        assert after == before


def test_an_old_attempt_commits_nothing_once_a_newer_one_holds_the_trial(tmp_path):
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    key = toy().key
    assert store.claim(key, "s") == 1
    store.release(key, 1)
    assert store.claim(key, "s") == 2
    with pytest.raises(StaleAttempt, match="attempt 1 can't make it complete, it is running at attempt 2"):
        store.finish(key, 1, "complete", done(loss=1))
    with pytest.raises(StaleAttempt):
        store.release(key, 1)
    store.finish(key, 2, "complete", done(loss=2))
    assert store.study_trials("s")[0]["result"] == done(loss=2)


def test_of_many_threads_that_claim_a_trial_exactly_one_gets_it(tmp_path):
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    won, ready = [], threading.Barrier(8)

    def claim():
        ready.wait()
        won.append(store.claim(toy().key, "s"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won, key=str) == [1] + [None] * 7
    store.close()


def test_adding_rows_twice_changes_nothing_and_keeps_their_order(tmp_path):
    rows = rows_of(*(toy(x) for x in (3, 1, 2)))
    store = make_store(tmp_path / "store", rows=rows)
    assert store.add_trials("s", rows) == 0
    found = store.study_trials("s")
    assert [row["variant"] for row in found] == ["v3", "v1", "v2"]
    for row, wanted in zip(found, rows, strict=True):
        assert row["folder"] == str(tmp_path / "store" / "trials" / wanted.trial.key[:2] / wanted.trial.key)
        store.claim(row["key"], "s")
        assert (tmp_path / row["folder"] / "trial.json").read_text() == wanted.trial.to_json()


def test_one_trial_can_stand_in_two_roles(tmp_path):
    trial = toy()
    store = make_store(tmp_path / "store", rows=[Row(trial, "a", role, {"lr": 0.1}, 0) for role in ("tune", "repeat")])
    store.claim(trial.key, "s")
    store.finish(trial.key, 1, "complete", done(x=1))
    assert [(row["role"], row["settings"], row["result"]) for row in store.study_trials("s")] == [
        ("tune", {"lr": 0.1}, done(x=1)),
        ("repeat", {"lr": 0.1}, done(x=1)),
    ]


def test_a_trial_finished_by_another_study_is_reused_and_says_so(tmp_path):
    store = make_store(tmp_path / "store", "first", rows_of(toy()))
    store.claim(toy().key, "first")
    store.finish(toy().key, 1, "diverged", {"state": "diverged"}, "nan at 3")
    make_store(tmp_path / "store", "second", rows_of(toy(), toy(2))).close()
    assert [row["reused"] for row in store.study_trials("first")] == [False]
    assert [(row["state"], row["reused"]) for row in store.study_trials("second")] == [
        ("diverged", True),
        ("planned", False),
    ]


def test_rows_that_an_edited_study_no_longer_wants_are_kept_as_orphaned(tmp_path):
    both = rows_of(toy(1), toy(2))
    store = make_store(tmp_path / "store", rows=both)
    store.claim(toy(1).key, "s")
    store.finish(toy(1).key, 1, "complete", done(x=1))
    assert store.drop_others("s", both[1:]) == 1
    assert [row["variant"] for row in store.study_trials("s")] == ["v2"]
    assert [(row["variant"], row["result"]) for row in store.study_trials("s", orphaned=True)] == [("v1", done(x=1))]
    assert store.add_trials("s", both) == 1
    assert [(row["variant"], row["state"]) for row in store.study_trials("s")] == [
        ("v1", "complete"),
        ("v2", "planned"),
    ]


def test_what_only_others_gave_up_is_planned_again_except_what_is_left_out(tmp_path):
    store = make_store(tmp_path / "store", "s", rows_of(*map(toy, range(4))))
    make_store(tmp_path / "store", "other", rows_of(*map(toy, range(4)))).close()
    store.finish(toy(3).key, store.claim(toy(3).key, "s"), "pruned", None)
    store.reset_pruned("s")
    for x, state in enumerate(("pruned", "failed", "failed", "failed")):
        store.finish(toy(x).key, store.claim(toy(x).key, "other"), state, None)
    assert set(store.reset_foreign("s", [toy(2).key])) == {toy(0).key, toy(1).key}
    assert [row["state"] for row in store.study_trials("s")] == ["planned", "planned", "failed", "failed"]


def test_orphans_are_what_the_study_itself_left_running(tmp_path):
    store = make_store(tmp_path / "store", "s", rows_of(toy(1), toy(2)))
    make_store(tmp_path / "store", "other", rows_of(toy(2))).close()
    store.claim(toy(1).key, "s")
    store.claim(toy(2).key, "other")
    assert [(each["key"], each["attempt"]) for each in store.orphans("s")] == [(toy(1).key, 1)]


def test_studies_lists_counts_and_an_unknown_study_names_the_known_ones(tmp_path):
    store = make_store(tmp_path / "store", rows=rows_of(toy(1), toy(2)))
    store.claim(toy(1).key, "s")
    (found,) = store.studies()
    assert (found["name"], found["question"], found["counts"]) == ("s", "?", {"planned": 1, "running": 1})
    assert store.study("s") == {"study": "s", "question": "?"}
    assert store.study_yaml("s") == "study: s\n"
    with pytest.raises(StoreError, match=r"no study 't'; archlab run makes one of a study file \(known: s\)"):
        store.study("t")


def test_every_transition_and_decision_leaves_an_event(tmp_path):
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    store.claim(toy().key, "s")
    store.add_event("prune", "s", toy().key, 1, history=[[1, 2.0]])
    store.finish(toy().key, 1, "pruned", None, "at step 1")
    assert [(each["kind"], each["attempt"], each["detail"]) for each in store.events("s")] == [
        ("running", 1, {}),
        ("prune", 1, {"history": [[1, 2.0]]}),
        ("pruned", 1, {"reason": "at step 1"}),
    ]


def test_processes_that_make_one_store_at_once_all_succeed(tmp_path):
    code = (
        "import sys; from archlab.search.store.store import Row, Store; from archlab.search.trial.trial import Trial\n"
        "root, name = sys.argv[1:]; store = Store.open(root); store.save_study(name, {}, '')\n"
        "store.add_trials(name, [Row(Trial({}, {}, name, 0), 'v', 'tune', {}, 0)])"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "store"), str(n)], cwd=ROOT, stderr=subprocess.PIPE
        )
        for n in range(4)
    ]
    errors = [process.communicate(timeout=240)[1].decode() for process in started]
    assert errors == [""] * 4
    with Store.open(tmp_path / "store", create=False) as store:
        assert sorted(each["name"] for each in store.studies()) == ["0", "1", "2", "3"]


def test_a_paused_trial_keeps_its_rung_while_it_goes_on_and_when_it_is_interrupted(tmp_path):
    store = make_store(tmp_path / "store", rows=rows_of(toy(), until=2))
    key, rung = toy().key, {"state": "paused", "step": 2, "validation": {"loss": 1.0}}
    store.finish(key, store.claim(key, "s"), "paused", rung)
    assert store.add_trials("s", rows_of(toy(), until=2)) == 0
    assert store.add_trials("s", rows_of(toy(), until=4)) == 1
    assert store.claim(key, "s") == 2
    (row,) = store.study_trials("s")
    assert (row["state"], row["until"], row["result"], row["reused"]) == ("running", 4, rung, False)
    store.release(key, 2, "stopped")
    assert [(row["state"], row["result"]) for row in store.study_trials("s")] == [("paused", rung)]
    store.finish(key, store.claim(key, "s"), "failed", None, "crash")
    assert store.reset_failed("s") == 1
    assert [(row["state"], row["result"]) for row in store.study_trials("s")] == [("planned", None)]


def test_a_decision_is_made_once_and_replayed_and_what_is_remembered_is_the_newest(tmp_path):
    store = make_store(tmp_path / "store")
    assert store.decide("s", "rung 1", lambda: ["a", 0.1]) == ["a", 0.1]
    assert store.decide("s", "nothing", lambda: None) is None
    store.remember("grain", "1M", {"sd": 1.5})
    store.remember("grain", "1M", {"sd": 2.5})
    with Store.open(tmp_path / "store") as again:
        assert again.decide("s", "rung 1", lambda: pytest.fail("computed twice")) == ["a", 0.1]
        assert again.decide("s", "nothing", lambda: pytest.fail("computed twice")) is None
        assert again.decide("other", "rung 1", lambda: "b") == "b"
        assert (again.recall("grain", "1M"), again.recall("grain", "2M")) == ({"sd": 2.5}, None)


def test_what_is_remembered_under_many_kinds_is_read_at_once(tmp_path):
    store = make_store(tmp_path / "store")
    kinds = [f"kind {number}" for number in range(MANY + 2)]
    for kind in (kinds[0], kinds[-1]):
        store.remember(kind, "b", {"x": kind})
        store.remember(kind, "a", 1)
    store.remember("other", "a", 2)
    assert store.recall_all(kinds) == {kind: {"a": 1, "b": {"x": kind}} for kind in (kinds[0], kinds[-1])}
    before = store.names(kinds)
    assert {kind: [*names] for kind, names in before.items()} == {kind: ["a", "b"] for kind in (kinds[0], kinds[-1])}
    store.remember(kinds[0], "a", 3)
    assert store.names(kinds)[kinds[0]]["a"] > before[kinds[0]]["a"]
    assert store.names(kinds)[kinds[0]]["b"] == before[kinds[0]]["b"]
    assert store.names([]) == store.recall_all([]) == {}


@pytest.mark.parametrize("harm", [os.remove, lambda path: path.write_text("")], ids=["removed", "emptied"])
def test_trial_json_that_was_lost_is_written_again_when_the_trial_starts(tmp_path, harm):
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    path = store.trial_folder(toy().key) / "trial.json"
    store.release(toy().key, store.claim(toy().key, "s"))
    harm(path)
    store.claim(toy().key, "s")
    assert json.loads(path.read_text()) == json.loads(toy().to_json())


def test_entries_of_a_memory_that_several_set_at_once_all_stand(tmp_path):
    with Store.open(tmp_path) as store:

        def tell(who):
            for turn in range(20):
                store.amend("grain", "key", f"{who}", turn)

        threads = [threading.Thread(target=tell, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.recall("grain", "key") == {str(who): 19 for who in range(4)}


def test_a_trial_that_starts_again_has_no_disputed_result_any_more(tmp_path):
    """What a killed repair has left would else take the new result back."""
    store = make_store(tmp_path, rows=rows_of(toy()))
    folder = store.trial_folder(toy().key)
    folder.mkdir(parents=True)
    (folder / DISPUTED).write_text("two results\n")
    assert store.claim(toy().key, "s") == 1
    assert not (folder / DISPUTED).exists()


def test_files_that_go_while_a_trial_is_claimed_are_no_fault(tmp_path, monkeypatch):
    (tmp_path / "kept").touch()
    listed = [tmp_path / "gone", tmp_path / "kept"]
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda _: iter(listed))
    assert fault_of(tmp_path) is None
