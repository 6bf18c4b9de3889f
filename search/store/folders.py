"""The folder of a trial: where it lies, whether a trial may be trained in it, and its trial.json."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path

from archlab.search.store.database import StoreRefused
from archlab.search.store.rows import is_key
from archlab.search.utils.files import write_whole


class Unfit(Exception):
    """A trial that can't be started: it has failed, and the message is its reason."""


def folder_of(root: Path, key: str) -> Path:
    """trials/<first two digits>/<key>. Raises StoreRefused for what is no key: it could name another folder."""
    if not is_key(key):
        told = f"the trial table has a row of {key[:80]!r}, which is no trial's key"
        raise StoreRefused(f"{told}: it was damaged, or made by somebody else")
    return root.joinpath("trials", key[:2], key)


DISPUTED = "disputed"
"""A file of a trial whose result is being taken back, until its row is planned again."""


def fault_of(folder: Path) -> str | None:
    """Why no trial may be trained in a folder: a link would have files elsewhere written, a pipe is never done.
    None where one may, also where there is no such folder yet. Files may go meanwhile: another process may end."""
    for each in (folder.parent, folder):
        if each.is_symlink() or (each.exists() and not each.is_dir()):
            return f"{each} is no folder, or a link to one: remove it, then `archlab retry`"
    for each in sorted(folder.iterdir()) if folder.exists() else ():
        with suppress(FileNotFoundError):
            mode = each.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                return f"{each} is no regular file: remove it, then `archlab retry`"
    return None


def prepare(folder: Path, text: str) -> None:
    """Makes the folder of a trial that starts, with its trial.json: most of thousands may never start. It is not
    synced; so it is compared, not trusted. No result is disputed any more."""
    path = folder / "trial.json"
    (folder / DISPUTED).unlink(missing_ok=True)
    if path.exists() and path.read_bytes() == text.encode():
        return
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    write_whole(path, text, durable=False)
