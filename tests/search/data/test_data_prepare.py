"""A data set is made once, whole or not at all, is named by its content, and is made again when it is damaged."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.data import (
    BytePairs,
    Bytes,
    DamagedData,
    DataError,
    Dataset,
    Stdlib,
    Text,
    Tokenizer,
    prepare,
    require,
)
from archlab.search.data.batches import batch, windows
from archlab.search.data.checksums import BLOCK_BYTES, Checksums, Stream, seal

NAMES = ("train", "validation", "test")


@pytest.fixture
def corpus(tmp_path: Path) -> Text:
    """200 documents in two files, with their separator."""
    for half in range(2):
        texts = [
            f"document {number}: " + "ä word or two " * (number % 17) for number in range(half * 100, half * 100 + 100)
        ]
        (tmp_path / f"{half}.txt").write_text("\n===\n".join(texts), encoding="utf-8")
    return Text(files=(str(tmp_path / "*.txt"),), separator="\n===\n")


@pytest.mark.parametrize("tokenizer", [Bytes(), BytePairs(vocab=300)], ids=["bytes", "bpe"])
def test_streams_hold_every_document_between_end_tokens(corpus: Text, tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = prepare(corpus, tokenizer, tmp_path / "data")
    texts = set()
    for name in NAMES:
        stream, index = data.split(name)[:], data.documents(name)
        assert stream.dtype == np.uint16 and len(stream) == data.tokens[name]
        assert not stream.flags.writeable
        assert stream[0] == stream[-1] == data.eod == data.vocab - 1
        assert index.starts[0] == 1 and (index.starts[1:] == (index.starts + index.tokens)[:-1]).all()
        assert index.starts[-1] + index.tokens[-1] == len(stream), "every target has one document"
        assert (stream[index.starts - 1] == data.eod).all() and (stream == data.eod).sum() == len(index.starts) + 1
        for place in range(len(index.starts)):
            text = data.document(name, place)
            assert len(text) == index.bytes[place]
            assert data.token_bytes[stream[index.starts[place] :][: index.tokens[place]]].sum() == index.bytes[place]
            texts.add(text.decode())
    read = {text for half in range(2) for text in (tmp_path / f"{half}.txt").read_text("utf-8").split("\n===\n")}
    assert texts == read
    assert sum(data.description["splits"][name]["documents"] for name in NAMES) == 200


def test_what_a_study_records_of_its_data(corpus: Text, tmp_path: Path) -> None:
    data = prepare(corpus, Bytes(), tmp_path / "data")
    record = data.record()
    assert record.pop("source") == f"text: {corpus.files[0]}"
    assert record.pop("overlap")["test"] > 0.5, "the documents are much alike"
    assert 0.98 < record.pop("bytes_per_token") < 1, "the ends of documents are tokens of no bytes"
    assert record == {"identity": data.identity, "tokenizer": "bytes"} | {f"{n}_tokens": data.tokens[n] for n in NAMES}
    assert data.description["source"] == {
        "type": "text", "version": 1, "validation_bytes": 256_000, "test_bytes": 512_000,
        "files": list(corpus.files), "separator": "\n===\n",
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(data)) == Dataset.open(tmp_path / "data", data.identity)


def test_identity_is_the_content_not_the_place(corpus: Text, tmp_path: Path) -> None:
    first = prepare(corpus, Bytes(), tmp_path / "data")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in tmp_path.glob("*.txt"):
        (moved / file.name).write_bytes(file.read_bytes())
    same = prepare(corpus.replace(files=("*.txt",)), Bytes(), tmp_path / "other", base=moved)
    assert same.identity == first.identity
    assert (same.split("train")[:] == first.split("train")[:]).all()

    (moved / "0.txt").write_bytes((moved / "0.txt").read_bytes() + b"\n===\none more")
    others = [
        prepare(corpus.replace(files=("*.txt",)), Bytes(), tmp_path / "other", base=moved),
        prepare(corpus.replace(separator=None), Bytes(), tmp_path / "data"),
        prepare(corpus.replace(validation_bytes=500), Bytes(), tmp_path / "data"),
        prepare(corpus, BytePairs(vocab=300), tmp_path / "data"),
        prepare(corpus, BytePairs(vocab=301), tmp_path / "data"),
    ]
    assert len({first.identity, *(data.identity for data in others)}) == 6


def test_unchanged_files_are_not_read_again_and_touched_ones_are(corpus: Text, tmp_path: Path) -> None:
    root = tmp_path / "data"
    first = prepare(corpus, Bytes(), root)
    made = (root / first.identity / "data.json").stat().st_mtime_ns
    file = tmp_path / "0.txt"
    remembered = file.stat()
    file.write_bytes(file.read_bytes().replace(b"document 7:", b"DOCUMENT 7:"))
    os.utime(file, ns=(remembered.st_atime_ns, remembered.st_mtime_ns))
    assert prepare(corpus, Bytes(), root).identity == first.identity, "size and time are as remembered"
    os.utime(file, ns=(remembered.st_atime_ns, remembered.st_mtime_ns + 1))
    changed = prepare(corpus, Bytes(), root)
    assert changed.identity != first.identity
    file.write_bytes(file.read_bytes().replace(b"DOCUMENT 7:", b"document 7:"))
    assert prepare(corpus, Bytes(), root).identity == first.identity, "the content decides"
    assert (root / first.identity / "data.json").stat().st_mtime_ns == made
    assert len(json.loads((root / "index.json").read_text())) == 1


DAMAGE = {
    "shard cut short": ("train.bin", lambda file: os.truncate(file, 10), "train.bin holds 10 bytes instead of"),
    "index missing": ("test.documents.npy", Path.unlink, "test.documents.npy holds 0 bytes instead of"),
    "header cut short": ("data.json", lambda file: os.truncate(file, 10), "data.json are not those that were written"),
    "index of the cache": ("../index.json", lambda file: os.truncate(file, 10), None),
}


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_data_set_is_made_again_and_says_so(
    corpus: Text, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: object, message: str | None
) -> None:
    assert callable(damage)
    root = tmp_path / "data"
    before = {split: prepare(corpus, Bytes(), root).split(split)[:].tolist() for split in NAMES}
    identity = prepare(corpus, Bytes(), root).identity
    damage(root / identity / name)
    if message is not None:
        with pytest.raises(DataError, match=message):
            Dataset.open(root, identity)
    with caplog.at_level(logging.INFO, "archlab.search.data"):
        again = prepare(corpus, Bytes(), root)
    assert again.identity == identity
    assert {split: again.split(split)[:].tolist() for split in NAMES} == before
    assert [record.levelname for record in caplog.records if "made again" in record.message] == ["INFO"] * bool(message)
    assert sorted(file.name for file in root.iterdir()) == sorted([".lock", identity, "index.json"])


def flip(file: Path, place: int) -> None:
    """Turns one bit of a file round, and leaves its size and times as they were."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


