"""Tokenizers lose nothing, give every text the same tokens each time, and say how many bytes each token stands for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.search.data import BytePairs, Bytes, Codec, Pretrained, Tokenizer, Unigram, WordPiece

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


TRAINED = {
    "bpe": BytePairs(vocab=400),
    "bpe, digits, nfkc": BytePairs(vocab=300, split_digits=True, normalize="nfkc"),
    "bpe of characters": BytePairs(vocab=400, byte_fallback=True),
    "wordpiece": WordPiece(vocab=200),
    "unigram": Unigram(vocab=400),
    "unigram without bytes": Unigram(vocab=200, byte_fallback=False, split_digits=True),
}


def prose(count: int) -> list[bytes]:
    """Documents of made-up words with numbers and characters beyond ASCII between them."""
    chance = random.Random(2)
    lexicon = ["".join(chance.choices("abcdefghilmnoprstuäöé", k=chance.randint(2, 9))) for _ in range(400)]
    others = ["①", "ﬁne", "€", "▁", "\N{SNOWMAN}", "1999", *["2024"] * 40, "\n", "don't", "(so)"]
    return [" ".join(chance.choices([*lexicon, *others], k=60)).encode() for _ in range(count)]


MIXED = prose(80)


@pytest.mark.parametrize("name", TRAINED)
def test_a_tokenizer_knows_whether_it_keeps_text(name: str) -> None:
    kind, kept = TRAINED[name], name in ("bpe", "bpe of characters", "unigram")
    codec = kind.train(MIXED, "")
    assert codec.lossless is kind.load(codec.state()).lossless is kept
    documents = [document.replace("▁".encode(), b"_") for document in prose(4)] + ["ﬁ  \t\n \N{BALLOON}".encode()]
    back = [codec.decode(tokens) for tokens in codec.encode(documents)]
    assert (back == documents) is kept


@pytest.mark.slow
def test_training_gives_the_same_vocabulary_with_any_number_of_threads() -> None:
    program = (
        "import hashlib; from archlab.search.data import BytePairs, Unigram, WordPiece\n"
        f"corpus, trained = {MIXED!r}, {list(TRAINED.values())!r}\n"
        "print([hashlib.sha256(each.train(corpus, '').state().encode()).hexdigest() for each in trained])"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | threads,
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout
        for threads in ({"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "4"})
    }
    assert len(digests) == 1


@pytest.mark.parametrize("tokenizer", TRAINED.values(), ids=TRAINED)
def test_a_trained_vocabulary_has_the_size_asked_for_and_an_end_that_no_text_spells(tokenizer: Tokenizer) -> None:
    codec = tokenizer.train(MIXED, "train.tokenizer")
    lengths = codec.token_bytes
    assert len(lengths) == tokenizer.vocab  # type: ignore[attr-defined]
    assert codec.eod == len(lengths) - 1 and lengths[-1] == 0
    for tokens in codec.encode([text.encode() for text in texts(50)] + MIXED[:5]):
        assert ((tokens >= 0) & (tokens < codec.eod)).all()
    again = tokenizer.load(codec.state())
    assert [t.tolist() for t in again.encode(MIXED[:9])] == [t.tolist() for t in codec.encode(MIXED[:9])]


@pytest.mark.parametrize(
    "tokenizer",
    [BytePairs(vocab=400, byte_fallback=True), BytePairs(vocab=275, split_digits=True), Unigram(vocab=310)],
    ids=["bpe of characters", "bpe, digits", "unigram"],
)
def test_bytes_stand_in_for_characters_that_the_training_text_lacks(tokenizer: Tokenizer) -> None:
    codec = tokenizer.train(CORPUS, "train.tokenizer")
    spelt = ["<0x41> is no byte", *(text.replace("▁", "") for text in texts(100))]
    for text, tokens in zip(spelt, codec.encode([text.encode() for text in spelt]), strict=True):
        assert codec.decode(tokens).decode() == text
        assert codec.token_bytes[tokens].sum() == len(text.encode())


def test_digits_are_split_and_characters_normalized_where_that_is_asked_for() -> None:
    for kind in (BytePairs(vocab=600), BytePairs(vocab=900, byte_fallback=True), Unigram(vocab=600), WordPiece()):
        together = kind.replace(vocab=500) if kind.type == "wordpiece" else kind
        pieces = {}
        for split in (False, True):
            codec = together.replace(split_digits=split).train(MIXED, "")
            (tokens,) = codec.encode([b"in 2024"])
            pieces[split] = [codec.decode(np.array([token])).strip() for token in tokens]
        assert [piece for piece in pieces[True] if piece.isdigit()] == [b"2", b"0", b"2", b"4"], kind
        assert (b"2024" in pieces[False]) != (kind.type == "unigram"), "its seeds are parts of several words"
    plain, folded = (BytePairs(vocab=300, normalize=how).train(MIXED, "") for how in ("none", "nfkc"))
    ligature = "ﬁ".encode()
    assert [codec.decode(next(iter(codec.encode([ligature])))) for codec in (plain, folded)] == [ligature, b"fi"]


def test_wordpiece_takes_the_longest_known_piece_and_loses_white_space() -> None:
    codec = WordPiece(vocab=16).train([b"abc abc abcd ab  cd\n" * 50], "")
    (tokens, unknown) = codec.encode([b"abcab\tcd", "abÄ cd".encode()])
    assert [codec.decode(np.array([token])) for token in tokens] == [b" abc", b"a", b"b", b" cd"]
    assert codec.decode(unknown) == b" [UNK] cd"


def test_a_character_without_a_token_is_unknown_only_without_fallback() -> None:
    psi = "a\N{GREEK SMALL LETTER PSI}".encode()
    (tokens,) = Unigram(vocab=200, byte_fallback=False).train(MIXED, "").encode([psi])
    assert tokens.tolist()[-1] == 0
    (tokens,) = Unigram(vocab=400).train(MIXED, "").encode([psi])
    assert tokens.tolist()[-2:] == [1 + 0xCF, 1 + 0x88]


def test_the_alphabet_is_what_makes_up_nearly_all_of_the_text() -> None:
    corpus = [b"abcd " * 4000, "Ж".encode()]
    assert "##Ж" not in WordPiece(vocab=12).train(corpus, "").state()
    with pytest.raises(SpecError, match=r"vocab: must be at least \d+, found 5: every character needs"):
        WordPiece(vocab=5).train(corpus, "tokenizer")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as GPT-2's is published: byte-level, with `<|endoftext|>` among its tokens and lower ids after it."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Model

    folder = tmp_path_factory.mktemp("gpt")
    model = Model.from_str(BytePairs(vocab=400).train(CORPUS, "").state())
    model.add_special_tokens([AddedToken("<|endoftext|>", special=True), AddedToken("<|pad|>", special=True)])
    model.enable_truncation(5)
    model.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["folder", "file", "relative to the study"])
def test_a_published_tokenizer_brings_its_own_end(published: Path, pairs: Codec, name: str) -> None:
    base = published.parent if name.startswith("rel") else None
    named = {"folder": str(published), "file": str(published / "tokenizer.json")}.get(name, published.name)
    tokenizer = parse(Tokenizer, {"pretrained": named})
    assert tokenizer == Pretrained(name=named)
    codec = tokenizer.train([], "train.tokenizer", base)
    assert (codec.eod, len(codec.token_bytes)) == (399, 401)
    assert codec.token_bytes[399] == codec.token_bytes[400] == 0
    text = b"def add_1(left, right):<|endoftext|>\n"
    (tokens,) = codec.encode([text])
    assert tokens.tolist() == next(iter(pairs.encode([text]))).tolist(), "no text spells the end, and none is cut"
    assert codec.decode(tokens) == text
    assert tokenizer.load(codec.state()).eod == 399
    other = tokenizer.replace(eod="<|pad|>")
    assert other.train([], "", base).eod == 400
    assert tokenizer.facts(base, "") == Pretrained(name=str(published)).facts(None, "") != other.facts(base, "")
    assert tokenizer.find(base, "") == [published / "tokenizer.json"]


def test_a_published_tokenizer_that_cannot_be_used_says_why(published: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    plain = tmp_path / "plain.json"
    plain.write_text(BytePairs(vocab=300).train(CORPUS, "").state())
    cases = {
        "./nowhere": r"t\.name: '\./nowhere' is no file, and no folder with a tokenizer\.json",
        str(tmp_path): r"t\.name: .*/tokenizer\.json is not a tokenizer of the `tokenizers` library: ",
        str(plain): r"t\.eod: is missing: no special token is known to end a document \(it has none\)",
    }
    for name, message in cases.items():
        with pytest.raises(SpecError, match=message):
            Pretrained(name=name).train([], "t")
    with pytest.raises(
        SpecError, match=r"t\.eod: '<endoftext>' is not a token of it; did you mean '<\|endoftext\|>'\?"
    ):
        Pretrained(name=str(published), eod="<endoftext>").train([], "t")


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
        (
            "byte",
            "tokenizer: 'byte' is not a tokenizer; did you mean 'bytes'? (bytes, bpe, wordpiece, unigram, pretrained)",
        ),
        ("{type: bytes, vocab: 300}", "tokenizer.vocab: 'vocab' is not a key of bytes (there is none)"),
    ],
    ids=["too small for the bytes", "unknown", "bytes have no vocab"],
)
def test_a_misspelt_tokenizer_is_refused(written: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(Tokenizer, read_text(written).plain(), "tokenizer")
    assert str(refused.value) == message
