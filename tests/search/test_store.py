"""The trial table: every allowed transition, none other, and a store that is whole or says what is wrong."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest

from search import database
from search.lock import StudyLock
from search.store import TERMINAL, Row, StaleAttempt, Store, StoreError, StoreFull
from tests.search.study_kit import ROOT, make_store, rows_of, toy

STATES = ("planned", "running", "paused", *TERMINAL)
ACTIONS = {
    "claim": lambda store, key: store.claim(key, "s"),
    "finish": lambda store, key: store.finish(key, 1, "complete", {"state": "complete"}),
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
        store.finish(key, 1, state, {"step": 2} if state == "paused" else None, "because")


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
        store.finish(key, 1, "complete", {"loss": 1})
    with pytest.raises(StaleAttempt):
        store.release(key, 1)
    store.finish(key, 2, "complete", {"loss": 2})
    assert store.study_trials("s")[0]["result"] == {"loss": 2}


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
    store.finish(trial.key, 1, "complete", {"x": 1})
    assert [(row["role"], row["settings"], row["result"]) for row in store.study_trials("s")] == [
        ("tune", {"lr": 0.1}, {"x": 1}),
        ("repeat", {"lr": 0.1}, {"x": 1}),
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
    store.finish(toy(1).key, 1, "complete", {"x": 1})
    assert store.drop_others("s", both[1:]) == 1
    assert [row["variant"] for row in store.study_trials("s")] == ["v2"]
    assert [(row["variant"], row["result"]) for row in store.study_trials("s", orphaned=True)] == [("v1", {"x": 1})]
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
    with pytest.raises(StoreError, match=r"no study 't' \(known: s\)"):
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


def test_a_store_is_private(tmp_path):
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    store.claim(toy().key, "s")
    modes = {}
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        modes[path.name] = (path.is_dir(), oct(stat.S_IMODE(path.stat().st_mode)))
    assert {mode for folder, mode in modes.values() if folder} == {"0o700"}
    assert {mode for folder, mode in modes.values() if not folder} == {"0o600"}
    assert {"trials.db", "trials.db-wal", "store.json", "trial.json"} <= modes.keys()


def overwrite(path, content):
    """Puts bytes in a file's place, without the log that SQLite would replay."""
    for each in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        each.unlink(missing_ok=True)
    path.write_bytes(content)


DAMAGE = {
    "newer": (lambda root: (root / "store.json").write_text('{"version": 7}'), "store.json says version 7, .* up to 2"),
    "garbled": (lambda root: (root / "store.json").write_text('{"vers'), "store.json can't be read"),
    "no number": (lambda root: (root / "store.json").write_text('{"version": "x"}'), "says version 'x'"),
    "no table": (lambda root: (root / "trials.db").unlink(), "trials.db is missing"),
    "empty table": (lambda root: overwrite(root / "trials.db", b""), "trials.db is not a whole trial table"),
    "not a table": (lambda root: overwrite(root / "trials.db", b"x" * 5000), "trials.db is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_refused_with_the_file_and_untouched(tmp_path, damage):
    root = tmp_path / "store"
    make_store(root).close()
    harm, message = DAMAGE[damage]
    harm(root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.name.endswith("-shm")}
    with pytest.raises(StoreError, match=message):
        Store.open(root)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_an_absent_store_is_made_only_on_request(tmp_path):
    with pytest.raises(StoreError, match="no store at"):
        Store.open(tmp_path / "store", create=False)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("left", [".trials.db.tmp", "trials.db"])
def test_a_creation_that_was_killed_half_way_is_completed(tmp_path, left):
    make_store(tmp_path / "whole").close()
    (tmp_path / "store").mkdir()
    whole = (tmp_path / "whole" / "trials.db").read_bytes()
    (tmp_path / "store" / left).write_bytes(whole if left == "trials.db" else whole[:100])
    with Store.open(tmp_path / "store") as store:
        assert store.studies() == [] or left == "trials.db"


def test_processes_that_make_one_store_at_once_all_succeed(tmp_path):
    code = (
        "import sys; from search.store import Row, Store; from search.trial import Trial\n"
        "root, name = sys.argv[1:]; store = Store.open(root); store.save_study(name, {}, '')\n"
        "store.add_trials(name, [Row(Trial({}, {}, name, 0), 'v', 'tune', {}, 0)])"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "store"), str(n)], cwd=ROOT, stderr=subprocess.PIPE
        )
        for n in range(4)
    ]
    errors = [process.communicate(timeout=30)[1].decode() for process in started]
    assert errors == [""] * 4
    with Store.open(tmp_path / "store", create=False) as store:
        assert sorted(each["name"] for each in store.studies()) == ["0", "1", "2", "3"]


