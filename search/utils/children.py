"""What a process that we start as a child needs: our modules, and to end when we do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def python_path() -> str:
    """PYTHONPATH for a child that is to import what we do."""
    return os.pathsep.join(os.path.abspath(each) for each in sys.path if each == "" or os.path.isdir(each))


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the one that started it ends; at once where it has ended already.

    Linux alone can. Elsewhere a child learns it by the end of a pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(70)
