"""Studies seen and steered from another terminal: real drivers, real signals, and what the store says of them."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from archlab.cli.main import main
from archlab.search.executors.inline import InlineExecutor
from archlab.search.running.driver import drive
from archlab.search.running.progress import JsonProgress, LineProgress
from archlab.search.running.status import lines, status_of
from archlab.search.running.stop_and_retry import forget_request, stop_requests, stop_study
from archlab.search.running.watch import Follower, follow
from archlab.search.store.lock import StudyLock, holder_of, lock_path
from tests.search.study_kit import ENTRY, ROOT, Driver, go, make_store, results, rows_of, steps_run, toy, until

SLOW = [toy(x, steps=25, step_s=0.05, holds=[4 + x]) for x in range(1, 4)]
HOLDS = (5, 6, 7)


def archlab(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def driver(tmp_path):
    """A driver that trains until its first trial holds, and is killed at the end whatever the test did."""
    driver = Driver(tmp_path, SLOW)
    until(lambda: sum(steps_run(tmp_path)[0].values()) > 2)
    yield driver
    if driver.process.poll() is None:
        driver.process.kill()
        driver.process.communicate()


def test_stop_lets_a_driver_of_this_machine_checkpoint_and_end(tmp_path, driver):
    done = archlab("stop", "s", "--store", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["how"], told["ended"], told["holder"]["pid"]) == ("signal", True, driver.process.pid)
    code, output = driver.end()
    assert code == 130 and "the same command goes on" in output
    assert told["counts"] == {"planned": 3}
    go(tmp_path, *HOLDS)
    assert Driver(tmp_path, SLOW).end()[0] == 0
    assert max(steps_run(tmp_path)[0].values()) == 1  # each step once: it went on from its checkpoint


@pytest.mark.slow
def test_a_driver_of_another_machine_reads_the_request_in_the_store(tmp_path, driver):
    holder = {"host": "elsewhere", "pid": driver.process.pid, "since": "2026-01-01T00:00:00+00:00"}
    lock_path(tmp_path, "s").write_text(json.dumps(holder))

    def when_asked():
        until(lock_path(tmp_path, "s").with_suffix(".stop").exists)
        go(tmp_path, 5)  # a driver that trains in its own process reads it after the trial

    thread = threading.Thread(target=when_asked)
    thread.start()
    done = archlab("stop", "s", "--store", tmp_path)
    thread.join()
    assert done.exit_code == 0 and "s has stopped: 3 trials: " in done.stdout, done.output
    code, output = driver.end()
    assert code == 130 and "archlab stop" in output
    go(tmp_path, *HOLDS)
    assert Driver(tmp_path, SLOW).end()[0] == 0  # the request was for the one before


def test_a_second_request_from_another_machine_ends_the_driver_at_once(tmp_path):
    store, trials = make_store(tmp_path), rows_of(toy(1), toy(2))

    def twice(event):
        if event["event"] == "launched":
            lock_path(tmp_path, "s").write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "2026"}))
            assert [stop_study(tmp_path, "s", wait_s=0)["how"] for _ in range(2)] == ["request", "request"]

    def run(on_event=None):
        return drive(store, "s", lambda _: trials, InlineExecutor(ENTRY, tmp_path), on_event=on_event)

    summary = run(twice)
    assert (summary.exit_code, summary.counts["planned"]) == (130, 1)
    assert "stopped at once" in summary.message
    assert run().exit_code == 0  # the requests were for the one before


def test_a_process_that_does_not_hold_the_lock_is_never_signalled(tmp_path):
    """The number in a lock may by now be that of any process: here this very one."""
    make_store(tmp_path, rows=rows_of(toy()))
    ours = {"host": socket.gethostname(), "pid": os.getpid(), "since": "2026-01-01T00:00:00+00:00"}
    holds = "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(600)"
    lock_path(tmp_path, "s").write_text(json.dumps(ours))
    with subprocess.Popen([sys.executable, "-c", holds, str(lock_path(tmp_path, "s"))]) as other:
        try:
            until(lambda: holder_of(tmp_path, "s"))
            assert holder_of(tmp_path, "s") == ours
            assert stop_study(tmp_path, "s", wait_s=0.2)["how"] == "request"
        finally:
            other.kill()


def test_a_request_that_comes_while_its_driver_starts_is_not_forgotten(tmp_path):
    store = make_store(tmp_path, rows=rows_of(toy()))
    request = lock_path(tmp_path, "s").with_suffix(".stop")
    with StudyLock(tmp_path, "s"):
        request.write_text(json.dumps({"holder": holder_of(tmp_path, "s")}))
        forget_request(store, "s")
        assert stop_requests(tmp_path, "s")
        for other in (json.dumps({"holder": {"host": "elsewhere", "pid": 1, "since": "2026"}}), ""):
            request.write_text(other)
            forget_request(store, "s")
            assert not stop_requests(tmp_path, "s")
    store.close()


def test_stopping_what_nobody_runs_says_so(tmp_path):
    make_store(tmp_path, rows=rows_of(toy()))
    done = archlab("stop", "s", "--store", tmp_path)
    assert done.exit_code == 0 and done.stdout == "nobody runs s: 1 trial: 1 planned\n"
    assert archlab("stop", "t", "--store", tmp_path).exit_code == 2


def test_after_a_kill_status_says_interrupted_and_what_to_do(tmp_path, driver):
    (found,) = status_of(tmp_path)
    assert (found["counts"]["running"], found["holder"]["pid"]) == (1, driver.process.pid)
    driver.process.kill()
    driver.process.communicate()
    (found,) = status_of(tmp_path)
    assert (found["counts"], found["holder"]) == ({"interrupted": 1, "planned": 2}, None)
    (line,) = lines([found])
    assert "1 interrupted, 2 planned" in line and line.endswith("archlab run goes on")


def test_status_tells_how_long_a_running_study_takes(tmp_path, driver):
    go(tmp_path, 5)  # the first trial ends, and tells how long one takes
    until(lambda: status_of(tmp_path)[0]["left_s"])
    (found,) = status_of(tmp_path)
    assert 0 < found["left_s"] < 1000
    assert "left" in lines([found])[0]


@pytest.mark.slow
def test_watch_tells_what_the_driver_tells_until_it_ends(tmp_path, driver):
    file = io.StringIO()

    class Watching(JsonProgress):
        def event(self, event):
            super().event(event)
            if event["event"] == "launched":  # it goes on when it was seen
                go(tmp_path, 4 + int(event["variant"][1:]))

    summary = follow(tmp_path, "s", Watching(file), poll_s=0.05)
    assert driver.end()[0] == 0
    assert (summary.exit_code, summary.counts["complete"]) == (0, 3)
    events = [json.loads(line) for line in file.getvalue().splitlines()]
    launched = {event["key"] for event in events if event["event"] == "launched"}
    finished = {event["key"]: event["state"] for event in events if event["event"] == "finished"}
    assert launched == {trial.key for trial in SLOW}
    assert finished == dict.fromkeys(launched, "complete")


@pytest.mark.slow
def test_watch_ends_when_the_driver_is_killed_and_says_what_is_left(tmp_path, driver):
    driver.process.kill()
    driver.process.communicate()
    done = archlab("watch", "s", "--store", tmp_path, "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    assert (done.exit_code, told["counts"]["interrupted"]) == (75, 1)
    assert "nobody runs it" in told["message"]


def test_a_retry_is_told_to_who_watches(tmp_path):
    store = make_store(tmp_path, rows=rows_of(toy()))
    key = toy().key
    with StudyLock(tmp_path, "s"):
        store.claim(key, "s")
        follower = Follower(store, "s")
        assert [event["event"] for event in follower.news()] == ["study", "launched", "tick"]
        store.release(key, 1, "crash: its process died")
        follower.read()
        retry, tick = follower.news()
    assert (retry["event"], retry["kind"], retry["message"]) == ("retry", "crash", "its process died")
    assert tick["running"] == {}


def test_retry_plans_failed_trials_again(tmp_path):
    broken = [toy(x, fault={"kind": "raise", "step": 1, "attempts": 1}) for x in (1, 2)]
    assert Driver(tmp_path, broken).end()[0] == 1
    wrong = archlab("retry", "s", "--store", tmp_path, "--variant", "v3")
    assert wrong.exit_code == 2 and "'v3' is not a variant of s" in wrong.stderr
    one = archlab("retry", "s", "--store", tmp_path, "--variant", "v1", "--json")
    assert json.loads(one.stdout) == {"study": "s", "planned": 1, "variants": {"v1": 1}}
    rest = archlab("retry", "s", "--store", tmp_path, "--failed")
    assert rest.stdout == "1 trial of s planned again (v2 1); archlab run goes on with them\n"
    assert Driver(tmp_path, broken).end()[0] == 0
    assert {state for state, _ in results(make_store(tmp_path)).values()} == {"complete"}
    assert "nothing to try again" in archlab("retry", "s", "--store", tmp_path).stdout


def test_plain_progress_has_a_line_per_running_trial(tmp_path):
    file = io.StringIO()
    folder = make_store(tmp_path, rows=rows_of(toy())).trial_folder(toy().key)
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(toy().to_json())
    (folder / "metrics.jsonl").write_text('{"step": 5, "tokens": 50, "loss": 2.5, "tokens_per_s": 10}\n')
    progress = LineProgress(file)
    progress.plan({"study": "s"}, 4)
    shown = {"variant": "v1", "settings": {}, "seed": 0}
    progress.event({"event": "launched", "key": "k", "attempt": 1, "folder": str(folder), **shown})
    progress.running["k"].steps = 10
    progress.event({"event": "tick", "running": {"k": folder}})
    assert file.getvalue().splitlines()[1:] == [
        "s: 0/4 trials, 1 running, about 35 s left",  # a trial of 10 steps at 1 s each, half done, and three more
        "  v1 seed 0  5/10  loss 2.500  10 tok/s  5 s left",
    ]


def test_the_time_left_is_that_of_the_budget_where_it_ends_first(tmp_path):
    progress = LineProgress(io.StringIO())
    variants = [
        {"name": "small", "flops_per_token": 1, "tokens": 10},
        {"name": "large", "flops_per_token": 3, "tokens": 10},
    ]
    progress.plan({"study": "s", "variants": variants}, 12)
    progress.pace.ended("small", 10.0)
    assert progress.left_s() == pytest.approx(12 * 20.0)  # the mean trial is twice the small one
    progress.plan({"study": "s", "variants": variants, "budget": {"trials": 3}}, 12)
    progress.pace.ended("small", 10.0)
    assert progress.left_s() == pytest.approx(3 * 20.0)
    progress.plan({"study": "s", "variants": variants, "budget": {"wall_s": 30}}, 12)
    progress.pace.ended("small", 10.0)
    assert 0 < progress.left_s() <= 30


@pytest.mark.slow
def test_ctrl_c_ends_watching_and_not_what_is_watched(tmp_path, driver):
    watch = [sys.executable, "-c", "from archlab.cli.main import main; main()", "watch", "s", "--store", str(tmp_path)]
    with subprocess.Popen(watch, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        until(lambda: "start" in watching.stderr.readline())
        watching.send_signal(signal.SIGINT)
        _, told = watching.communicate(timeout=240)
    assert (watching.returncode, told.splitlines()[-1]) == (130, "no longer watched; who runs s goes on")
    go(tmp_path, *HOLDS)
    assert driver.end()[0] == 0
