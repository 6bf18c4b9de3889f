"""Generated tasks: solvable to the last answer by rule, a pure function of the seed, scored on answers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.search.data import IGNORE, Bytes, Dataset, Probe, Source, prepare
from archlab.search.data.documents.draws import Draw, Ints
from archlab.search.data.examples import examples, read
from archlab.search.data.sources.splits import NAMES
from archlab.search.objectives import Answers, Causal
from archlab.search.planning.plan import plan
from archlab.search.recipe.recipe import load_recipe
from archlab.search.study.load import load_study
from tests.search.study_files import write_study

SMALL = {"sequences": 60, "validation_sequences": 20, "test_sequences": 20}
CASES: dict[str, dict[str, Any]] = {
    "associative_recall": {"pairs": 4, "keys": 9, "values": 7},
    "associative_recall with room": {"pairs": 3, "keys": 5, "values": 5, "length": 30},
    "forgetting_recall": {"pairs": 3, "overwrites": 5, "keys": 6, "values": 9},
    "induction": {"segment": 5, "tokens": 12, "length": 20},
    "induction with gaps": {"segment": 4, "gap": 2, "tokens": 12, "length": 30},
    "selective_copy": {"copies": 5, "tokens": 6, "length": 24},
    "compression": {"places": 6, "tokens": 7},
    "memorisation": {"pairs": 5, "keys": 40, "values": 9},
    "key_value_needle": {"needles": 3, "keys": 5, "values": 6, "fillers": 8, "length": 30},
}


def probe(case: str, **fields: Any) -> Probe:
    found = parse(Source, {"type": case.split()[0], **CASES.get(case, {}), **fields})
    assert isinstance(found, Probe)
    return found


def answered(source: Any, tokens: list[int], place: int) -> int:
    """The answer at a place by what is before it, as a reader of the task's description finds it."""
    before = tokens[:place]
    if source.type == "selective_copy":
        given = [token for token in before[: before.index(source.tokens + 1)] if token != source.tokens]
        return given[len(before) - before.index(source.tokens + 1) - 1]
    if source.type == "compression":
        return before[before[-1] - int(source.tokens)]
    back = 1 + getattr(source, "gap", 0)
    last = max(i for i in range(len(before) - back) if before[i] == before[-back])
    return before[last + back]


@pytest.mark.parametrize("case", [case for case in CASES if case != "memorisation"])
def test_every_answer_follows_from_what_is_before_it(case: str) -> None:
    source = probe(case)
    for index in range(50):
        tokens, asked = source.sequence(Draw(3, index))
        assert asked.any()
        assert ((tokens >= 0) & (tokens < source.kinds)).all()
        assert [answered(source, tokens.tolist(), place) for place in np.flatnonzero(asked)] == tokens[asked].tolist()


def test_memorisation_has_one_value_for_each_key_in_all_splits(tmp_path: Path) -> None:
    source = probe("memorisation", **SMALL)
    data = prepare(source, Bytes(), tmp_path)
    pairs = {
        (int(key), int(value)) for name in NAMES for row in sequences(data, name) for key, value in row.reshape(-1, 2)
    }
    assert len(pairs) == len({key for key, _ in pairs}) == 40
    assert {value for _, value in pairs} <= {*range(40, 49)}
    other = prepare(probe("memorisation", **SMALL, seed=1), Bytes(), tmp_path)
    assert pairs != {(int(key), int(value)) for row in sequences(other, "train") for key, value in row.reshape(-1, 2)}


def sequences(data: Dataset, name: str) -> Ints:
    """The sequences of a split, `[sequences, length]`, which are of one length."""
    documents, stream = data.documents(name), data.split(name)
    lengths = documents.tokens - 1
    return np.stack([stream[a : a + n] for a, n in zip(documents.starts, lengths, strict=True)]).astype(np.int64)


@pytest.mark.parametrize("case", [case for case in CASES if case != "memorisation"])
def test_chance_is_what_a_draw_from_the_answers_that_are_left_gets(case: str) -> None:
    source, right = probe(case), []
    chance = np.random.default_rng(0)
    for index in range(600):
        tokens, asked = source.sequence(Draw(9, index))
        answers = tokens[asked].tolist()
        held = held_by(source, tokens.tolist(), answers)
        for answer in answers:
            right.append(held[chance.integers(len(held))] == answer)
            held.remove(answer)
    error = 4 * np.sqrt(source.chance * (1 - source.chance) / len(right))
    assert np.mean(right) == pytest.approx(source.chance, abs=error)