READS: dict[str, Callable[[Dataset], object]] = {
    "train.bin": lambda data: batch(data.split("train"), 0, 0, data.tokens["train"] // 16, 16),
    "test.bin": lambda data: windows(data.split("test"), 16),
    "validation.documents.npy": lambda data: data.documents("validation"),
    "token_bytes.npy": lambda data: data.token_bytes,
    "tokenizer.json": lambda data: data.codec,
    "data.json": lambda data: data.vocab,
}


@pytest.mark.parametrize("name", READS)
def test_no_bit_that_a_disk_turned_round_is_read(corpus: Text, tmp_path: Path, name: str) -> None:
    """Not one, wherever it is: the data set says so, and is made again with the same tokens."""
    root = tmp_path / "data"
    made = prepare(corpus, BytePairs(vocab=300), root)
    before, file = made.split("train")[:].tolist(), made.folder / name
    for place in [*np.random.default_rng(0).integers(0, file.stat().st_size, 4), 0, file.stat().st_size - 1]:
        flip(file, int(place))
        with pytest.raises(DamagedData, match=f"{name} are not those that were written; the next run makes it again"):
            READS[name](Dataset.open(root, made.identity))
        made = prepare(corpus, BytePairs(vocab=300), root)
        assert made.split("train")[:].tolist() == before


def test_damaged_checksums_never_let_other_tokens_pass(corpus: Text, tmp_path: Path) -> None:
    root = tmp_path / "data"
    made = prepare(corpus, Bytes(), root)
    before, sums = made.split("train")[:].tolist(), made.folder / "checksums.json"
    for place in range(0, sums.stat().st_size, 7):
        flip(sums, place)
        flip(made.folder / "train.bin", 2 * place)
        with pytest.raises(DamagedData):
            Dataset.open(root, made.identity).split("train")[:]
        made = prepare(corpus, Bytes(), root)
        assert made.split("train")[:].tolist() == before


def test_tokens_are_checked_once_and_only_where_they_are_read(corpus: Text, tmp_path: Path) -> None:
    data = prepare(corpus.replace(separator=None), Bytes(), tmp_path / "data")
    file = data.folder / "train.bin"
    (data.folder / "checksums.json").unlink()
    blocks = np.zeros(3 * BLOCK_BYTES // 2, dtype="<u2")
    file.write_bytes(blocks.tobytes())
    seal(data.folder, ["train.bin"])
    flip(file, BLOCK_BYTES + 5)
    stream = Stream(np.memmap(file, dtype="<u2", mode="r"), Checksums(data.folder), "train.bin")
    half = BLOCK_BYTES // 2
    assert len(stream[:half]) == half and len(stream[2 * half :]) == half and stream.part(2 * half, 3 * half)[7] == 0
    for place in (slice(half, half + 1), slice(0, half + 1), slice(None)):
        with pytest.raises(DamagedData, match=r"bytes 65,536 to 131,072 of .*train\.bin are not those"):
            stream[place]
    with pytest.raises(DamagedData):
        np.asarray(stream.part(half, 2 * half))
    flip(file, 5)
    assert stream[2] == 256, "a process checks a block when it reads it first"
    with pytest.raises(DamagedData):
        Dataset.open(tmp_path / "data", data.identity)


def test_what_was_found_damaged_once_is_damaged_when_it_is_asked_again(corpus: Text, tmp_path: Path) -> None:
    made = prepare(corpus, Bytes(), tmp_path / "data")
    flip(made.folder / "test.documents.npy", 200)
    flip(made.folder / "train.bin", 200)
    data = Dataset.open(tmp_path / "data", made.identity)
    for _ in range(2):
        for read in (lambda: data.documents("test"), lambda: data.split("train")[:], lambda: data.split("train")[90]):
            with pytest.raises(DamagedData):
                read()


def test_a_data_set_of_before_there_were_checksums_gets_them(corpus: Text, tmp_path: Path) -> None:
    root = tmp_path / "data"
    data = prepare(corpus, Bytes(), root)
    (data.folder / "checksums.json").unlink()
    assert len(Dataset.open(root, data.identity).split("train")[:]) == data.tokens["train"]
    assert prepare(corpus, Bytes(), root).identity == data.identity
    flip(data.folder / "train.bin", 40)
    with pytest.raises(DamagedData):
        Dataset.open(root, data.identity).split("train")[:]


def test_opening_what_is_not_there_or_of_another_format_says_so(corpus: Text, tmp_path: Path) -> None:
    data = prepare(corpus, Bytes(), tmp_path / "data")
    with pytest.raises(DataError) as missing:
        Dataset.open(tmp_path, "0123456789abcdef")
    assert str(missing.value) == f"data 0123456789abcdef is not in {tmp_path}"
    header = data.folder / "data.json"
    header.write_text(header.read_text().replace('"format": 1', '"format": 99'))
    seal(data.folder, ["data.json"])
    with pytest.raises(DataError) as newer:
        Dataset.open(tmp_path / "data", data.identity)
    assert str(newer.value) == f"data {data.identity} has format 99, this archlab reads 1"


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\udcff"], ids=["too deep", "torn", "no text"])
def test_a_header_or_checksums_that_are_no_json_are_damage_that_names_the_file(
    corpus: Text, text, tmp_path: Path
) -> None:
    data = prepare(corpus, Bytes(), tmp_path / "data")
    header, sums = data.folder / "data.json", data.folder / "checksums.json"
    header.write_text(text, errors="surrogateescape")
    seal(data.folder, ["data.json"])
    with pytest.raises(DataError, match=rf"is damaged: {header} is not JSON"):
        Dataset.open(tmp_path / "data", data.identity)
    sums.write_text(text, errors="surrogateescape")
    with pytest.raises(DamagedData, match=rf"of {sums} are not those"):
        Dataset.open(tmp_path / "data", data.identity)


def test_a_failure_leaves_nothing_behind(corpus: Text, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train\.tokenizer\.vocab: must be at most \d+, found 60000"):
        prepare(corpus, BytePairs(vocab=60_000), tmp_path / "data")
    assert not list((tmp_path / "data").glob("*"))


FULL_DISK = """
import resource, sys
from pathlib import Path
from archlab.search.data import Bytes, Text, prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    prepare(Text(files=(sys.argv[1],)), Bytes(), Path(sys.argv[2]))
except OSError as error:
    print(error.strerror)
"""


def test_a_disk_that_takes_no_more_leaves_no_half_of_a_data_set(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (tmp_path / "long.txt").write_text("".join(f"paragraph {number}\n\n" for number in range(4000)))
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "long.txt"), str(root)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert said.stdout == "File too large\n"
    assert not list(root.iterdir())


MEASURED = """
import resource, sys
from pathlib import Path
from archlab.search.data import Bytes, Jsonl, prepare
source = Jsonl(files=(sys.argv[1],), validation_bytes=20_000_000, test_bytes=20_000_000)
prepare(source.replace(bytes=12_000_000), Bytes(), Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(source, Bytes(), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_corpus_may_be_larger_than_the_memory_that_preparing_it_takes(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        for number in range(120):
            file.write(json.dumps({"text": f"{number} " + "-" * 1_000_000}) + "\n")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "a.jsonl"), str(tmp_path / "data")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    assert int(said.stdout) < 40_000, "kilobytes more than for the first eleven documents"


def test_what_a_killed_process_left_is_removed_after_a_day(corpus: Text, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name, age_s in (("old", 100_000), ("young", 10)):
        folder = root / f".new-{name}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    prepare(corpus, Bytes(), root)
    assert [file.name for file in root.glob(".new-*")] == [".new-young"]


RACE = """
import sys, time
from pathlib import Path
from archlab.search.data import Bytes, Text, prepare
corpus, root, start = sys.argv[1:]
time.sleep(max(0.0, float(start) - time.time()))
for turn in range(20):
    data = prepare(Text(files=(corpus,), separator="\\n===\\n"), Bytes(), Path(root) / str(turn))
    print(data.identity, int(data.split("train")[:].sum()))
"""


@pytest.mark.slow
def test_two_processes_at_once_end_with_one_whole_data_set(corpus: Text, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for turn in range(0, 20, 2):
        os.truncate(prepare(corpus, Bytes(), root / str(turn)).folder / "train.bin", 10)
    command = [sys.executable, "-W", "error", "-c", RACE, corpus.files[0], str(root), str(time.time() + 2)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [racer.communicate(timeout=240) for racer in racers]
    assert [(racer.returncode, errors) for racer, (_, errors) in zip(racers, said, strict=True)] == [(0, "")] * 2
    assert said[0] == said[1]
    (line,) = set(said[0][0].splitlines())
    for turn in range(20):
        assert sorted(os.listdir(root / str(turn))) == sorted([".lock", line.split()[0], "index.json"])


def test_a_training_split_smaller_than_one_batch_is_refused(corpus: Text, tmp_path: Path) -> None:
    data = prepare(corpus, Bytes(), tmp_path / "data")
    held = data.tokens["train"]
    require(data, context=held - 1, batch=1)
    with pytest.raises(SpecError) as refused:
        require(data, context=1024, batch=64)
    assert str(refused.value) == (
        f"train.data: has {held:,} training tokens, fewer than one batch of 64 sequences of 1024 takes (65,537)"
    )


def test_the_standard_library_is_prepared_once_and_fills_its_splits(tmp_path: Path) -> None:
    cold = prepare(Stdlib(), Bytes(), tmp_path)
    assert prepare(Stdlib(), Bytes(), tmp_path).identity == cold.identity
    assert cold.tokens["train"] > 4_000_000
    assert 200_000 < cold.tokens["validation"] < 257_000 and 150_000 < cold.tokens["test"] < 513_000
