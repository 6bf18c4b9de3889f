"""Tokenizers lose nothing, give every text the same tokens each time, and say how many bytes each token stands for."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from arch_dsl.errors import SpecError
from arch_dsl.parse import parse
from arch_dsl.source import read_text
from search.data import BytePairs, Bytes, Codec, Tokenizer

CORPUS = [f"def add_{i}(left, right):\n    return left + right * {i}\n\n".encode() for i in range(300)]


@pytest.fixture(scope="module")
def pairs() -> Codec:
    return BytePairs(vocab=400).train(CORPUS, "train.tokenizer")


def texts(count: int) -> list[str]:
    """Strings of every kind of character, with whitespace and things that look like special tokens between."""
    chance = random.Random(1)

    def character() -> str:
        top = chance.choice([0x80, 0x800, 0xD800, 0x110000])
        return chr(chance.choice([code for code in (chance.randrange(top), 65) if not 0xD800 <= code < 0xE000]))

    special = ["<|endoftext|>", "Ġ", "Ċ", "\x00", "\r\n", "  ", "\u200d", "e\u0301", "[UNK]", "don't"]
    return [
        "".join(chance.choice([character(), chance.choice(special)]) for _ in range(chance.randrange(60)))
        for _ in range(count)
    ]


def test_bytes_are_their_own_tokens_and_come_back() -> None:
    codec = Bytes().train([], "")
    chance = random.Random(0)
    given = [bytes(range(256)), b"", *(chance.randbytes(chance.randrange(500)) for _ in range(100))]
    for document, tokens in zip(given, codec.encode(given), strict=True):
        assert tokens.tolist() == list(document)
        assert codec.decode(tokens) == document
    assert codec.decode(np.array([256, 104, 105, 256])) == b"hi"
    assert codec.token_bytes.tolist() == [1] * 256 + [0]


def test_byte_pairs_bring_back_every_text_byte_for_byte(pairs: Codec) -> None:
    given = [text.encode() for text in texts(300)] + CORPUS[:5] + [b"", bytes(range(128))]
    lengths = pairs.token_bytes
    assert len(lengths) == 400
    assert lengths[-1] == 0 and (lengths[:-1] > 0).all()
    for document, tokens in zip(given, pairs.encode(given), strict=True):
        assert pairs.decode(tokens) == document
        assert lengths[tokens].sum() == len(document)
        assert (tokens < 399).all(), "no text spells the end of a document"


def test_byte_pairs_merge_what_is_frequent_and_survive_saving(pairs: Codec) -> None:
    (tokens,) = pairs.encode(CORPUS[:1])
    assert len(tokens) < len(CORPUS[0]) / 2
    again = BytePairs(vocab=400).load(pairs.state())
    assert next(iter(again.encode(CORPUS[:1]))).tolist() == tokens.tolist()
    assert again.token_bytes.tolist() == pairs.token_bytes.tolist()


def test_training_gives_the_same_merges_with_any_number_of_threads(pairs: Codec) -> None:
    program = (
        "import hashlib; from search.data import BytePairs\n"
        f"corpus = {CORPUS!r}\n"
        "print(hashlib.sha256(BytePairs(vocab=400).train(corpus, '').state().encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | threads,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for threads in ({"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "4"})
    }
    assert len(digests) == 1


def test_a_vocabulary_larger_than_the_text_can_fill_is_refused() -> None:
    tokenizer = parse(Tokenizer, read_text("{type: bpe, vocab: 4096}", "s.yaml"))
    with pytest.raises(SpecError) as refused:
        tokenizer.train([b"aaaa aaaa"], "train.tokenizer")
    assert str(refused.value) == (
        "s.yaml:1:20: train.tokenizer.vocab: must be at most 260, found 4096: "
        "the training text has no more pairs to merge\n"
        "    1 | {type: bpe, vocab: 4096}\n      |                    ^"
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{type: bpe, vocab: 256}", "tokenizer.vocab: must be at least 257, found 256"),
        ("byte", "tokenizer: 'byte' is not a tokenizer; did you mean 'bytes'? (bytes, bpe)"),
        ("{type: bytes, vocab: 300}", "tokenizer.vocab: 'vocab' is not a key of bytes (there is none)"),
    ],
    ids=["too small for the bytes", "unknown", "bytes have no vocab"],
)
def test_a_misspelt_tokenizer_is_refused(written: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(Tokenizer, read_text(written).plain(), "tokenizer")
    assert str(refused.value) == message
