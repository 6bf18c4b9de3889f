"""Checksums of a data set's files by block, and streams of tokens that are checked as they are read."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast, overload

import numpy as np
import numpy.typing as npt

from archlab.search.utils.files import NO_JSON, write_whole
from archlab.search.utils.untrusted import NoRegularFile, open_regular, read_regular

log = logging.getLogger(__name__)

BLOCK_BYTES = 2**16
_LARGEST_BLOCK = 2**28  # that is read at once
SUMS = "checksums.json"
DAMAGED = "damaged.txt"
"""Written into the folder of a data set by who finds it damaged: it is made again when it is prepared next."""

Integers = npt.NDArray[np.integer[Any]]


class DataError(ValueError):
    """A prepared data set that is missing or damaged."""


class DamagedData(DataError):
    """A file of a data set does not hold what was written to it. The data set can be made again from its source."""


def seal(folder: Path, names: list[str]) -> None:
    """Keeps the checksums (CRC-32 by block) of these files of a data set, beside them."""
    sums = {name: _sums_of(folder / name) for name in names}
    write_whole(folder / SUMS, json.dumps({"block_bytes": BLOCK_BYTES, "files": sums}))


class Checksums:
    """What the files of a data set held when they were written. One that was made without them is not checked."""

    def __init__(self, folder: Path, mark: bool = True) -> None:
        """With `mark` a data set that is found damaged is made again when it is prepared next. Raises DamagedData."""
        self._folder, self._size, self._mark = folder, BLOCK_BYTES, mark
        self._sums: dict[str, list[int]] | None = None
        self._checked: dict[str, bytearray] = {}  # of each file a 1 for every block that was found whole
        if not (folder / SUMS).exists():
            return
        try:
            held = json.loads(read_regular(folder / SUMS))
            self._size = int(held["block_bytes"])
            self._sums = {str(name): [int(each) for each in own] for name, own in held["files"].items()}
        except (*NO_JSON, TypeError, KeyError, AttributeError, NoRegularFile) as error:
            raise self._damaged(SUMS, 0, (folder / SUMS).stat().st_size) from error
        if not 1 <= self._size <= _LARGEST_BLOCK:
            raise self._damaged(SUMS, 0, (folder / SUMS).stat().st_size)

    def check(self, name: str) -> None:
        """Reads a whole file, block by block, unless it was read. Raises DamagedData."""
        if self._sums is None or (name in self._checked and all(self._checked[name])):
            return
        with open_regular(self._folder / name, follow=True) as file:
            found = list(_sums_in(file, self._size))
            held = self._sums.get(name, [])
            if found != held:
                block = next((i for i, (a, b) in enumerate(zip(found, held, strict=False)) if a != b), len(held))
                raise self._damaged(name, block * self._size, min((block + 1) * self._size, file.tell()))
        self._checked[name] = bytearray(b"\1" * len(held))

    def check_bytes(self, name: str, data: memoryview, start: int, end: int) -> None:
        """Checks the blocks in which bytes `start` to `end` of a file lie, each once. Raises DamagedData."""
        if self._sums is None or start >= end:
            return
        sums = self._sums.get(name, [])
        checked = self._checked.setdefault(name, bytearray(len(sums)))
        first, last = start // self._size, (end - 1) // self._size
        if checked.find(0, first, last + 1) < 0 and last < len(sums):
            return
        for block in range(first, last + 1):
            place = block * self._size
            if block >= len(sums) or zlib.crc32(data[place : place + self._size]) != sums[block]:
                raise self._damaged(name, place, min(place + self._size, len(data)))
            checked[block] = 1

    def _damaged(self, name: str, start: int, end: int) -> DamagedData:
        message = (
            f"data {self._folder.name} is damaged: bytes {start:,} to {end:,} of {self._folder / name} are not those "
            "that were written; the next run makes it again from its source"
        )
        if self._mark:
            try:
                write_whole(self._folder / DAMAGED, message + "\n")
            except OSError as error:
                log.warning("%s can't be marked as damaged: %s", self._folder, error)
        return DamagedData(message)


class Stream:
    """The tokens of a split, or a part of them, memory-mapped: read by index and slice, checked block by block."""

    def __init__(self, tokens: Integers, sums: Checksums, name: str, first: int = 0, last: int | None = None) -> None:
        """Tokens `first` to `last` of all `tokens` of the file `name`."""
        self._tokens, self._sums, self._name = tokens, sums, name
        self._bytes = memoryview(cast(Any, tokens.view(np.uint8)))
        self._first, self._last = first, len(tokens) if last is None else last

    def __len__(self) -> int:
        return self._last - self._first

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Integers: ...
    def __getitem__(self, place: int | slice) -> int | Integers:
        """A token, or the tokens `[tokens]` of a slice. Raises DamagedData, IndexError."""
        if not isinstance(place, slice):
            index = range(len(self))[place]
            return int(self[index : index + 1][0])
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise IndexError("a stream is read token by token: a slice has a step of 1")
        first, last = self._first + start, self._first + max(start, stop)
        size = self._tokens.itemsize
        self._sums.check_bytes(self._name, self._bytes, first * size, last * size)
        return self._tokens[first:last]

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All tokens. Raises DamagedData."""
        return np.asarray(self[:], dtype=dtype)

    def part(self, first: int, last: int) -> Stream:
        """Tokens `first` to `last` as a stream; nothing is read."""
        return Stream(self._tokens, self._sums, self._name, self._first + first, self._first + last)


def _sums_of(file: Path) -> list[int]:
    with file.open("rb") as opened:
        return list(_sums_in(opened, BLOCK_BYTES))


def _sums_in(file: BinaryIO, size: int) -> Iterator[int]:
    """The checksum of each block of so many bytes."""
    return (zlib.crc32(block) for block in iter(lambda: file.read(size), b""))
