"""Processes forked from one that has imported PyTorch and the driver: a test starts dozens of them, each in no time."""

import atexit
import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path

FIRST = (
    "archlab.search.executors.inline",
    "archlab.search.running.driver",
    "archlab.search.training.train",
    "archlab.search.training.parallel.team",
    "archlab.search.training.parallel.pipeline",
)


def forking():
    """The context of such processes. The one that they are forked from is started with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(FIRST))
    return context


class Forked:
    """`main(job)` in a process and a session of its own, with what a test asks of a Popen that is read at its end."""

    def __init__(self, main, job, environment):
        handle, self._output = tempfile.mkstemp(prefix="forked-")
        os.close(handle)
        self._process = forking().Process(target=_run, args=(main, job, environment, self._output))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    poll = returncode.fget

    def send_signal(self, number):
        """To this process alone. One that has ended gets none."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=None):
        """What it wrote, when it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        output = Path(self._output).read_text()
        os.unlink(self._output)
        return output, None


def _run(main, job, environment, output):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    try:
        main(job)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out, and any other process does
