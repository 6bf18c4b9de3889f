"""Real kills of a real driver under Ray: whatever happens, the same command goes on and ends with the same results."""

import os
import signal
import time

import pytest

from search.driver import drive
from search.executor import InlineExecutor
from tests.search.processes import alive, descendants
from tests.search.study_kit import ENTRY, Driver, make_store, results, rows_of, steps_run, toy, until

TRIALS = [toy(x, steps=20, step_s=0.05) for x in range(1, 5)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What the trials give when nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    store, rows = make_store(folder), rows_of(*(toy(x, steps=20, step_s=0.05) for x in range(1, 5)))
    drive(store, "s", lambda _: rows, InlineExecutor(ENTRY, folder))
    return results(store)


def driver_with_steps(folder, steps):
    """A driver under Ray that has run this many steps of the study in all, and its processes."""
    before = sum(steps_run(folder)[0].values())
    driver = Driver(folder, TRIALS, "ray")
    until(lambda: sum(steps_run(folder)[0].values()) >= before + steps, 60, "the first steps")
    return driver, descendants(driver.process.pid)


def until_gone(processes):
    until(lambda: not any(map(alive, processes)), 60, "the driver's processes to end")


@pytest.mark.slow
def test_sigkill_then_ctrl_c_then_an_undisturbed_run_give_the_results_of_one(tmp_path, uninterrupted):
    driver, processes = driver_with_steps(tmp_path, 25)
    driver.process.kill()
    killed = time.monotonic()
    trainers = [pid for pid, command in processes.items() if "search.forkserver" in command]
    assert trainers
    until(lambda: not any(map(alive, trainers)), 5, "the trials of a dead driver to end")
    assert time.monotonic() - killed < 5
    driver.end()
    finished = {row["key"] for row in make_store(tmp_path).study_trials("s") if row["state"] == "complete"}

    driver, second = driver_with_steps(tmp_path, 10)
    driver.group_signal(signal.SIGINT)
    code, output = driver.end(30)
    assert (code, output.count("\n")) == (130, 1), output
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} <= {"complete", "planned"}
    assert "planned" in {row["state"] for row in store.study_trials("s")}

    code, output = Driver(tmp_path, TRIALS, "inline").end()
    assert code == 0, output
    assert results(store) == uninterrupted
    steps, starts = steps_run(tmp_path)
    assert all(starts[f"{trial.model['x']}/0"] == 1 for trial in TRIALS if trial.key in finished)
    assert sum(steps.values()) <= 4 * 20 + 2  # only the kill lost steps: one in each of two slots
    until_gone(second)


@pytest.mark.slow
def test_when_ray_dies_nothing_is_charged_and_the_next_run_completes(tmp_path, uninterrupted):
    driver, processes = driver_with_steps(tmp_path, 5)
    raylet = next(pid for pid, command in processes.items() if "/raylet/raylet " in command)
    os.kill(raylet, signal.SIGKILL)
    code, output = driver.end(90)
    assert code == 75, output
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} <= {"complete", "planned", "running"}
    assert Driver(tmp_path, TRIALS, "ray").end()[0] == 0
    assert results(store) == uninterrupted
    until_gone(processes)


@pytest.mark.slow
def test_the_driver_ends_even_when_ray_hangs_on_shutdown(tmp_path):
    driver, processes = driver_with_steps(tmp_path, 5)
    stopped = [pid for pid, command in processes.items() if "/raylet/raylet " in command or "/gcs_server " in command]
    driver.process.send_signal(signal.SIGTERM)
    until(lambda: not any("search.forkserver" in command for command in descendants(driver.process.pid).values()), 30)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    code, output = driver.end(45)
    assert (code, output.count("\n")) == (130, 1), output
    until_gone(processes)
