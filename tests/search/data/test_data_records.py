"""Records and tokens of files become documents, one by one; what cannot be read is named with its place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.search.data import BytePairs, Bytes, DataError, Hub, Jsonl, Parquet, Source, TokenFiles, prepare
from archlab.search.data.sources import hub as hub_module

TEXTS = [f"document {number}\nwith ünïcode and \\ backslashes" for number in range(40)]


def written(source: Source) -> list[str]:
    return [document.data.decode() for document in source.read(source.find(None, "data"), "data")]


def lines(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": place, field: text}).encode() + b"\n" for place, text in enumerate(texts))


PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": None}


@pytest.mark.parametrize("suffix", PACKERS)
def test_lines_of_json_are_documents_however_they_are_packed(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    if suffix == ".zst":
        with pa.CompressedOutputStream(str(file), "zstd") as out:
            out.write(lines(TEXTS))
    else:
        file.write_bytes(PACKERS[suffix](lines(TEXTS)))
    assert written(parse(Source, {"jsonl": str(file)})) == TEXTS
    assert written(Jsonl(files=(str(tmp_path / "*"),), bytes=100)) == TEXTS[:2]


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    table = pa.table({"id": list(range(40)), "body": [*TEXTS[:39], None]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert written(parse(Source, {"parquet": str(tmp_path / "*.parquet"), "column": "body"})) == TEXTS[:39]


BROKEN: dict[str, tuple[bytes, str]] = {
    "no JSON": (b'{"text": "a"}\n{"text": \n', r"files: .*a\.jsonl:2 is not JSON: "),
    "too deep": (b'{"text": "a"}\n' + b"[" * 100_000 + b"\n", r"files: .*a\.jsonl:2 is not JSON: "),
    "no object": (b"[1]\n", r"files: .*a\.jsonl:1 is no JSON object"),
    "no field": (b'{"txt": "a", "id": 1}\n', r"field: .*:1 has no 'text'; did you mean 'txt'\? \(txt, id\)"),
    "no text": (b'{"text": 1}\n', r"files: .*a\.jsonl:1: 'text' is no text"),
    "half a character": (b'{"text": "\\ud800"}\n', r"files: .*:1: 'text' is not Unicode text: surrogates not allowed"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN)
def test_a_record_that_is_no_document_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(SpecError, match=rf"^data\.{message}"):
        written(Jsonl(files=(str(tmp_path / "a.jsonl"),)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(SpecError, match=rf"data\.files: cannot read .*{name}: "):
            written(Jsonl(files=(str(tmp_path / name),)))
    (tmp_path / "a.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(SpecError, match=r"data\.files: cannot read .*a\.parquet: "):
        written(Parquet(files=(str(tmp_path / "a.parquet"),)))
    pq.write_table(pa.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SpecError, match=r"data\.files: .*a\.parquet: 'text' holds int64, no text"):
        written(Parquet(files=(str(tmp_path / "a.parquet"),)))
    with pytest.raises(SpecError, match=r"data\.column: .*a\.parquet has no 'body' \(text\)"):
        written(Parquet(files=(str(tmp_path / "a.parquet"),), column="body"))


# -- tokens ------------------------------------------------------------------------------------------------------------

EOD = 7
DOCUMENTS = [np.arange(number % 5 + 1) + 10 * number for number in range(2, 90)]


def megatron(folder: Path, kind: str = "<u2", code: int = 8) -> None:
    """An indexed data set as Megatron-LM writes it: two sequences for some documents, the end token after each."""
    sequences = [np.append(document, EOD) for document in DOCUMENTS]
    parts = [half for tokens in sequences for half in (np.array_split(tokens, 2) if len(tokens) > 3 else [tokens])]
    np.concatenate(parts).astype(kind).tofile(folder / "a.bin")
    lengths = np.array([len(part) for part in parts])
    firsts = np.concatenate([[0], np.cumsum([2 if len(tokens) > 3 else 1 for tokens in sequences])])
    offsets = (np.cumsum(lengths) - lengths) * np.dtype(kind).itemsize
    header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([code])
    header += np.array([len(parts), len(firsts)], "<u8").tobytes()
    body = lengths.astype("<i4").tobytes() + offsets.astype("<i8").tobytes() + firsts.astype("<i8").tobytes()
    (folder / "a.idx").write_bytes(header + body)


def flat() -> Any:
    return np.concatenate([np.append(document, EOD) for document in DOCUMENTS])


FORMS = {
    "flat": ("a.bin", {"dtype": "uint16"}),
    "flat, 32 bits": ("a.tok", {"dtype": "int32"}),
    "numpy": ("a.npy", {}),
    "megatron": ("a.bin", {}),
    "megatron by its index": ("a.idx", {}),
    "megatron, 32 bits": ("a.*", {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_read_as_documents_from_every_form(tmp_path: Path, form: str) -> None:
    name, fields = FORMS[form]
    if form.startswith("megatron"):
        megatron(tmp_path, *(("<i4", 4) if "32" in form else ("<u2", 8)))
    elif form == "numpy":
        np.save(tmp_path / name, flat())
    else:
        flat().astype(fields["dtype"]).tofile(tmp_path / name)
    source = parse(Source, {"tokens": str(tmp_path / name), "vocab": 1000, "eod": EOD, **fields})
    assert isinstance(source, TokenFiles)
    found = [np.frombuffer(d.data, "<u4").tolist() for d in source.read(source.find(None, "data"), "data")]
    assert found == [document[document != EOD].tolist() for document in DOCUMENTS]


def test_a_data_set_of_tokens_has_its_own_end_and_no_text(tmp_path: Path) -> None:
    megatron(tmp_path)
    source = TokenFiles(files=(str(tmp_path / "a.bin"),), vocab=1000, eod=EOD, test_tokens=9)
    data = prepare(source, Bytes(), tmp_path / "data")
    assert (data.vocab, data.eod, data.has_text) == (1000, EOD, False)
    train = data.split("train")[:]
    assert train.dtype == np.uint16 and train[0] == train[-1] == EOD
    index = data.documents("test")
    assert (index.tokens - 1).sum() <= 9 and index.bytes.sum() == 0
    assert data.bytes_per_token() is None and "bytes_per_token" not in data.record()
    with pytest.raises(DataError, match="was given as tokens: its text is not known"):
        data.document("train", 0)
    again = prepare(source.replace(eod=8), Bytes(), tmp_path / "data")
    assert again.identity != data.identity and again.eod == 8
    with pytest.raises(SpecError, match=r"t\.tokenizer: the data is tokenised already: leave the tokenizer out"):
        prepare(source, BytePairs(), tmp_path / "data", path="t")


def test_tokens_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    flat().astype("<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", np.zeros((2, 2), dtype=int))
    np.save(tmp_path / "b.npy", flat())
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "c.idx").write_bytes(b"")
    (folder := tmp_path / "m").mkdir()
    megatron(folder)
    (folder / "a.idx").write_bytes((folder / "a.idx").read_bytes()[:-1])
    place = 1 + int(np.argmax(flat() >= 100))
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "a.bin": ({}, r"dtype: is missing: a\.bin is a flat file, which does not say what its tokens are"),
        "./a.bin": (
            {"dtype": "uint16", "vocab": 100},
            rf"files: .*a\.bin has the token 10\d at {place - 1}; vocab says",
        ),
        "odd.bin": (
            {"dtype": "uint16"},
            r"files: cannot read .*odd\.bin: holds 3 bytes, not a number of uint16 tokens",
        ),
        "a.npy": ({}, r"files: cannot read .*a\.npy: holds int64 \[2, 2\], not a row of integers"),
        "b.npy": ({"dtype": "uint16"}, r"files: cannot read .*b\.npy: holds int64; leave out dtype, which says uint16"),
        "c.idx": ({}, r"files: .*c\.idx has no c\.bin"),
        "m/a.bin": ({}, r"files: cannot read .*a\.bin: a\.idx is cut short"),
        "a.*": ({"eod": 1000}, r"eod: must be a token, from 0 to 999, found 1000"),
    }
    for name, (fields, message) in cases.items():
        source = parse(Source, {"type": "tokens", "files": str(tmp_path / name), "vocab": 1000, "eod": EOD, **fields})
        with pytest.raises(SpecError, match=rf"^data\.{message}"):
            list(source.read(source.find(None, "data"), "data"))


# -- the hub's library, on local files ---------------------------------------------------------------------------------


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Two files of 20 lines each, kept in parts of at least 200 bytes of text."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(hub_module, "PART_BYTES", 200)
    for half in range(2):
        (tmp_path / f"{half}.jsonl").write_bytes(lines(TEXTS[20 * half : 20 * half + 20], "body"))
    return parse(Source, {"hf": {"name": "json", "data_files": str(tmp_path / "*.jsonl"), "column": "body"}})


@pytest.mark.filterwarnings("ignore")
def test_a_stream_is_kept_in_parts_and_read_from_them_afterwards(
    streamed: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(streamed, Bytes(), tmp_path / "data")
    assert sum(data.header["splits"][name]["documents"] for name in ("train", "validation", "test")) == 40
    monkeypatch.setattr(Hub, "_rows", lambda *_: pytest.fail("the network is not asked again"))
    assert prepare(streamed, BytePairs(vocab=270), tmp_path / "data").identity != data.identity
    files = streamed.find(None, "data", tmp_path / "data")
    assert len(files) > 3
    assert [document.data.decode() for document in streamed.read(files, "data")] == TEXTS


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_stream_goes_on_where_it_was_left(
    streamed: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, asked = Hub._rows, []

    class Cut:
        """A stream that breaks after 17 rows."""

        def __init__(self, whole: Any) -> None:
            self.whole = whole
            self.state_dict = whole.state_dict

        def __iter__(self) -> Any:
            for place, row in enumerate(self.whole):
                if place == 17:
                    raise ConnectionError("the line is dead")
                yield row

    monkeypatch.setattr(Hub, "_rows", lambda self, *given: Cut(rows(self, *given)))
    with pytest.raises(ConnectionError):
        streamed.find(None, "data", tmp_path / "data")
    (folder,) = (tmp_path / "data").glob("hub-*")
    kept = sorted(folder.glob("part-*"))
    before = [file.stat().st_mtime_ns for file in kept]
    assert len(kept) > 1

    class Watched:
        """A stream that notes its rows."""

        def __init__(self, whole: Any) -> None:
            self.whole = whole
            self.state_dict, self.load_state_dict = whole.state_dict, whole.load_state_dict

        def __iter__(self) -> Any:
            for row in self.whole:
                asked.append(row["body"])
                yield row

    monkeypatch.setattr(Hub, "_rows", lambda self, *given: Watched(rows(self, *given)))
    files = streamed.find(None, "data", tmp_path / "data")
    assert [document.data.decode() for document in streamed.read(files, "data")] == TEXTS
    assert asked == TEXTS[40 - len(asked) :] and len(asked) < 40, "what is there is not asked for again"
    assert [file.stat().st_mtime_ns for file in files[: len(before)]] == before


@pytest.mark.filterwarnings("ignore")
def test_a_stream_ends_when_there_is_enough(streamed: Hub, tmp_path: Path) -> None:
    few = streamed.replace(bytes=300)
    texts = [document.data.decode() for document in few.read(few.find(None, "data", tmp_path), "data")]
    assert texts == TEXTS[: len(texts)] and sum(len(text.encode()) for text in texts) <= 300 < 400


def test_a_data_set_of_the_hub_is_pinned() -> None:
    cases = {
        r"data\.revision: is missing: without it 'allenai/c4' may be another data set tomorrow": {"name": "allenai/c4"},
        r"data\.data_files: json needs data_files": {"name": "json"},
        r"data\.data_files: squad needs none of data_files": {"name": "squad", "data_files": "a.json"},
    }
    for message, fields in cases.items():
        with pytest.raises(SpecError, match=message):
            parse(Source, {"type": "hf", **fields}).find(None, "data")
