"""Says that a run of a store is under way, so that what it is about to use stays."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_use(root: Path, alone: bool = False) -> Iterator[bool]:
    """Held by every run of a store, which waits for it. With `alone` it is had only while nobody else has it, without
    waiting; True when it was had."""
    (root / "locks").mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(root / "locks" / ".in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
