"""Diagnostics of one pass: what they share, what they read, what counts, and for which models they mean something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from archlab.search.data.batches import Batch
from archlab.search.data.dataset import Dataset
from archlab.search.evaluation.measures import Measure, Subject
from archlab.search.evaluation.measures.inside.first_token_attention import FirstTokenAttention
from archlab.search.evaluation.measures.inside.gates import Gates
from archlab.search.evaluation.measures.inside.gradient_norms import GradientNorms
from archlab.search.evaluation.measures.inside.local_attention import LocalAttention
from archlab.search.evaluation.measures.inside.massive_activations import MassiveActivations
from archlab.search.evaluation.sample import Diagnostic, Sampled, sample
from tests.search.diagnostics_kit import (
    CONTEXT,
    VARIANTS,
    WINDOWS,
    about_of,
    every,
    make_about,
    make_dataset,
    make_subject,
    measured,
    small,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_tell_the_same(dataset: Dataset) -> None:
    about = about_of(dataset, "gated")
    subject = make_subject(about)
    model: Any = subject.model
    diagnostics = every(about)
    before = [each.plain() for each in measured(subject, *diagnostics)]
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.block:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    tokens = torch.from_numpy(sample(about, False, WINDOWS).tokens)
    with torch.no_grad():
        logits = model(tokens)
    assert graphs, "layers were compiled"
    assert [each.plain() for each in measured(subject, *diagnostics)] == before
    count = len(graphs)
    with torch.no_grad():
        assert torch.equal(model(tokens), logits)
    assert len(graphs) == count, "being watched compiles nothing anew"


def test_what_is_asked_together_shares_one_pass(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    about = about_of(dataset, "gated")
    subject = make_subject(about)
    model: Any = subject.model
    watched = [each for each in every(about) if isinstance(each, Diagnostic)]
    alone = [measured(subject, each)[0].plain() for each in watched]
    calls: list[int] = []
    hidden = model.hidden

    def counted(tokens: Tensor, call: Any) -> Tensor:
        calls.append(len(tokens))
        found: Tensor = hidden(tokens, call)
        return found

    monkeypatch.setattr(model, "hidden", counted)
    found = measured(subject, Gates(windows=2), *watched)
    assert [each.plain() for each in found[1:]] == alone
    assert len(watched) > 5
    assert calls == [2, *[4] * (len(calls) - 1)], "a pass for two windows, and one for all the others"


def test_a_diagnostic_that_goes_wrong_spoils_no_other(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject(about_of(dataset, "gated"))
    together = make_subject(subject.about, MassiveActivations(), Gates(), model=subject.model)
    expected = measured(subject, MassiveActivations())[0].plain()

    def broken(self: Any, sight: Any) -> None:
        raise ZeroDivisionError("the gate is stuck")

    monkeypatch.setattr("archlab.search.evaluation.measures.inside.gates._Gates.see", broken)
    assert MassiveActivations().compute(together).plain() == expected
    with pytest.raises(ZeroDivisionError, match="stuck"):
        Gates().compute(together)


@pytest.mark.parametrize("name", ["sinks", "forget_gate", "gated", "prompt", "memory"])
def test_padding_does_not_count(dataset: Dataset, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    about, most = about_of(dataset, name), 16
    tokens = sample(about, False, WINDOWS).tokens
    hidden = np.broadcast_to(np.arange(CONTEXT) >= most, tokens.shape)
    whole = Batch(tokens, tokens, tokens, padding=hidden)
    short = Batch(tokens[:, :most], tokens[:, :most], tokens[:, :most])
    subject = make_subject(about)
    found = []
    for asked in (whole, short):
        monkeypatch.setattr("archlab.search.evaluation.sample.sample", lambda *_, asked=asked: asked)
        watched = [each for each in every(about) if isinstance(each, Diagnostic)]
        found.append([told for each in measured(subject, *watched) for told in numbers_of(each)])
    assert len(found[0]) > 20
    assert found[0] == pytest.approx(found[1], rel=1e-9, nan_ok=True)


def numbers_of(found: Any) -> list[float]:
    """All of them, but for what is known of the distances of padded windows alone."""
    cells = [x for name, grid in found.grids.items() for row in grid.values for x in row if "map" not in name]
    return [*found.values.values(), *(y for curve in found.curves.values() for y in curve.y), *cells]


def test_in_bfloat16_they_are_about_the_same(dataset: Dataset) -> None:
    found = []
    for precision in ("fp32", "bf16"):
        about = make_about(dataset, VARIANTS["gated"], precision=precision)
        weights = {name: value.float() for name, value in make_subject(about).model.state_dict().items()}
        subject = Subject(about, torch.device("cpu"), weights, lambda: None)
        found.append([each.compute(subject).values for each in every(about)])
    for exact, rough in zip(*found, strict=True):
        assert exact.keys() == rough.keys()
        assert rough != exact
        close = {name: value for name, value in exact.items() if "below" not in name}  # shares beyond a bound may jump
        assert {name: rough[name] for name in close} == pytest.approx(close, rel=0.1)


@pytest.mark.parametrize(("windows", "count"), [(None, 4), (1, 1), (7, 7), (10_000, 29)])
def test_a_sample_has_whole_windows_evenly_spaced(dataset: Dataset, windows: int | None, count: int) -> None:
    asked = sample(make_about(dataset, small()), False, windows)
    stream = np.asarray(dataset.split("test"))
    assert len(stream) - 1 == 29 * CONTEXT + 21, "the last window is short"
    starts = [(stream[: 29 * CONTEXT].reshape(29, CONTEXT) == row).all(1).nonzero()[0].tolist() for row in asked.tokens]
    assert len(asked) == count and all(starts)
    assert (asked.targets >= 0).all()
    gaps = np.diff([places[0] for places in starts])
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("gated_delta_net", {"first_token_attention", "attention_entropy", "local_attention", "router_load"}),
        ("mamba", {"effective_rank", "forget_gate", "first_token_attention", "router_load"}),
        ("llama", {"gates", "forget_gate", "router_load"}),
        ("gated_attention_moe", {"forget_gate"}),
    ],
)
def test_what_means_nothing_for_a_model_is_refused(dataset: Dataset, name: str, refused: set[str]) -> None:
    about = about_of(dataset, name)
    found = {
        each for each, member in Measure.members.items() if issubclass(member, Sampled) and member().refusal(about)
    }
    assert found >= refused
    assert not found & {"massive_activations", "activation_norms", "gradient_norms"}


@pytest.mark.parametrize("weights", ["sigmoid", "stick_breaking"])
def test_weights_that_are_no_softmax_have_no_probabilities(dataset: Dataset, weights: str) -> None:
    """Where only some layers have them, the others are measured."""
    apart = make_about(dataset, small({"weights": weights}))
    assert "no softmax attention" in (FirstTokenAttention().refusal(apart) or "")
    assert "no softmax attention" in (LocalAttention().refusal(apart) or "")
    mixed = make_about(dataset, small(overrides={"1": {"block.attention.weights": weights}}))
    assert FirstTokenAttention().refusal(mixed) is None
    (found,) = measured(make_subject(mixed), FirstTokenAttention(windows=WINDOWS))
    assert found.grids[f"first_token_attention_{WINDOWS}"].rows == [0]


def test_options_are_in_every_name() -> None:
    labels = [
        each.label
        for each in (
            *(FirstTokenAttention(), FirstTokenAttention(windows=8), FirstTokenAttention(first_query=True)),
            *(LocalAttention(), LocalAttention(width=9), LocalAttention(width=9, windows=8), GradientNorms(windows=8)),
        )
    ]
    assert len(set(labels)) == len(labels)
    assert labels[1:3] == ["first_token_attention_8", "first_token_attention_with_first_query"]