def test_a_table_that_stays_locked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    make_store(tmp_path / "store").close()
    other = sqlite3.connect(tmp_path / "store" / "trials.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with Store.open(tmp_path / "store") as store, pytest.raises(StoreError, match=r"trials.db is locked by another"):
        store.save_study("s", {}, "")
    other.close()


def test_a_full_disk_under_the_table_is_told_apart_and_loses_nothing(tmp_path):
    store = make_store(tmp_path / "store")
    pages = store._query("PRAGMA page_count")[0]["page_count"]
    store._query(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFull, match="free some space"):
        store.save_study("t", {"x": "y" * 10**6}, "")
    assert [each["name"] for each in store.studies()] == ["s"]


def test_the_status_path_imports_neither_torch_nor_ray_nor_pandas():
    code = (
        "import sys, search.store, search.lock, search.trial, search.driver, search.executor, search.worker;"
        "print([name for name in ('torch', 'ray', 'pandas', 'numpy', 'optuna', 'mlflow') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


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
    store.remember("noise", "1M", {"sd": 1.5})
    store.remember("noise", "1M", {"sd": 2.5})
    with Store.open(tmp_path / "store") as again:
        assert again.decide("s", "rung 1", lambda: pytest.fail("computed twice")) == ["a", 0.1]
        assert again.decide("s", "nothing", lambda: pytest.fail("computed twice")) is None
        assert again.decide("other", "rung 1", lambda: "b") == "b"
        assert (again.recall("noise", "1M"), again.recall("noise", "2M")) == ({"sd": 2.5}, None)


VERSION_1 = """
CREATE TABLE study (
  name TEXT PRIMARY KEY, record TEXT NOT NULL, yaml TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL);
CREATE TABLE trial (
  key TEXT PRIMARY KEY, spec TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('planned', 'running', 'complete', 'pruned', 'failed', 'diverged')),
  attempt INTEGER NOT NULL DEFAULT 0, owner TEXT, reason TEXT, result TEXT, updated REAL NOT NULL);
CREATE TABLE study_trial (
  study TEXT NOT NULL REFERENCES study (name), key TEXT NOT NULL REFERENCES trial (key),
  variant TEXT NOT NULL, role TEXT NOT NULL CHECK (role IN ('tune', 'repeat', 'search')),
  settings TEXT NOT NULL, seed INTEGER NOT NULL, position INTEGER NOT NULL, orphaned INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (study, key, variant, role)) WITHOUT ROWID;
CREATE INDEX study_trial_key ON study_trial (key);
CREATE TABLE event (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, study TEXT, key TEXT, attempt INTEGER, kind TEXT NOT NULL,
  detail TEXT NOT NULL);
"""


def as_version_1(root):
    """Puts the table of a store back to what the first version wrote, with the same rows."""
    old = sqlite3.connect(root / "old.db")
    old.executescript(f"PRAGMA journal_mode = WAL; {VERSION_1} PRAGMA user_version = 1;")
    old.execute("ATTACH ? AS new", (str(root / "trials.db"),))
    for table in ("study", "trial", "study_trial", "event"):
        columns = ", ".join(row[1] for row in old.execute(f"PRAGMA table_info({table})"))
        old.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM new.{table}")
    old.commit()
    old.close()
    (root / "old.db").replace(root / "trials.db")
    (root / "store.json").write_text('{"version": 1}\n')


def test_a_store_of_the_first_version_is_brought_over_with_all_that_it_holds(tmp_path):
    with make_store(tmp_path / "store", rows=rows_of(*map(toy, range(4)))) as store:
        store.finish(toy(0).key, store.claim(toy(0).key, "s"), "complete", {"state": "complete", "x": 0.1})
        store.finish(toy(1).key, store.claim(toy(1).key, "s"), "failed", None, "because")
        store.claim(toy(2).key, "s")
        before = store.study_trials("s"), store.events(), store.studies(), store.study_yaml("s")
    as_version_1(tmp_path / "store")
    with Store.open(tmp_path / "store", create=False) as store:
        assert (store.study_trials("s"), store.events(), store.studies(), store.study_yaml("s")) == before
        store.finish(toy(2).key, 1, "paused", {"step": 1})
        assert store.known([toy(2).key])[toy(2).key]["state"] == "paused"
        assert [each["table"] for each in store._query("PRAGMA foreign_key_list(study_trial)")] == ["trial", "study"]
        with pytest.raises(sqlite3.IntegrityError):
            store._query("DELETE FROM trial")
    assert json.loads((tmp_path / "store" / "store.json").read_text()) == {"version": 2}


def test_a_store_that_is_being_run_by_an_older_version_is_not_changed_under_it(tmp_path):
    make_store(tmp_path / "store").close()
    as_version_1(tmp_path / "store")
    with StudyLock(tmp_path / "store", "s"), pytest.raises(StoreError, match=r"study 's' is being run by process \d+"):
        Store.open(tmp_path / "store")
    assert json.loads((tmp_path / "store" / "store.json").read_text()) == {"version": 1}
    Store.open(tmp_path / "store").close()


@pytest.mark.parametrize("harm", [os.remove, lambda path: path.write_text("")], ids=["removed", "emptied"])
def test_trial_json_that_was_lost_is_written_again_when_the_trial_starts(tmp_path, harm):
    store = make_store(tmp_path / "store", rows=rows_of(toy()))
    path = store.trial_folder(toy().key) / "trial.json"
    store.release(toy().key, store.claim(toy().key, "s"))
    harm(path)
    store.claim(toy().key, "s")
    assert json.loads(path.read_text()) == json.loads(toy().to_json())
