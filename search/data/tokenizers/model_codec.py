"""A model of the `tokenizers` library as a codec: the bytes of its tokens, and which of them ends a document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archlab.search.data.tokenizers.family import BYTE_VALUES, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model

_AT_ONCE, _BYTES_AT_ONCE = 512, 4 << 20  # documents and their bytes, encoded in one call
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_CUTS = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts")  # which drop no text by default


class ModelCodec:
    """A model and the token that ends a document: one more than the model knows, unless it is one of the model's own.

    No text can spell the end: what the model has as special tokens is read as ordinary text.
    """

    def __init__(self, model: Model, eod: int | None = None) -> None:
        self._model = model
        self._eod = eod
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True

    @property
    def eod(self) -> int:
        return self._size if self._eod is None else self._eod

    @property
    def _size(self) -> int:
        """Tokens of the model; ids that it leaves out are counted."""
        return max(self._model.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def _texts(self) -> list[bytes]:
        """The bytes of each token."""
        spell = _spelling(json.loads(self._model.to_str()))
        special = {token for token, item in self._model.get_added_tokens_decoder().items() if item.special}
        spelled = (self._model.id_to_token(token) if token not in special else None for token in range(self._size))
        texts = [spell(token) if token is not None else b"" for token in spelled]
        if self._eod is None:
            texts.append(b"")
        else:
            texts[self._eod] = b""
        return texts

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        return np.array([len(text) for text in self._texts], dtype=np.int32)

    @cached_property
    def lossless(self) -> bool:
        return _is_lossless(json.loads(self._model.to_str()))

    def encode(self, documents: Sequence[bytes]) -> Iterator[Tokens]:
        for texts in _batches(documents):
            for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)

    def decode(self, tokens: Tokens) -> bytes:
        texts = self._texts
        return b"".join(texts[token] for token in np.asarray(tokens).tolist())

    def state(self) -> str:
        return self._model.to_str()


def model_of(text: str) -> Model:
    """The model from the JSON text of the `tokenizers` library, which is imported only now."""
    from tokenizers import Tokenizer as Model

    return Model.from_str(text)


def _batches(documents: Iterable[bytes]) -> Iterator[list[str]]:
    """Texts that are encoded in one call: enough to keep all threads busy, not so much that memory fills."""
    texts: list[str] = []
    held = 0
    for document in documents:
        texts.append(document.decode())
        held += len(document)
        if len(texts) == _AT_ONCE or held >= _BYTES_AT_ONCE:
            yield texts
            texts, held = [], 0
    if texts:
        yield texts


def _spelling(made: dict[str, Any]) -> Any:
    """How this model spells bytes in its tokens, as a function from a token to its bytes.

    Byte-level models (GPT-2) have a printable character for each byte. WordPiece marks the pieces that continue a
    word; one that begins a word stands for the space before it too. The others (SentencePiece) write ▁ for a space,
    and a byte as <0x41> where they fall back to bytes.
    """
    model = made["model"]
    if '"ByteLevel"' in json.dumps([made["pre_tokenizer"], made["decoder"]]):
        back = _bytes_of_characters()
        return lambda token: b"".join(bytes([back[letter]]) if letter in back else letter.encode() for letter in token)
    if model["type"] == "WordPiece":
        mark = model["continuing_subword_prefix"]
        return lambda token: token.removeprefix(mark).encode() if token.startswith(mark) else f" {token}".encode()
    bytes_too = bool(model.get("byte_fallback"))

    def spell(token: str) -> bytes:
        if bytes_too and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()

    return spell


def _is_lossless(made: dict[str, Any]) -> bool:
    """Whether a model keeps text: nothing rewrites it (▁ for a space apart) or cuts something out of it, and every byte
    has a token."""
    model = made["model"]
    rewritten = any(
        step["type"] != "Prepend" and not (step["type"] == "Replace" and step["content"] == "▁")
        for step in _steps(made["normalizer"], "normalizers")
    )
    cuts = _steps(made["pre_tokenizer"], "pretokenizers")
    if rewritten or any(cut["type"] not in _CUTS or cut.get("behavior") == "Removed" for cut in cuts):
        return False
    pieces = {item[0] for item in model["vocab"]} if model["type"] == "Unigram" else set(model["vocab"])
    if any(cut["type"] == "ByteLevel" for cut in cuts):
        return model["type"] == "BPE" and pieces >= set(_bytes_of_characters())
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in pieces for byte in range(BYTE_VALUES))


def _steps(step: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """A step of a tokenizer, or those of a sequence, each by itself."""
    if step is None:
        return []
    return [one for each in step[inside] for one in _steps(each, inside)] if step["type"] == "Sequence" else [step]


def _bytes_of_characters() -> dict[str, int]:
    """The printable characters by which byte-level BPE (GPT-2) spells bytes, back to the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTE_VALUES) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
