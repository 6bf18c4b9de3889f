"""How a process of ours leaves when its libraries would keep it from ending."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_exit_hangs = threading.Event()


def exit_would_hang() -> None:
    """Says that a thread of this process is stuck in a library, so that the interpreter can't end in order."""
    _exit_hangs.set()


def leave(exit_code: int) -> NoReturn:
    """Ends this process with that code: in order if that is possible, at once if a library hangs."""
    if _exit_hangs.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


@contextmanager
def leaving_early() -> Iterator[None]:
    """Until a driver takes the signals there is nothing to save: either ends the process at once, with its exit code.

    An exception would surface wherever an import or Ray's start happens to be, and some of these swallow it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        os.write(2, b"interrupted; the same command goes on from here\n")
        os._exit(128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
