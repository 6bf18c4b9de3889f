"""Runs generated programs: each in a process of its own with little memory, time and no network where Linux allows it.

This keeps accidents away, not attacks. docs/reference/evaluate/downstream.md says what a program can still do.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass

MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
WAIT_S = 30  # beyond its time on a processor: for a busy machine, and for what sleeps
_MOST = 64  # bytes that are read of what it says

# What runs in the process: limits first, then the program, then the word that says that it came to its end. The word
# comes on stdin and is held by a local variable alone.
_RUNNER = """
import ctypes, os, resource, sys
def run():
    word, seconds = sys.stdin.readline().strip(), int(sys.argv[1])
    program = sys.stdin.read()
    libc = ctypes.CDLL(None)
    alone = 0
    if sys.platform == "linux":
        alone = int(libc.unshare(0x10000000 | 0x40000000) == 0 or libc.unshare(0x40000000) == 0)
        libc.prctl(1, 9)  # it is killed with the thread that runs it; after unshare, which would forget it
    for limit, value in (("CPU", seconds), ("AS", int(sys.argv[2])), ("FSIZE", int(sys.argv[3])), ("CORE", 0),
                         ("NOFILE", 32), ("NPROC", 0)):
        name = getattr(resource, "RLIMIT_" + limit, None)
        if name is not None:
            try:
                resource.setrlimit(name, (value, value))
            except (ValueError, OSError):
                if limit == "CPU":
                    raise
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    os.write(out, f"{word} {alone}".encode())
run()
os._exit(0)
"""


@dataclass(frozen=True)
class Ran:
    """Whether a program came to its end without an error in its time, and whether it had no network."""

    passed: bool
    offline: bool


def run(program: str, seconds: int = 5) -> Ran:
    """Runs a Python program in a fresh folder, without this process's environment, for at most `seconds`
    of a processor. Processes that it leaves behind are ended with it."""
    word = secrets.token_hex(16)
    limits = [str(seconds), str(MEMORY_BYTES), str(FILE_BYTES)]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="archlab-program-"))
        asked, told = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        asked.write(f"{word}\n{program}".encode(errors="replace"))
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _RUNNER, *limits],
            stdin=asked,
            stdout=told,  # a file, which nothing that still holds it open can make us wait for
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds + WAIT_S)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told.seek(0)
        ended, _, alone = told.read(_MOST).decode(errors="replace").partition(" ")
    return Ran(process.returncode == 0 and ended == word, alone == "1")


def has_no_network() -> bool:
    """Whether programs that run here have no network."""
    return run("").offline
