"""Sources that are tokenised already: flat binary files, NumPy arrays, Megatron's indexed data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Count
from archlab.search.data.documents.document import Document
from archlab.search.data.documents.text_files import find_files
from archlab.search.data.sources.family import Source
from archlab.search.data.tokenizers.family import Tokens

STORED = np.dtype("<u4")  # how a document of tokens is spelt in bytes
ANSWER = 1 << 31  # added to a token that is an answer
_MAGIC = b"MMIDIDX\x00\x00"
_KINDS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's DType, the integers
_AT_ONCE = 1 << 22  # tokens


@Source.register("tokens")
class TokenFiles(Source):
    """Tokens that another program made: their text is not known, so that there are no bits per byte.

    `vocab` counts the tokens, `eod` is the one that ends a document. A .npy file holds one array; a .bin file with an
    .idx beside it is Megatron's indexed data set, whose documents are known; any other file is flat, little-endian,
    and of the kind `dtype`. Documents end at `eod`, which belongs to none of them.
    """

    caps: ClassVar[dict[str, str]] = {"validation": "validation_tokens", "test": "test_tokens"}
    unit: ClassVar[int] = STORED.itemsize

    files: tuple[str, ...]
    vocab: Count
    eod: int
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    validation_tokens: Count = 64_000
    test_tokens: Count = 128_000

    @property
    def holds_tokens(self) -> bool:
        """It does."""
        return True

    def alphabet(self) -> tuple[int, int]:
        """Size of the vocabulary, and the end of a document."""
        return self.vocab, self.eod

    def find(self, base: Path | None, path: str, root: Path | None = None) -> list[Path]:
        """The files of the globs in their order; the .idx of a .bin goes with it."""
        if not 0 <= self.eod < self.vocab:
            message = f"must be a token, from 0 to {self.vocab - 1}, found {self.eod}"
            raise SpecError.of(f"{path}.eod", message, self.mark("eod"))
        found = find_files(self.files, base, f"{path}.files", self.mark("files"))
        shards = [file.with_suffix(".bin") if file.suffix == ".idx" else file for file in found]
        for file in (shard for shard in shards if not shard.is_file()):
            raise SpecError.of(f"{path}.files", f"{file.with_suffix('.idx')} has no {file.name}", self.mark("files"))
        return list(dict.fromkeys(part for shard in shards for part in (shard, *_index_of(shard))))

    def read(self, files: Sequence[Path], path: str) -> Iterator[Document]:
        """The documents of each file, as 32-bit tokens."""
        for file in files:
            if file.suffix != ".idx":
                for tokens in self._documents(file, f"{path}.files"):
                    data = tokens.astype(STORED).tobytes()
                    yield Document(data, hashlib.sha256(data).digest())

    def label(self) -> str:
        """`tokens: train.bin`"""
        return f"tokens: {', '.join(self.files)}"

    def _documents(self, file: Path, path: str) -> Iterator[Tokens]:
        tokens, ends = self._array(file, path)
        for start in range(0, len(tokens), _AT_ONCE):
            chunk = tokens[start : start + _AT_ONCE]
            if len(wrong := np.flatnonzero((chunk < 0) | (chunk >= self.vocab))):
                place = start + int(wrong[0])
                message = f"{file} has the token {tokens[place]} at {place:,}; vocab says there are {self.vocab:,}"
                raise SpecError.of(path, message, self.mark("files"))
        if ends is None:
            pieces = (np.flatnonzero(tokens[i : i + _AT_ONCE] == self.eod) + i for i in range(0, len(tokens), _AT_ONCE))
            ends = np.concatenate([*pieces, [len(tokens)]])
        start = 0
        for end in ends.tolist():
            document = tokens[start:end]
            document = document[document != self.eod]
            if len(document):
                yield document
            start = end

    def _array(self, file: Path, path: str) -> tuple[Tokens, npt.NDArray[np.int64] | None]:
        """The tokens of a file, mapped, and where its documents end if the file says so. Raises SpecError."""
        try:
            if file.suffix == ".npy":
                array = np.load(file, mmap_mode="r")
                if array.ndim != 1 or array.dtype.kind not in "iu":
                    raise ValueError(f"holds {array.dtype} {list(array.shape)}, not a row of integers")
                self._checked(array.dtype)
                return array, None
            if index := _index_of(file):
                return _megatron(file, index[0], self._checked)
            if self.dtype is None:
                message = f"is missing: {file.name} is a flat file, which does not say what its tokens are"
                raise SpecError.of(path.removesuffix("files") + "dtype", message, self.mark())
            kind = np.dtype(self.dtype).newbyteorder("<")
            if (size := file.stat().st_size) % kind.itemsize or not size:
                raise ValueError(f"holds {size:,} bytes, not a number of {self.dtype} tokens")
            return np.memmap(file, dtype=kind, mode="r"), None
        except (OSError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError.of(path, f"cannot read {file}: {error}", self.mark("files")) from error

    def _checked(self, kind: np.dtype[Any]) -> None:
        if self.dtype is not None and np.dtype(self.dtype) != kind:
            raise ValueError(f"holds {kind.name}; leave out dtype, which says {self.dtype}")


def _index_of(file: Path) -> list[Path]:
    """Megatron's index beside a .bin file."""
    index = file.with_suffix(".idx")
    return [index] if file.suffix == ".bin" and index.is_file() else []


def _megatron(file: Path, index: Path, check: Any) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """Tokens and ends of documents of a Megatron data set: header, then the length and the byte offset of every
    sequence, then the sequence at which each document begins, and one after the last. Raises ValueError."""
    raw = index.read_bytes()
    if not raw.startswith(_MAGIC) or len(raw) < 34:
        raise ValueError(f"{index.name} is no index of Megatron's")
    version, code = int.from_bytes(raw[9:17], "little"), raw[17]
    if version != 1 or code not in _KINDS:
        raise ValueError(f"{index.name} has version {version} and type {code} of tokens, which is not known")
    sequences, documents = (int.from_bytes(raw[at : at + 8], "little") for at in (18, 26))
    if len(raw) < 34 + 12 * sequences + 8 * documents:
        raise ValueError(f"{index.name} is cut short")
    kind = np.dtype(_KINDS[code])
    check(kind)
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    offsets = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences)
    ends = np.cumsum(lengths, dtype=np.int64)
    if (offsets != (ends - lengths) * kind.itemsize).any():
        raise ValueError(f"{index.name} does not list its sequences in the order of {file.name}")
    if not sequences:
        raise ValueError(f"{index.name} lists no sequence")
    if file.stat().st_size < int(ends[-1]) * kind.itemsize:
        raise ValueError(f"{file.name} is shorter than {index.name} says")
    tokens = np.memmap(file, dtype=kind, mode="r", shape=(int(ends[-1]),))
    return tokens, np.concatenate([[0], ends])[bounds[1:]]


class TokenCodec:
    """The codec of a source of tokens: it has no text."""

    lossless = False

    def __init__(self, vocab: int, eod: int) -> None:
        self.vocab, self.eod = vocab, eod

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        return np.zeros(self.vocab, dtype=np.int32)

    def encode(self, documents: Sequence[bytes]) -> Iterator[Tokens]:
        return (np.frombuffer(document, dtype=STORED) for document in documents)

    def decode(self, tokens: Tokens) -> bytes:
        raise ValueError("the data was given as tokens: its text is not known")

    def state(self) -> str:
        return ""
