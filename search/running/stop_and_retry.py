"""Asks the driver of a study to stop, from another process, and plans failed trials again."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from archlab.search.store.lock import holder_of, lock_path
from archlab.search.store.store import Store, StoreRefused
from archlab.search.utils.files import read_json, write_whole
from archlab.search.utils.shapes import Check, count, mapping

WAIT_S = 180.0  # for a driver to end: trials get a minute to write their checkpoint, trackers half a minute

_REQUEST: Check = mapping({}, {"times": count})


def stop_study(root: Path, study: str, wait_s: float = WAIT_S) -> dict[str, Any]:
    """Asks who runs the study to let its trials write a checkpoint and to end; waits for that up to `wait_s` seconds.

    A driver of this machine gets SIGINT, which is Ctrl-C; another one reads a request in the store. A second call ends
    either at once. Returns study, holder (None: nobody ran it), how ("signal", "request" or None) and ended.
    """
    holder = holder_of(root, study)
    if holder is None:
        return {"study": study, "holder": None, "how": None, "ended": True}
    how = "signal" if _signalled(root, study, holder) else "request"
    if how == "request":
        before = _read(root, study)
        times = before.get("times", 1) + 1 if before.get("holder") == holder else 1
        asked = {"host": socket.gethostname(), "pid": os.getpid(), "holder": holder, "times": times}
        write_whole(_request(root, study), json.dumps(asked), durable=False)
    deadline = time.monotonic() + wait_s
    while (ended := holder_of(root, study) != holder) is False and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"study": study, "holder": holder, "how": how, "ended": ended}


def stop_requests(root: Path, study: str) -> int:
    """How often someone of another host asked the study's driver to stop since it began."""
    return int(_read(root, study).get("times", 1)) if _request(root, study).exists() else 0


def forget_request(store: Store, study: str) -> None:
    """Removes a request that was meant for a driver before; one that came while this one was starting stays."""
    path = _request(store.root, study)
    if path.exists() and _read(store.root, study).get("holder") != store.holder(study):
        path.unlink(missing_ok=True)


def retry(store: Store, study: str, variants: Collection[str] = ()) -> dict[str, int]:
    """failed -> planned for a study's wanted trials, of these variants or of all. Returns how many by variant.

    Raises StoreRefused for a study or a variant that is not there.
    """
    store.study(study)
    rows = store.study_trials(study)
    names = list(dict.fromkeys(row["variant"] for row in rows))
    for name in variants:
        if name not in names:
            from archlab.arch_dsl.language.errors import unknown  # whose package imports torch

            raise StoreRefused(unknown(name, f"variant of {study}", names))
    counts = {name: store.reset_failed(study, name) for name in names if not variants or name in variants}
    return {name: count for name, count in counts.items() if count}


def _request(root: Path, study: str) -> Path:
    return lock_path(root, study).with_suffix(".stop")


def _read(root: Path, study: str) -> dict[str, Any]:
    """The request that is there; {} without one, or for one that a power cut left empty."""
    found = read_json(_request(root, study)) or {}
    return found if not _REQUEST(found) else {}


def _signalled(root: Path, study: str, holder: dict[str, Any]) -> bool:
    """Sends SIGINT to the holder if it is a process of this machine that has the lock file open, and may get one."""
    if holder.get("host") != socket.gethostname():
        return False
    path = lock_path(root, study)
    try:
        opened = [descriptor for descriptor in Path(f"/proc/{holder['pid']}/fd").iterdir() if _same(descriptor, path)]
        if opened:
            os.kill(holder["pid"], signal.SIGINT)
    except (OSError, KeyError):
        return False
    return bool(opened)


def _same(descriptor: Path, path: Path) -> bool:
    try:
        return descriptor.samefile(path)
    except OSError:
        return False  # closed meanwhile
