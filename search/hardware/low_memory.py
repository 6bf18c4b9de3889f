"""Which trial to end when a machine runs out of memory: the one that holds most of it, before the kernel picks one."""

from __future__ import annotations

import os
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
