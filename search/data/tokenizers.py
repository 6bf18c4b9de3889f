"""How text becomes tokens: a tokenizer spec is trained on documents and gives a codec, which encodes and decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from arch_dsl.errors import SpecError
from arch_dsl.spec import Family, Range

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model

Tokens = npt.NDArray[np.integer]

BYTE_VALUES = 256
END_OF_DOCUMENT = 1  # one token, the last of the vocabulary
_AT_ONCE = 512  # documents encoded in one call, which bounds memory


class Codec(Protocol):
    """A trained tokenizer. The last token of its vocabulary is the end of a document, which stands for no bytes."""

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Bytes that each token stands for, `[vocab]`; 0 for the end of a document."""

    def encode(self, documents: Sequence[bytes]) -> Iterator[Tokens]:
        """The tokens of each document (UTF-8 for BPE), without the end-of-document token."""

    def decode(self, tokens: Tokens) -> bytes:
        """The text that these tokens stand for; the end of a document stands for nothing."""

    def state(self) -> str:
        """What `load` of the spec needs to make the same codec again."""


class Tokenizer(Family):
    """How bytes of text are cut into tokens."""

    noun: ClassVar[str] = "tokenizer"

    def train(self, documents: Sequence[bytes], path: str) -> Codec:
        """The codec for this text; `path` is the tokenizer's place in the study. Raises SpecError if it cannot be."""
        raise NotImplementedError

    def load(self, state: str) -> Codec:
        """The codec that was trained, from its state."""
        raise NotImplementedError

    def label(self) -> str:
        """The tokenizer in a few words."""
        raise NotImplementedError


@Tokenizer.register("bytes")
class Bytes(Tokenizer):
    """One token per byte and one for the end of a document: a vocabulary of 257 that needs no training."""

    def train(self, documents: Sequence[bytes], path: str) -> Codec:
        """The codec, which is the same for every text."""
        return _ByteCodec()

    def load(self, state: str) -> Codec:
        """The codec."""
        return _ByteCodec()

    def label(self) -> str:
        """`bytes`"""
        return "bytes"


@Tokenizer.register("bpe")
class BytePairs(Tokenizer):
    """Byte-level byte-pair encoding (arXiv:1508.07909, bytes as in GPT-2), trained on the training split.

    `vocab` counts every token: 256 bytes, the merges, and the end of a document.
    """

    vocab: Annotated[int, Range(min=BYTE_VALUES + END_OF_DOCUMENT)] = 4096

    def train(self, documents: Sequence[bytes], path: str) -> Codec:
        """Learns the merges; the same text gives the same ones. Raises SpecError if it has too few for `vocab`."""
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab - END_OF_DOCUMENT,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator((document.decode() for document in documents), trainer)
        reached = model.get_vocab_size() + END_OF_DOCUMENT
        if reached < self.vocab:
            message = f"must be at most {reached}, found {self.vocab}: the training text has no more pairs to merge"
            raise SpecError.of(f"{path}.vocab", message, self.mark("vocab"))
        return _PairCodec(model)

    def load(self, state: str) -> Codec:
        """The codec from the JSON text of the `tokenizers` library."""
        from tokenizers import Tokenizer as Model

        return _PairCodec(Model.from_str(state))

    def label(self) -> str:
        """`bpe 4096`"""
        return f"bpe {self.vocab}"


class _ByteCodec:
    """Token b is the byte b."""

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


class _PairCodec:
    """A model of the `tokenizers` library. It knows no end of a document, so that no text can spell one."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @cached_property
    def _texts(self) -> list[bytes]:
        """The bytes of each token."""
        back = _bytes_of_characters()
        size = self._model.get_vocab_size()
        spelled = (self._model.id_to_token(token) or "" for token in range(size))
        return [*(bytes(back[character] for character in token) for token in spelled), b""]

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        return np.array([len(text) for text in self._texts], dtype=np.int32)

    def encode(self, documents: Sequence[bytes]) -> Iterator[Tokens]:
        for start in range(0, len(documents), _AT_ONCE):
            texts = [document.decode() for document in documents[start : start + _AT_ONCE]]
            for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)

    def decode(self, tokens: Tokens) -> bytes:
        texts = self._texts
        return b"".join(texts[token] for token in np.asarray(tokens).tolist())

    def state(self) -> str:
        return self._model.to_str()


def _bytes_of_characters() -> dict[str, int]:
    """The printable characters by which byte-level BPE (GPT-2) spells bytes, back to the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTE_VALUES) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
