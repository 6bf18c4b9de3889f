"""Checkpoints that survive anything: written beside and renamed, verified by digest, with the previous one kept.

`checkpoint-<step>.pt` holds the state, `checkpoint-<step>.pt.sha256` its digest. A torn, truncated or altered file is
never loaded: the one before it is used, and the caller learns what was discarded and why.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

_NAME = re.compile(r"checkpoint-(\d+)\.pt$")


@dataclass(frozen=True)
class Loaded:
    """The newest state that is whole (None: there is none), and the file name and fault of each that is not."""

    state: dict[str, Any] | None
    discarded: list[tuple[str, str]] = field(default_factory=list)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return folder / f"checkpoint-{step}.pt"


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, newest first, whole or not."""
    found = (_NAME.match(entry.name) for entry in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def save(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Writes a checkpoint, then removes all but the newest `keep`.

    Raises OSError (a full disk, for example) with the earlier checkpoints as they were and no part of a new one.
    """
    path = path_of(folder, step)
    digest = write_atomically(path, lambda file: torch.save(state, file))
    line = f"{digest}  {path.name}\n".encode()
    write_atomically(_sidecar(path), lambda file: file.write(line))
    remove_older(folder, keep, scraps="checkpoint-*.tmp")
    return path


def load(folder: Path, step: int) -> dict[str, Any]:
    """The state after `step` steps, on the CPU. Raises ValueError saying what is wrong with the file."""
    path = path_of(folder, step)
    try:
        expected = _sidecar(path).read_text(encoding="ascii").split()
    except FileNotFoundError:
        raise ValueError("it has no sha256 file beside it") from None
    except UnicodeDecodeError:
        raise ValueError("its sha256 file is not text") from None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if expected[:1] != [found]:
            raise ValueError(f"its sha256 is {found[:12]}…, not {expected[0][:12] if expected else 'anything'}…")
        file.seek(0)
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"torch can't read it: {str(error).splitlines()[0]}") from error
    return state


def load_newest(folder: Path) -> Loaded:
    """The newest whole checkpoint; those that are not whole are removed and listed."""
    discarded: list[tuple[str, str]] = []
    for step in steps_in(folder):
        path = path_of(folder, step)
        try:
            return Loaded(load(folder, step), discarded)
        except ValueError as fault:
            discarded.append((path.name, str(fault)))
            _remove(path)
    return Loaded(None, discarded)


def remove_older(folder: Path, keep: int, scraps: str = "*.tmp") -> None:
    """Removes all but the newest `keep` checkpoints, the oldest first, and what interrupted writes left behind.

    `scraps` says of which files: while a checkpoint is saved, other threads may be writing those that are none.
    """
    for step in reversed(steps_in(folder)[keep:]):
        _remove(path_of(folder, step))
    for scrap in folder.glob(scraps):
        scrap.unlink(missing_ok=True)


def write_atomically(path: Path, write: Any) -> str:
    """Calls `write(file)` on a file beside `path`, then renames it into place, both synced to disk.

    Returns the sha256 of what was written. Raises OSError, leaving `path` as it was and nothing beside it.
    """
    scrap = path.with_name(path.name + ".tmp")
    try:
        with scrap.open("wb") as raw:
            file = _Digesting(raw)
            try:
                write(file)
            except RuntimeError as error:
                # torch wraps whatever a file object raises
                raise (file.error or error) from None
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(scrap, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scrap.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return file.digest.hexdigest()


class _Digesting:
    """A file to append to that hashes on the way and remembers the system's error."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw = raw
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self.digest.update(data)
            return self.raw.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.raw.flush()


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _remove(path: Path) -> None:
    """The digest goes first, so that a half-removed checkpoint is never taken for a whole one."""
    _sidecar(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
