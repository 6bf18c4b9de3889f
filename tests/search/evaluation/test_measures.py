"""Each measure against a plain computation, and how `evaluate:` names them."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data import Mixture, prepare
from archlab.search.data.batches import IGNORE
from archlab.search.data.dataset import Dataset, write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.evaluation.measures import About, Measure, Measures, Subject
from archlab.search.evaluation.measures.loss_by_position import LossByPosition
from archlab.search.evaluation.measures.perplexity import Perplexity
from archlab.search.evaluation.measures.perplexity_by_domain import PerplexityByDomain
from archlab.search.evaluation.sample import sample
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.held_out import evaluate
from tests.docs_kit import ROOT, blocks

CONTEXT = 16
WORDS = [
    b"to be or not to be",
    b"that is the question",
    b"whether 'tis nobler",
    b"in the mind to suffer",
    b"slings",
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Five documents in each split, as bytes; the stream is no multiple of the context."""
    root = tmp_path_factory.mktemp("data")
    (root / "data").mkdir()
    write(root / "data", Bytes().train([], "tokenizer"), dict.fromkeys(("train", "validation", "test"), WORDS * 3), {})
    found = Dataset.open(root, "data")
    assert (len(found.split("test")) - 1) % CONTEXT
    return found


def about(dataset: Dataset, positional: str = "rope", **recipe: Any) -> About:
    embed = {"embed": ["learned"]} if positional == "learned" else {}
    attention = {"heads": 2} | ({} if embed else {"positional": positional})
    block = {"norm": "rmsnorm", "attention": attention, "ffn": {"type": "glu", "activation": "silu"}}
    plain = {"d_model": 32, "n_layers": 2, "block": block, **embed}
    model = arch_dsl.resolve(arch_dsl.load(plain), vocab=257, max_positions=CONTEXT)
    fields = {"tokens": 1000, "context": CONTEXT, "batch": 4, "lr": 1e-3, "precision": "fp32", **recipe}
    return About(model, load_recipe(fields), dataset)


def subject(of: About, scale: float = 1.0) -> Subject:
    """An untrained model, whose logits `scale` makes uneven."""
    torch.manual_seed(0)
    weights = {name: value.clone() for name, value in arch_dsl.compile(of.model, seed=3).state_dict().items()}
    weights["embedding"] = weights["embedding"] * scale
    return Subject(of, torch.device("cpu"), weights, lambda: None)


def plain_losses(model: Any, dataset: Dataset, context: int) -> list[list[float]]:
    """The loss of every token of the test stream, window by window, from the logits of one window at a time."""
    stream = torch.from_numpy(np.asarray(dataset.split("test")).astype(np.int64))
    found = []
    for start in range(0, len(stream) - 1, context):
        window = stream[start : start + context + 1]
        with torch.no_grad():
            logits = model(window[None, :-1])[0].double()
        found.append((-logits.log_softmax(-1)[torch.arange(len(window) - 1), window[1:]]).tolist())
    return found


