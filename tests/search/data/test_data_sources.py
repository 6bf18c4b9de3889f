"""Sources find their files, cut them without losing a byte, and say what is wrong with a corpus."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.language.spec import Spec
from archlab.search.data import Source, Stdlib, Text
from archlab.search.data.documents.document import Document, pieces
from archlab.search.data.sources.splits import NAMES, Kept, Splits, split_all


class Train(Spec):
    """A stand-in for the part of a study that names its data."""

    data: Source = Stdlib()


def documents(*texts: bytes) -> list[Document]:
    return [Document(text, hashlib.sha256(text).digest()) for text in texts]


def split(given: list[Document], source: Source, path: str) -> Splits:
    kept = Kept()
    return split_all({"": (source, path, kept.add(given, source))}, kept)


SPELLINGS = {
    "name": ("stdlib", Stdlib()),
    "type": ("{type: stdlib, bytes: 2M}", Stdlib(bytes=2_000_000)),
    "no cap": ("{type: stdlib, bytes: null}", Stdlib(bytes=None)),
    "name of a mapping": ("{stdlib: {bytes: 2M}}", Stdlib(bytes=2_000_000)),
    "part of the library": ("{stdlib: json/*.py, bytes: 2M}", Stdlib(bytes=2_000_000, files=("json/*.py",))),
    "glob": ("{text: a/*.txt}", Text(files=("a/*.txt",))),
    "globs": ("{text: [a.txt, b.txt]}", Text(files=("a.txt", "b.txt"))),
    "files": ("{text: {files: a.txt, separator: '---'}}", Text(files=("a.txt",), separator="---")),
    "long form": ("{type: text, files: [a.txt], test_bytes: 9}", Text(files=("a.txt",), test_bytes=9)),
}


@pytest.mark.parametrize(("written", "meant"), SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_of_a_source_means_its_spec(written: str, meant: Source) -> None:
    assert parse(Train, read_text(f"data: {written}")).data == meant
    assert parse(Source, read_text(written)) == meant


SOURCES = """
    (stdlib, text, tokens, jsonl, parquet, hf, mixture, needles, induction, selective_copy, compression,
     associative_recall, forgetting_recall, key_value_needle, memorisation)"""
KEYS = "(clean, validation_bytes, test_bytes, files, separator)"
MISTAKES = {
    "unknown source": (
        "stlib",
        f"s.yaml:1:7: data: 'stlib' is not a data source; did you mean 'stdlib'?{SOURCES}\n"
        "    1 | data: stlib\n      |       ^",
    ),
    "unknown short form": (
        "{txt: a.txt}",
        f"s.yaml:1:8: data.type: 'txt' is not a data source; did you mean 'text'?{SOURCES}\n"
        "    1 | data: {txt: a.txt}\n      |        ^",
    ),
    "unknown key": (
        "{text: {file: a.txt}}",
        f"s.yaml:1:15: data.file: 'file' is not a key of text; did you mean 'files'? {KEYS}\n"
        "    1 | data: {text: {file: a.txt}}\n      |               ^\n"
        "s.yaml:1:7: data.files: is missing: text needs it\n"
        "    1 | data: {text: {file: a.txt}}\n      |       ^",
    ),
    "nothing": (
        "null",
        f"s.yaml:1:7: data: must be a data source, found nothing{SOURCES}\n    1 | data: null\n      |       ^",
    ),
    "cap of nothing": (
        "{type: stdlib, test_bytes: 0}",
        "s.yaml:1:34: data.test_bytes: must be at least 1, found 0\n"
        "    1 | data: {type: stdlib, test_bytes: 0}\n      |                                  ^",
    ),
}


@pytest.mark.parametrize(("written", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_misspelt_source_is_refused_where_it_stands(written: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(Train, read_text(f"data: {written}", "s.yaml"))
    assert str(refused.value) == message


def test_pieces_join_to_the_text_and_keep_to_the_limit() -> None:
    chance = random.Random(0)
    for _ in range(300):
        parts = ["word ", "ä", "語", "🙂", "\n", "\n\n", "\r\n\r\n", " " * 9, "x" * 40]
        data = "".join(chance.choices(parts, k=chance.randrange(80))).encode()
        limit = chance.choice([4, 7, 16, 50, 5000])
        cut = list(pieces(data, limit))
        assert b"".join(cut) == data
        assert all(0 < len(piece) <= limit for piece in cut)
        assert all(piece.decode() for piece in cut), "a character was cut in two"


CUTS = {
    "at the last blank line": (b"aa\n\nbb\ncc\n\ndddd", 12, [b"aa\n\nbb\ncc\n\n", b"dddd"]),
    "windows line ends": (b"aa\r\n\r\nbbbb\r\ncc", 10, [b"aa\r\n\r\n", b"bbbb\r\ncc"]),
    "no blank line: at a line's end": (b"aa\nbb\ncccc", 8, [b"aa\nbb\n", b"cccc"]),
    "no line: between characters": ("ääää".encode(), 5, ["ää".encode(), "ää".encode()]),
    "short enough": (b"a\n\nb", 4, [b"a\n\nb"]),
}


@pytest.mark.parametrize(("data", "limit", "expected"), CUTS.values(), ids=CUTS)
def test_a_piece_ends_where_a_reader_would_end_it(data: bytes, limit: int, expected: list[bytes]) -> None:
    assert list(pieces(data, limit)) == expected


def test_the_standard_library_is_a_capped_sample_in_a_fixed_order_without_tests() -> None:
    source = Stdlib(bytes=300_000)
    files = source.find(None, "data")
    assert files == source.find(None, "data")
    assert not {"tests", "test", "idlelib", "lib2to3", "site-packages"} & {
        part for file in files for part in file.parts
    }
    small, large = list(source.read(files, "data")), list(Stdlib(bytes=600_000).read(files, "data"))
    assert 300_000 - 8_192 < sum(len(document.data) for document in small) <= 300_000
    assert large[: len(small)] == small, "a larger cap keeps what a smaller one has"
    assert len({document.group for document in small}) < len(small), "files are cut into pieces of one group"


def test_globs_pick_files_of_the_standard_library_that_keep_their_order() -> None:
    everything = Stdlib().find(None, "data")
    found = Stdlib(files=("json/*.py", "email/**/*.py")).find(None, "data")
    assert {file.parent.name for file in found} == {"json", "email", "mime"}
    assert found == [file for file in everything if file in found]
    assert Stdlib(files=("email/**/*.py", "json/*.py")).find(None, "data") == found
    assert Stdlib(files=("json/*.py",)).label().startswith("json/*.py of the standard library of Python 3.")


@pytest.mark.parametrize("pattern", ["jsn/*.py", "../*", "/etc/*", "test/*.py", ""])
def test_a_glob_that_no_file_of_the_library_matches_is_refused_where_it_stands(pattern: str) -> None:
    source = parse(Source, read_text(f"{{stdlib: ['json/*.py', '{pattern}']}}", "s.yaml"))
    message = f"s.yaml:1:10: data.files: '{pattern}' matches no .py file of the standard library in "
    with pytest.raises(SpecError, match=re.escape(message)):
        source.find(None, "data")


@pytest.mark.parametrize(("pattern", "meant"), [("jsn/*.py", "json/*.py"), ("json", "json/*.py"), ("ast", "ast.py")])
def test_a_glob_that_matches_nothing_is_answered_by_the_nearest_that_does(pattern: str, meant: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"; did you mean '{meant}'?")):
        Stdlib(files=(pattern,)).find(None, "data")


def test_a_separator_cuts_and_belongs_to_no_document(tmp_path: Path) -> None:
    (tmp_path / "poems.txt").write_bytes(b"one\n---\ntwo\r\n---\n\n---\nthree")
    source = Text(files=(str(tmp_path / "poems.txt"),), separator="---\n")
    texts = [document.data for document in source.read(source.find(None, "data"), "data")]
    assert texts == [b"one\n", b"two\r\n", b"\n", b"three"]


def test_relative_globs_search_the_current_folder_then_the_study_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, study = tmp_path / "here", tmp_path / "study"
    for file in (here / "a.txt", study / "a.txt", study / "b.txt", study / "deep" / "er" / "c.txt"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
    monkeypatch.chdir(here)
    found = Text(files=("*.txt", "b.txt", "[ab].txt", "deep/**/*.txt")).find(study, "data")
    assert found == [here / "a.txt", study / "b.txt", study / "deep" / "er" / "c.txt"]


def test_missing_and_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, study = tmp_path / "here", tmp_path / "study"
    here.mkdir()
    (study / "folder").mkdir(parents=True)
    (study / "latin.txt").write_bytes(b"abc\xe4def")
    monkeypatch.chdir(here)
    cases = {
        "*.txt": f"train.data.files: '*.txt' matches no file in {here}",
        "folder": "train.data.files: 'folder' is a folder; name its files: 'folder/**/*.txt'",
        f"{tmp_path}/x.txt": f"train.data.files: '{tmp_path}/x.txt' matches no file",
        "nothing-*": f"train.data.files: 'nothing-*' matches no file in {here} or {study}",
        "latin.txt": f"train.data.files: {study}/latin.txt is not UTF-8 text (byte 3)",
    }
    for pattern, message in cases.items():
        source = Text(files=(pattern,))
        with pytest.raises(SpecError) as refused:
            list(source.read(source.find(None if pattern == "*.txt" else study, "train.data"), "train.data"))
        assert str(refused.value) == message


REFUSED_TEXTS = {
    "no file": (Text(files=()), "data.files: names no file"),
    "empty separator": (Text(files=("a.txt",), separator=""), "data.separator: must not be empty"),
}


@pytest.mark.parametrize(("source", "message"), REFUSED_TEXTS.values(), ids=REFUSED_TEXTS)
def test_a_text_that_can_mean_nothing_is_refused(source: Text, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        source.find(None, "data")
    assert str(refused.value) == message


def test_an_error_of_the_files_points_at_them(tmp_path: Path) -> None:
    source = parse(Train, read_text("data:\n  text: /nowhere/*.txt\n", "s.yaml")).data
    with pytest.raises(SpecError) as refused:
        source.find(tmp_path, "data")
    assert str(refused.value) == (
        "s.yaml:2:9: data.files: '/nowhere/*.txt' matches no file\n    2 |   text: /nowhere/*.txt\n      |         ^"
    )


# -- splits ------------------------------------------------------------------------------------------------------------


def test_splits_are_disjoint_and_about_90_5_5() -> None:
    texts = [b"text %d" % number for number in range(2000)]
    found = split(documents(*texts), Stdlib(), "data").documents
    assert sorted(text for name in NAMES for text in found[name]) == sorted(texts)
    assert [round(len(found[name]) / 2000, 2) for name in NAMES] == [0.9, 0.05, 0.05]
    for name in NAMES:
        assert list(found[name]) == [text for text in texts if text in set(found[name])], "reading order is kept"


def test_a_document_keeps_its_split_when_the_corpus_grows() -> None:
    texts = [b"text %d" % number for number in range(1000)]
    small, large = split(documents(*texts[:500]), Stdlib(), ""), split(documents(*texts), Stdlib(), "")
    for name in NAMES:
        assert set(small.documents[name]) <= set(large.documents[name])


def test_pieces_of_a_group_share_a_split_and_duplicates_are_dropped() -> None:
    groups = [hashlib.sha256(b"%d" % number).digest() for number in range(100)]
    license_text = b"the same licence in every file"
    given = [Document(b"piece %d %d" % (i, j), group) for i, group in enumerate(groups) for j in range(5)]
    given += [Document(license_text, group) for group in groups] + [Document(b" \n", groups[0])]
    found = split(given, Stdlib(), "data")
    split_of = {text: name for name in NAMES for text in found.documents[name]}
    assert len(split_of) == 501
    assert sum(len(found.documents[name]) for name in NAMES) == 501
    assert all(len({split_of[b"piece %d %d" % (i, j)] for j in range(5)}) == 1 for i in range(100))
    assert found.duplicate_bytes == 99 * len(license_text)


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_a_tiny_corpus_still_has_all_splits(count: int) -> None:
    for seed in range(50):
        found = split(documents(*(b"%d %d" % (seed, number) for number in range(count))), Stdlib(), "data")
        assert all(found.documents[name] for name in NAMES)


def test_caps_hold_and_the_rest_is_counted_and_used_nowhere() -> None:
    texts = [b"%04d" % number * 25 for number in range(2000)]
    whole = split(documents(*texts), Stdlib(), "data")
    capped = split(documents(*texts), Stdlib(validation_bytes=1_000, test_bytes=250), "data")
    assert list(capped.documents["train"]) == list(whole.documents["train"])
    assert [len(capped.documents[name]) for name in NAMES[1:]] == [10, 2]
    assert set(capped.documents["validation"]) < set(whole.documents["validation"])
    held_out = len(whole.documents["validation"]) + len(whole.documents["test"])
    assert capped.unused_bytes == 100 * (held_out - 12)


SMALL = {
    "empty": (documents(), Stdlib(), "data: holds no text"),
    "blank": (documents(b" \n ", b"\n"), Stdlib(), "data: holds no text"),
    "one": (documents(b"a"), Stdlib(), "data: holds 1 document; training, validation and test need at least one each"),
    "two": (
        documents(b"a", b"b"),
        Stdlib(),
        "data: holds 2 documents; training, validation and test need at least one each",
    ),
    "cap below any document": (
        documents(b"a" * 2000, b"b" * 3000, b"c" * 4000),
        Stdlib(test_bytes=100),
        "data.test_bytes: must be at least 3,000, the smallest document of its split, found 100",
    ),
}


@pytest.mark.parametrize(("given", "source", "message"), SMALL.values(), ids=SMALL)
def test_a_corpus_too_small_to_split_is_refused(given: list[Document], source: Source, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        split(given, source, "data")
    assert str(refused.value) == message
