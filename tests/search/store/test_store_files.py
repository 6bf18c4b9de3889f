"""The folder of a store: whole, or refused with file and reason; private; brought over from older versions."""

import json
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing, suppress

import pytest

from archlab.search.store import database
from archlab.search.store.lock import StudyLock
from archlab.search.store.store import Store, StoreError, StoreFull
from tests.search.study_kit import ROOT, Driver, done, go, make_store, results, rows_of, steps_run, toy, until


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
    "newer": (lambda root: (root / "store.json").write_text('{"version": 7}'), "store.json says version 7, .* up to 3"),
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


def test_a_store_that_is_no_folder_is_said(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match=r"can't make a store at .*/store: "):
        Store.open(tmp_path / "store")


@pytest.mark.parametrize("left", [".trials.db.tmp", "trials.db"])
def test_a_creation_that_was_killed_half_way_is_completed(tmp_path, left):
    make_store(tmp_path / "whole").close()
    (tmp_path / "store").mkdir()
    whole = (tmp_path / "whole" / "trials.db").read_bytes()
    (tmp_path / "store" / left).write_bytes(whole if left == "trials.db" else whole[:100])
    with Store.open(tmp_path / "store") as store:
        assert store.studies() == [] or left == "trials.db"


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


def locked(root):
    """A connection that holds the table, as a backup does."""
    other = sqlite3.connect(root / "trials.db", timeout=120.0, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


@pytest.mark.slow
def test_a_driver_waits_for_a_table_that_is_locked_for_eight_seconds(tmp_path):
    trials = [toy(x, steps=4, step_s=0.05, holds=[2]) for x in range(4)]
    driver = Driver(tmp_path / "store", trials)
    until(lambda: steps_run(tmp_path / "store")[1])
    with closing(locked(tmp_path / "store")) as other:
        go(tmp_path / "store", 2)
        time.sleep(8)
        running = driver.process.poll() is None
        other.execute("ROLLBACK")
    code, output = driver.end()
    assert running and code == 0, output
    assert set(steps_run(tmp_path / "store")[0].values()) == {1}


@pytest.mark.slow
def test_a_table_that_is_locked_for_longer_is_said_and_the_same_command_goes_on(tmp_path):
    trials = [toy(x, steps=4, step_s=0.05, holds=[2]) for x in range(4)]
    driver = Driver(tmp_path / "store", trials, busy_timeout_s=1.0)
    until(lambda: steps_run(tmp_path / "store")[1])
    with closing(locked(tmp_path / "store")) as other:
        go(tmp_path / "store", 2)
        code, output = driver.end()
        other.execute("ROLLBACK")
    assert (code, "trials.db is locked by another process" in output) == (75, True), output
    code, output = Driver(tmp_path / "store", trials).end()
    assert code == 0, output
    assert set(steps_run(tmp_path / "store")[0].values()) == {1}


@pytest.mark.slow
def test_a_backup_that_is_taken_in_a_sweep_holds_nothing_up_and_is_a_whole_store(tmp_path):
    trials = [toy(x, steps=4, step_s=0.02) for x in range(8)]
    driver = Driver(tmp_path / "store", trials)
    until(lambda: len(steps_run(tmp_path / "store")[1]) > 1)
    shutil.copytree(tmp_path / "store", tmp_path / "copy", ignore=shutil.ignore_patterns("trials.db*", ".*", "*.tmp"))
    with (
        closing(sqlite3.connect(tmp_path / "store" / "trials.db")) as source,
        closing(sqlite3.connect(tmp_path / "copy" / "trials.db")) as target,
    ):
        source.backup(target, pages=1, sleep=0.05)  # slowly, while it is written to
    code, output = driver.end()
    assert code == 0, output
    code, output = Driver(tmp_path / "copy", trials).end()
    assert code == 0, output
    with Store.open(tmp_path / "store") as first, Store.open(tmp_path / "copy") as second:
        assert results(first) == results(second)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte, which only root can make."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here: a full disk under the table is not tested")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_under_the_table_stops_the_run_and_loses_nothing(tmp_path, small_disk):
    trials = [toy(x, steps=4, step_s=0.05, holds=[2] if x else []) for x in range(4)]
    driver = Driver(small_disk / "store", trials)
    until(lambda: len(steps_run(small_disk / "store")[1]) > 1)
    held = small_disk / "store" / "held"
    held.touch()
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 512)
    held.rename(held.with_name("go-2"))  # which takes no space
    code, output = driver.end()
    assert (code, "Traceback" in output) == (75, False), output
    filler.unlink()
    code, output = Driver(small_disk / "store", trials).end()
    assert code == 0, output
    with Store.open(small_disk / "store") as store:
        assert {state for state, _ in results(store).values()} == {"complete"}