@pytest.mark.parametrize("contexts", [(4,), (CONTEXT,), (5, CONTEXT, 40)], ids=str)
def test_perplexity_at_a_context_is_that_of_windows_of_so_many_tokens(
    dataset: Dataset, contexts: tuple[int, ...]
) -> None:
    asked = subject(about(dataset), scale=20.0)
    found = Perplexity(context=contexts).compute(asked)
    size = int(dataset.documents("test").bytes.sum())
    for context in contexts:
        losses = [each for window in plain_losses(asked.model, dataset, context) for each in window]
        assert len(losses) == len(dataset.split("test")) - 1
        assert found.values[f"perplexity_{context}"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
        bits = sum(losses) / math.log(2) / size
        assert found.values[f"bits_per_byte_{context}"] == pytest.approx(bits, rel=1e-5)
    assert len(found.values) == 2 * len(contexts)


def test_perplexity_at_the_recipes_context_is_that_of_the_table_to_the_bit(dataset: Dataset) -> None:
    asked = subject(about(dataset), scale=20.0)
    table, _ = evaluate(asked.model, dataset, "test", CONTEXT, asked.about.recipe.micro_batch)
    found = Perplexity(context=(CONTEXT,)).compute(asked).values
    assert found[f"perplexity_{CONTEXT}"] == table["perplexity"]
    assert found[f"bits_per_byte_{CONTEXT}"] == table["bits_per_byte"]


@pytest.mark.parametrize("context", [None, 6, 40])
def test_loss_by_position_is_the_mean_over_windows_and_averages_to_the_loss(
    dataset: Dataset, context: int | None
) -> None:
    asked = subject(about(dataset), scale=20.0)
    measure = LossByPosition(context=context)
    found, length = measure.compute(asked), context or CONTEXT
    windows = plain_losses(asked.model, dataset, length)
    end = "" if context is None else f"_{context}"
    curve, by_context = found.curves[f"loss_by_position{end}"], found.curves[f"perplexity_by_context{end}"]
    at = [[window[place] for window in windows if len(window) > place] for place in range(length)]
    assert curve.x == list(range(1, length + 1))
    assert curve.n == [len(losses) for losses in at]
    assert curve.n[0] > curve.n[-1] > 0, "the last window is shorter"
    assert curve.y == pytest.approx([sum(losses) / len(losses) for losses in at], rel=1e-5)
    whole = Perplexity(context=(length,)).compute(asked).values[f"perplexity_{length}"]
    assert math.exp(np.average(np.array(curve.y, float), weights=curve.n)) == pytest.approx(whole, rel=1e-9)
    assert by_context.y[-1] == pytest.approx(whole, rel=1e-9), "P(l) at full length is the perplexity"
    first = [loss for losses in at[:3] for loss in losses]
    assert by_context.y[2] == pytest.approx(math.exp(sum(first) / len(first)), rel=1e-5)


def test_loss_by_position_of_another_objective_averages_to_its_loss(dataset: Dataset) -> None:
    asked = subject(about(dataset, objective="prefix"), scale=20.0)
    recipe = asked.about.recipe
    table, documents = evaluate(asked.model, dataset, "test", CONTEXT, recipe.micro_batch, objective=recipe.objective)
    curve = LossByPosition().compute(asked).curves["loss_by_position"]
    known = [(y, n) for y, n in zip(curve.y, curve.n, strict=True) if y is not None]
    assert sum(curve.n) == documents["tokens"].sum()
    assert curve.n[0] == 0, "what is given is not asked for"
    assert sum(y * n for y, n in known) / sum(curve.n) == pytest.approx(table["loss"], rel=1e-9)


def test_positions_that_no_target_has_are_none(dataset: Dataset) -> None:
    long = len(dataset.split("test")) + 50
    curve = LossByPosition(context=long).compute(subject(about(dataset))).curves[f"loss_by_position_{long}"]
    assert curve.n[-1] == 0
    assert curve.y[-1] is None
    assert curve.y[0] is not None


def test_perplexity_by_domain_is_that_of_each_domains_own_documents(tmp_path: Path) -> None:
    for name, text in (("a", "aaab " * 40), ("b", "the quick brown fox " * 10)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{number} {text * 9}" for number in range(60)))
    source = parse(Mixture, {"domains": {n: {"text": f"{tmp_path}/{n}.txt", "weight": 1} for n in ("a", "b")}})
    mixed = prepare(source, Bytes(), tmp_path / "store", base=tmp_path)
    asked = subject(about(mixed), scale=20.0)
    found = PerplexityByDomain().compute(asked).values
    tokens = np.asarray(mixed.split("test"))
    losses = np.array([loss for window in plain_losses(asked.model, mixed, CONTEXT) for loss in window])
    starts, lengths = mixed.documents("test").starts, mixed.documents("test").tokens
    assert len(losses) == len(tokens) - 1
    for domain in mixed.domains:
        first, end = domain.documents["test"]
        own = np.concatenate([np.arange(starts[d] - 1, starts[d] - 1 + lengths[d]) for d in range(first, end)])
        assert found[f"perplexity_in_{domain.name}"] == pytest.approx(math.exp(losses[own].mean()), rel=1e-5)
    assert len(found) == 2
    assert abs(found["perplexity_in_a"] - found["perplexity_in_b"]) > 1e-3
    assert PerplexityByDomain().refusal(about(mixed)) is None


def test_measuring_leaves_the_random_state_and_the_weights_alone(dataset: Dataset) -> None:
    asked = subject(about(dataset), scale=20.0)
    weights = {name: value.clone() for name, value in asked.weights.items()}
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for measure in (Perplexity(context=(4, 40)), LossByPosition()):
        measure.compute(asked)
    assert np.random.get_state()[1].tolist() == numpy_before
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in asked.weights.items())
    assert torch.equal(asked.model.state_dict()["embedding"], weights["embedding"])


@pytest.mark.parametrize(
    ("positional", "context", "told"),
    [("rope", 100, None), ("learned", 8, None), ("learned", 17, "table of positions ends before windows of 17")],
)
def test_a_context_is_refused_where_positions_are_a_table(
    dataset: Dataset, positional: str, context: int, told: str | None
) -> None:
    asked = about(dataset, positional)
    for measure in (Perplexity(context=(context,)), LossByPosition(context=context)):
        found = measure.refusal(asked)
        assert told in found if told and found else found is told
    if told is None:
        assert Perplexity(context=(context,)).compute(subject(asked)).values[f"perplexity_{context}"] > 1


def named(text: str) -> Measures:
    problems: list[Any] = []
    found = Measures.parse_node(read_text(text, "study.yaml"), "evaluate", problems)
    if problems:
        raise SpecError(problems)
    measures: Measures = found
    return measures


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("perplexity", [Perplexity()]),
        ("[perplexity, loss_by_position]", [Perplexity(), LossByPosition()]),
        ("[{perplexity: {context: [64, 128]}}]", [Perplexity(context=(64, 128))]),
        ("{perplexity: [64, 128]}", [Perplexity(context=(64, 128))]),
        ("[{type: perplexity, context: 64}]", [Perplexity(context=(64,))]),
        ("{loss_by_position: }", [LossByPosition()]),
    ],
)
def test_a_measure_is_named_with_its_options(text: str, expected: list[Measure]) -> None:
    found = named(text)
    assert list(found) == expected
    again = named(json.dumps(canonical(found)))
    assert list(again) == expected, "a record of a study is read as it was written"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{perplexity: {type: loss_by_position, context: 64}}", "1:15: evaluate.perplexity.type: stands inside of"),
        ("{perplexity: [64, 32, 64]}", "1:14: evaluate.context: names 64 twice"),
    ],
)
def test_what_a_measure_says_twice_is_refused_where_it_stands(text: str, told: str) -> None:
    with pytest.raises(SpecError) as error:
        named(text)
    assert told in str(error.value)


