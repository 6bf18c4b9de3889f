"""Real kills of a real driver under Ray: whatever happens, the same command goes on and ends with the same results."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from archlab.search.executors.inline import InlineExecutor
from archlab.search.hardware.facts import memory
from archlab.search.running.driver import drive
from tests.search.processes import alive, descendants
from tests.search.study_files import write_study
from tests.search.study_kit import ENTRY, Driver, go, make_store, results, rows_of, steps_run, toy, until
from tests.slow_tests import ALL

# The first one runs through; the others wait at two steps, so that no fault comes when all is done.
TRIALS = [toy(x, steps=20, step_s=0.05, holds=[8, 15] if x > 1 else []) for x in range(1, 5)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What the trials give when nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    store, rows = make_store(folder), rows_of(*TRIALS)
    go(folder, 8, 15)
    drive(store, "s", lambda _: rows, InlineExecutor(ENTRY, folder))
    return results(store)


def driver_with_steps(folder, steps):
    """A driver under Ray that has run this many steps of the study in all, and its processes."""
    before = sum(steps_run(folder)[0].values())
    driver = Driver(folder, TRIALS, "ray")
    until(lambda: sum(steps_run(folder)[0].values()) >= before + steps)
    return driver, descendants(driver.process.pid)


def until_gone(processes):
    until(lambda: not any(map(alive, processes)))


@pytest.mark.slow
def test_sigkill_then_ctrl_c_then_an_undisturbed_run_give_the_results_of_one(tmp_path, uninterrupted):
    driver, processes = driver_with_steps(tmp_path, 25)
    driver.process.kill()
    trainers = [pid for pid, command in processes.items() if "archlab.search.executors.forkserver" in command]
    assert trainers
    until(lambda: not any(map(alive, trainers)))
    driver.end()
    go(tmp_path, 8)
    finished = {row["key"] for row in make_store(tmp_path).study_trials("s") if row["state"] == "complete"}

    driver, second = driver_with_steps(tmp_path, 5)
    driver.group_signal(signal.SIGINT)
    code, output = driver.end(120)
    assert (code, output.count("\n")) == (130, 1), output
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} <= {"complete", "planned"}
    assert "planned" in {row["state"] for row in store.study_trials("s")}
    go(tmp_path, 15)

    code, output = Driver(tmp_path, TRIALS, "inline").end(240)
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
    code, output = driver.end(240)
    assert code == 75, output
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} <= {"complete", "planned", "running"}
    go(tmp_path, 8, 15)
    assert Driver(tmp_path, TRIALS, "ray").end(240)[0] == 0
    assert results(store) == uninterrupted
    until_gone(processes)


@pytest.mark.slow
def test_the_driver_ends_even_when_ray_hangs_on_shutdown(tmp_path):
    driver, processes = driver_with_steps(tmp_path, 5)
    stopped = [pid for pid, command in processes.items() if "/raylet/raylet " in command or "/gcs_server " in command]
    driver.process.send_signal(signal.SIGTERM)
    until(
        lambda: (
            not any(
                "archlab.search.executors.forkserver" in command for command in descendants(driver.process.pid).values()
            )
        )
    )
    for pid in stopped:
        with suppress(ProcessLookupError):  # where the driver was faster, it has nothing to wait for
            os.kill(pid, signal.SIGSTOP)
    code, output = driver.end(240)
    assert (code, output.count("\n")) == (143, 1), output
    until_gone(processes)


@pytest.mark.slow
def test_when_the_head_of_ray_dies_the_driver_ends_and_the_next_run_completes(tmp_path, uninterrupted):
    driver, processes = driver_with_steps(tmp_path, 5)
    head = next(pid for pid, command in processes.items() if "/gcs_server " in command)
    os.kill(head, signal.SIGKILL)
    go(tmp_path, 8, 15)
    code, output = driver.end(240)
    assert code in (0, 75), output  # 0 where the trials were done before Ray noticed
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} <= {"complete", "planned", "running"}
    assert not [row["reason"] for row in store.study_trials("s") if (row["reason"] or "").startswith("crash")]
    assert Driver(tmp_path, TRIALS, "inline").end(240)[0] == 0
    assert results(store) == uninterrupted
    until_gone(processes)


@pytest.mark.slow
def test_a_trial_that_eats_the_memory_is_ended_and_its_neighbour_lives(tmp_path, monkeypatch):
    """The machine counts as full when 2 GB less are free than now; the trial takes up to 6 GB, 50 MB at a time."""
    available, total = memory()
    if available < 8e9:
        pytest.skip("needs 8 GB of free memory")
    monkeypatch.setenv("ARCHLAB_MEMORY_LEFT", str((available - 2e9) / total))
    hungry = toy(1, fault={"kind": "grow", "step": 1, "attempts": 1})
    code, output = Driver(tmp_path, [hungry, toy(2, steps=40, step_s=0.05)], "ray").end(240)
    assert code == 0, output
    store = make_store(tmp_path)
    assert [row["attempt"] for row in store.study_trials("s")] == [2, 1]
    (reason,) = [event["detail"]["reason"] for event in store.events("s", hungry.key) if event["kind"] == "planned"]
    assert re.match(r"oom: memory ran out: the trial's process had [0-9.]+ GB", reason), reason


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.3, 2.0, *([3.2] if ALL else [])])
def test_sigterm_while_ray_starts_ends_the_run_in_a_line(tmp_path, after_s):
    """Through the command line, as the signals are taken there; Ray's own handler would print a stack trace."""
    endless = "tokens: 50M, context: 32, batch: 4, lr: 1e-3, precision: fp32, compile: off"
    study = write_study(tmp_path, train=f"train: {{data: {{text: corpus.txt}}, {endless}}}")
    command = [Path(sys.executable).parent / "archlab", "run", study, "--store", tmp_path / "store", "--no-track"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    until(lambda: any("archlab.search.executors.forkserver" in each for each in descendants(run.pid).values()))
    time.sleep(after_s)
    processes = descendants(run.pid)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 143, output
    assert "SIGTERM received" not in output, output
    assert "Traceback" not in output, output
    until_gone(processes)
