"""Where text comes from: each source finds its files and cuts them into documents, in an order that never varies."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from arch_dsl.errors import Mark, Problem, SpecError
from arch_dsl.parse import INVALID, parse_member, parse_record
from arch_dsl.source import Node
from arch_dsl.spec import Count, Family

PIECE_BYTES = 8_192
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_MADE_HERE = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")  # they differ from machine to machine


class Document(NamedTuple):
    """UTF-8 bytes of one document, and the SHA-256 it is split by: the documents of one group share a split."""

    data: bytes
    group: bytes


class Source(Family):
    """A corpus: files, cut into documents. The caps bound the held-out splits, so that evaluation stays quick."""

    noun: ClassVar[str] = "data source"

    validation_bytes: Count = 256_000
    test_bytes: Count = 512_000

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """Reads `{text: "*.txt"}` and `{text: {files: …}}` as `{type: text, files: …}`, the rest like any family."""
        if cls.type:  # a member, whose `type` the parser has read and taken away
            return parse_record(cls, node, path, problems)
        if node.value is None:
            message = f"must be a data source, found nothing ({', '.join(cls.members)})"
            problems.append(Problem(path, message, node.mark))
            return INVALID
        return parse_member((cls,), _long_form(node), path, problems)

    def find(self, base: Path | None, path: str) -> list[Path]:
        """The files of the corpus in reading order; `base` is the study's folder, `path` the source's place in it.

        Raises SpecError when there is none.
        """
        raise NotImplementedError

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """The documents of these files in order. Raises SpecError for a file that is not UTF-8 text."""
        raise NotImplementedError

    def label(self) -> str:
        """The source in a few words, for tables and figures."""
        raise NotImplementedError


@Source.register("stdlib")
class Stdlib(Source):
    """The Python standard library's own source text, without tests: real text that every machine has.

    Files come in the order of a hash of their names, so that a small `bytes` is a sample of the whole library. The
    text depends on the version of Python, and with it the identity of the data.
    """

    bytes: Count | None = 8_000_000

    def find(self, base: Path | None, path: str) -> list[Path]:
        """All .py files below the library's folder but those of tests, of IDLE and of this machine."""
        root = sysconfig.get_path("stdlib")
        names = []
        for folder, folders, found in os.walk(root):
            folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(_MADE_HERE)]
            inside = Path(folder).relative_to(root)
            names += [
                (inside / name).as_posix() for name in found if name.endswith(".py") and not name.startswith(_MADE_HERE)
            ]
        if not names:
            raise SpecError.of(path, f"finds no .py file of the standard library in {root}", self.mark())
        return [Path(root, name) for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())]

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """Pieces of at most 8 kB, until the next one would pass `bytes`; the pieces of a file are one group."""
        total = 0
        for file in files:
            data = _read(file, path, self.mark())
            group = hashlib.sha256(data).digest()
            for piece in pieces(data):
                total += len(piece)
                if self.bytes is not None and total > self.bytes:
                    return
                yield Document(piece, group)

    def label(self) -> str:
        """`standard library of Python 3.12.1`"""
        return f"standard library of Python {platform.python_version()}"


@Source.register("text")
class Text(Source):
    """Text files in UTF-8, named by one or more globs.

    Documents are what `separator` separates (it belongs to none of them), or without one pieces of at most 8 kB that
    end at blank lines. A relative glob is searched in the current directory, then in the study's folder.
    """

    files: tuple[str, ...]
    separator: str | None = None

    def find(self, base: Path | None, path: str) -> list[Path]:
        """The files of the globs in their order, those of one glob sorted by name, each file once."""
        place, mark = f"{path}.files", self.mark("files")
        if not self.files:
            raise SpecError.of(place, "names no file", mark)
        if self.separator == "":
            raise SpecError.of(f"{path}.separator", "must not be empty", self.mark("separator"))
        found: dict[Path, Path] = {}
        for pattern in self.files:
            for file in _matches(pattern, base, place, mark):
                found.setdefault(file.resolve(), file)
        return list(found.values())

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """One document per group, so that even a single book has all splits."""
        for file in files:
            data = _read(file, f"{path}.files", self.mark("files"))
            cut = pieces(data) if self.separator is None else data.split(self.separator.encode())
            for piece in cut:
                yield Document(piece, hashlib.sha256(piece).digest())

    def label(self) -> str:
        """`text: poems/*.txt`"""
        return f"text: {', '.join(self.files)}"


def pieces(data: bytes, limit: int = PIECE_BYTES) -> Iterator[bytes]:
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


def _long_form(node: Node) -> Node:
    """`{name: fields}` as `{type: name, **fields}`; a value that is no mapping stands for `files`."""
    if not isinstance(node.value, dict) or len(node.value) != 1 or "type" in node.value:
        return node
    ((name, child),) = node.value.items()
    kind = Node(name, node.key_marks.get(name, node.mark))
    if isinstance(child.value, dict):
        return Node({"type": kind, **child.value}, node.mark, child.key_marks)
    fields = {} if child.value is None else {"files": child}
    return Node({"type": kind, **fields}, node.mark, {"files": child.mark} if child.mark else {})


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


def _read(file: Path, path: str, mark: Mark | None) -> bytes:
    """The bytes of a text file, exactly. Raises SpecError when it cannot be read or is not UTF-8."""
    try:
        data = file.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise SpecError.of(path, f"cannot read {file}: {error.strerror}", mark) from error
    except UnicodeDecodeError as error:
        raise SpecError.of(path, f"{file} is not UTF-8 text (byte {error.start})", mark) from error
    return data
