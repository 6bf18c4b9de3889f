"""Text files: found by globs, read as the UTF-8 that they have to be."""

from __future__ import annotations

import codecs
import glob
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from archlab.arch_dsl.language.errors import Mark, SpecError

_CHUNK = 1 << 20  # bytes that are checked at a time


def find_files(patterns: Sequence[str], base: Path | None, path: str, mark: Mark | None) -> list[Path]:
    """The files of the globs in their order, those of one glob sorted by name, each file once. Raises SpecError."""
    if not patterns:
        raise SpecError.of(path, "names no file", mark)
    found: dict[Path, Path] = {}
    for pattern in patterns:
        for file in _matches(pattern, base, path, mark):
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _matches(pattern: str, base: Path | None, place: str, mark: Mark | None) -> list[Path]:
    """The files of one glob in the first folder that has any, sorted. Raises SpecError when there is none."""
    wanted = os.path.expanduser(pattern)
    if os.path.isabs(wanted):
        folders = [Path(os.path.sep)]
    else:
        folders = list(dict.fromkeys(folder.resolve() for folder in (Path.cwd(), base) if folder is not None))
    for folder in folders:
        matches = [folder / name for name in sorted(glob.glob(wanted, root_dir=folder, recursive=True))]
        if files := [file for file in matches if file.is_file()]:
            return files
        if matches:
            raise SpecError.of(
                place, f"'{pattern}' is a folder; name its files: '{pattern.rstrip('/')}/**/*.txt'", mark
            )
    where = "" if os.path.isabs(wanted) else f" in {' or '.join(map(str, folders))}"
    raise SpecError.of(place, f"'{pattern}' matches no file{where}", mark)


def read_text(file: Path, path: str, mark: Mark | None) -> bytes:
    """The bytes of a text file, exactly. Raises SpecError when it cannot be read or is not UTF-8."""
    try:
        data = file.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise SpecError.of(path, f"cannot read {file}: {error.strerror}", mark) from error
    except UnicodeDecodeError as error:
        raise SpecError.of(path, f"{file} is not UTF-8 text (byte {error.start})", mark) from error
    return data


@contextmanager
def mapped_text(file: Path, path: str, mark: Mark | None) -> Iterator[bytes | mmap.mmap]:
    """A text file that the system reads as it is needed. Raises SpecError when it cannot be read or is not UTF-8."""
    try:
        with file.open("rb") as opened:
            if not os.fstat(opened.fileno()).st_size:
                yield b""
                return
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_utf8(data, file, path, mark)
                yield data
    except OSError as error:
        raise SpecError.of(path, f"cannot read {file}: {error.strerror}", mark) from error


def _check_utf8(data: mmap.mmap, file: Path, path: str, mark: Mark | None) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), _CHUNK):
        begun = len(decoder.getstate()[0])
        try:
            decoder.decode(data[start : start + _CHUNK], final=start + _CHUNK >= len(data))
        except UnicodeDecodeError as error:
            message = f"{file} is not UTF-8 text (byte {start - begun + error.start})"
            raise SpecError.of(path, message, mark) from error
