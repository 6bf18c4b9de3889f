"""Inside a trial's process: one attempt from claim to outcome, with every way to fail told apart."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.search.executors.executor import LOST, Failure, FailureKind, named, request_stop, stop_flag
from archlab.search.trial.outcome_files import read_attempt, read_result
from archlab.search.utils.files import lock_file, write_whole

if TYPE_CHECKING:
    from archlab.search.executors.process_group import Gang

_WRITER_WAIT_S = 30.0  # how long the process of an earlier attempt may take to die
_STOP_POLL_S = 0.1
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA out of memory")
_LOST = ("DistNetworkError", "DistStoreError", "DistBackendError")
_LOST_GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_MESSAGE_CHARACTERS = 500  # the whole of it is in error.txt


def run_trial(
    entry: str,
    folder: Path,
    data_root: Path,
    attempt: int,
    until: int | None = None,
    gang: Gang | None = None,
    node: str = "",
    checkpoint_s: float | None = None,
) -> dict[str, Any] | Failure:
    """Trains one attempt with `entry` ("module:function") and returns its result or why there is none. Never raises.

    With `until` it pauses after that step, and what it returns says so. The folder is locked while it is written to,
    so that two attempts never write into one another. A result that is already there is returned as it is. Of a
    `gang`, whose processes all call this, rank 0 is the one that writes. `node` is Ray's number for the machine,
    `checkpoint_s` the time from one checkpoint to the next where the study says one.
    """
    told = {"until": until, "gang": gang, "checkpoint_s": checkpoint_s}
    options = {name: value for name, value in told.items() if value is not None}
    try:
        if gang is not None and not gang.leads:
            return read_result(folder) or _train(entry, folder, data_root, attempt, options)
        with _only_writer(folder, attempt):
            found = read_result(folder)
            if found is not None:
                return found
            who = {"attempt": attempt, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
            if node:
                who["node"] = node
            write_whole(folder / "attempt.json", json.dumps(who), durable=False)
            return _train(entry, folder, data_root, attempt, options)
    except _StillWritten as error:
        return Failure("busy", str(error))
    except OSError as error:
        return _os_failure(error, folder)


class _StillWritten(Exception):
    """The process of an earlier attempt neither trains nor ends: its machine is to blame."""


def _who(earlier: dict[str, Any]) -> str:
    return f"process {earlier['pid']} on {earlier['host']}" if "pid" in earlier else "another process"


def _train(
    entry: str, folder: Path, data_root: Path, attempt: int, options: dict[str, Any]
) -> dict[str, Any] | Failure:
    rank = options["gang"].rank if "gang" in options else 0
    try:
        train, interrupted = named(entry), named(f"{entry.partition(':')[0]}:Interrupted")
    except Exception:
        return _user_failure(folder, f"the trainer {entry} can't be loaded", rank)
    should_stop = _stop_poll(stop_flag(folder, attempt))
    try:
        if rank == 0 and should_stop():
            return Failure("interrupted", "asked to stop before the first step")
        result: dict[str, Any] = train(folder, data_root, attempt, should_stop, **options)
        return result
    except interrupted as error:
        return Failure("interrupted", str(error) or "asked to stop")
    except MemoryError:
        return Failure("oom", f"out of memory{_limit()}")
    except OSError as error:
        return _os_failure(error, folder, rank)
    except (Exception, SystemExit) as error:
        if kind := _kind(error):
            first = str(error).splitlines()[0][:_MESSAGE_CHARACTERS]
            return Failure(kind, {"crash": f"{LOST}: {first}", "oom": f"{first}{_limit()}"}.get(kind, first))
        return _user_failure(folder, f"{type(error).__name__}: {error}", rank)
    finally:
        if rank == 0:
            stop_flag(folder, attempt).unlink(missing_ok=True)


def _limit() -> str:
    """What `resources.memory` allows this process, where that is what was too little."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return "" if most == resource.RLIM_INFINITY else f" (resources.memory allows {most / 1e9:.3g} GB)"


def _kind(error: BaseException) -> FailureKind | None:
    """What errors are by name, as torch and the data must not be imported here: no memory, a neighbour that was lost,
    data that a disk did not keep."""
    name, text = type(error).__name__, str(error)
    if name == "OutOfMemoryError" or (name == "RuntimeError" and any(each in text for each in _NO_MEMORY)):
        return "oom"
    if name in _LOST or (name == "RuntimeError" and any(each in text for each in _LOST_GLOO)):
        return "crash"
    return "disk" if name == "DamagedData" else None


@contextmanager
def _only_writer(folder: Path, attempt: int) -> Iterator[None]:
    """Holds the folder for this process. The process of an earlier attempt is waited for: it may still train, on a
    machine that only Ray has lost, and then ends with a checkpoint. Raises OSError, _StillWritten where it does not."""
    with lock_file(folder / "writer.lock") as take:
        deadline = time.monotonic() + _WRITER_WAIT_S
        while not take():
            earlier = read_attempt(folder)
            if earlier.get("attempt", attempt) < attempt:
                request_stop(folder, earlier["attempt"])
            if time.monotonic() > deadline:
                raise _StillWritten(f"{_who(earlier)} still writes to {folder}")
            time.sleep(0.05)
        yield


def _stop_poll(flag: Path) -> Callable[[], bool]:
    """should_stop for the trainer: cheap enough for every step, as it looks at the disk ten times a second at most."""
    asked, next_look = False, 0.0
    path = os.fspath(flag)

    def should_stop() -> bool:
        nonlocal asked, next_look
        now = time.monotonic()
        if not asked and now >= next_look:
            asked, next_look = os.path.exists(path), now + _STOP_POLL_S
        return asked

    return should_stop


def _user_failure(folder: Path, message: str, rank: int = 0) -> Failure:
    try:
        write_whole(folder / (f"error-{rank}.txt" if rank else "error.txt"), traceback.format_exc())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _os_failure(error, folder)
        message += f" (error.txt can't be written: {error})"
    return Failure("user", message[:_MESSAGE_CHARACTERS])


def _os_failure(error: OSError, folder: Path, rank: int = 0) -> Failure:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure("disk", f"no space left for {folder}: {error}; free some")
    if error.errno in (errno.ETIMEDOUT, errno.EADDRINUSE):  # a file system on the network; a port that is taken
        return Failure("crash", str(error))
    return _user_failure(folder, f"{type(error).__name__}: {error}", rank)
