"""Files that are written whole, and lines that are whole."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archlab.search.utils.shapes import Check
from archlab.search.utils.untrusted import NoRegularFile, read_regular

NO_JSON = (ValueError, RecursionError)
"""What `json.loads` raises for what is none, or is nested so deeply that it can't be read."""


def write_whole(path: Path, text: str, durable: bool = True) -> None:
    """Writes a file of mode 0600 so that readers see the old text or the new one. Raises OSError.

    Without `durable` a power cut may leave an empty file: for what can be written again.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for their owner alone. Raises OSError."""
    for each in [*reversed(folder.parents), folder]:
        each.mkdir(mode=0o700, exist_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping that a file of JSON holds; None without a file, and where a power cut left none in it."""
    try:
        found = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError, NoRegularFile, *NO_JSON):
        return None
    return found if isinstance(found, dict) else None


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; nothing of what is gone meanwhile."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(size_of(child) for child in path.iterdir())
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def lock_file(path: Path, mode: int = 0o600) -> Iterator[Callable[..., bool]]:
    """Opens a file, made if need be, whose lock ends with the block or with the process. Follows no link.

    Yields what takes it: exclusive and without waiting, or as the flags of `flock` say; False while others have it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def take(how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            return False
        return True

    try:
        yield take
    finally:
        os.close(descriptor)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps out other processes that do the same with this folder: they wait until this one is done."""
    with lock_file(folder / ".lock", 0o666) as take:
        take(fcntl.LOCK_EX)
        yield


def whole_lines(path: Path, check: Check) -> list[tuple[str, dict[str, Any]]]:
    """The lines that were written to their end and are JSON, as text and as said; from a torn one on none. One that is
    not as `check` wants it is left out: a disk changed it."""
    try:
        texts = read_regular(path).decode(errors="replace").split("\n")[:-1]
    except (FileNotFoundError, NotADirectoryError, NoRegularFile):
        return []
    try:
        told = json.loads(f"[{','.join(texts)}]")  # at once, which is twice as fast
    except NO_JSON:
        told = []
    if len(told) == len(texts):
        return [(text, line) for text, line in zip(texts, told, strict=True) if not check(line)]
    lines: list[tuple[str, dict[str, Any]]] = []
    for line in texts:
        try:
            lines.append((line, json.loads(line)))
        except NO_JSON:
            break
    return [(text, line) for text, line in lines if not check(line)]
