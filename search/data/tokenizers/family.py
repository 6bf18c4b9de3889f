"""How text becomes tokens: a tokenizer spec is trained on documents and gives a codec, which encodes and decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import parse_member, parse_record
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Family
from archlab.search.data.documents.notation import long_form, plain

Tokens = npt.NDArray[np.integer]

BYTE_VALUES = 256
END_OF_DOCUMENT = 1  # one token, the last of the vocabulary


class Codec(Protocol):
    """A trained tokenizer. `eod` is the token that ends a document, which stands for no bytes and which no text spells:
    the last of the vocabulary, or the one that a pretrained tokenizer has for it.
    """

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Bytes that each token stands for, `[vocab]`; 0 for the end of a document."""

    @property
    def eod(self) -> int:
        """The end-of-document token."""

    @property
    def lossless(self) -> bool:
        """Whether its tokens tell the text. Else not all of it is predicted: bits per byte are a lower bound."""

    def encode(self, documents: Sequence[bytes]) -> Iterator[Tokens]:
        """The tokens of each document (UTF-8 but for `bytes`), without the end-of-document token."""

    def decode(self, tokens: Tokens) -> bytes:
        """The text that these tokens stand for; the end of a document stands for nothing."""

    def state(self) -> str:
        """What `load` of the spec needs to make the same codec again."""


class Tokenizer(Family):
    """How bytes of text are cut into tokens."""

    noun: ClassVar[str] = "tokenizer"

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """Reads `{pretrained: gpt2}` as `{type: pretrained, name: gpt2}`, the rest like any family."""
        if cls.type:  # a member, whose `type` the parser has read and taken away
            return parse_record(cls, node, path, problems)
        return parse_member((cls,), long_form(node, cls.members, "name"), path, problems)

    def train(self, documents: Sequence[bytes], path: str, base: Path | None = None) -> Codec:
        """The codec for this text; `path` is the tokenizer's place in the study, `base` the study's folder.

        Raises SpecError if it cannot be.
        """
        raise NotImplementedError

    def load(self, state: str) -> Codec:
        """The codec that was trained, from its state."""
        raise NotImplementedError

    def size(self, path: str, base: Path | None = None) -> int:
        """How many tokens it has, the end of a document included; `path` and `base` as in `train`. Raises SpecError."""
        return len(self.train((), path, base).token_bytes)

    def find(self, base: Path | None, path: str) -> list[Path]:
        """The files that it is read from; `base` is the study's folder. Raises SpecError when there is none."""
        return []

    def facts(self, base: Path | None, path: str) -> dict[str, Any]:
        """What decides its numbers, as JSON data: part of the identity of what it makes."""
        return plain(self)

    def label(self) -> str:
        """The tokenizer in a few words."""
        raise NotImplementedError


@Tokenizer.register("bytes")
class Bytes(Tokenizer):
    """One token per byte and one for the end of a document: a vocabulary of 257 that needs no training."""

    def train(self, documents: Sequence[bytes], path: str, base: Path | None = None) -> Codec:
        """The codec, which is the same for every text."""
        return _ByteCodec()

    def load(self, state: str) -> Codec:
        """The codec."""
        return _ByteCodec()

    def label(self) -> str:
        """`bytes`"""
        return "bytes"


class _ByteCodec:
    """Token b is the byte b."""

    eod = BYTE_VALUES
    lossless = True

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        return np.array([1] * BYTE_VALUES + [0], dtype=np.int32)

    def encode(self, documents: Sequence[bytes]) -> Iterator[Tokens]:
        return (np.frombuffer(document, dtype=np.uint8) for document in documents)

    def decode(self, tokens: Tokens) -> bytes:
        tokens = np.asarray(tokens)
        return tokens[tokens < BYTE_VALUES].astype(np.uint8).tobytes()

    def state(self) -> str:
        return ""
