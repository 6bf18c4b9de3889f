"""Runs trials by Ray, on this machine or on a running cluster; Ray starts while the study is being planned."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archlab.search.executors.executor import (
    SERVERLESS,
    ExecutorError,
    Failure,
    FailureKind,
    Finished,
    ResourcesError,
)
from archlab.search.executors.forkserver import ForkServer
from archlab.search.executors.group_end import Ends
from archlab.search.executors.ray_cluster import (
    blame_machines,
    check_machines,
    dead_machines,
    launch_gang,
    of_all,
    placed_on,
    trains_on,
)
from archlab.search.executors.ray_start import (
    head_is_dead,
    only_what_trials_need,
    say_nothing,
    set_environment,
    signals_as_they_are,
    started_at,
    tree_naming,
)
from archlab.search.executors.ray_task import run_attempt, warm
from archlab.search.executors.resources import Resources, Room
from archlab.search.executors.shipping import ours, runtime_environment
from archlab.search.utils.exits import exit_would_hang
from archlab.search.utils.temporary import private_folder

_SHUTDOWN_S = 10.0
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least: jobs and results are a few kilobytes
_NODES_S = 5.0  # how long is believed what machines a cluster has
_SERVERS = 5  # that may die under one trial; then none would live
_REVIVED = 100  # times that a fork server is started again in a run; then none would live
_one_ray = threading.Lock()  # a process has one Ray at a time


@dataclass
class _Launched:
    """An attempt that Ray has: its tasks by rank, one for all ranks of a machine of ours, and where they are placed."""

    key: str
    attempt: int
    folder: Path
    tasks: dict[Any, int]
    ends: Ends
    group: Any = None


class RayExecutor:
    """One Ray task per trial, never repeated by Ray itself; each trial in fresh processes on cores of their own.

    `entry` is "module:function" of the trainer, `resources` what each process of a trial gets. Without `address` a Ray
    of our own is started, which listens on loopback only and ends with us. On a cluster the code is sent along, and
    the processes of a trial may be on several machines: each has a bundle of a placement group.
    """

    def __init__(
        self, entry: str, data_root: Path, resources: Resources | None = None, address: str | None = None
    ) -> None:
        self._entry, self._data_root, self._cluster = entry, data_root, address
        self._wants = resources or Resources()
        self._keeper: threading.Thread | None = None
        self._up, self._down = threading.Event(), threading.Event()
        self._boot_error: BaseException | None = None
        self._speak_again: Callable[[], None] = lambda: None
        self._server: ForkServer | None = None
        self._folder: Path | None = None
        self._ray: Any = None
        self._options: dict[str, Any] = {}
        self._task: Any = None
        self._slots, self._slots_until, self._dead_until = 0, 0.0, 0.0
        self._running: dict[Any, _Launched] = {}  # by task
        self._cancelled: set[str] = set()
        self._revived = 0
        self._serverless: Counter[str] = Counter()  # by key, how often its fork server died

    def start(self) -> None:
        """Begins to start Ray and to import the trainer, both in the background. Raises ResourcesError at once."""
        if self._keeper is not None:
            return
        if self._cluster is None:
            self._wants.slots([Room.here(gpus=bool(self._wants.gpus))])
            self._folder = private_folder("ray")
            self._server = ForkServer(self._entry, self._wants.cpus)
        self._keeper = threading.Thread(target=self._keep_ray, name="keep Ray", daemon=True)
        self._keeper.start()

    def _keep_ray(self) -> None:
        """The kernel kills Ray's processes when the thread that started them ends, so this one stays to the end."""
        if not _one_ray.acquire(timeout=_SHUTDOWN_S):
            self._boot_error = ExecutorError("another executor of this process still has one; close it first")
            self._up.set()
            return
        try:
            self._start_ray()
        except BaseException as error:  # told to whoever needs Ray next, in `_ready`
            self._boot_error = error
        self._up.set()
        self._down.wait()
        if self._ray is not None:
            self._ray.shutdown()
        self._speak_again()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # Ray's processes may still write their logs
        _one_ray.release()

    def _start_ray(self) -> None:
        set_environment(local=self._cluster is None)
        self._ray = ray = importlib.import_module("ray")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        with signals_as_they_are():
            if self._folder is not None:
                room = Room.here()
                self._wants = self._wants.with_gpus(room.gpus)
                with only_what_trials_need():
                    ray.init(
                        num_cpus=int(room.cpus),
                        num_gpus=int(room.gpus),
                        _memory=int(room.memory),
                        include_dashboard=False,
                        object_store_memory=_OBJECT_STORE_BYTES,
                        _temp_dir=str(self._folder / "ray"),  # Ray opens it to everyone; the folder above is closed
                        **quiet,
                    )
            else:
                ours()  # of what is sent now
                self._speak_again = say_nothing()
                ray.init(address=self._cluster, runtime_env=runtime_environment(), **quiet)
                self._wants = self._wants.with_gpus(ray.cluster_resources().get("GPU", 0))
                check_machines(ray, self._data_root.parent)
        self._options = {"num_cpus": self._wants.cpus, "num_gpus": self._wants.gpus, "max_retries": 0}
        if self._wants.memory:
            self._options["memory"] = self._wants.memory.bytes
        for _ in range(self._wants.slots([room]) if self._folder is not None else 0):
            ray.remote(**of_all(self._options, self._wants.world))(warm).remote()  # its worker has our code by then
        self._task = ray.remote(run_attempt)

    def _ready(self) -> Any:
        """Ray, once it is up. Raises ExecutorError when it does not come up."""
        self.start()
        while not self._up.wait(1.0):  # in pieces, so that a signal gets through
            pass
        if self._boot_error is not None:
            where = f"Ray at {self._cluster}" if self._cluster else "Ray"
            raise ExecutorError(f"{where} can't be used: {self._boot_error}") from self._boot_error
        if self._folder is not None and head_is_dead():
            raise ExecutorError("Ray's head, its GCS, has died")
        return self._ray

    @property
    def slots(self) -> int:
        """Trials that fit at once. Raises ResourcesError when not even one fits, ExecutorError when one did before."""
        now = time.monotonic()
        if now >= self._slots_until:
            nodes = [node["Resources"] for node in self._ready().nodes() if node["Alive"]]
            if not nodes:  # it ends as it begins: no trial asks for too much
                raise ExecutorError("Ray has no machine left")
            rooms = [Room(node.get("CPU", 0), node.get("GPU", 0), node.get("memory", 0)) for node in nodes]
            try:
                self._slots, self._slots_until = self._wants.slots(rooms), now + _NODES_S
            except ResourcesError as error:
                if not self._slots:
                    raise
                raise ExecutorError(f"machines have left the cluster: {error}") from error
        return self._slots

    @property
    def gpus(self) -> float:
        """GPUs of a trial, those of all its processes."""
        self._ready()
        return (self._wants.gpus or 0.0) * self._wants.world

    def submit(self, key: str, folder: Path, attempt: int, until: int | None = None, entry: str | None = None) -> None:
        """Hands an attempt to Ray. Raises ExecutorError when Ray is not there."""
        ray = self._ready()
        memory = self._wants.memory.bytes if self._wants.memory else None
        job = {
            **{"entry": entry or self._entry, "folder": str(folder), "data_root": str(self._data_root)},
            **{"attempt": attempt, "until": until, "cpus": self._wants.cpus, "gpus": self._wants.gpus},
            **{"memory": memory, "parallel": self._wants.parallel.sizes, "ours": ours() if self._cluster else None},
            "checkpoint_s": None if entry else self._wants.checkpoint_s,  # what else is run writes none
        }
        if self._cluster and self._wants.world > 1:
            group, tasks = launch_gang(ray, self._task, job, self._options, self._wants.world)
        else:
            self._revive()
            address, options = self._server.address if self._server else "", of_all(self._options, self._wants.world)
            group, tasks = None, {self._task.options(**options).remote(job, address): 0}
        self._cancelled.discard(key)
        launched = _Launched(key, attempt, folder, tasks, Ends(len(tasks)), group)
        self._running.update(dict.fromkeys(tasks, launched))

    def wait(self, timeout: float) -> list[Finished]:
        """What ended, as soon as something did or after `timeout` seconds."""
        if not self._running:
            return []
        self._revive()
        ray, tasks = self._ready(), list(self._running)
        ready, _ = ray.wait(tasks, num_returns=1, timeout=timeout)
        if ready:
            ready, _ = ray.wait(tasks, num_returns=len(tasks), timeout=0)
        known = {id(launched): launched for launched in self._running.values()}
        for task in ready:
            launched = self._running.pop(task)
            launched.ends.add(launched.tasks.pop(task), self._answer(ray, task, launched))
        if self._cluster and time.monotonic() >= self._dead_until:
            self._dead_until = time.monotonic() + _NODES_S
            self._give_up(ray, list(known.values()))
        return [self._collect(ray, launched) for launched in known.values() if launched.ends.over()]

    def _give_up(self, ray: Any, launched: list[_Launched]) -> None:
        """Ends attempts on machines that have left. Where a cable was cut, Ray waits six minutes for their answers."""
        dead = dead_machines(ray)
        for each in launched if dead else ():
            on = trains_on(each.folder, each.attempt) if each.group is None else placed_on(ray, each.group)
            lost = on & dead.keys()
            for task in list(each.tasks) if lost else ():
                self._running.pop(task)
                ray.cancel(task, force=True)
                message = f"the machine {dead[min(lost)]} has left the cluster"
                each.ends.add(each.tasks.pop(task), {"failure": "node", "message": message})

    def _revive(self) -> None:
        """Starts the fork server again where something has killed it; a task may be waiting for it by now."""
        try:
            self._revived += self._server is not None and self._server.revive()
        except OSError as error:
            raise ExecutorError(f"the fork server has died, and no other one can be started: {error}") from error
        if self._revived > _REVIVED:
            raise ExecutorError(f"the fork server has died {self._revived:,} times: what kills it?")

    def _answer(self, ray: Any, task: Any, launched: _Launched) -> dict[str, Any]:
        """What a task returned, or what became of it, in the same form."""
        try:
            answer: dict[str, Any] = ray.get(task)
        except ray.exceptions.RayError as error:
            failure = _failure(ray.exceptions, error, launched.key in self._cancelled)
            return {"failure": failure.kind, "message": failure.message}
        return answer

    def _collect(self, ray: Any, launched: _Launched) -> Finished:
        """The end of an attempt; whatever is left of it is killed, and what it held is given back."""
        for task in launched.tasks:
            self._running.pop(task, None)
            ray.cancel(task, force=True)
        answer = launched.ends.answer()
        if self._cluster:
            answer = blame_machines(ray, answer, launched.folder, launched.attempt, launched.group)
        if launched.group is not None:
            ray.util.remove_placement_group(launched.group)
        if answer.get("failure") == "node":
            self._slots_until = 0.0
            self._serverless[launched.key] += SERVERLESS in answer["message"]
            if self._serverless[launched.key] >= _SERVERS:
                answer = {**answer, "failure": "infra"}
        if "outcome" in answer:
            return Finished(launched.key, launched.attempt, answer["outcome"])
        return Finished(launched.key, launched.attempt, Failure(answer["failure"], answer["message"]))

    def cancel(self, key: str) -> None:
        """Kills an attempt's Ray workers; their connections to its processes end then, and so do these."""
        for task, launched in self._running.items():
            if launched.key == key:
                self._cancelled.add(key)
                self._ray.cancel(task, force=True)

    def close(self) -> None:
        """Kills what runs, then ends our Ray, or leaves the cluster. Takes seconds even where Ray hangs."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._keeper is None:
            return
        if self._cluster is not None:
            for key in {launched.key for launched in self._running.values()}:
                self.cancel(key)
        self._running.clear()
        rays = tree_naming(str(self._folder)) if self._folder else {}
        self._down.set()
        if not self._up.is_set():
            return  # nobody waits for a Ray that nobody needs: the keeper ends it when it is up, or the kernel with us
        self._keeper.join(_SHUTDOWN_S)
        if self._keeper.is_alive():
            exit_would_hang()
        # Where a part of Ray hangs, the others wait for it for minutes, also when their parent is gone.
        for pid, started in rays.items():
            if started_at(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _failure(kinds: Any, error: Exception, cancelled: bool) -> Failure:
    """Ray's errors in our words: the trial's fault, ours by request, a machine's, or Ray's own."""
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, kinds.TaskCancelledError) or (cancelled and isinstance(error, kinds.WorkerCrashedError)):
        return Failure("cancelled", "killed on request")
    known: dict[FailureKind, Any] = {
        "oom": kinds.OutOfMemoryError,
        "crash": kinds.WorkerCrashedError,
        "node": kinds.NodeDiedError,
    }
    return Failure(next((kind for kind, each in known.items() if isinstance(error, each)), "infra"), message)
