"""Documents on disk while a data set is made, so that a corpus may be larger than memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, overload


class Texts(Protocol):
    """What documents are put into, one after the other, and taken out of by their places: a list, or a Spool."""

    def append(self, text: bytes, /) -> None:
        """Adds a document."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> bytes: ...


class Spool:
    """A file of documents. Memory holds eight bytes of each: where it begins."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w+b", buffering=1 << 20)
        self._starts = array("q", [0])
        self._written = True

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, text: bytes, /) -> None:
        """Adds a document. Raises OSError when the disk is full."""
        self._file.write(text)
        self._starts.append(self._starts[-1] + len(text))
        self._written = False

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, place: int, /) -> bytes:
        if not self._written:
            self._file.flush()
            self._written = True
        start, end = self._starts[place], self._starts[place + 1]
        return os.pread(self._file.fileno(), end - start, start)


class Picked(Sequence[bytes]):
    """Some of the documents, in an order of their own, each read when it is asked for."""

    def __init__(self, texts: Texts, places: Sequence[int]) -> None:
        self._texts, self.places = texts, array("q", places)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self._texts[index] for index in self.places[place]]
        return self._texts[self.places[place]]

    def __iter__(self) -> Iterator[bytes]:
        return (self._texts[place] for place in self.places)
