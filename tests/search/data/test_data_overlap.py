"""What training and held-out text have in common is counted exactly, and once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from archlab.search.data import Bytes, Text, WordPiece, prepare
from archlab.search.data import overlap as module
from archlab.search.data.overlap import measure, of_files, overlap, share


def naive(train: list[str], held: list[str], n: int) -> dict[str, int]:
    def grams(text: str) -> list[tuple[str, ...]]:
        words = "".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split()
        return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]

    known = {gram for text in train for gram in grams(text)}
    found = [[gram in known for gram in grams(text)] for text in held]
    return {
        "documents": len(held),
        "documents_shared": sum(any(each) for each in found),
        "short": sum(not each for each in found),
        "ngrams": sum(map(len, found)),
        "ngrams_shared": sum(map(sum, found)),
    }


@pytest.mark.parametrize("n", [1, 3, 13])
def test_shared_n_grams_are_those_that_comparing_all_finds(n: int) -> None:
    chance = random.Random(n)
    lexicon = ["The", "the", "cat,", "Ünder", "x_1", "7", "dog.", "(ran)", "away;", *(f"w{i}" for i in range(8))]

    def text(words: int) -> str:
        return " ".join(chance.choices(lexicon, k=words))

    train = [text(chance.randrange(40)) for _ in range(60)]
    held = [text(chance.randrange(40)) for _ in range(20)]
    held += [f"{text(5)} {chance.choice(train).upper()}! {text(5)}" for _ in range(10)] + ["", "other words only"]
    found = overlap(train, {"held": held, "none": []}, n)
    assert found["held"] == naive(train, held, n)
    assert found["none"] == dict.fromkeys(found["none"], 0) and share(found["none"]) == 0
    assert 0 < share(found["held"]) <= 1


@pytest.fixture
def corpus(tmp_path: Path) -> Text:
    chance = random.Random(0)
    texts = [" ".join(f"w{chance.randrange(500)}" for _ in range(60)) for _ in range(100)]
    (tmp_path / "a.txt").write_text("\n==\n".join(texts + [f"{text} and more" for text in texts]))
    return Text(files=(str(tmp_path / "a.txt"),), separator="\n==\n")


def test_the_overlap_is_measured_when_data_is_made_and_kept_beside_it(
    corpus: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(corpus, Bytes(), tmp_path / "data")
    found = data.overlap
    assert found is not None
    train = [data.document("train", place).decode() for place in range(data.header["splits"]["train"]["documents"])]
    for name in ("validation", "test"):
        held = [data.document(name, place).decode() for place in range(data.header["splits"][name]["documents"])]
        assert found[name] == naive(train, held, 13)
    assert data.record()["overlap"]["test"] == round(share(found["test"]), 4) > 0.5
    (data.folder / "overlap.json").unlink()
    assert data.overlap is None and measure(data) == found == data.overlap, "from the tokens it is the same"
    monkeypatch.setattr(module, "overlap", lambda *_: pytest.fail("it is measured once"))
    assert measure(data) == found


def test_other_files_are_compared_with_the_training_text(corpus: Text, tmp_path: Path) -> None:
    data = prepare(corpus, Bytes(), tmp_path / "data")
    asked = tmp_path / "asked.txt"
    asked.write_text(f"{data.document('train', 0).decode()}\n\n{' '.join(f'other{n}' for n in range(30))}\n")
    found = of_files(data, {"asked": asked})["asked"]
    assert (found["documents"], found["documents_shared"], found["short"]) == (2, 1, 0)


def test_the_text_is_compared_not_its_tokens(corpus: Text, tmp_path: Path) -> None:
    by_bytes = prepare(corpus, Bytes(), tmp_path / "data")
    pieces = prepare(corpus, WordPiece(vocab=60), tmp_path / "data")
    assert pieces.overlap == by_bytes.overlap
