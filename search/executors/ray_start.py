"""How Ray is started on this machine: on loopback, with a token, and without the services that no trial uses."""

from __future__ import annotations

import ctypes
import importlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from archlab.search.executors.executor import ExecutorError

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # at 0 every socket of Ray is on 127.0.0.1, on Linux too
_SIGACTION_BYTES = 256  # more than struct sigaction takes
_SET_HANDLERS = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"  # of ray::RayLog, with argv0 and whether to chain
_UNUSED_STARTERS = ("start_api_server", "start_monitor", "start_log_monitor")


def set_environment(local: bool) -> None:
    """What Ray reads when it is imported. Set for us and for the processes that Ray starts.

    Raises ExecutorError when it was imported before without them: it would listen on every interface.
    """
    if local and "ray" in sys.modules and os.environ.get(_LOOPBACK) != "0":
        raise ExecutorError(
            f"ray was imported before it could be told to stay on loopback: set {_LOOPBACK}=0 before that"
        )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if local or "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"  # Ray itself sets it for clusters that it starts, and not to join one
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if local:
        os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray names it so; it would kill the newest trial; we end the largest
        os.environ[_LOOPBACK] = "0"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    else:
        os.environ.pop(_LOOPBACK, None)


def head_is_dead() -> bool:
    """Whether the GCS of the Ray that this process started has ended.

    Calls that need it would block for a minute, and Ray would then end this process with 1.
    """
    node = getattr(importlib.import_module("ray._private.worker"), "_global_node", None)
    servers = getattr(node, "all_processes", {}).get("gcs_server", [])
    return any(server.process.poll() is not None for server in servers)


@contextmanager
def only_what_trials_need() -> Iterator[None]:
    """Keeps Ray from starting its dashboard, autoscaler and log monitor, which it does even when told not to.

    There is no public switch. They would cost 260 MB and four seconds of one core, a third of what it takes to the
    first training step. A Ray without these methods starts as it likes.
    """
    node = importlib.import_module("ray._private.node").Node
    kept = {name: getattr(node, name) for name in _UNUSED_STARTERS if hasattr(node, name)}

    def start_nothing(self: Any, **_: object) -> None:
        self._webui_url = ""

    try:
        for name in kept:
            setattr(node, name, start_nothing)
        yield
    finally:
        for name, method in kept.items():
            setattr(node, name, method)


def say_nothing() -> Callable[[], None]:
    """Keeps Ray from printing what happens to the cluster, a page of its stack for each machine that leaves, until what
    is returned is called.

    What it means for trials is told by how they end. There is no public switch; a Ray without this function prints.
    """
    worker, name = importlib.import_module("ray._private.worker"), "print_to_stdstream"
    kept = getattr(worker, name, None)
    if kept is None:
        return lambda: None
    setattr(worker, name, lambda *_, **__: None)
    return lambda: setattr(worker, name, kept)


@contextmanager
def signals_as_they_are() -> Iterator[None]:
    """Puts back what SIGINT and SIGTERM do, which Ray's native part replaces by printing a stack trace and dying.

    Python can set handlers in its main thread only, and knows nothing of these; the C library can everywhere.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    kept = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, action in kept.items():
        libc.sigaction(int(number), None, action)

    def put_back() -> None:
        for number, action in kept.items():
            libc.sigaction(int(number), action, None)

    try:
        _take_signals_now()
        put_back()
        yield
    finally:
        put_back()


def _take_signals_now() -> None:
    """Has Ray's native part set its handlers before it starts, rather than at some moment in the seconds that it takes.

    It sets them once per process; until they are put back, a SIGTERM ends the process by SIGABRT, three seconds later.
    A Ray without this function sets them while it starts.
    """
    native = ctypes.CDLL(importlib.import_module("ray._raylet").__file__)
    with suppress(AttributeError):
        getattr(native, _SET_HANDLERS)(None, False)


def tree_naming(text: str) -> dict[int, str]:
    """Our children with `text` in their command line, and all below them, with the time when each started.

    Read from /proc; elsewhere than on Linux none are found.
    """
    parents, naming = {}, set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            pid = int(process.name)
            parents[pid] = int(_stat(pid)[1])
            if parents[pid] == os.getpid() and text in (process / "cmdline").read_text():
                naming.add(pid)
    found, frontier = set(naming), naming
    while frontier := {pid for pid, parent in parents.items() if parent in frontier} - found:
        found |= frontier
    return {pid: started for pid in sorted(found) if (started := started_at(pid))}


def started_at(pid: int) -> str:
    """When a process started, in clock ticks since the machine did: tells it from a later one. "" for none."""
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: its name may have spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
