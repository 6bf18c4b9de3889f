"""How a run ends: told to the trackers, killed, interrupted, and gone on with."""

import json
import signal

import pytest

from tests.search.study_kit import Driver, drive_inline, go, make_store, results, rows_of, steps_run, toy, until


def test_the_shipper_hears_of_every_start_and_end_and_is_closed(tmp_path):
    heard = []

    class Shipper:
        def start(self):
            heard.append("start")

        def notice(self, key):
            heard.append(key)

        def close(self, timeout):
            heard.append("close")

    drive_inline(make_store(tmp_path), rows_of(toy(1), toy(2)), shipper=Shipper())
    assert heard == ["start", *[toy(1).key] * 2, *[toy(2).key] * 2, "close"]


def test_a_signal_while_the_trackers_are_waited_for_leaves_them_and_not_the_result(tmp_path):
    heard, seen = [], []

    class Shipper:
        def start(self):
            heard.append("start")

        def notice(self, key):
            heard.append("notice")

        def close(self, timeout):
            signal.raise_signal(signal.SIGINT)
            heard.append("close")

        def leave(self):
            heard.append("leave")

    summary = drive_inline(make_store(tmp_path), rows_of(toy()), shipper=Shipper(), on_event=seen.append)
    assert heard == ["start", "notice", "notice", "leave"]
    assert summary.exit_code == 0 and summary.counts["complete"] == 1
    assert seen[-1]["event"] == "summary"


def test_a_run_that_was_asked_to_stop_hardly_waits_for_the_trackers(tmp_path):
    given = []

    class Shipper:
        def __init__(self, stops):
            self.stops = stops

        def start(self):
            pass

        def notice(self, key):
            if self.stops:
                self.stops = False
                signal.raise_signal(signal.SIGINT)

        def close(self, timeout):
            given.append(timeout)

    for stops in (False, True):
        drive_inline(make_store(tmp_path / str(stops)), rows_of(toy()), shipper=Shipper(stops))
    assert given[1] < given[0] / 5


TRIALS = [toy(x, step_s=0.05, steps=6) for x in range(1, 5)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What the four trials give when nothing happens."""
    store = make_store(tmp_path_factory.mktemp("whole"))
    drive_inline(store, rows_of(*TRIALS))
    return results(store)


@pytest.mark.parametrize("steps", [*(pytest.param(at, marks=pytest.mark.slow) for at in (1, 17)), 8])
def test_a_study_killed_at_any_moment_ends_with_the_same_results(tmp_path, uninterrupted, steps):
    driver = Driver(tmp_path, TRIALS)
    until(lambda: sum(steps_run(tmp_path)[0].values()) >= steps)
    driver.process.kill()
    driver.end()
    finished = {row["key"] for row in make_store(tmp_path).study_trials("s") if row["state"] == "complete"}
    starts = steps_run(tmp_path)[1]
    assert Driver(tmp_path, TRIALS).end()[0] == 0
    assert results(make_store(tmp_path)) == uninterrupted
    again = steps_run(tmp_path)[1]
    assert all(
        again[f"{trial.model['x']}/0"] == starts[f"{trial.model['x']}/0"] for trial in TRIALS if trial.key in finished
    )
    assert sum(steps_run(tmp_path)[0].values()) <= 4 * 6 + 1  # at most the step that was not yet in a checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 7])
def test_a_study_killed_while_its_trials_go_to_their_pauses_repeats_at_most_a_step(tmp_path, uninterrupted, steps):
    driver = Driver(tmp_path, TRIALS, until=3)
    until(lambda: sum(steps_run(tmp_path)[0].values()) >= steps)
    driver.process.kill()
    driver.end()
    code, output = Driver(tmp_path, TRIALS, until=3).end()
    assert (code, json.loads(output)["counts"]) == (0, {"paused": 4, "reused": 0})
    assert max(step for _, step in steps_run(tmp_path)[0]) == 2  # the third step
    assert Driver(tmp_path, TRIALS).end()[0] == 0
    assert results(make_store(tmp_path)) == uninterrupted
    assert sum(steps_run(tmp_path)[0].values()) <= 4 * 6 + 1


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_first_signal_leaves_checkpoints_and_planned_rows(tmp_path, uninterrupted, number):
    trials = [toy(x, step_s=0.05, steps=6, holds=[3] if x == 2 else []) for x in range(1, 5)]
    driver = Driver(tmp_path, trials)
    until(lambda: sum(steps_run(tmp_path)[0].values()) >= 8)
    driver.process.send_signal(number)
    code, output = driver.end()
    assert code == 128 + number, output
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} == {"complete", "planned"}
    go(tmp_path, 3)
    assert drive_inline(store, rows_of(*trials)).exit_code == 0
    assert list(results(store).values()) == list(uninterrupted.values())
    assert set(steps_run(tmp_path)[0].values()) == {1}


def test_the_second_signal_ends_it_at_once_and_it_can_be_resumed(tmp_path):
    slow = [toy(1, step_s=1000.0)]
    driver = Driver(tmp_path, slow)
    until(lambda: steps_run(tmp_path)[1])
    driver.process.send_signal(signal.SIGINT)
    until(lambda: list(tmp_path.glob("trials/*/*/stop-*")))
    assert driver.process.poll() is None
    driver.process.send_signal(signal.SIGINT)
    code, output = driver.end()
    assert code == 130, output
    assert "at once" in output
    assert [row["state"] for row in make_store(tmp_path).study_trials("s")] == ["running"]
