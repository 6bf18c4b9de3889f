"""Examples: what is given is read, what is asked for is scored, each once in an epoch, in the tokens of before."""

import json

import numpy as np
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.search.data.batches import IGNORE
from archlab.search.data.examples import examples, read
from archlab.search.data.prepare import prepare
from archlab.search.data.sources.family import Source
from archlab.search.data.tokenizers.family import Bytes, Tokenizer
from archlab.search.objectives import Targets
from archlab.search.planning.plan import plan
from archlab.search.study.load import load_study
from tests.search.study_files import write_study

EOD = 256


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of 200 sums."""
    path = tmp_path_factory.mktemp("examples") / "sums.jsonl"
    rows = [{"sum": f"{n}+{n * 7}=", "is": str(n * 8)} for n in range(200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def source(file, **fields):
    return parse(Source, {"type": "jsonl", "files": str(file), "input": "sum", "field": "is", **fields})


@pytest.fixture(scope="module")
def sums(file, tmp_path_factory):
    return prepare(source(file), Bytes(), tmp_path_factory.mktemp("store"))


def told(batch, row):
    """What a row asks for, as text."""
    targets = batch.targets[row]
    return bytes(targets[(targets != IGNORE) & (targets != EOD)].astype(np.uint8)).decode()


def test_an_epoch_has_every_example_once(sums):
    total = len(sums.documents("train").tokens)
    for first in (0, total):
        rows = examples(sums, 3, first, total, 24)
        assert len({row.tobytes() for row in rows}) == total
    assert (examples(sums, 3, 5, 4, 24) == examples(sums, 3, 0, 9, 24)[5:]).all()
    assert (examples(sums, 3, 0, total, 24) != examples(sums, 3, total, total, 24)).any()


@pytest.mark.parametrize("encoder", [False, True])
def test_only_targets_are_scored_and_end_with_their_document(sums, encoder):
    rows = read(sums, "test", np.arange(len(sums.documents("test").tokens)), 24)
    batch = Targets().batch(rows, 0, 0, 257, encoder)
    for row in range(len(rows)):
        given = (
            batch.source_tokens[row][~batch.source_padding[row]]
            if encoder
            else batch.tokens[row][1 : batch.prefix[row]]
        )
        left, _, right = bytes(given.astype(np.uint8)).decode().partition("+")
        assert told(batch, row) == str(int(left) + int(right.rstrip("=")))
        assert batch.targets[row][batch.targets[row] != IGNORE][-1] == EOD
        assert batch.tokens[row][0] == EOD


def test_examples_of_one_input_share_a_split(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"sum": f"q{n % 60}", "is": str(n)}) + "\n" for n in range(300)))
    data = prepare(source(path), Bytes(), tmp_path / "store")
    given = {
        name: {bytes(row[1 : row[0] + 1].astype(np.uint8)) for row in read(data, name, np.arange(count), 16)}
        for name, count in ((name, len(data.documents(name).tokens)) for name in ("train", "validation", "test"))
    }
    assert sum(map(len, given.values())) == len(set.union(*given.values())) == 60


def test_a_long_example_loses_the_beginning_of_what_is_given_then_its_end(tmp_path):
    path = tmp_path / "long.jsonl"
    rows = [{"sum": "a" * 20 + "b" * 4 + str(n), "is": "c" * length} for n, length in enumerate([3, 30] * 20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = prepare(source(path), Bytes(), tmp_path / "store")
    found = {bytes(row[1:][row[1:] >= 0][:-1].astype(np.uint8)) for row in read(data, "train", np.arange(30), 12)}
    assert {text.strip(b"0123456789") for text in found} >= {b"c" * 11}
    assert all(text.endswith(b"ccc") and len(text) == 11 for text in found)


def test_a_stage_reads_in_the_tokens_that_were_trained_before_it(file, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the sum of {n} and {n + 1}" for n in range(2000)))
    spec = parse(Tokenizer, {"type": "bpe", "vocab": 300})
    first = prepare(parse(Source, {"text": {"files": str(text), "separator": "\n\n"}}), spec, tmp_path)
    alike, own = prepare(source(file), spec, tmp_path, like=first), prepare(source(file), spec, tmp_path)
    assert alike.codec.state() == first.codec.state() != own.codec.state()
    assert alike.identity != own.identity
    assert prepare(source(file), spec, tmp_path, like=first).identity == alike.identity


STUDY = """\
train:
  data: {{text: corpus.txt}}
  tokens: 1k
  context: 32
  batch: 4
  lr: 1e-3
  stages: [{{tokens: 1k, lr: 1e-3, {stage}}}]"""


def planned(folder, stage):
    return plan(load_study(write_study(folder, train=STUDY.format(stage=stage))), folder / "data")


def test_a_plan_takes_examples_and_refuses_text_in_their_place(file, tmp_path):
    data = f"data: {{jsonl: {{files: '{file}', input: sum, field: is}}}}"
    (stage,) = planned(tmp_path, f"objective: targets, {data}").variants[0].stages
    assert stage.dataset.inputs("train") is not None
    examples = len(stage.dataset.documents("train").tokens)
    assert stage.recipe.epochs(stage.dataset) == (32 / examples,), "8 steps of 4 examples, however long they are"
    with pytest.raises(SpecError, match=r"train\.stages\.0\.objective: targets needs examples"):
        planned(tmp_path, "objective: targets")
    with pytest.raises(SpecError, match=r"input: .* has no 'smu'; did you mean 'sum'"):
        planned(tmp_path, f"objective: targets, {data.replace('input: sum', 'input: smu')}")
    with pytest.raises(SpecError, match="examples are read as they are"):
        planned(tmp_path, f"objective: targets, {data.replace('field', 'clean: [gopher], field')}")
