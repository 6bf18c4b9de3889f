"""Sources whose documents are records of a file: lines of JSON, rows of Parquet."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from archlab.arch_dsl.language.errors import Mark, SpecError, nearest
from archlab.arch_dsl.language.spec import Count, added
from archlab.search.data.documents.document import GIVEN, Document
from archlab.search.data.documents.text_files import find_files
from archlab.search.data.sources.family import Corpus, Source
from archlab.search.utils.files import NO_JSON

Raw = bytes  # what a class with a field of that name cannot say
_ROWS = 1_000  # of Parquet at a time


class Records(Corpus):
    """Files of records, one document each. `bytes` is how much text is read: until the next document would pass it."""

    files: tuple[str, ...]
    bytes: Count | None = None

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """The files of the globs in their order, those of one glob sorted by name, each file once."""
        return find_files(self.files, base, f"{path}.files", self.mark("files"))

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """One document per record, which is a group of its own; empty ones are left out."""
        return capped((text for file in files for text in self.texts(file, f"{path}.files")), self.bytes)

    def texts(self, file: Path, path: str) -> Iterator[Raw]:
        """The texts of one file. Raises SpecError for a file or record that cannot be read."""
        raise NotImplementedError

    def label(self) -> str:
        """`jsonl: pile/*.jsonl.zst`"""
        return f"{self.type}: {', '.join(self.files)}"


@Source.register("jsonl")
class Jsonl(Records):
    """Lines of JSON objects; `field` is the one that holds the text. Files may be compressed: .gz, .zst, .bz2, .xz.

    With `input` every record is an example: the objective `targets` gives the text of that field and asks for `field`.
    Examples with the same input share a split, so that none is tested on what was given in training.
    """

    field: str = "text"
    input: str | None = added(default=None)

    @property
    def holds_examples(self) -> bool:
        return self.input is not None

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """One document per record; the group of an example is what is given."""
        for document in super().read(files, path):
            given, ends, _ = document.data.partition(GIVEN) if self.holds_examples else (b"", b"", b"")
            yield document._replace(group=hashlib.sha256(given).digest()) if ends else document

    def texts(self, file: Path, path: str) -> Iterator[Raw]:
        """The text of each line that is not blank."""
        mark = self.mark("files")
        try:
            with opened(file) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield self._text(line, f"{file}:{number}", path, mark)
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise SpecError.of(
                path, f"cannot read {file}: {getattr(error, 'strerror', None) or error}", mark
            ) from error

    def _text(self, line: Raw, where: str, path: str, mark: Mark | None) -> Raw:
        try:
            record = json.loads(line)
        except NO_JSON as error:
            raise SpecError.of(path, f"{where} is not JSON: {error}", mark) from error
        if not isinstance(record, dict):
            raise SpecError.of(path, f"{where} is no JSON object", mark)
        text = self._field(record, "field", self.field, where, path)
        if self.input is None:
            return text
        given = self._field(record, "input", self.input, where, path)
        if GIVEN in given:
            raise SpecError.of(path, f"{where}: '{self.input}' has the character U+001E, which ends an input", mark)
        return given + GIVEN + text

    def _field(self, record: dict[str, Any], key: str, name: str, where: str, path: str) -> Raw:
        """The text of one field, which the source names under `key`."""
        mark = self.mark("files")
        if name not in record:
            place = path.removesuffix("files") + key
            raise SpecError.of(place, _missing(name, record, where), self.mark(key))
        text = record[name]
        if not isinstance(text, str):
            raise SpecError.of(path, f"{where}: '{name}' is no text", mark)
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise SpecError.of(path, f"{where}: '{name}' is not Unicode text: {error.reason}", mark) from error


@Source.register("parquet")
class Parquet(Records):
    """Rows of Parquet files; `column` is the one that holds the text. Rows without a text are left out."""

    column: str = "text"

    def texts(self, file: Path, path: str) -> Iterator[Raw]:
        """The text of each row."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(file) as table:
                names = table.schema_arrow.names
                if self.column not in names:
                    place = path.removesuffix("files") + "column"
                    raise SpecError.of(place, _missing(self.column, names, str(file)), self.mark("column"))
                kind = table.schema_arrow.field(self.column).type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                    raise SpecError.of(path, f"{file}: '{self.column}' holds {kind}, no text", self.mark("files"))
                for batch in table.iter_batches(_ROWS, columns=[self.column]):
                    yield from (text.encode() for text in batch.column(0).to_pylist() if text is not None)
        except (OSError, pa.ArrowException) as error:
            raise SpecError.of(path, f"cannot read {file}: {error}", self.mark("files")) from error


def capped(texts: Iterator[Raw], limit: int | None) -> Iterator[Document]:
    """Texts as documents, until the next one would pass `limit` bytes."""
    total = 0
    for text in texts:
        total += len(text)
        if limit is not None and total > limit:
            return
        yield Document(text, hashlib.sha256(text).digest())


def opened(file: Path) -> IO[Raw]:
    """A file for reading, decompressed as its name says."""
    if file.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(file)), "zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    found: IO[Raw] = openers.get(file.suffix, open)(file, "rb")
    return found


def _missing(name: str, known: Sequence[str] | dict[str, Any], where: str) -> str:
    meant = nearest(name, known)
    hint = f"; did you mean '{meant}'?" if meant else ""
    return f"{where} has no '{name}'{hint} ({', '.join(known)})"
