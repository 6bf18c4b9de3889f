"""Who hangs: no progress while we watched, whatever clocks and machines did meanwhile."""

import json
import os
import signal
import time

import pytest

from archlab.search.trial.metrics import GAP_S, Watch
from tests.search.study_kit import Driver, make_store, results, steps_run, toy, until


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def watched(folder, hang_s=60.0):
    """A watch on an attempt that has started, and its clock."""
    (folder / "attempt.json").write_text(json.dumps({"attempt": 1}))
    clock = Clock()
    watch = Watch(folder, 1, hang_s, clock)
    assert not watch.hangs()
    return watch, clock


def look(watch, clock, seconds, every=0.5):
    """Whether the watch ever said that the attempt hangs while the driver ticked for so long."""
    hung = False
    for _ in range(round(seconds / every)):
        clock.now += every
        hung |= watch.hangs()
    return hung


def test_an_attempt_that_writes_nothing_hangs_after_its_time_and_again_if_it_lasts(tmp_path):
    watch, clock = watched(tmp_path)
    assert not look(watch, clock, 59)
    assert look(watch, clock, 3)
    assert watch.hung
    assert not look(watch, clock, 58)
    assert look(watch, clock, 4)


def test_progress_starts_the_clock_again(tmp_path):
    watch, clock = watched(tmp_path)
    for step in range(5):
        assert not look(watch, clock, 50)
        (tmp_path / "metrics.jsonl").write_text("x" * step)
    assert look(watch, clock, 62)


def test_an_attempt_that_waits_for_its_process_does_not_hang(tmp_path):
    clock = Clock()
    watch = Watch(tmp_path, 1, 60.0, clock)
    assert not look(watch, clock, 1000)
    (tmp_path / "attempt.json").write_text(json.dumps({"attempt": 1}))
    assert not look(watch, clock, 60)
    assert look(watch, clock, 2)


@pytest.mark.parametrize("gap_s", [120.0, 86400.0])
def test_the_time_in_which_nobody_watched_counts_for_little(tmp_path, gap_s):
    """A suspended laptop, a paused machine, Ctrl-Z and fg: after them the trial has its time to show that it lives."""
    watch, clock = watched(tmp_path)
    look(watch, clock, 30)
    clock.now += gap_s
    assert not watch.hangs()
    assert not look(watch, clock, 60 - 30 - GAP_S)
    assert look(watch, clock, 2)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_the_wall_clock_may_jump(tmp_path, jump_s):
    """Files are compared with themselves alone: lines that come from an hour ago are as new as any."""
    watch, clock = watched(tmp_path)
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 5):
        path.write_text("x" * step)
        os.utime(path, (time.time() + jump_s, time.time() + jump_s))
        assert not look(watch, clock, 50)


@pytest.mark.slow
def test_a_driver_that_is_stopped_and_continued_goes_on(tmp_path):
    """Ctrl-Z and fg, with the trial in the same process: nothing is lost, nothing runs twice."""
    trials = [toy(x, steps=6, step_s=0.05) for x in range(1, 4)]
    driver = Driver(tmp_path, trials)
    until(lambda: sum(steps_run(tmp_path)[0].values()) >= 4)
    driver.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    driver.process.send_signal(signal.SIGCONT)
    code, output = driver.end()
    assert code == 0, output
    assert set(steps_run(tmp_path)[0].values()) == set(steps_run(tmp_path)[1].values()) == {1}
    assert [state for state, _ in results(make_store(tmp_path)).values()] == ["complete"] * 3
