"""Probes of a trained model: accuracy, induction, recall and needles, against plain computations and known readers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from archlab import arch_dsl
from archlab.arch_dsl.language.parse import parse
from archlab.search.data import Bytes, Dataset, Source, prepare
from archlab.search.data.examples import read
from archlab.search.data.sources.given_tokens import ANSWER
from archlab.search.data.sources.questions import TASKS
from archlab.search.evaluation.measures import About, Measure, Subject
from archlab.search.evaluation.measures.needle import Needle
from archlab.search.evaluation.replies import asking, replies
from archlab.search.recipe.recipe import load_recipe

CONTEXT = 256


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """300 documents of made-up words, as bytes."""
    folder, chance = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    words = ["".join(chance.choice(list("abcdefghijklmnop"), 5)) for _ in range(400)]
    texts = [" ".join(chance.choice(words, 60)) for _ in range(300)]
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    source = {"type": "text", "files": str(folder / "corpus.txt"), "separator": "\n\n"}
    return prepare(parse(Source, source), Bytes(), folder / "data")


@pytest.fixture(scope="module")
def recalled(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    fields = {"pairs": 4, "keys": 8, "values": 8, "length": 20, "sequences": 50, "test_sequences": 30}
    return prepare(parse(Source, {"type": "associative_recall", **fields}), Bytes(), tmp_path_factory.mktemp("recall"))


def about(dataset: Dataset, embed: bool = False, **recipe: Any) -> About:
    attention = {"heads": 2} | ({} if embed else {"positional": "rope"})
    block = {"norm": "rmsnorm", "attention": attention, "ffn": {"type": "glu", "activation": "silu"}}
    model = arch_dsl.load({"d_model": 32, "n_layers": 1, "block": block, **({"embed": ["learned"]} if embed else {})})
    fields = {"tokens": 1000, "context": CONTEXT, "batch": 4, "lr": 1e-3, "precision": "fp32", **recipe}
    found = load_recipe(fields)
    return About(arch_dsl.resolve(model, vocab=dataset.vocab, max_positions=found.context), found, dataset)


def subject(of: About) -> Subject:
    """An untrained model, whose logits are made uneven."""
    weights = {name: value.clone() for name, value in arch_dsl.compile(of.model, seed=3).state_dict().items()}
    weights["embedding"] *= 20
    return Subject(of, torch.device("cpu"), weights, lambda: None)


class Matches(nn.Module):
    """Goes on as after the last place, at most `memory` tokens back, where the last `order` tokens stood before."""

    rows_at_once = 1000

    def __init__(self, vocab: int, order: int, memory: int) -> None:
        super().__init__()
        self.vocab, self.order, self.memory = vocab, order, memory
        self.weight = nn.Parameter(torch.zeros(1))

    def hidden(self, tokens: Tensor, call: Any) -> Tensor:
        """The logits: 9 of what it says, 0 of the others."""
        found = torch.zeros(*tokens.shape, self.vocab)
        for row, line in zip(found, tokens.tolist(), strict=True):
            for end in range(self.order, len(line)):
                last = line[end + 1 - self.order : end + 1]
                for start in range(end - self.order, max(end - self.memory, -1), -1):
                    if line[start : start + self.order] == last:
                        row[end, line[start + self.order]] = 9.0
                        break
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden(tokens, None)


@dataclass(frozen=True)
class Read(Subject):
    """A subject with a given reader in the place of its model."""

    order: int = 1
    memory: int = 10_000

    def at(self, context: int) -> nn.Module:
        return Matches(self.about.dataset.vocab, self.order, self.memory)

    @property
    def model(self) -> nn.Module:
        return self.at(0)


def reader(of: About, order: int = 1, memory: int = 10_000) -> Read:
    return Read(of, torch.device("cpu"), {}, lambda: None, order=order, memory=memory)


def measured(name: str, of: Subject, **fields: Any) -> Any:
    measure = parse(Measure, {"type": name, **fields})
    assert measure.refusal(of.about) is None
    return measure.compute(of)


def test_accuracy_is_the_share_of_answers_that_are_the_likeliest_token(recalled: Dataset) -> None:
    of = reader(about(recalled, context=24, batch=7), memory=10)
    found = measured("accuracy", of)
    right = []
    for row in read(recalled, "test", np.arange(30), 20):
        tokens = torch.from_numpy(row % ANSWER)
        likeliest = of.model(tokens[None, :-1])[0].argmax(-1)
        right.append([bool(likeliest[i] == tokens[i + 1]) for i in range(20) if row[i + 1] >= ANSWER])
    assert 0 < np.mean(right) < 1
    values = {name: pytest.approx(value) for name, value in found.values.items()}
    chance = (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4
    whole = float(np.mean(np.all(right, 1)))
    assert values == {
        "accuracy": np.mean(right),
        "accuracy_chance": chance,
        "accuracy_ceiling": 1,
        "accuracy_whole": whole,
    }
    assert found.curves["accuracy_by_answer"].y == pytest.approx(np.mean(right, 0).tolist())
    assert found.curves["accuracy_by_answer"].n == [30] * 4


def test_replies_are_what_all_logits_say(text: Dataset) -> None:
    of = subject(about(text, context=32))
    rows = np.asarray(text.split("test")[: 33 * 9]).astype(np.int64).reshape(9, 33)
    scored = np.arange(9 * 32).reshape(9, 32) % 3 > 0
    found = replies(of, of.model, asking(rows, scored))
    logits = of.model(torch.from_numpy(rows[:, :-1])).detach()
    nll = -logits.log_softmax(-1).gather(-1, torch.from_numpy(rows[:, 1:, None]))[..., 0].double().numpy()
    np.testing.assert_allclose(found.nll, nll * scored, rtol=1e-5)
    assert (found.right == (logits.argmax(-1).numpy() == rows[:, 1:]) & scored).all()


@pytest.mark.parametrize("name", ["induction", "recall"])
def test_what_comes_again_is_found_by_who_looks_back_far_enough(name: str, text: Dataset) -> None:
    of = about(text)
    fields = {"length": 12, "sequences": 20}
    found = measured(name, reader(of), **fields).values
    asked = 11 if name == "induction" else 6
    right, wrong = np.log(1 + 256 * np.exp(-9)), np.log(257)
    assert found[f"{name}_12_accuracy"] == 1
    assert found[f"{name}_12_chance"] == pytest.approx(1 / asked)
    assert found[f"{name}_12_loss_second"] == pytest.approx(right, rel=1e-4)
    assert found[f"{name}_12_loss_first"] == pytest.approx(wrong)
    near = measured(name, reader(of, memory=11), **fields).values[f"{name}_12_accuracy"]
    assert near == 0 if name == "induction" else 0 < near < 1


def test_without_a_length_what_comes_again_fills_the_context_or_takes_every_token(text: Dataset) -> None:
    known = len(np.unique(text.split("test"))) - 1
    for context, half in ((32, 16), (CONTEXT, known)):
        found = measured("induction", subject(about(text, context=context)), sequences=3).values
        assert found["induction_chance"] == pytest.approx(1 / (half - 1))
    assert 8 < known < 30


def test_a_needle_is_found_where_it_is_within_reach(text: Dataset) -> None:
    of = about(text)
    fields = {"lengths": [160, 240], "depths": 3, "samples": 2, "answers": 4}
    found = measured("needle", reader(of, order=8), **fields)
    label = "needle_160_240_d3_s2_a4"
    cells = found.grids[f"{label}_exact"]
    assert (cells.row, cells.rows, cells.column, cells.columns, cells.n) == (
        "length",
        [160, 240],
        "depth %",
        [0.0, 50.0, 100.0],
        2,
    )
    assert cells.values == [[1, 1, 1], [1, 1, 1]]
    told = {name.removeprefix(f"{label}_"): value for name, value in found.values.items()}
    assert told == pytest.approx(
        {"exact": 1, "chosen": 1, "rank": 1, "loss": np.log(1 + 256 * np.exp(-9)), "floor": told["floor"]}
        | {"ceiling": 1, "exact_ceiling": 1, "chance": 0.25},
        rel=1e-4,
    )
    assert told["floor"] < 1
    near = measured("needle", reader(of, order=8, memory=90), **fields)
    assert near.grids[f"{label}_exact"].values == [[0, 0, 1], [0, 0, 1]]
    assert (near.values[f"{label}_exact_ceiling"], near.values[f"{label}_exact"]) == (1, pytest.approx(1 / 3))
    assert near.grids[f"{label}_chosen"].values[0][2] == 1


def test_questions_about_several_facts_are_told_apart_by_task_and_length(text: Dataset) -> None:
    found = measured("ruler", reader(about(text), order=8), lengths=[240, 400], samples=3)
    cells = found.grids["ruler_240_400_s3_exact"]
    assert (cells.row, cells.rows, cells.column, cells.columns, cells.n) == ("length", [240, 400], "task", [*TASKS], 3)
    by_task = dict(zip(TASKS, zip(*cells.values, strict=True), strict=True))
    assert by_task["one"] == by_task["keys"] == (1, 1), "who copies what followed the same eight bytes finds a number"
    assert by_task["variables"] == by_task["values"] == (0, 0), "and knows neither chains nor lists"
    told = {name.removeprefix("ruler_240_400_s3_"): value for name, value in found.values.items()}
    chosen = np.array(found.grids["ruler_240_400_s3_chosen"].values)
    assert told["chosen"] == pytest.approx(chosen.mean()) and told["chance"] == 0.1
    assert told["chosen_400"] == pytest.approx(chosen[1].mean())
    assert told["keys_chosen"] == pytest.approx(chosen[:, 1].mean()) == 1
    assert told["keys_ceiling"] == 1 and told["ceiling"] < 1 and told["floor"] < 0.5
    near = measured("ruler", reader(about(text), order=8, memory=60), tasks=["one"], lengths=[400], samples=3)
    assert near.values["ruler_one_400_s3_exact"] < 1, "out of reach"


def test_greedy_decoding_token_by_token_gives_what_exact_says(text: Dataset) -> None:
    of = reader(about(text), order=8, memory=90)
    needle = Needle(mode="easy", fact="san_francisco")
    (prompt, *_) = needle.prompts(text)
    hay = np.asarray(text.split("test")[:90]).astype(np.int64)
    for depth in (0.0, 1.0):
        rows = prompt.rows(hay, depth, text.eod)
        right, size = rows[0]
        line = right[:-size].tolist()
        for _ in range(size):
            line.append(int(of.at(0)(torch.tensor([line]))[0, -1].argmax()))
        found = replies(of, of.at(0), asking(right[None], np.arange(1, len(right))[None] >= len(right) - size))
        assert bool(found.right[0, -size:].all()) == (line == right.tolist())
    assert Bytes().train([], "").decode(right).count(b"eat a sandwich") == 2


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("needle", {"lengths": [60]}, {}, "60 tokens have no room"),
    ("needle", {}, {"context": 64}, "64 tokens have no room"),
    ("needle", {"lengths": [10**6]}, {}, "more than the test text has"),
    ("needle", {}, {"objective": "masked"}, "masked does not predict the next token"),
    ("ruler", {"lengths": [100]}, {}, "100 tokens have no room"),
    ("ruler", {"tasks": []}, {}, "there are no tasks"),
    ("induction", {"length": 60}, {}, "60 different tokens are asked for"),
    ("recall", {}, {"context": 6}, "context of 6 tokens is too short"),
    ("induction", {}, {"objective": "prefix"}, "prefix does not predict the next token"),
    ("accuracy", {}, {}, "the data are no probe"),
]


@pytest.mark.parametrize(("name", "fields", "recipe", "why"), REFUSED)
def test_what_means_nothing_is_refused(
    name: str, fields: dict[str, Any], recipe: dict[str, Any], why: str, text: Dataset
) -> None:
    assert why in (parse(Measure, {"type": name, **fields}).refusal(about(text, **recipe)) or "")


def test_a_learned_table_of_positions_ends_before_a_longer_haystack(text: Dataset) -> None:
    needle = parse(Measure, {"type": "needle", "lengths": [400]})
    assert "table of positions ends" in (needle.refusal(about(text, embed=True)) or "")
    assert needle.refusal(about(text)) is None
    assert needle.refusal(about(text, data="induction", objective="causal")) is None


def test_probes_of_language_are_not_asked_of_tokens_without_text(recalled: Dataset) -> None:
    of = about(recalled, context=24, data="associative_recall")
    assert "answers does not predict" in (parse(Measure, {"type": "induction"}).refusal(of) or "")
    of = about(recalled, context=24, data="associative_recall", objective="causal")
    assert "given as tokens" in (parse(Measure, {"type": "needle"}).refusal(of) or "")
    assert "longer than the context" in (
        parse(Measure, {"type": "accuracy"}).refusal(about(recalled, context=16)) or ""
    )


def test_documents_with_needles_are_in_the_split_of_their_haystack(tmp_path: Path) -> None:
    texts = [f"{'lorem ipsum dolor ' * 15}{number} end" for number in range(200)]
    (tmp_path / "hay.txt").write_text("|".join(texts))
    hay = {"type": "text", "files": str(tmp_path / "hay.txt"), "separator": "|"}
    needles = {"type": "needles", "haystack": hay, "documents": 150, "document_bytes": 1000}
    mixture = {"type": "mixture", "domains": {"plain": {"source": hay}, "hidden": {"source": needles}}}
    data = prepare(parse(Source, mixture), Bytes(), tmp_path / "data")
    splits: list[dict[int, str]] = [{}, {}]
    fact = re.compile(r"\nThe number of ([a-z]{4}) is (\d{4})\.\n")
    asked = re.compile(r"\nWhat is the number of ([a-z]{4})\? Answer: The number of ([a-z]{4}) is (\d{4})\.\n$")
    for name in ("train", "validation", "test"):
        for place, domain in enumerate(data.domains):
            for index in range(*domain.documents[name]):
                found = data.document(name, index).decode()
                if place:
                    (hidden,), question = fact.findall(found), asked.search(found)
                    assert question
                    assert question.groups() == (hidden[0], *hidden)
                    found = fact.sub("", asked.sub("", found), count=1)
                splits[place][int(found.removesuffix(" end").split()[-1])] = name
    plain, hidden_in = splits
    assert len(plain) == 200
    assert len(hidden_in) == 150
    assert hidden_in.items() <= plain.items()


def test_needles_as_examples_give_text_and_question_and_ask_for_the_answer(tmp_path: Path) -> None:
    (tmp_path / "hay.txt").write_text("|".join(f"{'lorem ipsum ' * 15}\x1e{number} end" for number in range(200)))
    hay = {"type": "text", "files": str(tmp_path / "hay.txt"), "separator": "|"}
    plain = parse(Source, {"type": "needles", "haystack": hay, "documents": 150})
    data = prepare(plain.replace(as_examples=True), Bytes(), tmp_path / "data")
    inputs = data.inputs("train")
    assert inputs is not None
    assert prepare(plain, Bytes(), tmp_path / "data").inputs("train") is None
    for index, given in enumerate(inputs):
        text = data.document("train", index).decode()
        assert re.fullmatch(r" \d{4}\.\n", text[given:])
        assert f"is{text[given:]}" in text[:given]
        assert text[:given].endswith(" is")
