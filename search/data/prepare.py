"""Turns a source and a tokenizer into a data set of the store: made whole or not at all, found again by content."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from archlab.arch_dsl.language.errors import Mark, SpecError
from archlab.search.data.checksums import DataError
from archlab.search.data.cleaning.stages import Cleaner
from archlab.search.data.dataset import FORMAT, Dataset, write
from archlab.search.data.documents.notation import plain
from archlab.search.data.documents.spool import Spool
from archlab.search.data.overlap import measure
from archlab.search.data.sources.family import Source
from archlab.search.data.sources.given_tokens import TokenCodec
from archlab.search.data.sources.mixture import Mixture, corpora_of
from archlab.search.data.sources.splits import Kept, Splits, split_all
from archlab.search.data.tokenizers.family import Bytes, Codec, Tokenizer
from archlab.search.utils.files import alone, make_private, read_json

log = logging.getLogger(__name__)

_INDEX = "index.json"
_UNFINISHED = ".new-"
_TEXTS = "texts"  # the documents while they are read
_ABANDONED_S = 24 * 3600  # an unfinished folder this old belongs to a process that was killed


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    root: Path,
    base: Path | None = None,
    path: str = "train",
    like: Dataset | None = None,
) -> Dataset:
    """The data set of this text and tokenizer in `root`, made if it is not there; in the tokens of the data set `like`
    if there is one, whose tokenizer was made by the same spec.

    `base` is the study's folder, where relative globs are searched after the current directory; `path` is where `data`
    and `tokenizer` stand in the study. Files whose size and time are as remembered are not read again; otherwise the
    content decides. Processes may race: one of their equal results stays. A damaged data set is made again, which the
    log says. Raises SpecError for missing files, text that is not UTF-8, and too little text.
    """
    place = f"{path}.data"
    if source.holds_tokens and tokenizer != Bytes():
        message = "the data is tokenised already: leave the tokenizer out"
        raise SpecError.of(f"{path}.tokenizer", message, tokenizer.mark())
    files = source.find(base, place, root)
    known_as = {"source": plain(source), "tokenizer": plain(tokenizer), "format": FORMAT}
    codec = like.codec if like is not None and not source.holds_tokens else None
    state = {"state": _hash(codec.state())} if codec and type(tokenizer) is not Bytes else {}
    asked = _hash(known_as | state)
    read = [*files, *tokenizer.find(base, f"{path}.tokenizer")]
    seen = _hash([[str(file), stat.st_size, stat.st_mtime_ns] for file in read for stat in (file.stat(),)])
    known = _read_index(root).get(asked, {})
    if known.get("files") == seen and (found := _intact(root, known.get("identity", ""))):
        return found.sealed()
    make_private(root)
    _sweep(root)
    made = _unfinished(root)
    made.mkdir()
    try:
        with Spool(made / _TEXTS) as texts:
            corpus = _read(source, place, base, root, texts)
            facts = state | tokenizer.facts(base, f"{path}.tokenizer") if not source.holds_tokens else {}
            identity = corpus.identity(facts)
            if not (dataset := _intact(root, identity)):
                _make(made, corpus, tokenizer, f"{path}.tokenizer", base, codec)
                dataset = _placed(made, root / identity)
                measure(dataset, corpus.splits.documents["train"])
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remember(root, asked, {"files": seen, "identity": identity})
    return dataset.sealed()


class Read(NamedTuple):
    """A source that was read: its documents by split, the shares of its domains, and what cleaning did to them."""

    source: Source
    splits: Splits
    shares: dict[str, float]
    cleaning: dict[str, list[dict[str, Any]]]

    def identity(self, tokenizer: dict[str, Any]) -> str:
        """16 hex digits of what the data set will hold. What a corpus does not have is no part of it."""
        source = self.source
        facts: dict[str, Any] = {"text": self.splits.digest(), "tokenizer": tokenizer, "format": FORMAT}
        if source.holds_tokens:
            facts["tokens"] = source.alphabet()
        facts |= self.asked()
        if self.shares:
            facts["mixture"] = [[name, share, self.splits.domains[name]] for name, share in self.shares.items()]
        if self.cleaning:
            facts["clean"] = {name: [stage["stage"] for stage in record] for name, record in self.cleaning.items()}
        return _hash(facts)[:16]

    def asked(self) -> dict[str, bool]:
        """Whether it holds examples or answers, where it does."""
        held = {"examples": self.source.holds_examples, "answers": self.source.holds_answers}
        return {name: True for name, holds in held.items() if holds}

    def record(self) -> dict[str, Any]:
        """What the header says of it."""
        found: dict[str, Any] = {
            "source": plain(self.source),
            "duplicate_bytes": self.splits.duplicate_bytes,
            "unused_bytes": self.splits.unused_bytes,
        }
        if self.shares:
            ranges = self.splits.domains
            found["domains"] = [{"name": n, "share": s, "documents": ranges[n]} for n, s in self.shares.items()]
        return found | self.asked() | ({"cleaning": self.cleaning} if self.cleaning else {})


def _read(source: Source, path: str, base: Path | None, root: Path, texts: Spool) -> Read:
    """Reads, cleans and splits every corpus of a source, one document at a time. Raises SpecError."""
    kept = Kept(texts)
    together = Cleaner(source.clean)
    corpora: dict[str, tuple[Source, str, range]] = {}
    cleaning: dict[str, list[dict[str, Any]]] = {}
    for name, (corpus, place) in corpora_of(source, path).items():
        if corpus.holds_examples and (corpus.clean or source.clean or corpus is not source):
            message = "examples are read as they are: they cannot be cleaned or mixed with other text"
            said = "as_examples" if corpus.mark("as_examples") else "input"
            raise SpecError.of(f"{place}.{said}", message, corpus.mark(said))
        if corpus.holds_answers and corpus is not source:
            message = "its sequences are asked one by one: they cannot be mixed with other data"
            raise SpecError.of(place, message, corpus.mark())
        if corpus.holds_tokens and (corpus.clean or source.clean):
            raise SpecError.of(f"{place}.clean", "cleans text, and this source holds tokens", corpus.mark("clean"))
        own = together if corpus is source else Cleaner(corpus.clean)
        documents = own.run(corpus.read(corpus.find(base, place, root), place))
        if own is not together:
            documents = together.run(documents)
        corpora[name] = (corpus, place, kept.add(documents, corpus))
        if corpus.clean and own is not together:
            cleaning[name] = own.record()
    if source.clean:
        cleaning[""] = together.record()
    splits = split_all(corpora, kept)
    shares: dict[str, float] = {}
    if isinstance(source, Mixture):
        ranges = {name: domain["train"] for name, domain in splits.domains.items()}
        places = splits.documents["train"].places
        shares = source.shares({n: sum(kept.sizes[place] for place in places[a:b]) for n, (a, b) in ranges.items()})
    return Read(source, splits, shares, cleaning)


def require(dataset: Dataset, context: int, batch: int, path: str = "train", mark: Mark | None = None) -> None:
    """Raises SpecError when the training split holds fewer tokens than one batch of `batch` windows, or one of its
    domains fewer than one window."""
    needed = batch * context + 1
    if (found := dataset.tokens["train"]) < needed:
        message = (
            f"has {found:,} training tokens, fewer than one batch of {batch} sequences of {context} takes ({needed:,})"
        )
        raise SpecError.of(f"{path}.data", message, mark)
    streams = zip(dataset.domains, dataset.streams(), strict=True) if dataset.domains else ()
    for domain, (_, tokens) in streams:
        if len(tokens) <= context:
            held = f"the domain '{domain.name}' has {len(tokens):,} training tokens"
            message = f"{held}, fewer than one sequence of {context} takes ({context + 1:,})"
            raise SpecError.of(f"{path}.data", message, mark)


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _intact(root: Path, identity: str) -> Dataset | None:
    try:
        return Dataset.open(root, identity)
    except DataError:
        return None


def _make(made: Path, corpus: Read, tokenizer: Tokenizer, path: str, base: Path | None, codec: Codec | None) -> None:
    """Writes the files of a data set into its unfinished folder. Without a codec, the tokenizer is trained."""
    source, documents = corpus.source, corpus.splits.documents
    if source.holds_tokens:
        vocab, eod = source.alphabet()
        codec, spec, label = TokenCodec(vocab, eod), None, f"as given, {vocab:,} tokens"
    else:
        codec = codec or tokenizer.train(documents["train"], path, base)
        spec, label = plain(tokenizer), tokenizer.label()
    labels = {"source": source.label(), "tokenizer": label}
    (made / _TEXTS).unlink()  # it is open until its documents are read, and no file of the data set
    write(made, codec, documents, {**corpus.record(), "tokenizer": spec, "labels": labels})


def _placed(made: Path, place: Path) -> Dataset:
    """The data set after its folder was put in its place."""
    _move(made, place)
    dataset = Dataset.open(place.parent, place.name)
    counts = ", ".join(f"{count:,} {name} tokens" for name, count in dataset.tokens.items())
    unused, duplicates = (dataset.header[name] for name in ("unused_bytes", "duplicate_bytes"))
    left = f"{unused:,} held-out bytes beyond the caps are unused, {duplicates:,} are duplicates"
    log.info("data %s: %s; %s", dataset.identity, counts, left)
    return dataset


def _unfinished(root: Path) -> Path:
    """A new name for what is not whole yet."""
    return root / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}"


def _move(made: Path, place: Path) -> None:
    """Puts a finished folder in its place. Whoever comes second keeps the first one's, unless that is damaged."""
    with alone(place.parent):
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
    return {asked: entry for asked, entry in (read_json(root / _INDEX) or {}).items() if isinstance(entry, dict)}


def _remember(root: Path, asked: str, entry: dict[str, str]) -> None:
    """Adds an entry."""
    with alone(root):
        made = _unfinished(root)
        made.write_text(json.dumps(_read_index(root) | {asked: entry}, indent=1))
        made.replace(root / _INDEX)
