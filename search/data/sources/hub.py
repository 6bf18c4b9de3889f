"""Data sets of the Hugging Face hub: streamed once into files of the store, and on from where that was interrupted."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.documents.document import Document
from archlab.search.data.documents.text_files import find_files
from archlab.search.data.sources.family import Corpus, Source
from archlab.search.data.sources.records import Jsonl, capped
from archlab.search.utils.files import alone, make_private, read_json

log = logging.getLogger(__name__)

PART_BYTES = 64 << 20  # of text in one file: what an interruption loses at most
_LOCAL = ("json", "parquet", "text", "csv", "arrow")  # builders of `datasets` that read files of this machine
_STATE = "state.json"


@Source.register("hf")
class Hub(Corpus):
    """A data set that the `datasets` library reads: one of the Hugging Face hub, or local files by one of its builders.

    `name`, `config`, `split` and `revision` are those of `datasets.load_dataset`; a data set of the hub needs its
    `revision`, best a commit. `column` holds the text, `bytes` is how much of it is read: until the next document would
    pass it. With `data_files`, `name` may be json, parquet, text, csv or arrow. Needs `pip install 'archlab[hub]'`.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    data_files: tuple[str, ...] = ()
    bytes: Count | None = None

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """The files that hold its text, downloaded first where that was not done or not finished."""
        local = self.name in _LOCAL
        if local != bool(self.data_files):
            missing = "data_files" if local else "none of data_files: a data set of the hub knows its own"
            raise SpecError.of(f"{path}.data_files", f"{self.name} needs {missing}", self.mark("name"))
        if not local and self.revision is None:
            message = f"is missing: without it '{self.name}' may be another data set tomorrow; give a commit"
            raise SpecError.of(f"{path}.revision", message, self.mark("name"))
        files = find_files(self.data_files, base, f"{path}.data_files", self.mark("data_files")) if local else []
        return files if root is None else self._fetched(self._folder(root, files), files, path)

    def absent(self, root: Path) -> bool:
        """Whether it is of the hub, and not all of it was downloaded."""
        return self.name not in _LOCAL and not _read_state(self._folder(root, []))["done"]

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """One document per row."""
        reader = Jsonl(files=tuple(map(str, files)))
        return capped((text for file in files for text in reader.texts(file, path)), self.bytes)

    def label(self) -> str:
        """`hf: allenai/c4 en@1588ec4`"""
        config = f" {self.config}" if self.config else ""
        return f"hf: {self.name}{config}{f'@{self.revision[:7]}' if self.revision else ''}"

    def _folder(self, root: Path, files: list[Path]) -> Path:
        """Where its parts are kept: by what is downloaded, whatever becomes of it then."""
        asked = {**canonical(self), "data_files": [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]}
        for name in ("clean", "validation_bytes", "test_bytes"):
            asked.pop(name, None)
        return root / f"hub-{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]}"

    def _fetched(self, folder: Path, files: list[Path], path: str) -> list[Path]:
        """The parts in a folder, after adding those that are not there."""
        make_private(folder)
        with alone(folder):  # one process downloads; another one waits for it
            state = _read_state(folder)
            if not state["done"]:
                rows = self._rows(files, path)
                if state["place"] is not None:
                    rows.load_state_dict(state["place"])
                    log.info("%s: goes on after %d parts", self.label(), state["parts"])
                self._add_parts(folder, rows, state, path)
        return [_part(folder, number) for number in range(state["parts"])]

    def _rows(self, files: list[Path], path: str) -> Any:
        """The rows as a stream that knows its place."""
        try:
            import datasets
        except ImportError as error:
            message = "needs the `datasets` library: pip install 'archlab[hub]'"
            raise SpecError.of(f"{path}.name", message, self.mark("name")) from error
        try:
            return datasets.load_dataset(
                self.name,
                self.config,
                split=self.split,
                revision=self.revision,
                data_files=[str(file) for file in files] or None,
                streaming=True,
            )
        except Exception as error:  # the library raises whatever its builders raise
            message = f"'{self.name}' could not be opened: {type(error).__name__}: {error}"
            raise SpecError.of(f"{path}.name", message, self.mark("name")) from error

    def _add_parts(self, folder: Path, rows: Any, state: dict[str, Any], path: str) -> None:
        """Writes part after part, each whole before the state says so, until there is enough."""
        part: list[str] = []
        held = 0
        for row in rows:
            text = row.get(self.column)
            if not isinstance(text, str):
                message = f"has no text in '{self.column}' (columns: {', '.join(row)})"
                raise SpecError.of(f"{path}.column", message, self.mark("column") or self.mark("name"))
            part.append(text)
            held += len(text.encode())
            enough = self.bytes is not None and state["bytes"] + held >= self.bytes
            if held >= PART_BYTES or enough:
                _write_part(folder, part, state, held, rows.state_dict(), done=enough)
                part, held = [], 0
            if enough:
                return
        _write_part(folder, part, state, held, None, done=True)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.jsonl.gz"


def _read_state(folder: Path) -> dict[str, Any]:
    """How far it came: whole parts, their bytes of text, the place in the stream after them. Without it: nowhere."""
    found = read_json(folder / _STATE)
    return {"parts": 0, "bytes": 0, "place": None, "done": False} if found is None else found


def _write_part(
    folder: Path, texts: list[str], state: dict[str, Any], held: int, place: dict[str, Any] | None, *, done: bool
) -> None:
    """Adds a part, then says so; `state` is changed."""
    if texts:
        file = _part(folder, state["parts"])
        new = file.with_suffix(".new")
        with gzip.GzipFile(new, "wb", compresslevel=3, mtime=0) as out:
            out.writelines(json.dumps({"text": text}).encode() + b"\n" for text in texts)
        new.replace(file)
        state["parts"] += 1
        state["bytes"] += held
        log.info("%s: %d parts, %d bytes of text", folder.name, state["parts"], state["bytes"])
    state |= {"place": place, "done": done}
    new = folder / f"{_STATE}.new"
    new.write_text(json.dumps(state))
    os.replace(new, folder / _STATE)