@pytest.mark.slow
def test_a_creation_that_is_killed_leaves_nothing_or_all(tmp_path):
    command = [
        sys.executable,
        "-c",
        f"from archlab.search.store.store import Store; Store.open({str(tmp_path / 'store')!r})",
    ]
    for delay in range(20):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        process = subprocess.Popen(command, cwd=ROOT)
        until((tmp_path / "store").exists)
        time.sleep(0.0005 * delay)
        process.kill()
        process.wait()
        with make_store(tmp_path / "store", rows=rows_of(toy())) as store:
            assert store.claim(toy().key, "s") == 1


def test_reading_leaves_nothing_open_that_would_hold_up_a_writer(tmp_path):
    store = make_store(tmp_path / "store", rows=rows_of(*map(toy, range(50))))
    store.study_trials("s"), store.studies(), store.known([toy(1).key]), store.events()
    with closing(sqlite3.connect(tmp_path / "store" / "trials.db", timeout=0.0)) as other:
        busy, *_ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert not busy
    assert (tmp_path / "store" / "trials.db-wal").stat().st_size == 0
    store.close()


def test_the_status_path_imports_neither_torch_nor_ray_nor_pandas():
    code = (
        "import sys; from archlab.search.running import status, watch; from archlab.search.store import lock, store;"
        "from archlab.search.executors import attempt, executor;"
        "heavy = ('torch', 'ray', 'pandas', 'numpy', 'optuna', 'mlflow', 'psycopg', 'sqlalchemy');"
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


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
        store.finish(toy(0).key, store.claim(toy(0).key, "s"), "complete", done(x=0.1))
        store.finish(toy(1).key, store.claim(toy(1).key, "s"), "failed", None, "because")
        store.claim(toy(2).key, "s")
        before = store.study_trials("s"), store.events(), store.studies(), store.study_yaml("s")
    as_version_1(tmp_path / "store")
    with Store.open(tmp_path / "store", create=False) as store:
        assert (store.study_trials("s"), store.events(), store.studies(), store.study_yaml("s")) == before
        store.finish(toy(2).key, 1, "paused", {"step": 1})
        assert store.known([toy(2).key])[toy(2).key]["state"] == "paused"
        assert store.add_trials("s", rows_of(toy(4), role="screen")) == 1
        assert [each["table"] for each in store._query("PRAGMA foreign_key_list(study_trial)")] == ["trial", "study"]
        with pytest.raises(sqlite3.IntegrityError):
            store._query("DELETE FROM trial")
    assert json.loads((tmp_path / "store" / "store.json").read_text()) == {"version": 3}


def test_a_store_that_is_being_run_by_an_older_version_is_not_changed_under_it(tmp_path):
    make_store(tmp_path / "store").close()
    as_version_1(tmp_path / "store")
    with StudyLock(tmp_path / "store", "s"), pytest.raises(StoreError, match=r"study 's' is being run by process \d+"):
        Store.open(tmp_path / "store")
    assert json.loads((tmp_path / "store" / "store.json").read_text()) == {"version": 1}
    Store.open(tmp_path / "store").close()