def test_a_context_longer_than_the_test_stream_is_refused(dataset: Dataset) -> None:
    most, asked = len(dataset.split("test")) - 1, about(dataset)
    assert asked.refusal(most) is None
    told = asked.refusal(most + 1)
    assert told == f"windows of {most + 1} tokens are longer than the test stream, which has {most} targets"


def test_all_is_everything_that_needs_no_options_once() -> None:
    everything = [member() for member in Measure.members.values() if member.in_all]
    assert sorted(named("all"), key=str) == sorted(everything, key=str)
    assert set(named("[{perplexity: 8}, all]")) == {Perplexity(context=(8,)), *everything}
    assert len(named("[perplexity, all]")) == len(everything)


def test_the_identity_of_a_finding_changes_with_options_version_and_data_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Perplexity(context=(8,)).digest("data")
    assert plain == parse(Measure, {"type": "perplexity", "context": 8}).digest("data")
    others = {
        Perplexity(context=(9,)).digest("data"),
        Perplexity(context=(8,)).digest("other"),
        LossByPosition().digest("data"),
    }
    monkeypatch.setattr(Perplexity, "version", 2)
    others |= {Perplexity(context=(8,)).digest("data")}
    assert len(others) == 4
    assert plain not in others


@pytest.mark.parametrize("name", sorted(Measure.members))
def test_every_measure_says_what_it_is_and_where_from(name: str) -> None:
    member = Measure.members[name]
    assert "arXiv:" in (member.__doc__ or ""), "a definition has a source"
    assert name in (Path(__file__).parents[3] / "docs" / "reference" / "evaluate" / "measures.md").read_text()


def test_the_measure_of_the_page_measures(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "reference" / "evaluate" / "index.md").read_text()
    (text,) = [block.text for block in blocks(page) if block.language == "python"]
    monkeypatch.setattr(Measure, "members", dict(Measure.members))  # it is gone after this test
    made = ModuleType("confidence_of_the_page")
    monkeypatch.setitem(sys.modules, made.__name__, made)  # where annotations are looked up
    exec(text, made.__dict__)
    (asked,) = re.findall(r"`evaluate: (\[confidence.*?\])`", page)
    usual, more = named(asked)
    assert (usual.label, more.label) == ("confidence", "confidence_windows_64")
    assert usual.digest("data") != more.digest("data")
    of = subject(about(dataset), scale=4.0)
    assert usual.refusal(of.about) is None
    read = sample(of.about, False, 8)
    with torch.no_grad():
        sure = [
            float(of.model(torch.from_numpy(row)[None])[0].double().softmax(-1)[place].max())
            for row, targets in zip(read.tokens.astype(np.int64), read.targets, strict=True)
            for place in np.flatnonzero(targets != IGNORE)
        ]
    assert len(sure) == 8 * CONTEXT and max(sure) - min(sure) > 0.01
    assert usual.compute(of).values == {"confidence": pytest.approx(100 * sum(sure) / len(sure), rel=1e-5)}
    assert more.compute(of).values.keys() == {"confidence_windows_64"}
