"""Trials of several processes under Ray: they live and die as one, and go on from what they left."""

import json
import os
import signal
import tempfile
import threading

import pytest

from archlab.search.executors.executor import LOST
from archlab.search.executors.forkserver import ForkServer
from archlab.search.executors.group_end import Ends, ask
from archlab.search.executors.process_group import Parallel
from archlab.search.executors.ray_executor import RayExecutor
from archlab.search.executors.resources import Resources
from archlab.search.running.driver import drive
from archlab.search.sections.budget.spec import Budget
from archlab.search.utils.quantities import Duration
from tests.search.processes import alive
from tests.search.study_kit import go, make_store, rows_of, steps_run, toy, until

ENTRY = "tests.search.toy_gang:train"
TWO = Resources(parallel=Parallel(data=2))
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a gang of two takes two cores")


def ranks_of(store, trial):
    """What each rank wrote of itself."""
    folder = store.trial_folder(trial.key)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([(1, {"outcome": {}}), (0, {"outcome": {"state": "complete"}})], {"outcome": {"state": "complete"}}),
        (
            [(0, {"failure": "user", "message": "lost a peer"}), (1, {"failure": "crash", "message": "SIGKILL"})],
            {"failure": "crash", "message": "rank 1: SIGKILL"},
        ),
        (
            [(1, {"failure": "crash", "message": "gone"}), (0, {"failure": "interrupted", "message": "at step 3"})],
            {"failure": "interrupted", "message": "at step 3"},
        ),
        (
            [(0, {"failure": "oom", "message": "too much"}), (1, {"failure": "node", "message": "no power"})],
            {"failure": "node", "message": "rank 1: no power"},
        ),
        (
            [(0, {"failure": "crash", "message": f"{LOST}: closed"}), (1, {"failure": "crash", "message": "SIGSEGV"})],
            {"failure": "crash", "message": "rank 1: SIGSEGV"},
        ),
        (
            [(1, {"failure": "user", "message": "first"}), (0, {"failure": "user", "message": "second"})],
            {"failure": "user", "message": "rank 1: first"},
        ),
    ],
    ids=["result", "crash", "interrupted", "node", "lost", "first"],
)
def test_a_gang_ends_as_rank_0_says_or_as_the_worst_failure(ends, told):
    gang = Ends(2)
    for rank, answer in ends:
        assert not gang.over()
        gang.add(rank, answer)
    assert gang.over()
    assert gang.answer() == told


def test_when_one_rank_dies_all_are_killed(tmp_path):
    """Without Ray: the ranks are those of a fork server, one of them hangs and the other one dies."""
    server = ForkServer("tests.search.toy_trainer:train", 1)
    store, trial = make_store(tmp_path), toy(1, steps=1, fault={"kind": "hang", "step": 0})
    store.add_trials("s", rows_of(trial))
    other = toy(2, fault={"kind": "exit", "step": 0}, holds=[0])
    store.add_trials("s", rows_of(trial, other))
    jobs = [
        {"entry": "tests.search.toy_trainer:train", "folder": str(store.trial_folder(each.key)), "cpus": 1}
        | {"data_root": str(tmp_path), "attempt": store.claim(each.key, "s"), "environment": {}}
        for each in (trial, other)
    ]

    def let_it_die():
        until(lambda: steps_run(tmp_path)[1]["1/0"])
        go(tmp_path, 0)

    thread = threading.Thread(target=let_it_die)
    thread.start()
    answer = ask(server.address, jobs)
    thread.join()
    assert answer == {"failure": "crash", "message": "rank 1: the trial's process exited with code 3"}
    (hanging,) = {int(line.split()[2]) for line in (tmp_path / "steps.log").read_text().splitlines() if "1/0" in line}
    assert not alive(hanging), "a rank outlives the answer"
    server.stop()


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    """One Ray for the whole file."""
    executor = RayExecutor(ENTRY, tmp_path_factory.mktemp("gang"), TWO)
    with pytest.MonkeyPatch.context() as patch:  # cores that other studies on this machine hold are none of ours
        tempfile.gettempdir()
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("cores")))
        executor.start()
    yield executor
    executor.close()


@pytest.fixture(autouse=True)
def fresh_log(request):
    """Each test counts its own steps, and holds its own trials."""
    if "executor" in request.fixturenames:
        root = request.getfixturevalue("executor")._data_root
        for left in (root / "steps.log", *root.glob("go-*")):
            left.unlink(missing_ok=True)


