"""A process that has imported the trainer once and forks a fresh process per trial: no trial waits for imports.

It has one thread and computes nothing itself, so that forking is safe (no CUDA, no thread pool before a fork). It
listens on a Unix socket in a private folder; one connection is one trial: a line of JSON in, a line of JSON out, and
closing the connection early kills the trial. When whoever started it dies, it and its trials die at once.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from archlab.search.hardware import low_memory
from archlab.search.utils.children import die_with, python_path
from archlab.search.utils.temporary import private_folder

# glibc keeps and reuses the memory of large tensors; else every one is mapped, cleared by the kernel and unmapped anew:
# 65,000 page faults and a twentieth of the processor time of a trial of five seconds. What the user has set stands.
HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}
_FIRST = ("torch._dynamo", "torch.utils.serialization", "numpy.ma")  # what every trial imports sooner or later
_READY_S = 60.0
_LOOK_S = 0.5  # between looks at the machine's memory


class ForkServer:
    """Starts the server as a child, and stops it. Importing goes on in the child while the caller does other things."""

    def __init__(self, entry: str, threads: int) -> None:
        self.folder = private_folder("fork")
        self.address = str(self.folder / "socket")
        self._entry, self._threads = entry, str(threads)
        self._process = self._launched()

    def _launched(self) -> subprocess.Popen[bytes]:
        module = self._entry.partition(":")[0]
        return subprocess.Popen(
            # -P: a file of the folder may be called like a module
            [sys.executable, "-P", "-m", "archlab.search.executors.forkserver", self.address, module],
            stdin=subprocess.PIPE,  # its end of file is how the server learns that we died
            start_new_session=True,  # Ctrl-C in a terminal is for the driver, which asks for checkpoints
            env={
                **HEAP,
                **os.environ,
                "PYTHONPATH": python_path(),
                **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), self._threads),
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not initialise it
            },
        )

    def revive(self) -> bool:
        """Starts the server again where it has died, at the same address: who connects meanwhile waits for it."""
        if self._process.poll() is None:
            return False
        self._end()
        self._process = self._launched()
        return True

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)


def connected(address: str) -> socket.socket:
    """A connection, which is one trial: hanging up kills it. Raises ConnectionRefusedError without a server.

    A server that is being started is waited for; its folder exists before it and goes when it is stopped.
    """
    deadline = time.monotonic() + _READY_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError) as error:
            connection.close()
            if time.monotonic() > deadline or not os.path.isdir(os.path.dirname(address)):
                raise ConnectionRefusedError(f"no fork server at {address}") from error
            time.sleep(0.02)


# what runs in the server


class _Server:
    """One selector over: new connections, requests and hang-ups, outcomes of children, and the starter's death."""

    def __init__(self, address: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(address).unlink(missing_ok=True)  # of a server that died
        self.listener.bind(address)
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.starter_died)
        self.next_look = 0.0

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """One batch of events. The first of two about the same trial may have closed what the second is about."""
        for key, _ in self.selector.select(_LOOK_S):
            if self.selector.get_map().get(key.fd) is key:
                key.data()
        if time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + _LOOK_S
            self.look_at_memory()

    def look_at_memory(self) -> None:
        """Ends the trial that holds most, where the machine has next to nothing left."""
        children = {child.pid: child for child in self.children() if child.pid and not child.starved}
        if not children or not low_memory.runs_out():
            return
        pid, held = low_memory.largest(children)
        if pid:
            children[pid].starved = f"memory ran out: the trial's process had {held / 1e9:.1f} GB, more than the others"
            children[pid].kill()

    def children(self) -> list[_Child]:
        """Those that have a connection or a process."""
        found = (getattr(key.data, "__self__", None) for key in self.selector.get_map().values())
        return list(dict.fromkeys(each for each in found if isinstance(each, _Child)))

    def starter_died(self) -> None:
        """The children die with us, by the kernel where it can, by hand where it can't."""
        for child in self.children():
            child.kill()
        os._exit(0)

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        child = _Child(self, connection)
        self.selector.register(connection, selectors.EVENT_READ, child.requested)


class _Child:
    """A connection and the trial that it asked for."""

    def __init__(self, server: _Server, connection: socket.socket) -> None:
        self.server, self.connection = server, connection
        self.request, self.outcome, self.pid, self.pipe = b"", b"", 0, -1
        self.starved = ""  # why it was killed, if the machine ran out of memory

    def requested(self) -> None:
        """Part of the request, or the end of the connection: then nobody wants the trial any more."""
        try:
            part = self.connection.recv(65536)
        except OSError:  # reset by the other end, or anything else: it is of no use any more
            part = b""
        if not part:
            self.server.selector.unregister(self.connection)
            self.kill()
            if not self.pid:
                self.connection.close()
            return
        self.request += part
        if self.request.endswith(b"\n") and not self.pid:
            self.fork(json.loads(self.request))

    def fork(self, job: dict[str, Any]) -> None:
        self.pipe, write = os.pipe()
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for key in self.server.selector.get_map().values():  # nothing of the server's but our pipe
                    os.close(key.fd)
                _run(job, write, server)
            finally:
                os._exit(70)  # only reached when reporting failed
        os.close(write)
        self.server.selector.register(self.pipe, selectors.EVENT_READ, self.reported)

    def reported(self) -> None:
        """Part of the outcome, or its end: the child is gone."""
        part = os.read(self.pipe, 65536)
        if part:
            self.outcome += part
            return
        self.server.selector.unregister(self.pipe)
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        with suppress(OSError):  # whoever asked may be gone
            self.connection.sendall(self.answer(status) + b"\n")
        with suppress(KeyError):
            self.server.selector.unregister(self.connection)
        self.connection.close()

    def answer(self, status: int) -> bytes:
        """What the child said, or how it died."""
        if self.outcome.endswith(b"}") and status == 0:
            return self.outcome
        if self.starved:
            return json.dumps({"failure": "oom", "message": self.starved}).encode()
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return json.dumps({"failure": "crash", "message": f"the trial's process {how}"}).encode()

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _run(job: dict[str, Any], write: int, server: int) -> None:
    """The trial's process, from fork to exit; what it prints goes to output.txt in its folder."""
    from archlab.search.executors.attempt import run_trial
    from archlab.search.executors.executor import Failure
    from archlab.search.hardware.cores import limit, pin

    die_with(server)
    os.environ.update(job["environment"])
    folder = Path(job["folder"])
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    pin(job["cpus"])
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(job["cpus"])
    limit(job.get("gpus", 0.0), job.get("memory"))
    gang = None
    if job.get("gang"):
        from archlab.search.executors.process_group import Gang

        gang = Gang.of(job["gang"])
    where = {"gang": gang, "node": job.get("node", ""), "checkpoint_s": job.get("checkpoint_s")}
    found = run_trial(job["entry"], folder, Path(job["data_root"]), job["attempt"], job.get("until"), **where)
    answer = {"failure": found.kind, "message": found.message} if isinstance(found, Failure) else {"outcome": found}
    with open(write, "w") as pipe:
        pipe.write(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(address: str, module: str) -> None:
    """Imports the trainer, then serves. A trainer that can't be imported fails in each trial, with a traceback."""
    with suppress(Exception):
        importlib.import_module(module)
        if "torch" in sys.modules:
            for each in _FIRST:  # the first optimizer step imports dynamo: two seconds in every trial
                importlib.import_module(each)
    gc.collect()
    gc.freeze()  # what is here now stays shared with the children
    _Server(address).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
