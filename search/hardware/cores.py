"""Gives each process of a trial cores of its own, among all studies on a machine, and holds it to its share."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile
from pathlib import Path

_held: list[int] = []  # open lock files: the cores are ours until this process ends


def pin(cpus: int, folder: Path | None = None) -> list[int]:
    """Pins this process to `cpus` cores that no other trial of this user holds; to none when too few are free.

    A core is held by a lock on a file, which ends with the process. Where the system can't pin, nothing happens.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []
    folder = folder or Path(tempfile.gettempdir()) / f"archlab-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        return []  # someone else's folder under our name
    taken: dict[int, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        if len(taken) == cpus:
            break
        descriptor = os.open(folder / f"core-{core}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken[core] = descriptor
        except BlockingIOError:
            os.close(descriptor)
    if len(taken) < cpus:
        for descriptor in taken.values():
            os.close(descriptor)
        return []
    os.sched_setaffinity(0, taken)
    _held.extend(taken.values())
    return sorted(taken)


def limit(gpus: float, memory: int | None) -> None:
    """Holds this process to its share of a GPU and its bytes of memory; what exceeds them is the trial's own failure.

    On the CPU `memory` is the most that may be allocated (RLIMIT_DATA: heap and private mappings, those of torch
    among them, 0.3 GB). With a GPU it is only counted, as the driver of the GPU reserves address space at will.
    """
    torch = sys.modules.get("torch")
    if gpus and torch is not None and torch.cuda.is_available():
        if gpus < 1:
            torch.cuda.set_per_process_memory_fraction(gpus)
    elif memory and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
