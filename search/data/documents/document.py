"""A document, and how a text is cut into documents."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 8_192
GIVEN = b"\x1e"  # ends what an example gives; ASCII's record separator, which text does not have


class Document(NamedTuple):
    """UTF-8 bytes of one document, and the SHA-256 it is split by: the documents of one group share a split."""

    data: bytes
    group: bytes


def pieces(data: bytes | mmap.mmap, limit: int = PIECE_BYTES) -> Iterator[bytes]:
    """Cuts UTF-8 text into pieces of at most `limit` bytes (at least 4) that join to the same text again.

    A piece ends at its last blank line; where it has none at a line's end, and where it has none at a character's end.
    """
    start = 0
    while len(data) - start > limit:
        end = start + limit
        blank = max(data.rfind(b"\n\n", start, end) + 2, data.rfind(b"\n\r\n", start, end) + 3)
        line = data.rfind(b"\n", start, end) + 1
        if blank > start + 3:
            end = blank
        elif line > start:
            end = line
        else:
            while data[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
        yield data[start:end]
        start = end
    if start < len(data):
        yield data[start:]


def separated(data: bytes | mmap.mmap, separator: bytes) -> Iterator[bytes]:
    """What stands between separators, as `bytes.split` does, one at a time."""
    start = 0
    while (end := data.find(separator, start)) >= 0:
        yield data[start:end]
        start = end + len(separator)
    yield data[start:]