def run(executor, store, *trials, **options):
    return drive(store, "s", lambda _: rows_of(*trials), executor, **options)


@pytest.mark.slow
def test_each_rank_has_a_process_and_a_core_of_its_own(executor, tmp_path):
    store, trial = make_store(tmp_path), toy(1)
    assert run(executor, store, trial).exit_code == 0
    first, second = ranks_of(store, trial)
    assert first["pid"] != second["pid"]
    assert len(first["cores"]) == len(second["cores"]) == 1
    assert first["cores"] != second["cores"]
    assert executor.slots == len(os.sched_getaffinity(0)) // 2


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_costs_one_retry_from_the_common_checkpoint(executor, tmp_path, dying):
    store, trial, other = make_store(tmp_path), toy(1, steps=8, step_s=0.1, holds=[5]), toy(2)

    def killer():
        until(lambda: steps_run(executor._data_root)[0]["1/0", 3])
        os.kill(ranks_of(store, trial)[dying]["pid"], signal.SIGKILL)
        go(executor._data_root, 5)

    thread = threading.Thread(target=killer)
    thread.start()
    assert run(executor, store, trial, other).exit_code == 0
    thread.join()
    assert [row["attempt"] for row in store.study_trials("s")] == [2, 1]
    reason = next(event["detail"]["reason"] for event in store.events("s") if event["kind"] == "planned")
    assert reason == f"crash: rank {dying}: the trial's process was killed by SIGKILL"
    steps, starts = steps_run(executor._data_root)
    assert starts["1/0"] == 2
    assert sum(count for (name, _), count in steps.items() if name == "1/0") <= 9
    undisturbed = make_store(tmp_path / "again")
    assert run(executor, undisturbed, trial).exit_code == 0
    assert [row["result"]["x"] for row in store.study_trials("s")][:1] == [
        row["result"]["x"] for row in undisturbed.study_trials("s")
    ]


@pytest.mark.slow
def test_a_gang_whose_rank_always_dies_fails_and_the_next_one_runs(executor, tmp_path):
    store = make_store(tmp_path)
    broken = toy(1, steps=3, fault={"kind": "exit", "step": 1, "rank": 1})
    assert run(executor, store, broken, toy(2)).exit_code == 1
    rows = store.study_trials("s")
    assert [(row["state"], row["attempt"]) for row in rows] == [("failed", 3), ("complete", 1)]
    assert rows[0]["reason"] == "crash: rank 1: the trial's process exited with code 3"


@pytest.mark.slow
def test_a_gang_that_hangs_is_killed_whole(executor, tmp_path):
    store, hanging = make_store(tmp_path), toy(1, fault={"kind": "hang", "step": 1, "rank": 1})
    assert run(executor, store, hanging, hang_s=5.0).exit_code == 1
    assert run(executor, store, hanging, toy(2)).exit_code == 1
    rows = store.study_trials("s")
    assert [(row["state"], row["attempt"]) for row in rows] == [("failed", 2), ("complete", 1)]
    assert rows[0]["reason"] == "hang: no progress for 5 s"
    until(lambda: not any(alive(rank["pid"]) for rank in ranks_of(store, hanging)))


@pytest.mark.slow
def test_a_pruned_gang_frees_its_cores(executor, tmp_path):
    store, long = make_store(tmp_path), toy(1, steps=10_000, step_s=0.05)
    summary = run(executor, store, long, toy(2), should_prune=lambda key, step, _: key == long.key and step > 2)
    assert (summary.exit_code, summary.counts) == (0, {"pruned": 1, "complete": 1, "reused": 0})
    until(lambda: not any(alive(rank["pid"]) for rank in ranks_of(store, long)))


@pytest.mark.slow
def test_a_gang_that_is_asked_to_stop_leaves_a_checkpoint_and_goes_on(executor, tmp_path):
    store, trial = make_store(tmp_path), toy(1, steps=30, step_s=0.05, holds=[20])
    assert executor.slots  # Ray is up, so that the trial has its time
    assert run(executor, store, trial, limits=Budget(wall=Duration(3.0))).exit_code == 3
    (row,) = store.study_trials("s")
    assert row["state"] == "planned"
    go(executor._data_root, 20)
    assert run(executor, store, trial).exit_code == 0
    steps, _ = steps_run(executor._data_root)
    assert max(steps.values()) == 1, "a step ran twice"
