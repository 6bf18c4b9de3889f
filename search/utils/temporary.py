"""Private temporary folders that carry their owner's process id, so that what a killed process left is cleaned up."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def private_folder(kind: str) -> Path:
    """A new folder of mode 0700, /tmp/archlab-<kind>-<pid>-...; removes those of `kind` whose process is gone."""
    for left in left_over(kind):
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"archlab-{kind}-{os.getpid()}-"))


def left_over(kind: str = "[a-z]+") -> list[Path]:
    """Our private folders, of a kind or of all, whose process is gone."""
    found = []
    for path in Path(tempfile.gettempdir()).glob("archlab-*-*-*"):
        match = re.fullmatch(rf"archlab-{kind}-(\d+)-.*", path.name)
        with suppress(FileNotFoundError):  # another process may be removing it too
            if match and not _alive(int(match[1])) and path.stat().st_uid == os.getuid():
                found.append(path)
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
