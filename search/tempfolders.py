"""Private temporary folders that carry their owner's process id, so that what a killed process left is cleaned up."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path


def private_folder(kind: str) -> Path:
    """A new folder of mode 0700, /tmp/archlab-<kind>-<pid>-...; removes those of `kind` whose process is gone."""
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"archlab-{kind}-*"):
        found = re.fullmatch(rf"archlab-{kind}-(\d+)-.*", left.name)
        if found and not _alive(int(found[1])) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)  # another process may be removing it too
    return Path(tempfile.mkdtemp(prefix=f"archlab-{kind}-{os.getpid()}-"))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
