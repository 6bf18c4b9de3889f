"""Files that somebody else may have made: a regular file alone is read, and no link on the way to it is followed."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


class NoRegularFile(OSError):
    """A pipe, a device, a socket or a folder in the place of a file."""


def read_regular(path: Path) -> bytes:
    """What a file holds, which may be reached by a link. Raises OSError, NoRegularFile among them."""
    with open_regular(path, follow=True) as file:
        return file.read()


def open_regular(path: Path, folders: int = 0, follow: bool = False) -> BufferedReader:
    """Opens a file for reading, without following a link (with `follow` one at its end): neither there nor at the last
    `folders` folders above it. Raises OSError, and NoRegularFile for what is none: a pipe would wait for ever, a device
    never end."""
    at = os.open(path.parents[folders], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.parts[len(path.parts) - folders - 1 : -1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = inner
        last = 0 if follow else os.O_NOFOLLOW
        file = os.open(path.name, os.O_RDONLY | last | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NoRegularFile(errno.EINVAL, "is no regular file", str(path))
    return open(file, "rb")


def has_link(path: Path, root: Path) -> bool:
    """Whether a link lies between a folder and a path in it, which may be one itself. Raises ValueError for a path
    elsewhere."""
    names = path.relative_to(root).parts
    return ".." in names or any(root.joinpath(*names[:many]).is_symlink() for many in range(1, len(names)))
