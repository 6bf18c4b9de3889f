"""Where text comes from: each source finds its files and cuts them into documents, in an order that never varies."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from archlab.arch_dsl.language.errors import Problem, SpecError, nearest
from archlab.arch_dsl.language.parse import INVALID, parse_member, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, Family, added
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.cleaning.stages import CleaningStage
from archlab.search.data.documents.document import Document, pieces, separated
from archlab.search.data.documents.notation import long_form
from archlab.search.data.documents.text_files import find_files, mapped_text, read_text

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_MADE_HERE = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")  # they differ from machine to machine


class Source(Family):
    """Where documents come from. `caps` are the fields that bound the held-out splits, counted in `unit` bytes."""

    noun: ClassVar[str] = "data source"
    caps: ClassVar[dict[str, str]] = {}
    unit: ClassVar[int] = 1

    clean: tuple[CleaningStage, ...] = added(default=())

    @property
    def holds_tokens(self) -> bool:
        """Whether its documents are tokens (uint32), not text."""
        return False

    @property
    def holds_examples(self) -> bool:
        """Whether its documents are examples: what is given, `GIVEN`, and what is asked for."""
        return False

    @property
    def holds_answers(self) -> bool:
        """Whether some of its tokens are answers, the only ones that the objective `answers` scores."""
        return False

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """Reads `{text: "*.txt"}` and `{text: {files: …}}` as `{type: text, files: …}`, the rest like any family."""
        if cls.type:  # a member, whose `type` the parser has read and taken away
            return parse_record(cls, node, path, problems)
        if node.value is None:
            message = f"must be a data source, found nothing ({', '.join(cls.members)})"
            problems.append(Problem(path, message, node.mark))
            return INVALID
        if isinstance(node.value, str) and node.value not in cls.members and {*node.value} & {*"*./"}:
            kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(Path(node.value).suffix, "text")
            message = f"'{node.value}' is no data source; files are read by `{{{kind}: \"{node.value}\"}}`"
            problems.append(Problem(path, message, node.mark))
            return INVALID
        if isinstance(node.value, dict) and "mixture" in node.value and "type" not in node.value:
            own = {"type": Node("mixture", node.key_marks.get("mixture", node.mark))}
            named = {"domains" if key == "mixture" else key: child for key, child in node.value.items()}
            node = Node(own | named, node.mark, node.key_marks)
        return parse_member((cls,), long_form(node, cls.members, "files"), path, problems)

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """The files of the corpus in reading order; `base` is the study's folder, `path` the source's place in it.

        What has to be downloaded is kept in `root`, the folder of prepared data. Raises SpecError when there is none.
        """
        raise NotImplementedError

    def absent(self, root: Path) -> bool:
        """Whether some of its text has yet to be downloaded into `root`, the folder of prepared data."""
        return False

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """The documents of these files in order. Raises SpecError for a file that is not UTF-8 text."""
        raise NotImplementedError

    def label(self) -> str:
        """The source in a few words, for tables and figures."""
        raise NotImplementedError

    def alphabet(self) -> tuple[int, int]:
        """Of a source of tokens how many there are, and which one ends a document."""
        raise NotImplementedError

    def held_out(self) -> Any:
        """What decides the text of the held-out splits, as JSON data."""
        return canonical(self)


class Corpus(Source):
    """A source of text: files, cut into documents. The caps bound the held-out splits, so that evaluation is quick."""

    caps: ClassVar[dict[str, str]] = {"validation": "validation_bytes", "test": "test_bytes"}

    validation_bytes: Count = 256_000
    test_bytes: Count = 512_000


@Source.register("stdlib")
class Stdlib(Corpus):
    """The Python standard library's own source text, without tests: real text that every machine has.

    Files come in the order of a hash of their names, so that a small `bytes` is a sample of the whole library, or of
    the `files` that globs in its folder name (`encodings/*.py`). The text depends on the version of Python, and with
    it the identity of the data.
    """

    bytes: Count | None = 8_000_000
    files: tuple[str, ...] = added(default=())

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """The .py files of the library, or those of `files`, but for those of tests, of IDLE and of this machine.

        Raises SpecError for a glob that matches none of them.
        """
        library = sysconfig.get_path("stdlib")
        names: list[str] = []
        for folder, folders, found in os.walk(library):
            folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(_MADE_HERE)]
            inside = Path(folder).relative_to(library)
            names += [
                (inside / name).as_posix() for name in found if name.endswith(".py") and not name.startswith(_MADE_HERE)
            ]
        if not names:
            raise SpecError.of(path, f"finds no .py file of the standard library in {library}", self.mark())
        if self.files:
            names = self._named(names, library, path)
        return [Path(library, name) for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())]

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """Pieces of at most 8 kB, until the next one would pass `bytes`; the pieces of a file are one group."""
        total = 0
        for file in files:
            data = read_text(file, path, self.mark())
            group = hashlib.sha256(data).digest()
            for piece in pieces(data):
                total += len(piece)
                if self.bytes is not None and total > self.bytes:
                    return
                yield Document(piece, group)

    def label(self) -> str:
        """`standard library of Python 3.12.1`, `encodings/*.py of the standard library of Python 3.12.1`"""
        library = f"standard library of Python {platform.python_version()}"
        return f"{', '.join(self.files)} of the {library}" if self.files else library

    def _named(self, names: Sequence[str], library: str, path: str) -> list[str]:
        """Those of the library's `names` that `files` match."""
        named: set[str] = set()
        for pattern in self.files:
            matches = set(names).intersection(glob.glob(pattern, root_dir=library, recursive=True))
            if not matches:
                folders = {f"{Path(name).parent.as_posix()}/*.py" for name in names if "/" in name}
                meant = nearest(pattern, [*sorted(folders), *names])
                hint = f"; did you mean '{meant}'?" if meant else ""
                message = f"'{pattern}' matches no .py file of the standard library in {library}{hint}"
                raise SpecError.of(f"{path}.files", message, self.mark("files"))
            named |= matches
        return [name for name in names if name in named]


@Source.register("text")
class Text(Corpus):
    """Text files in UTF-8, named by one or more globs.

    Documents are what `separator` separates (it belongs to none of them), or without one pieces of at most 8 kB that
    end at blank lines. A relative glob is searched in the current directory, then in the study's folder.
    """

    files: tuple[str, ...]
    separator: str | None = None

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """The files of the globs in their order, those of one glob sorted by name, each file once."""
        if self.separator == "":
            raise SpecError.of(f"{path}.separator", "must not be empty", self.mark("separator"))
        return find_files(self.files, base, f"{path}.files", self.mark("files"))

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """One document per group, so that even a single book has all splits."""
        for file in files:
            with mapped_text(file, f"{path}.files", self.mark("files")) as data:
                cut = pieces(data) if self.separator is None else separated(data, self.separator.encode())
                for piece in cut:
                    yield Document(piece, hashlib.sha256(piece).digest())

    def label(self) -> str:
        """`text: poems/*.txt`"""
        return f"text: {', '.join(self.files)}"
