"""Memory that runs out: which trial to end, before the kernel picks one, and whether a process may take more."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from archlab.search.hardware.facts import memory

LEFT = "ARCHLAB_MEMORY_LEFT"  # the share of memory that must stay free; 0 switches this off
_LEFT = 0.04
_PAGE = os.sysconf("SC_PAGE_SIZE")


def runs_out() -> bool:
    """Whether less is available than the share that must stay free."""
    available, total = memory()
    return available < float(os.environ.get(LEFT, _LEFT)) * total


def has_room(size: int) -> bool:
    """Whether this process may take so many bytes more: twice the share stays free, and its own limit is kept.

    What it has given back to the heap counts as held, as the next step takes it again.
    """
    available, total = memory()
    if available - size < 2 * float(os.environ.get(LEFT, _LEFT)) * total:
        return False
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return most == resource.RLIM_INFINITY or _data() + size <= most


def _data() -> int:
    """Bytes of this process that count for RLIMIT_DATA; 0 where that can't be seen."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def peak() -> int:
    """Bytes: the most that this process has held so far, resident."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def largest(pids: Iterable[int]) -> tuple[int, int]:
    """The process with most memory of its own, and how many bytes; (0, 0) where none can be seen."""
    return max(((held(pid), pid) for pid in pids), default=(0, 0))[::-1]


def held(pid: int) -> int:
    """Bytes that a process holds and shares with no file."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE
