"""Trials under Ray: fresh pinned processes, deaths told apart, loopback only, nothing infeasible waits."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from archlab.search.executors.executor import ExecutorError, Failure, Finished, ResourcesError
from archlab.search.executors.forkserver import ForkServer
from archlab.search.executors.group_end import Ends, ask
from archlab.search.executors.inline import InlineExecutor
from archlab.search.executors.process_group import Parallel
from archlab.search.executors.ray_executor import RayExecutor, _Launched
from archlab.search.executors.resources import Resources
from archlab.search.hardware.cores import pin
from archlab.search.hardware.facts import usable_cores
from archlab.search.running.driver import drive
from archlab.search.trial.outcome_files import read_attempt
from archlab.search.utils.quantities import Duration, Memory
from tests.search.processes import alive, descendants, listeners
from tests.search.study_kit import ENTRY, HERE, ROOT, go, make_store, results, rows_of, steps_run, toy, until

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    """One Ray for the whole file, with two trials at once."""
    before = descendants()  # of other files' tests, such as a server that they share; it may start more meanwhile
    executor = RayExecutor(ENTRY, tmp_path_factory.mktemp("ray"))
    with pytest.MonkeyPatch.context() as patch:  # cores that other studies on this machine hold are none of ours
        tempfile.gettempdir()
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("cores")))
        executor.start()
    yield executor
    started = descendants(without=before)
    children = {pid: command for pid, command in started.items() if "_tracker" not in command}
    executor.close()
    print("must end:", children)
    until(lambda: not any(map(alive, children)))


@pytest.fixture(autouse=True)
def fresh_log(executor):
    """Each test counts its own steps, and holds its own trials."""
    for left in (executor._data_root / "steps.log", *executor._data_root.glob("go-*")):
        left.unlink(missing_ok=True)


def run(executor, store, *trials, **options):
    return drive(store, "s", lambda _: rows_of(*trials), executor, **options)


def test_trials_get_the_results_that_they_get_inline(executor, tmp_path, monkeypatch):
    """And the time between checkpoints that the study says."""
    monkeypatch.setattr(executor, "_wants", executor._wants.replace(checkpoint=Duration(7.0)))
    trials = [toy(x) for x in range(1, 7)]
    here, there = make_store(tmp_path / "inline"), make_store(tmp_path / "ray")
    drive(here, "s", lambda _: rows_of(*trials), InlineExecutor(ENTRY, tmp_path, 7.0))
    assert run(executor, there, *trials).exit_code == 0
    assert results(there) == results(here)
    assert {row["result"]["checkpoint_s"] for row in there.study_trials("s")} == {7.0}


def test_trials_pause_and_go_on_to_the_same_results(executor, tmp_path):
    trials = [toy(x) for x in range(1, 4)]
    here, there = make_store(tmp_path / "inline"), make_store(tmp_path / "ray")
    drive(here, "s", lambda _: rows_of(*trials), InlineExecutor(ENTRY, tmp_path))
    paused = drive(there, "s", lambda _: rows_of(*trials, until=2), executor)
    assert paused.counts == {"paused": 3, "reused": 0}
    assert {row["result"]["step"] for row in there.study_trials("s")} == {2}
    assert run(executor, there, *trials).exit_code == 0
    assert results(there) == results(here)


def test_each_trial_has_a_process_and_a_core_of_its_own(executor, tmp_path):
    run(executor, make_store(tmp_path), *(toy(x, step_s=0.1) for x in range(1, 5)))
    lines = [line.split(maxsplit=4) for line in (executor._data_root / "steps.log").read_text().splitlines()]
    by_trial = {name: {(pid, cores) for each, _, pid, _, cores in lines if each == name} for name, *_ in lines}
    assert all(len(found) == 1 for found in by_trial.values())
    (processes, cores) = zip(*(next(iter(found)) for found in by_trial.values()), strict=True)
    assert len(set(processes)) == 4
    assert set(cores) == {f"[{core}]" for core in sorted(os.sched_getaffinity(0))[: executor.slots]}


@pytest.mark.parametrize("kind", ["raise", "unpicklable"])
def test_an_exception_fails_its_trial_alone(executor, tmp_path, kind):
    store = make_store(tmp_path)
    assert run(executor, store, toy(1), toy(2, fault={"kind": kind, "step": 1}), toy(3)).exit_code == 1
    assert [(row["state"], row["attempt"]) for row in store.study_trials("s")] == [
        ("complete", 1),
        ("failed", 1),
        ("complete", 1),
    ]
    assert "Traceback" in (store.trial_folder(store.study_trials("s")[1]["key"]) / "error.txt").read_text()


@pytest.mark.parametrize(
    ("kind", "how"), [("exit", "exited with code 3"), ("abort", "was killed by SIGABRT")], ids=["os._exit", "abort"]
)
def test_a_trial_whose_process_always_dies_fails_after_two_retries(executor, tmp_path, kind, how):
    store = make_store(tmp_path)
    assert run(executor, store, toy(1, fault={"kind": kind, "step": 1}), toy(2)).exit_code == 1
    row = store.study_trials("s")[0]
    assert (row["state"], row["attempt"], row["reason"]) == ("failed", 3, f"crash: the trial's process {how}")
    assert steps_run(executor._data_root)[0]["1/0", 0] == 1  # retries go on from the checkpoint


def kill_trial(store, trial):
    os.kill(read_attempt(store.trial_folder(trial.key))["pid"], signal.SIGKILL)


def kill_ray_worker(store, trial):
    """Of the trial that runs alone."""
    for pid, command in descendants().items():
        if command.startswith("ray::run_attempt"):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_trial, kill_ray_worker])
def test_a_killed_trial_goes_on_as_attempt_two(executor, tmp_path, kill):
    store, trial = make_store(tmp_path), toy(1, steps=8, step_s=0.1, holds=[5])

    def killer():
        until(lambda: steps_run(executor._data_root)[0]["1/0", 3])
        first = read_attempt(store.trial_folder(trial.key))["pid"]
        kill(store, trial)
        until(lambda: not alive(first))  # which may come to its end first: the worker was another process
        go(executor._data_root, 5)

    thread = threading.Thread(target=killer)
    thread.start()
    assert run(executor, store, trial).exit_code == 0
    thread.join()
    assert store.study_trials("s")[0]["attempt"] == 2
    assert [event["kind"] for event in store.events("s")] == ["running", "planned", "running", "complete"]
    steps, starts = steps_run(executor._data_root)
    assert starts["1/0"] == 2
    assert sum(steps.values()) <= 9  # at most the step that had no checkpoint yet ran twice


def test_a_fork_server_that_dies_is_started_again_and_costs_its_trial_nothing(executor, tmp_path):
    """Three times, which as crashes of the trial would be one too many. The third one dies before it serves."""
    store, trial = make_store(tmp_path), toy(1, steps=8, step_s=0.1, holds=[3, 6])

    def killer():
        for held in (3, 6):
            until(lambda held=held: steps_run(executor._data_root)[0]["1/0", held - 1])
            server, first = executor._server._process, read_attempt(store.trial_folder(trial.key))
            os.kill(server.pid, signal.SIGKILL)
            until(lambda first=first: not alive(first["pid"]))
            go(executor._data_root, held)
            until(lambda server=server: executor._server._process is not server)
        os.kill(executor._server._process.pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    assert run(executor, store, trial, toy(2)).exit_code == 0
    thread.join()
    assert [row["state"] for row in store.study_trials("s")] == ["complete", "complete"]
    reasons = [event["detail"]["reason"] for event in store.events("s", trial.key) if event["kind"] == "planned"]
    assert len(reasons) >= 2
    assert all(reason.startswith("node: lost its fork server: ") for reason in reasons), reasons
    steps, _ = steps_run(executor._data_root)
    assert sum(steps["1/0", step] for step in range(8)) <= 8 + len(reasons)  # each went on from its checkpoint


@pytest.mark.parametrize(("deaths", "kind"), [(1, "node"), (4, "node"), (5, "infra")])
def test_a_trial_under_which_every_fork_server_dies_ends_the_run_as_nothing_else_would(tmp_path, deaths, kind):
    executor, answer = RayExecutor(ENTRY, tmp_path), {"failure": "node", "message": "lost its fork server: gone"}
    for attempt in range(1, deaths + 1):
        launched = _Launched("key", attempt, tmp_path, {}, Ends(1))
        launched.ends.add(0, answer)
        finished = executor._collect(None, launched)
    assert finished == Finished("key", deaths, Failure(kind, answer["message"]))


@pytest.mark.parametrize(("attempt", "node"), [(2, "gone"), (2, "here"), (1, "gone")])
def test_only_an_attempt_whose_machine_has_left_is_given_up(tmp_path, attempt, node):
    class Ray:  # Ray itself would say so six minutes later, where a cable was cut
        nodes = staticmethod(lambda: [{"NodeID": "gone", "NodeManagerAddress": "10.0.0.2", "Alive": False}])
        cancel = staticmethod(lambda task, force: None)

    executor = RayExecutor(ENTRY, tmp_path, address="10.0.0.1:6379")
    launched = _Launched("key", 2, tmp_path, {"task": 0}, Ends(1))
    executor._running["task"] = launched
    (tmp_path / "attempt.json").write_text(json.dumps({"attempt": attempt, "node": node}))
    executor._give_up(Ray, [launched])
    given_up = (attempt, node) == (2, "gone")
    assert (not executor._running, launched.ends.over()) == (given_up, given_up)
    if given_up:
        answer = {"failure": "node", "message": "the machine 10.0.0.2 has left the cluster"}
        assert launched.ends.answer() == answer


@pytest.mark.slow
def test_a_hung_trial_is_killed_and_fails_after_one_retry(executor, tmp_path):
    store = make_store(tmp_path)
    hanging = toy(1, fault={"kind": "hang", "step": 1})
    assert run(executor, store, hanging, toy(2), hang_s=3.0).exit_code == 1
    rows = store.study_trials("s")
    assert [row["state"] for row in rows] == ["failed", "complete"]
    assert (rows[0]["attempt"], rows[0]["reason"]) == (2, "hang: no progress for 3 s")
    until(lambda: not alive(read_attempt(store.trial_folder(hanging.key))["pid"]))


def test_a_pruned_trial_is_killed_and_frees_its_slot(executor, tmp_path):
    store, long = make_store(tmp_path), toy(1, steps=10_000, step_s=0.05)
    summary = run(executor, store, long, toy(2), should_prune=lambda key, step, _: key == long.key and step > 2)
    assert (summary.exit_code, summary.counts) == (0, {"pruned": 1, "complete": 1, "reused": 0})
    until(lambda: not alive(read_attempt(store.trial_folder(long.key))["pid"]))


def test_ray_listens_on_loopback_only_and_its_folder_is_private(executor):
    assert executor.slots == len(os.sched_getaffinity(0))
    found = listeners(descendants())
    assert found
    assert found <= LOOPBACK
    assert executor._folder.stat().st_mode & 0o777 == 0o700


def test_ray_runs_without_dashboard_autoscaler_and_log_monitor(executor):
    assert executor.slots
    running = " ".join(descendants().values())
    assert "/raylet/raylet " in running
    for unused in ("dashboard/dashboard.py", "monitor.py", "log_monitor.py"):
        assert unused not in running


def test_a_ray_that_was_imported_too_early_is_refused_as_it_would_listen_everywhere(tmp_path):
    code = (
        "import sys, types; sys.modules['ray'] = types.ModuleType('ray')\n"
        "from archlab.search.executors.ray_start import set_environment\nset_environment(local=True)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "ExecutorError: ray was imported before" in found.stderr


def test_an_executor_that_nobody_used_is_closed_without_waiting_for_ray(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from archlab.search.executors.ray_executor import RayExecutor\n"
        f"executor = RayExecutor({ENTRY!r}, Path(sys.argv[1])); executor.start(); time.sleep(1)\n"
        "executor.close(); assert executor._keeper.is_alive() or executor._up.is_set(); sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=240).returncode == 7


def test_a_process_has_one_ray_at_a_time(executor, tmp_path, monkeypatch):
    assert executor.slots
    monkeypatch.setattr("archlab.search.executors.ray_executor._SHUTDOWN_S", 0.1)
    second = RayExecutor(ENTRY, tmp_path)
    with pytest.raises(ExecutorError, match="close it first"):
        _ = second.slots
    second.close()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (Resources(cpus=99), "asks for 99 cores; this machine has {cores} cores"),
        (Resources(gpus=64.0), "asks for 1 core and 64 GPUs; this machine has {cores} cores, 0 GPUs"),
        (Resources(memory=Memory(10**15)), "asks for 1 core and 1e+06 GB of memory; this machine has"),
        (Resources(parallel=Parallel(data=99)), "asks for 1 core for each of 99 processes; this machine has"),
    ],
    ids=["cores", "gpus", "memory", "gang"],
)
def test_more_than_there_is_is_refused_at_once_with_what_there_is(tmp_path, asked, told):
    if asked.gpus and torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    executor = RayExecutor(ENTRY, tmp_path, asked)
    with pytest.raises(ResourcesError, match=re.escape(told.format(cores=usable_cores()))):
        executor.start()
    assert executor._keeper is None, "Ray was started"


def test_cores_are_given_out_once(tmp_path):
    """In a process of its own, as pinning lasts."""
    code = (
        "import os, sys; from pathlib import Path; from archlab.search.hardware.cores import pin\n"
        "print(pin(1, Path(sys.argv[1])), flush=True); sys.stdin.read()"
    )
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-c", code, str(tmp_path)]
    holders = [subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True) for _ in range(len(cores) + 1)]
    given = [holder.stdout.readline().strip() for holder in holders]
    assert sorted(given) == sorted([f"[{core}]" for core in cores] + ["[]"])
    for holder in holders:
        holder.communicate()
    assert pin(len(cores) + 1, tmp_path) == []


@pytest.fixture
def server():
    """A fork server for the toy."""
    server = ForkServer(ENTRY, 1)
    yield server
    server.stop()


def job_of(store, trial, data_root):
    """What the executor would ask for."""
    store.add_trials("s", rows_of(trial))
    attempt = store.claim(trial.key, "s")
    paths = {"folder": str(store.trial_folder(trial.key)), "data_root": str(data_root)}
    return {"entry": ENTRY, **paths, "attempt": attempt, "cpus": 1, "environment": {"MARK": "1"}}


def test_the_fork_server_has_one_thread_when_it_has_imported_the_trainer(server, tmp_path):
    assert ask(server.address, [job_of(make_store(tmp_path), toy(), tmp_path)])["outcome"]["state"] == "complete"
    status = Path(f"/proc/{server._process.pid}/status").read_text()
    assert "Threads:\t1\n" in status


def test_hanging_up_kills_the_trial_and_not_the_server(server, tmp_path):
    store, trial = make_store(tmp_path), toy(1, step_s=1000.0)
    job = job_of(store, trial, tmp_path)
    code = "import json, sys; from archlab.search.executors.group_end import ask;"
    code += "ask(sys.argv[1], [json.loads(sys.argv[2])])"
    caller = subprocess.Popen([sys.executable, "-c", code, server.address, json.dumps(job)], cwd=ROOT)
    pid = until(lambda: read_attempt(store.trial_folder(trial.key)).get("pid"))
    caller.kill()
    caller.wait()
    until(lambda: not alive(pid))
    assert ask(server.address, [job_of(store, toy(2), tmp_path)])["outcome"]["state"] == "complete"


def test_when_the_starter_of_a_fork_server_dies_its_trials_die(tmp_path):
    store, trial = make_store(tmp_path), toy(1, step_s=1000.0)
    job = job_of(store, trial, tmp_path)
    code = (
        "import json, sys; from archlab.search.executors.forkserver import ForkServer\n"
        "from archlab.search.executors.group_end import ask\n"
        f"ask(ForkServer({ENTRY!r}, 1).address, [json.loads(sys.argv[1])])"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, json.dumps(job)], cwd=ROOT)
    pid = until(lambda: read_attempt(store.trial_folder(trial.key)).get("pid"))
    starter.kill()
    starter.wait()
    until(lambda: not alive(pid))
    assert not (store.trial_folder(trial.key) / "result.json").exists()


def test_a_trainer_that_cannot_be_imported_is_the_trials_failure(tmp_path):
    server = ForkServer("no_such_module:train", 1)
    store = make_store(tmp_path)
    answer = ask(server.address, [{**job_of(store, toy(), tmp_path), "entry": "no_such_module:train"}])
    assert Failure(**{"kind": answer["failure"], "message": answer["message"]}).kind == "user"
    assert "No module named" in (store.trial_folder(toy().key) / "error.txt").read_text()
    server.stop()


def test_a_file_of_the_folder_is_no_module_of_a_trial(tmp_path, monkeypatch):
    """A user's selectors.py beside the study is neither run nor in the way."""
    store = make_store(tmp_path)
    (tmp_path / "selectors.py").write_text("open('was_run', 'w')\nraise ImportError")
    monkeypatch.chdir(tmp_path)
    server = ForkServer(ENTRY, 1)
    assert ask(server.address, [job_of(store, toy(), tmp_path)])["outcome"]["state"] == "complete"
    server.stop()
    assert not (tmp_path / "was_run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trials", "gangs"])
def test_a_machine_of_a_cluster_that_dies_costs_its_trials_nothing(tmp_path, what):
    """Ray nodes on this machine; the driver joins by address. A gang has its processes on two of them."""
    found = subprocess.run(
        [sys.executable, str(HERE / "drive_cluster.py"), str(tmp_path), what],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    store = make_store(tmp_path)
    assert {row["state"] for row in store.study_trials("s")} == {"complete"}
    assert "planned" in [event["kind"] for event in store.events("s")]  # those of the machine that died
    assert all(row["reason"] is None for row in store.study_trials("s"))
    charged = [event["detail"].get("reason", "") for event in store.events("s") if event["kind"] == "planned"]
    assert not any(reason.startswith(("crash: ", "user: ")) for reason in charged), charged
