"""A prepared data set on disk: one folder with token shards, document indices and a header that says their sizes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archlab.arch_dsl.language.parse import parse
from archlab.search.data.checksums import DAMAGED, SUMS, Checksums, DamagedData, DataError, Stream, seal
from archlab.search.data.documents.document import GIVEN
from archlab.search.data.sources.given_tokens import ANSWER
from archlab.search.data.sources.splits import NAMES
from archlab.search.data.tokenizers.family import Codec, Tokenizer, Tokens
from archlab.search.utils.files import NO_JSON, read_json
from archlab.search.utils.shapes import Check, anything, count, fault_of, mapping, mapping_of, text
from archlab.search.utils.untrusted import NoRegularFile, read_regular

log = logging.getLogger(__name__)

FORMAT = 1  # raised when the files, the splits or the cutting of documents change; part of the identity
HEADER = "data.json"
HELD_OUT = ("validation", "test")
OVERLAP = "overlap.json"  # beside the data; made after it, where it is missing
_HEADER: Check = mapping(
    {
        "files": mapping_of(count),
        "vocab": count,
        "splits": mapping_of(mapping({"tokens": count})),
        "dtype": text,
    },
    {"labels": mapping_of(anything)},
)
_STATE = "tokenizer.json"
_LENGTHS = "token_bytes.npy"


@dataclass(frozen=True)
class Documents:
    """Where the documents of a split lie in its stream `[eod] doc [eod] doc … [eod]`; int64 `[documents]` each.

    `starts` is the position of a document's first token, `tokens` counts its tokens with the eod that ends it (so that
    `[starts, starts + tokens)` are the targets that it owns, all but position 0 together), `bytes` its bytes of text.
    """

    starts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Domain:
    """One corpus of a mixture: its share of the training rows, and which documents of each split are its own, as the
    first of them and the one after the last."""

    name: str
    share: float
    documents: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Dataset:
    """Token streams of a corpus by split, memory-mapped, read-only. Its identity is the hash of what it holds."""

    folder: Path
    header: dict[str, Any]
    absent: ClassVar[bool] = False  # whether its text has yet to be downloaded

    @classmethod
    def open(cls, root: Path, identity: str) -> Dataset:
        """The data set of this identity. Raises DataError when it is missing, damaged or of another format."""
        folder = root / identity
        if (folder / DAMAGED).exists():
            raise DamagedData(_told(folder))
        try:
            Checksums(folder).check(HEADER)
            header = json.loads(read_regular(folder / HEADER))
        except FileNotFoundError as error:
            raise DataError(f"data {identity} is not in {root}") from error
        except DataError:
            raise
        except (*NO_JSON, NoRegularFile) as error:
            raise DataError(f"data {identity} is damaged: {folder / HEADER} is not JSON") from error
        found = header.get("format") if isinstance(header, dict) else None
        if found != FORMAT:
            raise DataError(f"data {identity} has format {found}, this archlab reads {FORMAT}")
        if fault := fault_of(header, _HEADER):
            raise DataError(f"data {identity} is damaged: {folder / HEADER}: {fault}")
        for name, size in header["files"].items():
            try:
                held = (folder / name).stat().st_size
            except FileNotFoundError:
                held = 0
            if held != size:
                raise DataError(f"data {identity} is damaged: {name} holds {held} bytes instead of {size}")
        return cls(folder, header)

    @cached_property
    def checksums(self) -> Checksums:
        """What its files held when they were written."""
        return Checksums(self.folder)

    def sealed(self) -> Dataset:
        """The same, with checksums of what it holds now where it was made before there were any; without them where
        nothing can be written."""
        if (self.folder / SUMS).exists():
            return self
        try:
            seal(self.folder, [*self.header["files"], HEADER])
        except OSError as error:
            log.warning("data %s gets no checksums: %s", self.identity, error)
        return replace(self)

    @property
    def identity(self) -> str:
        """16 hex digits: the name of the folder and the `data` of a trial."""
        return self.folder.name

    @property
    def vocab(self) -> int:
        """Number of tokens, the end of a document included."""
        return int(self.header["vocab"])

    @property
    def eod(self) -> int:
        """The end-of-document token: the last one, unless a tokenizer or a source of tokens has another."""
        return int(self.header.get("eod", self.vocab - 1))

    @property
    def has_text(self) -> bool:
        """Whether the text is known: not for a source of tokens."""
        return self.header.get("tokenizer", "") is not None

    @property
    def description(self) -> dict[str, Any]:
        """Source and tokenizer as specs, and what became of the text: splits, duplicates, what is unused, and where
        there are any the domains and what cleaning did."""
        wanted = ("source", "tokenizer", "splits", "duplicate_bytes", "unused_bytes", "domains", "cleaning")
        return {name: self.header[name] for name in wanted if name in self.header}

    @property
    def domains(self) -> tuple[Domain, ...]:
        """The domains of a mixture, in the order of their documents; none without one."""
        return tuple(
            Domain(row["name"], row["share"], {name: (int(a), int(b)) for name, (a, b) in row["documents"].items()})
            for row in self.header.get("domains", ())
        )

    @property
    def overlap(self) -> dict[str, dict[str, int]] | None:
        """Per held-out split its n-grams and those that the training split has, if they were counted."""
        held = read_json(self.folder / OVERLAP) or {}
        found = {name: held.get(name) for name in HELD_OUT}
        counted = all(isinstance(each, dict) and {"ngrams", "ngrams_shared"} <= each.keys() for each in found.values())
        return {name: dict(counts) for name, counts in found.items() if counts} if counted else None

    def streams(self) -> tuple[tuple[float, Stream], ...]:
        """Share and training stream of each domain, each again `[eod] doc … [eod]`; without domains the only one."""
        tokens = self.split("train")
        if not self.domains:
            return ((1.0, tokens),)
        index = self.documents("train")
        found = []
        for domain in self.domains:
            first, last = domain.documents["train"][0], domain.documents["train"][1] - 1
            start, end = int(index.starts[first]) - 1, int(index.starts[last] + index.tokens[last])
            found.append((domain.share, tokens.part(start, end)))
        return tuple(found)

    def bytes_per_token(self, split: str = "train") -> float | None:
        """Bytes of text for each token of a split, the ends of documents counted as tokens; None without a text."""
        counts = self.header["splits"][split]
        return counts["bytes"] / (counts["tokens"] - 1) if self.has_text else None

    @property
    def tokens(self) -> dict[str, int]:
        """Length of each split's stream."""
        return {name: int(split["tokens"]) for name, split in self.header["splits"].items()}

    def record(self) -> dict[str, Any]:
        """What a study's record says of its data."""
        counts = {f"{name}_tokens": count for name, count in self.tokens.items()}
        labels = self.header["labels"]
        density = self.bytes_per_token()
        found = {"identity": self.identity, "source": labels["source"], "tokenizer": labels["tokenizer"], **counts}
        found |= {"bytes_per_token": round(density, 4)} if density is not None else {}
        found |= {"lossy": self.lossy} if self.lossy else {}
        streams = zip(self.domains, self.streams(), strict=True) if self.domains else ()
        rows = [{"name": d.name, "share": d.share, "train_tokens": len(stream)} for d, (_, stream) in streams]
        found |= {"domains": rows} if rows else {}
        shared = {name: round(c["ngrams_shared"] / max(c["ngrams"], 1), 4) for name, c in (self.overlap or {}).items()}
        return found | ({"overlap": shared} if shared else {})

    def split(self, name: str) -> Stream:
        """The stream of `train`, `validation` or `test`: unsigned tokens `[tokens]`. Reading raises DamagedData."""
        file, dtype = f"{name}.bin", np.dtype(self.header["dtype"])
        held = np.memmap(self.folder / file, dtype=dtype, mode="r", shape=(self.tokens[name],))
        return Stream(held, self.checksums, file)

    def _array(self, name: str, mapped: bool = False) -> npt.NDArray[Any]:
        """An array in a file of its own, checked whole. Raises DamagedData."""
        self.checksums.check(name)
        found: npt.NDArray[Any] = np.load(self.folder / name, mmap_mode="r" if mapped else None)
        return found

    def documents(self, name: str) -> Documents:
        """The documents of a split."""
        starts, tokens, lengths = self._array(f"{name}.documents.npy")
        return Documents(starts, tokens, lengths)

    def inputs(self, name: str) -> npt.NDArray[np.int64] | None:
        """How many tokens at the start of each document of a split are given, `[documents]`; None without examples."""
        return self._array(f"{name}.inputs.npy") if self.header.get("examples") else None

    def answers(self, name: str) -> npt.NDArray[np.bool_] | None:
        """Which tokens of a split's stream are answers, `[tokens]`, memory-mapped; None without answers."""
        return self._array(f"{name}.answers.npy", mapped=True) if self.header.get("answers") else None

    def document(self, name: str, index: int) -> bytes:
        """The text of one document."""
        index_of = self.documents(name)
        start = int(index_of.starts[index])
        return self.codec.decode(self.split(name)[start : start + int(index_of.tokens[index])])

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Bytes of text that each token stands for, `[vocab]`; 0 for the end of a document."""
        return self._array(_LENGTHS)

    @cached_property
    def lossy(self) -> str | None:
        """Which tokenizer cut the text, if that does not keep all of it: the hash of its state. None for the others."""
        if not self.has_text or self.codec.lossless:
            return None
        return hashlib.sha256(self._state.encode()).hexdigest()[:16]

    @cached_property
    def codec(self) -> Codec:
        """The trained tokenizer. Raises DataError for a source of tokens."""
        if not self.has_text:
            raise DataError(f"data {self.identity} was given as tokens: its text is not known")
        return parse(Tokenizer, self.header["tokenizer"]).load(self._state)

    @property
    def _state(self) -> str:
        """The trained tokenizer as text."""
        self.checksums.check(_STATE)
        return (self.folder / _STATE).read_text()


def _told(folder: Path) -> str:
    """What whoever found a data set damaged wrote down."""
    try:
        return read_regular(folder / DAMAGED).decode(errors="replace").strip()
    except NoRegularFile:
        return f"data {folder.name} is damaged: {DAMAGED} in it is no file"


def write(folder: Path, codec: Codec, splits: Mapping[str, Sequence[bytes]], facts: dict[str, Any]) -> None:
    """Writes shards, indices and last the header into an existing empty folder. `facts` joins the header."""
    lengths = codec.token_bytes
    vocab = len(lengths)
    dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
    (folder / _STATE).write_text(codec.state())
    np.save(folder / _LENGTHS, lengths)
    has_text = facts.get("tokenizer", "") is not None
    kind = has_text, bool(facts.get("examples")), bool(facts.get("answers"))
    counts = {name: _write_split(folder, name, codec, splits[name], dtype, *kind) for name in NAMES}
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    header = {"format": FORMAT, "vocab": vocab, "dtype": dtype.str, "splits": counts, "files": sizes, **facts}
    header |= {"eod": codec.eod} if codec.eod != vocab - 1 else {}
    (folder / HEADER).write_text(json.dumps(header, indent=1))
    seal(folder, [*sizes, HEADER])


def _write_split(
    folder: Path,
    name: str,
    codec: Codec,
    texts: Sequence[bytes],
    dtype: np.dtype[Any],
    has_text: bool,
    examples: bool,
    answers: bool,
) -> dict[str, int]:
    end = np.array([codec.eod], dtype=dtype).tobytes()
    tokens = np.empty(len(texts), dtype=np.int64)
    lengths, inputs = np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts), dtype=np.int64)
    asked = [np.zeros(1, dtype=bool)]
    with (folder / f"{name}.bin").open("wb") as shard:
        shard.write(end)
        for place, (document, given, size) in enumerate(_encoded(codec, texts, examples)):
            if answers:
                asked.append(np.append(document >= ANSWER, False))
                document = document % ANSWER
            shard.write(document.astype(dtype).tobytes() + end)
            tokens[place], inputs[place] = len(document) + 1, given
            lengths[place] = size if has_text else 0
    if examples:
        np.save(folder / f"{name}.inputs.npy", inputs)
    if answers:
        np.save(folder / f"{name}.answers.npy", np.concatenate(asked))
    starts = np.concatenate([[1], 1 + np.cumsum(tokens)[:-1]])
    np.save(folder / f"{name}.documents.npy", np.stack([starts, tokens, lengths]))
    return {"tokens": int(tokens.sum()) + 1, "documents": len(texts), "bytes": int(lengths.sum())}


def _encoded(codec: Codec, texts: Sequence[bytes], examples: bool) -> Iterator[tuple[Tokens, int, int]]:
    """The tokens of each document, how many of them are given, and its bytes."""
    if not examples:
        for document, text in zip(codec.encode(texts), texts, strict=True):
            yield document, 0, len(text)
        return
    for text in texts:
        given, _, asked = text.partition(GIVEN)
        first, second = codec.encode([given, asked])
        yield np.concatenate([first, second]), len(first), len(given) + len(asked)
