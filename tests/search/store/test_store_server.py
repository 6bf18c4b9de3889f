"""The trial table on a real PostgreSQL: restarts lose nothing, locks end with their process, passwords stay unsaid."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

import pytest

from archlab.search.running.recovery import settle
from archlab.search.store import postgres as server
from archlab.search.store.addresses import DATABASE, shown
from archlab.search.store.lock import StudyLock, StudyLocked, StudyLost, holder_of
from archlab.search.store.opening import open_database
from archlab.search.store.store import Store, StoreAway, StoreError, StoreRefused
from tests.search.study_kit import ROOT, Driver, done, go, make_store, results, rows_of, steps_run, toy, until

pytestmark = pytest.mark.slow

HOLD = (
    "import sys, time; from pathlib import Path; from archlab.search.store.lock import StudyLock\n"
    "with StudyLock(Path(sys.argv[1]), 's'): print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def url(postgres, monkeypatch):
    """Where stores are made, in a database that is empty."""
    address = postgres.emptied()
    monkeypatch.setenv(DATABASE, address)
    return address


@pytest.fixture
def holder(tmp_path, url):
    """Another process that holds study 's'."""
    make_store(tmp_path / "store").close()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "store")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


# addresses and passwords


def test_a_password_is_never_said_whatever_is_wrong_with_the_address(tmp_path, postgres, monkeypatch):
    wrong = {
        postgres.url("lab", password="s3cret"): "password authentication failed",
        postgres.url("nowhere", password=postgres.PASSWORD): "does not exist",
        postgres.url("lab").replace("open%3Asesame", "s3cret%zz"): "is no address of PostgreSQL",
        "s3cret": "a URL that can't be read is no address",
        postgres.url("lab", password="s3cret/12"): "a URL that can't be read is no address",
    }
    postgres.emptied()
    for address, message in wrong.items():
        monkeypatch.setenv(DATABASE, address)
        with pytest.raises(StoreRefused, match=message) as caught:
            Store.open(tmp_path / "store")
        told = "".join(traceback.format_exception(caught.value))
        assert "s3cret" not in told and "sesame" not in told
    assert not (tmp_path / "store" / "store.json").exists()


def test_an_address_in_a_file_is_read_only_where_nobody_else_can(tmp_path, postgres, monkeypatch):
    monkeypatch.delenv(DATABASE, raising=False)
    root = tmp_path / "store"
    root.mkdir()
    (root / "database.url").write_text(postgres.emptied() + "\n")
    (root / "database.url").chmod(0o640)
    with pytest.raises(StoreRefused, match=r"others can read it \(mode 0640\): chmod 600") as caught:
        Store.open(root)
    assert "sesame" not in str(caught.value)
    (root / "database.url").chmod(0o600)
    with make_store(root, rows=rows_of(toy())) as store:
        assert store.database.name == f"postgresql://lab:***@127.0.0.1:{postgres.port}/lab"
        store.claim(toy().key, "s")
        with pytest.raises(StoreError, match="no study 't'") as caught:
            store.study("t")
    written = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "database.url"}
    assert "sesame" not in str(caught.value) and not [path for path, text in written.items() if b"sesame" in text]
    run = [sys.executable, "-c", "from archlab.cli.main import main; main()", "status", "--store", str(root)]
    told = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1 interrupted" in told.stdout and "sesame" not in told.stdout + told.stderr


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://u:p@h:1/d?password=q&sslmode=require", "postgresql://u:***@h:1/d"),
        ("postgresql:///d?host=/run", "postgresql:///d"),
        ("postgresql://u:p@one:1,two:2/d?target_session_attrs=read-write", "postgresql://u:***@one:1,two:2/d"),
        ("postgresql://u:p@one:1,two:x/d", "a URL that can't be read"),
        ("http://token@h/x#p", "http://token@h/x"),
        ("postgresql://u:p@[::1/d", "a URL that can't be read"),
        ("postgresql://u:12/34@h/d", "a URL that can't be read"),
        ("postgresql://u:12#34@h/d", "a URL that can't be read"),
    ],
)
def test_what_is_shown_of_an_address(address, said):
    assert shown(address) == said


def test_a_store_and_its_database_belong_together(tmp_path, url, postgres, monkeypatch):
    make_store(tmp_path / "one").close()
    with pytest.raises(StoreRefused, match=f"belongs to the store at {tmp_path}/one, and not to {tmp_path}/two"):
        Store.open(tmp_path / "two")
    other = postgres.emptied("other")
    monkeypatch.setenv(DATABASE, other)
    make_store(tmp_path / "three").close()
    with pytest.raises(StoreRefused, match=f"belongs to the store at {tmp_path}/three, and not to {tmp_path}/one"):
        Store.open(tmp_path / "one")
    monkeypatch.delenv(DATABASE)
    with pytest.raises(StoreRefused, match=f"on a PostgreSQL server: set {DATABASE}, or write its URL"):
        Store.open(tmp_path / "one")
    make_store(tmp_path / "file").close()
    monkeypatch.setenv(DATABASE, url)
    with pytest.raises(StoreRefused, match=r"is the file trials.db, and a server is named as well"):
        Store.open(tmp_path / "file")


def test_a_database_of_a_newer_version_is_refused(tmp_path, url, postgres):
    make_store(tmp_path / "store").close()
    postgres.run("lab", "UPDATE archlab.store SET version = 7")
    with pytest.raises(StoreRefused, match="says version 7, this archlab supports up to 3"):
        Store.open(tmp_path / "store")


def test_a_database_of_an_older_version_learns_the_roles_of_this_one(tmp_path, url, postgres):
    with make_store(tmp_path / "store", rows=rows_of(toy())) as store:
        before = store.study_trials("s")
    postgres.run("lab", "ALTER TABLE archlab.study_trial DROP CONSTRAINT study_trial_role_check")
    old = "CHECK (role IN ('tune', 'repeat', 'search'))"
    postgres.run("lab", f"ALTER TABLE archlab.study_trial ADD CONSTRAINT study_trial_role_check {old}")
    postgres.run("lab", "UPDATE archlab.store SET version = 2")
    with Store.open(tmp_path / "store", create=False) as store:
        assert store.study_trials("s") == before
    with Store.open(tmp_path / "store") as store:
        assert store.add_trials("s", rows_of(toy(1), role="screen")) == 1
        assert [row["role"] for row in store.study_trials("s") if row not in before] == ["screen"]
    assert postgres.run("lab", "SELECT version FROM archlab.store")[0][0] == 3


def test_a_creation_that_was_killed_leaves_nothing_or_all(tmp_path, url, postgres):
    command = [
        sys.executable,
        "-c",
        f"from archlab.search.store.store import Store; Store.open({str(tmp_path / 'store')!r})",
    ]
    for delay in range(8):
        process = subprocess.Popen(command, cwd=ROOT)
        until((tmp_path / "store" / "locks" / ".create").exists)
        time.sleep(0.01 * delay)
        process.kill()
        process.wait()
    with make_store(tmp_path / "store", rows=rows_of(toy())) as store:
        assert store.claim(toy().key, "s") == 1


def test_the_dashboard_shows_what_a_server_holds_as_it_changes(tmp_path, url):
    from archlab.dashboards.library import Library
    from tests.dashboards import generate

    with generate.make_store(tmp_path / "store") as store:
        plan = generate.make_study(store, generate.Plan(rates=(1e-3,), seeds=(0,), points=10), finish=False)
        library = Library(tmp_path / "store")
        assert library.study(plan.name).counts == {"planned": 6}
        for key in generate.planned(store, plan)[:2]:
            generate.run_trial(store, plan, key)
        assert library.study(plan.name).counts == {"complete": 2, "planned": 4}
        with StudyLock(tmp_path / "store", plan.name):
            assert library.study(plan.name).holder["pid"] == os.getpid()


# the lock of a study


def test_a_second_driver_is_refused_at_once_with_the_name_of_the_first(tmp_path, holder):
    with pytest.raises(StudyLocked) as caught:
        StudyLock(tmp_path / "store", "s").acquire()
    assert holder.poll() is None, "it does not wait for the first one's end"
    assert (caught.value.holder["pid"], caught.value.holder["host"]) == (holder.pid, socket.gethostname())
    assert "lab:***@127.0.0.1" in str(caught.value) and "sesame" not in str(caught.value)
    assert holder_of(tmp_path / "store", "s")["pid"] == holder.pid
    assert holder_of(tmp_path / "store", "t") is None


def test_the_lock_of_a_killed_driver_is_free_and_one_given_back_has_no_holder(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    until(lambda: holder_of(tmp_path / "store", "s") is None)
    with StudyLock(tmp_path / "store", "s") as lock:
        lock.check()
        assert holder_of(tmp_path / "store", "s")["pid"] == os.getpid()
    assert holder_of(tmp_path / "store", "s") is None


def cut(postgres, pid):
    """Ends the sessions of a process as a broken network does."""
    postgres.run("lab", f"SELECT pg_terminate_backend({pid})")


def backend(postgres):
    """The server's process that holds a study's lock."""
    return postgres.run("lab", "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1")[0][0]


def test_a_lock_whose_connection_broke_is_taken_again_unless_somebody_was_faster(tmp_path, url, postgres, monkeypatch):
    monkeypatch.setattr(server, "RETURN_S", 0.0)  # this server was started a moment ago
    make_store(tmp_path / "store").close()
    with StudyLock(tmp_path / "store", "s") as first:
        cut(postgres, backend(postgres))
        first.check()
        with pytest.raises(StudyLocked):
            StudyLock(tmp_path / "store", "s").acquire()
        cut(postgres, backend(postgres))
        with StudyLock(tmp_path / "store", "s"), pytest.raises(StudyLost, match="somebody else has taken the study"):
            first.check()
        with pytest.raises(StudyLost):  # it may have been run meanwhile
            first.check()


def test_after_a_restart_of_the_server_a_living_holder_comes_back_first(tmp_path, url, postgres):
    make_store(tmp_path / "store").close()
    with StudyLock(tmp_path / "store", "s") as first:
        postgres.stop()
        postgres.start()
        with pytest.raises(StudyLocked, match=f"process {os.getpid()} on"):
            StudyLock(tmp_path / "store", "s").acquire()
        first.check()


def test_a_driver_that_has_lost_its_study_to_another_commits_nothing_more(tmp_path, url, postgres, monkeypatch):
    monkeypatch.setattr(server, "RETURN_S", 0.0)
    driver = Driver(tmp_path / "store", [toy(x, steps=6, step_s=0.2, holds=[3]) for x in range(3)])
    until(lambda: steps_run(tmp_path / "store")[1])
    driver.process.send_signal(signal.SIGSTOP)  # a host that sleeps, whose connection the network gives up
    with Store.open(tmp_path / "store") as store:
        cut(postgres, backend(postgres))
        with StudyLock(tmp_path / "store", "s"):
            assert settle(store, "s") == []
            before = store.study_trials("s"), store.events()
            driver.process.send_signal(signal.SIGCONT)
            go(tmp_path / "store", 3)
            code, output = driver.end()
            assert (code, "somebody else has taken the study" in output) == (75, True), output
            assert (store.study_trials("s"), store.events()) == before


# a server that goes away


class Proxy:
    """Stands between a client and the server, and cuts the line around the next COMMIT, then before `also` if given."""

    def __init__(self, port):
        self._server, self._socket = port, socket.create_server(("127.0.0.1", 0))
        self.port, self.cut, self.also = self._socket.getsockname()[1], None, None
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self._pass(client, socket.create_connection(("127.0.0.1", self._server)))

    def _pass(self, client, real):
        with client, real:
            while True:
                for ready in select.select([client, real], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is client and self.cut and b"COMMIT" in data:
                        if self.cut == "after":
                            real.sendall(data)
                            real.recv(65536)  # the server has said that it is done
                        self.cut = None
                        return
                    if ready is client and self.also and self.also in data:
                        self.also = None
                        return
                    (real if ready is client else client).sendall(data)

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_whose_answer_was_lost_happens_once(tmp_path, url, postgres, monkeypatch, when):
    make_store(tmp_path / "store", rows=rows_of(toy())).close()
    proxy = Proxy(postgres.port)
    monkeypatch.setenv(DATABASE, re.sub(r":\d+/lab", f":{proxy.port}/lab", url))
    with Store.open(tmp_path / "store") as store:
        proxy.cut = when
        assert store.claim(toy().key, "s") == 1
        assert proxy.cut is None
        proxy.cut = when
        store.finish(toy().key, 1, "complete", done(x=1))
        assert [event["kind"] for event in store.events("s")] == ["running", "complete"]
    proxy.close()


def test_a_commit_whose_answer_was_lost_twice_happens_once(tmp_path, url, postgres, monkeypatch):
    make_store(tmp_path / "store", rows=rows_of(toy())).close()
    proxy = Proxy(postgres.port)
    monkeypatch.setenv(DATABASE, re.sub(r":\d+/lab", f":{proxy.port}/lab", url))
    with Store.open(tmp_path / "store") as store:
        proxy.cut, proxy.also = "after", b"pg_xact_status"
        assert store.claim(toy().key, "s") == 1
        assert (proxy.cut, proxy.also) == (None, None)
    proxy.close()


def test_a_commit_that_a_crashed_server_has_no_trace_of_did_not_happen(url):
    with contextlib.closing(server.connect(url)) as connection:
        assert not server._committed(connection, str(2**40))


def test_a_server_that_stays_away_is_said_after_a_while_and_nothing_is_lost(tmp_path, url, postgres, monkeypatch):
    make_store(tmp_path / "store", rows=rows_of(toy())).close()
    monkeypatch.setattr(server, "PATIENCE_S", 1.0)
    store = Store.open(tmp_path / "store")
    postgres.stop()
    try:
        with pytest.raises(StoreAway, match=r"lab:\*\*\*@127.0.0.1:\d+/lab has not answered for 1 s .* again"):
            store.claim(toy().key, "s")
        with pytest.raises(StoreAway):
            open_database(tmp_path / "store", create=True)
        driver = Driver(tmp_path / "store", [toy()], patience_s=0.5)
        code, output = driver.end()
        assert (code, output.count("has not answered")) == (75, 1)
    finally:
        postgres.start()
    assert store.claim(toy().key, "s") == 1
    store.close()


def test_a_server_that_does_not_come_back_ends_the_run_and_the_next_one_commits_what_has_a_result(
    tmp_path, url, postgres
):
    trials = [toy(x, steps=8, step_s=0.05, holds=[4] if x else []) for x in range(4)]
    driver = Driver(tmp_path / "store", trials, patience_s=1.0)
    until(lambda: len(steps_run(tmp_path / "store")[1]) >= 2)
    postgres.stop(signal.SIGKILL)
    go(tmp_path / "store", 4)
    try:
        code, output = driver.end()
    finally:
        postgres.start()
    assert (code, "has not answered" in output) == (75, True), output
    code, output = Driver(tmp_path / "store", trials).end()
    assert code == 0, output
    steps, _ = steps_run(tmp_path / "store")
    assert len(steps) == 32 and set(steps.values()) == {1}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_server_that_is_restarted_in_a_sweep_is_waited_for(tmp_path, url, postgres, how):
    trials = [toy(x, steps=8, step_s=0.05, holds=[4] if x else []) for x in range(8)]
    driver = Driver(tmp_path / "store", trials)
    until(lambda: len(steps_run(tmp_path / "store")[1]) >= 2)
    postgres.stop(how)
    go(tmp_path / "store", 4)
    time.sleep(0.5)
    postgres.start()
    code, output = driver.end()
    assert code == 0, output
    with Store.open(tmp_path / "store", create=False) as store:
        assert {state for state, _ in results(store).values()} == {"complete"}
        assert [row["attempt"] for row in store.study_trials("s")] == [1] * 8
    steps, starts = steps_run(tmp_path / "store")
    assert set(steps.values()) == {1} and set(starts.values()) == {1}


def test_a_driver_that_is_killed_with_its_server_goes_on_at_once(tmp_path, url, postgres):
    trials = [toy(x, steps=6, step_s=0.05) for x in range(4)]
    driver = Driver(tmp_path / "store", trials)
    until(lambda: len(steps_run(tmp_path / "store")[1]) >= 2)
    postgres.stop(signal.SIGKILL)
    driver.process.kill()
    driver.process.communicate()
    postgres.start()
    code, output = Driver(tmp_path / "store", trials).end()
    assert code == 0, output
    with Store.open(tmp_path / "store", create=False) as store:
        assert {state for state, _ in results(store).values()} == {"complete"}
    steps, _ = steps_run(tmp_path / "store")
    assert len(steps) == 24


def test_two_drivers_that_want_the_same_trials_run_each_once(tmp_path, url):
    trials = [toy(x, steps=4, step_s=0.05) for x in range(6)]
    drivers = [Driver(tmp_path / "store", trials, study=name) for name in ("a", "b")]
    for driver in drivers:
        code, output = driver.end()
        assert code == 0, output
    steps, starts = steps_run(tmp_path / "store")
    assert len(starts) == 6 and set(starts.values()) == {1} and set(steps.values()) == {1}
    with Store.open(tmp_path / "store", create=False) as store:
        reused = [[row["reused"] for row in store.study_trials(name)] for name in ("a", "b")]
        assert [not one for one in reused[0]] == reused[1]  # each trial is the one's own and the other's reused
