"""Turns a source and a tokenizer into a data set of the store: made whole or not at all, found again by content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from arch_dsl.errors import Mark, SpecError
from search.data.dataset import FORMAT, DataError, Dataset, write
from search.data.notation import plain
from search.data.sources import Source
from search.data.splits import Splits, split
from search.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)

_INDEX = "index.json"
_LOCK = ".lock"
_UNFINISHED = ".new-"
_ABANDONED_S = 24 * 3600  # an unfinished folder this old belongs to a process that was killed


def prepare(source: Source, tokenizer: Tokenizer, root: Path, base: Path | None = None, path: str = "train") -> Dataset:
    """The data set of this text and tokenizer in `root`, made if it is not there.

    `base` is the study's folder, where relative globs are searched after the current directory; `path` is where `data`
    and `tokenizer` stand in the study. Files whose size and time are as remembered are not read again; otherwise the
    content decides. Processes may race: one of their equal results stays. A damaged data set is made again, which the
    log says. Raises SpecError for missing files, text that is not UTF-8, and too little text.
    """
    place = f"{path}.data"
    files = source.find(base, place)
    asked = _hash({"source": plain(source), "tokenizer": plain(tokenizer), "format": FORMAT})
    seen = _hash([[str(file), stat.st_size, stat.st_mtime_ns] for file in files for stat in (file.stat(),)])
    known = _read_index(root).get(asked, {})
    if known.get("files") == seen and (found := _intact(root, known.get("identity", ""))):
        return found
    splits = split(source.read(files, place), source, place)
    identity = _hash({"text": splits.digest(), "tokenizer": plain(tokenizer), "format": FORMAT})[:16]
    dataset = _intact(root, identity) or _make(root, identity, source, tokenizer, splits, path)
    _remember(root, asked, {"files": seen, "identity": identity})
    return dataset


def require(dataset: Dataset, context: int, batch: int, path: str = "train", mark: Mark | None = None) -> None:
    """Raises SpecError when the training split holds fewer tokens than one batch of `batch` windows."""
    needed = batch * context + 1
    if (found := dataset.tokens["train"]) < needed:
        message = (
            f"has {found:,} training tokens, fewer than one batch of {batch} sequences of {context} takes ({needed:,})"
        )
        raise SpecError.of(f"{path}.data", message, mark)


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _intact(root: Path, identity: str) -> Dataset | None:
    try:
        return Dataset.open(root, identity)
    except DataError:
        return None


def _make(root: Path, identity: str, source: Source, tokenizer: Tokenizer, splits: Splits, path: str) -> Dataset:
    """Writes a folder beside its place and renames it there."""
    codec = tokenizer.train(splits.documents["train"], f"{path}.tokenizer")
    facts = {
        "source": plain(source),
        "tokenizer": plain(tokenizer),
        "labels": {"source": source.label(), "tokenizer": tokenizer.label()},
        "duplicate_bytes": splits.duplicate_bytes,
        "unused_bytes": splits.unused_bytes,
    }
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    made = _unfinished(root)
    made.mkdir()
    try:
        write(made, codec, splits.documents, facts)
        _move(made, root / identity)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    dataset = Dataset.open(root, identity)
    counts = ", ".join(f"{count:,} {name} tokens" for name, count in dataset.tokens.items())
    left = (
        f"{splits.unused_bytes:,} held-out bytes beyond the caps are unused, {splits.duplicate_bytes:,} are duplicates"
    )
    log.info("data %s: %s; %s", identity, counts, left)
    return dataset


def _unfinished(root: Path) -> Path:
    """A new name for what is not whole yet."""
    return root / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keeps other processes out for the moment in which a folder or the index changes its place."""
    with (root / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file, and with the process
        yield


def _move(made: Path, place: Path) -> None:
    """Puts a finished folder in its place. Whoever comes second keeps the first one's, unless that is damaged."""
    with _alone(place.parent):
        if place.exists():
            try:
                Dataset.open(place.parent, place.name)
                return
            except DataError as error:
                log.info("%s; it is made again", error)
            place.rename(aside := _unfinished(place.parent))
            shutil.rmtree(aside)
        made.rename(place)


def _sweep(root: Path) -> None:
    """Removes what killed processes left unfinished long ago."""
    for folder in root.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # another process may be first
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


def _read_index(root: Path) -> dict[str, dict[str, str]]:
    """What was prepared from which files. It only saves reading them: one that is damaged is as good as none."""
    try:
        index = json.loads((root / _INDEX).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def _remember(root: Path, asked: str, entry: dict[str, str]) -> None:
    """Adds an entry."""
    with _alone(root):
        made = _unfinished(root)
        made.write_text(json.dumps(_read_index(root) | {asked: entry}, indent=1))
        made.replace(root / _INDEX)