def held_by(source: Any, tokens: list[int], answers: list[int]) -> list[int]:
    """What a sequence holds that may be an answer."""
    if source.type == "forgetting_recall":
        return tokens[1 : 2 * source.writes : 2]
    if source.type == "key_value_needle":
        return [token for token in tokens[:-2] if source.keys <= token < source.keys + source.values]
    return list(answers)


@pytest.mark.parametrize("case", CASES)
def test_a_data_set_is_that_of_its_seed_and_its_splits_share_no_sequence(case: str, tmp_path: Path) -> None:
    data = prepare(probe(case, **SMALL), Bytes(), tmp_path / "a")
    assert prepare(probe(case, **SMALL), Bytes(), tmp_path / "b").identity == data.identity
    assert prepare(probe(case, **SMALL, seed=1), Bytes(), tmp_path / "a").identity != data.identity
    more = prepare(probe(case, **SMALL | {"sequences": 80}), Bytes(), tmp_path / "a")
    assert (sequences(more, "train")[:60] == sequences(data, "train")).all()
    assert (sequences(more, "test") == sequences(data, "test")).all(), "a longer training set has the same test"
    found = [{row.tobytes() for row in sequences(data, name)} for name in NAMES]
    assert [len(rows) for rows in found] == [60, 20, 20]
    assert len(set.union(*found)) == 100


def test_only_answers_are_scored_each_after_what_is_before_it(tmp_path: Path) -> None:
    source = probe("associative_recall", **SMALL)
    data = prepare(source, Bytes(), tmp_path)
    rows = read(data, "train", np.arange(60), 20)
    batch = Answers().batch(rows, 0, 0, data.vocab, False, data.eod)
    plain = sequences(data, "train")
    assert batch.tokens.shape == batch.targets.shape == (60, 20)
    assert (batch.tokens[:, 0] == data.eod).all()
    assert (batch.tokens[:, 1:17] == plain).all(), "the sequence is read as it is, and what is behind it is empty"
    asked = np.zeros((60, 20), dtype=bool)
    asked[:, 9:16:2] = True
    assert (batch.targets == np.where(asked, np.pad(plain, ((0, 0), (0, 4))), IGNORE)).all()
    epoch = examples(data, 3, 0, 60, 20)
    assert sorted(map(bytes, epoch)) == sorted(map(bytes, rows)), "an epoch has each sequence once"


WRONG = [
    ("{associative_recall: {pairs: 8, keys: 4}}", r"data\.keys: must be at least 8, .* found 4"),
    ("{associative_recall: {pairs: 8, length: 30}}", r"data\.length: must be even and at least 4 pairs, which is 32"),
    ("{forgetting_recall: {pairs: 40, overwrites: 40}}", r"data\.values: must be at least 80"),
    ("{induction: {segment: 1}}", r"data\.segment: must be at least 2"),
    ("{induction: {segment: 8, tokens: 8}}", r"data\.tokens: must be more than the 8 of a segment"),
    ("{induction: {gap: 7, length: 64}}", r"data\.length: must be at least 114, where two segments fit"),
    ("{selective_copy: {copies: 40}}", r"data\.length: must be at least 81"),
    ("{key_value_needle: {length: 9}}", r"data\.length: must be at least 10"),
    ("{compression: {places: 11}}", r"train\.context: must be at least 33, the length of the probe's sequences"),
    ("{associative_recal: {pairs: 8}}", r"did you mean 'associative_recall'"),
    ("{induction: {}}, tokenizer: bpe", r"tokenizer: the data is tokenised already"),
    ("{text: corpus.txt}, objective: answers", r"objective: answers needs a probe"),
    ("{mixture: {a: {induction: {}}, b: {induction: {gap: 1}}}}", r"domains\.a: .* cannot be mixed"),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_a_wrong_probe_is_refused_before_anything_is_trained(data: str, message: str, tmp_path: Path) -> None:
    train = f"train: {{data: {data}, tokens: 1k, context: 32, batch: 4, lr: 1e-3}}"
    with pytest.raises(SpecError, match=message):
        plan(load_study(write_study(tmp_path, train=train)), tmp_path / "data")


def test_of_a_probe_answers_are_asked_unless_it_is_said_otherwise() -> None:
    fields = "tokens: 1k, lr: 1e-3"
    assert load_recipe(read_text(f"{{data: {{induction: {{}}}}, {fields}}}")).objective == Answers()
    assert load_recipe(read_text(f"{{data: induction, {fields}}}")).objective == Answers()
    assert load_recipe(read_text(f"{{data: induction, objective: causal, {fields}}}")).objective == Causal()
    assert load_recipe(read_text(f"{{data: stdlib, {fields}}}")).objective == Causal()
