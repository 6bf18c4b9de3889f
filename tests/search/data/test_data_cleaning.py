"""Every stage of cleaning removes what its rule says and nothing else, and says what it did."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data import (
    C4,
    Bytes,
    Cleaner,
    CleaningStage,
    Document,
    Gopher,
    Mask,
    MinHash,
    Paragraphs,
    Source,
    Spans,
    prepare,
)

PROSE = (
    "There is a house by the river that nobody has lived in for many years, and the people of the village say that "
    "its owner left one morning with nothing but a coat. Children throw stones at the windows when they have time to "
    "spare. An old woman told me once what she had seen there as a girl, but I could not tell whether it was true or "
    "only one of the stories that grow around empty places. The garden still bears fruit in autumn."
)


def cleaned(stages: list[Any], texts: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    cleaner = Cleaner([parse(CleaningStage, stage) for stage in stages])
    given = [Document(text.encode(), hashlib.sha256(text.encode()).digest()) for text in texts]
    left = [document.data.decode() for document in cleaner.run(given)]
    return left, cleaner.record()


WRITTEN = {
    "a group": ({"quality": "gopher"}, Gopher()),
    "a group with fields": ({"dedup": "minhash", "threshold": 0.9, "ngram": 3}, MinHash(threshold=0.9, ngram=3)),
    "a word": ("paragraphs", Paragraphs()),
    "in full": ({"type": "spans", "words": 30}, Spans(words=30)),
    "one kind": ({"pii": "mask", "kinds": "email"}, Mask(kinds=("email",))),
}


@pytest.mark.parametrize(("written", "meant"), WRITTEN.values(), ids=WRITTEN)
def test_a_stage_is_written_by_its_group_or_its_name(written: Any, meant: CleaningStage) -> None:
    assert parse(CleaningStage, written) == meant == parse(CleaningStage, canonical(meant))


MISTAKES = {
    "wrong group": ({"quality": "minhash"}, "x.quality: 'minhash' is not a quality stage (gopher, c4)"),
    "misspelt": ({"dedup": "minhsah"}, "x.dedup: 'minhsah' is not a dedup stage; did you mean 'minhash'? "),
    "no group": ({"clean": "gopher"}, "x: says no type of cleaning stage ("),
    "field of another": (
        {"dedup": "paragraphs", "threshold": 0.5},
        "x.threshold: 'threshold' is not a key of paragraphs",
    ),
    "threshold": ({"dedup": "minhash", "threshold": 0}, "x.threshold: must be greater than 0, found 0"),
}


@pytest.mark.parametrize(("written", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_misspelt_stage_is_refused(written: Any, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(CleaningStage, written, "x")
    assert str(refused.value).startswith(message)


WORDS = PROSE.split()
GOPHER = {
    "fewer than 50 words": " ".join(WORDS[:49]),
    "mean word length outside of 3 to 10": " ".join(["the", "of"] * 10 + ["a"] * 60),
    "more than 0.1 hash signs or ellipses per word": PROSE + " #tag" * 12,
    "more than 90% of lines are bullets": "\n".join(f"• {word} {word[::-1]}s" for word in WORDS),
    "more than 30% of lines end with an ellipsis": PROSE.replace(". ", "...\n"),
    "fewer than 80% of words have a letter": PROSE + " 1234" * 30,
    "fewer than 2 English stop words": " ".join(f"palabra{place} larga" for place in range(60)),
    "more than 30% of lines repeated": PROSE + "\nagain" * 2,
    "more than 30% of paragraphs repeated": "\n\n".join([PROSE.replace(". ", ".\n"), "well", "well", "well"]),
    "repeated lines hold more than 20% of the characters": "\n".join([*PROSE.split(". "), "so", *[PROSE[:220]] * 2]),
    "the most frequent 2-gram holds more than 20% of the characters": "\n".join(
        [PROSE, *(f"extraordinary circumstances {n} words" for n in ("one", "two", "three", "four", "five", "six"))]
    ),
    "repeated 5-grams hold more than 15% of the characters": f"{PROSE} and then again {PROSE[:120]}",
}


@pytest.mark.parametrize("reason", GOPHER)
def test_gopher_drops_a_document_for_each_of_its_rules(reason: str) -> None:
    left, (record,) = cleaned([{"quality": "gopher"}], [PROSE, GOPHER[reason]])
    assert record["reasons"] == {reason: 1}
    assert left == [PROSE], "and keeps prose"
    assert (record["documents"], record["changed"]) == ([2, 1], 0)
    assert record["bytes"] == [len(PROSE.encode()) + len(GOPHER[reason].encode()), len(PROSE.encode())]
    assert record["examples"][0]["reason"] == reason


def test_c4_keeps_sentences_and_drops_lines_and_pages() -> None:
    page = (
        "Home | About | Contact us today\nThis is the first sentence of it.\nToo short.\n\n"
        'And "this is the second one." Here the third one ends!\nPlease enable JavaScript in your browser now.\n'
    )
    left, (record,) = cleaned(
        ["c4"], [page, "One is enough here. Two.", "for (;;) { this is code. } It is. So. So.", page]
    )
    kept = 'This is the first sentence of it.\n\nAnd "this is the second one." Here the third one ends!\n'
    assert left == [kept, kept]
    assert record["reasons"] == {
        "lines without terminal punctuation": 2,
        "lines of fewer than 5 words": 2,
        "lines that say JavaScript": 2,
        "fewer than 3 sentences": 1,
        "holds {": 1,
    }
    assert (record["documents"], record["changed"]) == ([4, 2], 2)
    assert isinstance(parse(CleaningStage, "c4"), C4)


def test_paragraphs_that_occurred_before_are_removed_wherever_they_stand() -> None:
    texts = ["one a\n\ntwo a\n\none a\n", "three\n \n\n  two a  \n\nfour", "two a\n\none a"]
    left, (record,) = cleaned([{"dedup": "paragraphs"}], texts)
    assert left == ["one a\n\ntwo a\n\n", "three\n \n\n  four"]
    assert (record["documents"], record["reasons"]) == ([3, 2], {"repeated paragraphs": 4})


def naive_spans(texts: list[str], n: int) -> list[str]:
    """The words that no window of n words covers which occurred before, by comparing all windows."""
    seen: set[tuple[str, ...]] = set()
    left = []
    for text in texts:
        words = text.split()
        gone = set()
        for start in range(len(words) - n + 1):
            window = tuple(words[start : start + n])
            if window in seen:
                gone |= set(range(start, start + n))
            seen.add(window)
        left.append(" ".join(word for place, word in enumerate(words) if place not in gone))
    return left


def test_spans_that_occurred_before_are_removed_as_comparing_all_windows_would() -> None:
    chance = random.Random(0)
    lexicon = [f"w{number}" for number in range(30)]
    base = [" ".join(chance.choices(lexicon, k=chance.randrange(3, 60))) for _ in range(60)]
    texts = [f"{chance.choice(base)} {text} {chance.choice(base)}" for text in base]
    for n in (2, 7, 50):
        left, (record,) = cleaned([{"dedup": "spans", "words": n}], texts)
        assert [" ".join(text.split()) for text in left] == [text for text in naive_spans(texts, n) if text]
        assert record["bytes"][0] == sum(map(len, texts)) and record["bytes"][1] == sum(map(len, left))


def test_a_span_goes_with_the_white_space_after_it() -> None:
    left, (record,) = cleaned([{"dedup": "spans", "words": 3}], ["a b c d\n", "x  a b\n c  d  y\n"])
    assert left == ["a b c d\n", "x  y\n"]
    assert record["reasons"] == {"repeated spans of 3 words or more": 1}
    assert record["examples"] == [{"reason": "repeated spans of 3 words or more", "text": "a b c d y"}]


def test_minhash_drops_what_is_nearly_an_earlier_document() -> None:
    chance = random.Random(1)
    texts = [" ".join(f"w{chance.randrange(2000)}" for _ in range(300)) for _ in range(30)]

    def touched(text: str, words: int) -> str:
        parts = text.split()
        for place in chance.sample(range(len(parts)), words):
            parts[place] = "other"
        return " ".join(parts)

    near, far = [touched(text, 2) for text in texts], [touched(text, 60) for text in texts]
    left, (record,) = cleaned([{"dedup": "minhash", "threshold": 0.8}], [*texts, *far, *near, texts[0].upper()])
    assert left == [*texts, *far]
    assert record["reasons"] == {"nearly the same as an earlier document": 31}
    loose, _ = cleaned([{"dedup": "minhash", "threshold": 0.1, "permutations": 256}], [*texts, *far])
    assert loose[:30] == texts and len(loose) < 35, "hashing may miss a pair near the threshold"
    assert cleaned([{"dedup": "minhash"}], ["a b", "a b c", "c"])[0] == ["a b", "a b c", "c"]


MASKED = {
    "mail anna.b+c@mail.example.org, or x@y.de.": "mail <EMAIL>, or <EMAIL>.",
    "not mail: a@b, @decorator, user@localhost": "not mail: a@b, @decorator, user@localhost",
    "at 192.168.0.12:80 and 2001:db8::8a2e:370:7334!": "at <IP>:80 and <IP>!",
    "versions 1.2.3, 1.2.3.4.5 and 999.1.1.1; 12:30:45; std::vector": (
        "versions 1.2.3, 1.2.3.4.5 and 999.1.1.1; 12:30:45; std::vector"
    ),
    "call +49 30 1234567 or +1 (212) 555-0100.": "call <PHONE> or <PHONE>.",
    "call (212) 555-0100, 212-555-0100, 212.555.0100": "call <PHONE>, <PHONE>, <PHONE>",
    "no phones: 123456, 3.14159, 2024-11-21, +1 2, 555-0100": "no phones: 123456, 3.14159, 2024-11-21, +1 2, 555-0100",
}


@pytest.mark.parametrize("text", MASKED)
def test_addresses_and_numbers_of_people_are_masked(text: str) -> None:
    left, (record,) = cleaned([{"pii": "mask"}], [text])
    assert left == [MASKED[text]]
    assert record["changed"] == (text != MASKED[text])
    for example in record["examples"]:
        assert example["text"] in MASKED[text], "an example does not show what was masked"


def test_only_the_kinds_asked_for_are_masked() -> None:
    (left,), _ = cleaned([{"pii": "mask", "kinds": ["ip"]}], ["x@y.de 10.0.0.1 +49 30 1234567"])
    assert left == "x@y.de <IP> +49 30 1234567"


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, Any]:
    texts = [f"{PROSE} It is told for the {number}. time." for number in range(60)]
    (tmp_path / "a.txt").write_text("\n==\n".join([*texts, "short", "shorter"]))
    return {"text": str(tmp_path / "a.txt"), "separator": "\n==\n"}


def test_cleaning_is_a_part_of_the_data_and_says_what_it_did(pages: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "data"
    plain = prepare(parse(Source, pages), Bytes(), root)
    stages = [{"quality": "gopher"}, {"dedup": "spans", "words": 20}, {"pii": "mask"}]
    source = parse(Source, {**pages, "clean": stages})
    data = prepare(source, Bytes(), root)
    assert data.identity != plain.identity and "cleaning" not in plain.description
    gopher, spans, mask = data.description["cleaning"][""]
    assert gopher["documents"] == [62, 60] and gopher["reasons"] == {"fewer than 50 words": 2}
    assert spans["documents"][0] == 60 and spans["bytes"][1] < spans["bytes"][0] / 20
    assert (mask["documents"][0], mask["changed"], mask["stage"]["type"]) == (spans["documents"][1], 0, "mask")
    assert prepare(source, Bytes(), root).identity == data.identity
    assert len({prepare(parse(Source, {**pages, "clean": stages[:n]}), Bytes(), root).identity for n in range(4)}) == 4


def test_a_mixture_is_cleaned_by_domain_and_as_a_whole(tmp_path: Path) -> None:
    chance = random.Random(3)
    texts = [" ".join([*chance.choices(WORDS, k=90), "the", "and", f"item{number}"]) for number in range(40)]
    files = {
        "a": [*texts, "short", "shorter"],
        "b": [f"{text} river" for text in texts[:9]] + [f"n{n}" for n in range(50)],
    }
    domains: dict[str, Any] = {}
    for name, documents in files.items():
        (tmp_path / f"{name}.txt").write_text("\n==\n".join(documents))
        domains[name] = {"text": str(tmp_path / f"{name}.txt"), "separator": "\n==\n"}
    domains["a"]["clean"] = {"quality": "gopher"}
    source = parse(Source, {"mixture": domains, "clean": {"dedup": "minhash"}})
    data = prepare(source, Bytes(), tmp_path / "data")
    record = data.description["cleaning"]
    assert list(record) == ["a", ""]
    assert record["a"][0]["documents"] == [42, 40]
    assert record[""][0]["documents"] == [40 + 59, 40 + 50], "what is near a document of the other domain goes too"
    assert data.domains[1].documents["train"][1] <= 90
