"""Runs trials by Ray, on this machine or on a running cluster; Ray starts while the study is being planned."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from search.executor import ExecutorError, Failure, Finished, ResourcesError
from search.forkserver import ForkServer
from search.ray_start import only_what_trials_need, set_environment, started_at, tree_naming
from search.ray_task import run_attempt, warm
from search.stop import exit_would_hang
from search.tempfolders import private_folder

_SHUTDOWN_S = 10.0
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least: jobs and results are a few kilobytes
_NODES_S = 5.0  # how long the number of slots of a cluster is believed
_one_ray = threading.Lock()  # a process has one Ray at a time


class RayExecutor:
    """One Ray task per trial, never repeated by Ray itself; each trial in a fresh process on cores of its own.

    `entry` is "module:function" of the trainer. `cpus` and `gpus` are per trial; gpus None is one where there are any.
    Without `address` a Ray of our own is started, which listens on loopback only and ends with us.
    """

    def __init__(
        self, entry: str, data_root: Path, cpus: int = 1, gpus: float | None = None, address: str | None = None
    ) -> None:
        self._entry, self._data_root = entry, data_root
        self._cpus, self._gpus, self._cluster = cpus, gpus, address
        self._keeper: threading.Thread | None = None
        self._up, self._down = threading.Event(), threading.Event()
        self._boot_error: BaseException | None = None
        self._server: ForkServer | None = None
        self._folder: Path | None = None
        self._ray: Any = None
        self._task: Any = None
        self._slots, self._slots_until = 0, 0.0
        self._running: dict[Any, tuple[str, int]] = {}
        self._cancelled: set[str] = set()

    def start(self) -> None:
        """Begins to start Ray and to import the trainer, both in the background. Raises ResourcesError at once."""
        if self._keeper is not None:
            return
        if self._cluster is None:
            cores = len(_cores())
            if self._cpus > cores:
                raise ResourcesError(f"each trial asks for {self._cpus} CPUs, this machine has {cores} for us")
            self._folder = private_folder("ray")
            self._server = ForkServer(self._entry, self._cpus)
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
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # Ray's processes may still write their logs
        _one_ray.release()

    def _start_ray(self) -> None:
        set_environment(local=self._cluster is None)
        self._ray = ray = importlib.import_module("ray")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._folder is not None:
            with only_what_trials_need():
                ray.init(
                    num_cpus=len(_cores()),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=str(self._folder / "ray"),  # Ray opens it to everyone; the folder above is closed
                    **quiet,
                )
        else:
            ray.init(address=self._cluster, **quiet)
        if self._gpus is None:
            self._gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
        self._task = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0)(run_attempt)
        for _ in range(len(_cores()) // self._cpus if self._cluster is None else 0):
            ray.remote(num_cpus=self._cpus)(warm).remote()  # its worker has our code by the time a trial comes

    def _ready(self) -> Any:
        """Ray, once it is up. Raises ExecutorError when it does not come up."""
        self.start()
        while not self._up.wait(1.0):  # in pieces, so that a signal gets through
            pass
        if self._boot_error is not None:
            where = f"Ray at {self._cluster}" if self._cluster else "Ray"
            raise ExecutorError(f"{where} can't be used: {self._boot_error}") from self._boot_error
        return self._ray

    @property
    def slots(self) -> int:
        """Trials that fit at once. Raises ResourcesError when not even one fits."""
        now = time.monotonic()
        if now >= self._slots_until:
            nodes = [node["Resources"] for node in self._ready().nodes() if node["Alive"]]
            self._slots, self._slots_until = sum(map(self._fit, nodes)), now + _NODES_S
            if not self._slots:
                largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in ("CPU", "GPU")}
                raise ResourcesError(
                    f"each trial asks for {self._cpus} CPUs and {self._gpus:g} GPUs; "
                    f"the largest of {len(nodes)} machines has {largest['CPU']:g} and {largest['GPU']:g}"
                )
        return self._slots

    def _fit(self, node: dict[str, float]) -> int:
        fit = int(node.get("CPU", 0) // self._cpus)
        return min(fit, int(node.get("GPU", 0) / self._gpus + 1e-9)) if self._gpus else fit

    def submit(self, key: str, folder: Path, attempt: int, until: int | None = None) -> None:
        """Hands an attempt to Ray. Raises ExecutorError when Ray is not there."""
        self._ready()
        job = {"entry": self._entry, "folder": str(folder), "data_root": str(self._data_root), "until": until}
        address = self._server.address if self._server else ""
        reference = self._task.remote({**job, "attempt": attempt, "cpus": self._cpus}, address, self._gpus)
        self._cancelled.discard(key)
        self._running[reference] = (key, attempt)

    def wait(self, timeout: float) -> list[Finished]:
        """What ended, as soon as something did or after `timeout` seconds."""
        if not self._running:
            return []
        ray, references = self._ready(), list(self._running)
        ready, _ = ray.wait(references, num_returns=1, timeout=timeout)
        if ready:
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [self._collect(ray, reference) for reference in ready]

    def _collect(self, ray: Any, reference: Any) -> Finished:
        key, attempt = self._running.pop(reference)
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayError as error:
            outcome: dict[str, Any] | Failure = _failure(ray.exceptions, error, key in self._cancelled)
        else:
            outcome = answer["outcome"] if "outcome" in answer else Failure(answer["failure"], answer["message"])
        if isinstance(outcome, Failure) and outcome.kind == "node":
            self._slots_until = 0.0
        return Finished(key, attempt, outcome)

    def cancel(self, key: str) -> None:
        """Kills an attempt's Ray worker; its connection to the trial's process ends then, and so does that process."""
        for reference, (each, _) in self._running.items():
            if each == key:
                self._cancelled.add(key)
                self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Kills what runs, then ends our Ray, or leaves the cluster. Takes seconds even where Ray hangs."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._keeper is None:
            return
        if self._cluster is not None:
            for key, _ in list(self._running.values()):
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
    if isinstance(error, kinds.OutOfMemoryError):
        return Failure("oom", message)
    if isinstance(error, kinds.WorkerCrashedError):
        return Failure("crash", message)
    if isinstance(error, kinds.NodeDiedError):
        return Failure("node", message)
    return Failure("infra", message)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
