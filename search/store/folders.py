"""The folder of a trial: where it lies, whether a trial may be trained in it, and its trial.json."""

from __future__ import annotations

import stat
from pathlib import Path

from archlab.search.store.database import StoreRefused
from archlab.search.store.rows import is_key
from archlab.search.utils.files import write_whole


def folder_of(root: Path, key: str) -> Path:
    """trials/<first two digits>/<key>. Raises StoreRefused for what is no key: it could name another folder."""
    if not is_key(key):
        told = f"the trial table has a row of {key[:80]!r}, which is no trial's key"
        raise StoreRefused(f"{told}: it was damaged, or made by somebody else")
    return root / "trials" / key[:2] / key


def fault_of(folder: Path) -> str | None:
    """Why no trial may be trained in a folder: a link would have files elsewhere written, a pipe is never done.
    None where one may, also where there is no such folder yet."""
    for each in (folder.parent, folder):
        if each.is_symlink() or (each.exists() and not each.is_dir()):
            return f"{each} is no folder, or a link to one: remove it, then `archlab retry`"
    for each in sorted(folder.iterdir()) if folder.exists() else ():
        mode = each.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return f"{each} is no regular file: remove it, then `archlab retry`"
    return None


def write_trial_json(folder: Path, text: str) -> None:
    """Written when a trial starts, as most of thousands may never. Not synced; so it is compared, not trusted."""
    path = folder / "trial.json"
    if path.exists() and path.read_bytes() == text.encode():
        return
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    write_whole(path, text, durable=False)
