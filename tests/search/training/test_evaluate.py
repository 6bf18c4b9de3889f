"""Measures on a held-out split: every token once, by document, in units that can be checked by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from archlab.search.data.dataset import Dataset, write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.objectives import Causal
from archlab.search.training.held_out import evaluate, held_out, summary

DOCUMENTS = [b"to be", b"or not to be, that is the question", b"?", b"whether 'tis nobler in the mind"]
BYTES = sum(map(len, DOCUMENTS))
TOKENS = BYTES + len(DOCUMENTS)  # each document's end is a token


@pytest.fixture
def dataset(tmp_path):
    """Four documents in each split, as bytes."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, Bytes().train([], "tokenizer"), dict.fromkeys(("train", "validation", "test"), DOCUMENTS), {})
    return Dataset.open(tmp_path, "data")


class Table(nn.Module):
    """Predicts the next token from the present one alone: a uniform guess without `noise`."""

    def __init__(self, vocab=257, noise=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.logits = nn.Parameter(torch.randn(vocab, vocab, generator=generator) * noise)
        self.modes = []

    def loss(self, tokens, targets, call, reduction):
        self.modes.append((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        logits = self.logits[tokens].flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction).view_as(targets)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize(("context", "batch"), [(8, 2), (7, 100), (1000, 1)])
def test_uniform_model_has_the_perplexity_of_its_vocabulary(dataset, split, context, batch):
    measures, documents = evaluate(Table(), dataset, split, context, batch)
    assert measures["loss"] == pytest.approx(math.log(257), rel=1e-6)
    assert measures["perplexity"] == pytest.approx(257, rel=1e-5)
    assert measures["bits_per_byte"] == pytest.approx(math.log2(257) * TOKENS / BYTES, rel=1e-6)
    assert documents["tokens"].tolist() == [len(text) + 1 for text in DOCUMENTS]
    assert documents["bytes"].tolist() == [len(text) for text in DOCUMENTS]
    assert documents["nll"] == pytest.approx(documents["tokens"] * math.log(257), rel=1e-6)


@pytest.mark.parametrize(("context", "batch"), [(8, 2), (5, 3), (1000, 1)])
def test_every_document_is_charged_for_its_own_tokens_once(dataset, context, batch):
    model = Table(noise=2.0)
    table = model.logits.detach().log_softmax(-1).double()
    paths = [[256, *text, 256] for text in DOCUMENTS]
    expected = [-float(sum(table[a, b] for a, b in pairwise(path))) for path in paths]
    measures, documents = evaluate(model, dataset, "test", context, batch)
    assert documents["nll"] == pytest.approx(expected, rel=1e-5)
    assert documents["nll"].dtype == np.float64
    assert measures["loss"] == pytest.approx(sum(expected) / TOKENS, rel=1e-6)


@pytest.mark.parametrize(
    ("nll", "tokens", "size", "expected"),
    [
        (math.log(2) * 8, 8, 8, {"loss": math.log(2), "perplexity": 2.0, "bits_per_byte": 1.0}),
        (math.log(2) * 8, 2, 16, {"loss": math.log(2) * 4, "perplexity": 16.0, "bits_per_byte": 0.5}),
        (1e4, 1, 1, {"loss": 1e4, "perplexity": math.inf, "bits_per_byte": 1e4 / math.log(2)}),
    ],
)
def test_summary_is_what_one_computes_by_hand(nll, tokens, size, expected):
    assert summary(nll, tokens, size) == pytest.approx(expected)


def test_summary_of_a_loss_that_is_no_number_is_none():
    assert all(math.isnan(value) for value in summary(math.nan, 3, 3).values())


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_mode_and_random_state_alone(dataset, training):
    model = Table().train(training)
    before = torch.get_rng_state()
    evaluate(model, dataset, "test", 8, 2, precision="bf16")
    assert set(model.modes) == {(False, False, True)}
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_can_be_ended_between_batches(dataset):
    model = Table()

    def tick():
        if len(model.modes) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        evaluate(model, dataset, "test", 8, 1, tick=tick)
    assert len(model.modes) == 2
    assert model.training


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (4, 4), (1000, -(-TOKENS // 8))])
def test_some_windows_are_spread_over_the_split(dataset, count, rows):
    asked = held_out(dataset, "validation", 8, Causal(), encoder=False, count=count)
    assert asked.tokens.shape == asked.targets.shape == (rows, 8)
    assert asked.tokens[0, 0] == dataset.eod
    if count > 1:
        assert -100 in asked.targets[-1]
