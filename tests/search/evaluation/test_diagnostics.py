"""Diagnostics against a plain computation in float64, for every variant of attention."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab.arch_dsl import zoo
from archlab.search.data.batches import Batch
from archlab.search.data.dataset import Dataset
from archlab.search.evaluation.measures import Subject
from archlab.search.evaluation.measures.inside.activation_norms import ActivationNorms
from archlab.search.evaluation.measures.inside.attention_entropy import AttentionEntropy
from archlab.search.evaluation.measures.inside.effective_rank import EffectiveRank
from archlab.search.evaluation.measures.inside.first_token_attention import FirstTokenAttention
from archlab.search.evaluation.measures.inside.forget_gate import ForgetGate
from archlab.search.evaluation.measures.inside.gates import Gates
from archlab.search.evaluation.measures.inside.gradient_norms import GradientNorms
from archlab.search.evaluation.measures.inside.local_attention import LocalAttention
from archlab.search.evaluation.measures.inside.massive_activations import MassiveActivations
from archlab.search.evaluation.measures.inside.router_load import RouterLoad
from archlab.search.evaluation.measures.inside.strong_attention import StrongAttention
from archlab.search.evaluation.sample import sample
from archlab.search.objectives import has_encoder
from tests.search.diagnostics_kit import (
    CONTEXT,
    VARIANTS,
    WINDOWS,
    ZOO,
    Plain,
    about_of,
    make_about,
    make_dataset,
    make_subject,
    measured,
    plainly,
    small,
)

STRONG = 0.2  # small models at their beginning weigh little more


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data"))


def seen_by(dataset: Dataset, name: str) -> tuple[Subject, Batch, Plain]:
    """A model, the windows that it is asked about, and what passes through it by the formulas."""
    subject = make_subject(about_of(dataset, name))
    asked = sample(subject.about, has_encoder(subject.model), WINDOWS)
    return subject, asked, plainly(subject.model, asked)  # type: ignore[arg-type]


def place_of(name: str) -> tuple[str, int]:
    """Place and layer of a module."""
    stack, _, rest = name.partition("block.")
    layer, _, path = rest.partition(".")
    return stack + path.replace("members.", ""), int(layer)


def places_of(model: Any, name: str) -> list[tuple[str, int]]:
    """The same of a module that layers share, for each of them; where a loop has all layers, for each of its turns."""
    shared, loop = model.get_submodule(name), getattr(model, "loop", None)
    found = [place_of(path) for path, module in model.named_modules(remove_duplicate=False) if module is shared]
    if loop is None:
        return found
    return [(place, layer + turn * loop.length) for turn in loop.turns for place, layer in found]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def statistics_of(subject: Subject, asked: Batch, plain: Plain) -> Iterator[tuple[str, int, list[dict[str, float]]]]:
    """Place, layer, and the statistics of each head."""
    model: Any = subject.model
    documents = (torch.from_numpy(asked.tokens) == subject.about.dataset.eod).cumsum(-1).tolist()
    prompt = len(model.prompt) if getattr(model, "prompt", None) is not None else 0
    for name, layers in plain.weights.items():
        module = model.get_submodule(name)
        hidden = asked.source_padding if name.startswith("encoder") else asked.padding
        apart = documents if getattr(module, "documents", False) else [[0] * (CONTEXT + prompt)] * len(asked)
        memory = len(module.memory.keys) if getattr(module, "memory", None) is not None else 0
        for again, (weights, seen, _) in enumerate(layers):
            rows = [
                (b, i, memory + apart[b].index(apart[b][i] if i < len(apart[b]) else 0))
                for b in range(len(asked))
                for i in range(weights.shape[2])
                if hidden is None or i < prompt or not hidden[b, i - prompt]
            ]
            cross = type(module).__name__ == "_CrossAttention"
            heads = [
                statistics_of_head(weights[:, h], seen[:, h], rows, memory, cross) for h in range(weights.shape[1])
            ]
            yield *places_of(model, name)[again], heads


def statistics_of_head(
    weights: Tensor, seen: Tensor, rows: list[tuple[int, int, int]], memory: int, cross: bool
) -> dict[str, float]:
    """Means over queries, of which `rows` have the window, the place, and the key that comes first."""
    found: dict[str, list[float]] = {
        kind: [] for kind in ("first", "even", "every", "entropy", "local", "near", "strong")
    }
    for b, i, start in rows:
        row, can = weights[b, i].tolist(), seen[b, i].tolist()
        found["every"].append(row[start])
        if sum(can) > 1:
            found["first"].append(row[start])
            found["even"].append(can[start] / sum(can))
        found["entropy"].append(-sum(p * math.log(p) for p in [*row, 1 - sum(row)] if p > 1e-15))
        if not cross:
            around = [j for j in range(len(row)) if j >= memory and abs(j - memory - i) <= 2]
            found["local"].append(sum(row[j] for j in around))
            found["near"].append(sum(can[j] for j in around) / sum(can))
            found["strong"].append(sum(p for p in row[memory:] if p > STRONG))
    return {kind: mean(numbers) for kind, numbers in found.items()}


KINDS: dict[str, Any] = {
    "first": FirstTokenAttention(windows=WINDOWS),
    "every": FirstTokenAttention(windows=WINDOWS, first_query=True),
    "entropy": AttentionEntropy(windows=WINDOWS),
    "local": LocalAttention(windows=WINDOWS),
    "strong": StrongAttention(windows=WINDOWS, above=STRONG),
}
UNIFORM = {"even": "first", "near": "local"}


def assert_attention_agrees(dataset: Dataset, name: str) -> None:
    subject, asked, plain = seen_by(dataset, name)
    rows = list(statistics_of(subject, asked, plain))
    assert len(asked) == WINDOWS and rows
    found = dict(zip(KINDS, measured(subject, *KINDS.values()), strict=True))
    for kind in (*KINDS, *UNIFORM):
        own = [
            (place, layer, [head[kind] for head in heads])
            for place, layer, heads in rows
            if not math.isnan(heads[0][kind])
        ]
        measure, told = KINDS[UNIFORM.get(kind, kind)], found[UNIFORM.get(kind, kind)]
        label = measure.type + ("_uniform" if kind in UNIFORM else "") + measure.ending
        assert told.values[label] == pytest.approx(mean([mean(heads) for *_, heads in own]), rel=1e-9)
        places = dict.fromkeys(place for place, _, _ in own)
        for place in places if kind in KINDS else ():
            grid = told.grids[
                measure.type + (f"_{place.replace('.', '_')}" if len(places) > 1 else "") + measure.ending
            ]
            mine = dict(sorted((layer, heads) for other, layer, heads in own if other == place))
            assert (grid.rows, grid.row, grid.column, grid.n) == ([*mine], "layer", "head", WINDOWS)
            values = [[x for x in row if x is not None] for row in grid.values]
            assert values == [pytest.approx(heads, rel=1e-9) for heads in mine.values()]


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_that_of_whole_matrices(dataset: Dataset, name: str) -> None:
    assert_attention_agrees(dataset, name)


@pytest.mark.parametrize("name", VARIANTS)
def test_strong_attention_by_distance_is_that_of_whole_matrices(dataset: Dataset, name: str) -> None:
    subject, asked, plain = seen_by(dataset, name)
    (told,) = measured(subject, StrongAttention(windows=WINDOWS, above=STRONG))
    shown = {key: grid for key, grid in told.grids.items() if "_map" in key}
    prompt = len(subject.model.prompt) if getattr(subject.model, "prompt", None) is not None else 0
    found = []
    for module_name, layers in plain.weights.items():
        module = subject.model.get_submodule(module_name)
        if type(module).__name__ == "_CrossAttention":
            continue
        hidden = asked.source_padding if module_name.startswith("encoder") else asked.padding
        memory = len(module.memory.keys) if getattr(module, "memory", None) is not None else 0
        for weights, _, _ in layers:
            own = weights[..., memory:]
            rows = torch.ones(own.shape[0], own.shape[2], dtype=torch.bool)
            if hidden is not None:
                rows[:, prompt:] = ~torch.from_numpy(hidden)
            places = torch.arange(own.shape[2])
            far = (places[:, None] - torch.arange(own.shape[3])).abs()
            strong = torch.where(own > STRONG, own, 0) * rows[:, None, :, None]
            count = float(rows.sum()) * own.shape[1]
            powers = range((own.shape[3] - 1).bit_length())
            found.append([float(strong[..., (far >= 2**p) & (far < 2 ** (p + 1))].sum()) / count for p in powers])
    values = [[x for x in row if x is not None] for grid in shown.values() for row in grid.values]
    assert sorted(values) == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in sorted(found)]
    assert all(grid.columns[:3] == [1, 2, 4] and grid.column == "distance" for grid in shown.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_attention_of_the_zoo_is_that_of_whole_matrices(dataset: Dataset, name: str) -> None:
    assert_attention_agrees(dataset, name)


def assert_activations_agree(dataset: Dataset, name: str) -> None:
    subject, asked, plain = seen_by(dataset, name)
    measures = MassiveActivations(windows=WINDOWS), ActivationNorms(windows=WINDOWS), Gates(windows=WINDOWS)
    massive, norms, gates = measured(subject, *measures)
    largest, roots = [], {}
    for module, streams in plain.streams.items():
        hidden = asked.source_padding if module.startswith("encoder") else asked.padding
        for place, stream in zip(places_of(subject.model, module), streams, strict=True):
            kept = stream if hidden is None else stream[torch.from_numpy(~hidden)]
            largest.append(float(kept.abs().max()))
            roots[place] = math.sqrt(float((kept**2).mean()))
    assert massive.values[f"massive_activations_{WINDOWS}"] == pytest.approx(mean(largest), rel=1e-9)
    curves = [y for name, curve in sorted(massive.curves.items(), reverse=True) for y in curve.y]
    assert sorted(curves) == pytest.approx(sorted(largest), rel=1e-9)
    for (stack, layer), root in roots.items():
        grid = norms.grids["activation_norms" + (f"_{stack[:-1]}" if stack else "") + f"_{WINDOWS}"]
        assert grid.values[grid.rows.index(layer)][grid.columns.index("stream")] == pytest.approx(root, rel=1e-9)
    if not plain.gates:
        assert Gates().refusal(subject.about) == "the model has no gates"
        return
    assert asked.padding is None
    scores = [each for layers in plain.gates.values() for each in layers]
    assert gates.values[f"gate_mean_{WINDOWS}"] == pytest.approx(
        mean([float(opened.mean()) for opened, _, _ in scores])
    )
    closed = [float((opened.abs() < 0.1).double().mean()) for opened, _, _ in scores]
    assert gates.values[f"gate_below_0.1_{WINDOWS}"] == pytest.approx(mean(closed))
    for place, pick in (("before", 1), ("after", 2)):
        expected = mean([float(each[pick].abs().mean()) for each in scores])
        assert gates.values[f"gated_{place}_{WINDOWS}"] == pytest.approx(expected, rel=1e-9)
    sparse = mean([float((after.abs() < 0.01).double().mean()) for _, _, after in scores])
    assert gates.values[f"gated_below_0.01_{WINDOWS}"] == pytest.approx(sparse)
    for curve in gates.curves.values():
        assert sum(curve.y) == pytest.approx(1)
    grid = gates.grids[f"gate_mean_{WINDOWS}"]
    for module, layers in plain.gates.items():
        for again, (opened, _, _) in enumerate(layers):
            path, layer = places_of(subject.model, module)[again]
            column = grid.columns.index(path.replace(".gate_2", ".gate"))
            assert grid.values[grid.rows.index(layer)][column] == pytest.approx(float(opened.mean()), rel=1e-9)


@pytest.mark.parametrize("name", ["gated", "constant_gate", "sinks", "prompt", "shared"])
def test_activations_and_gates_are_those_of_plain_tensors(dataset: Dataset, name: str) -> None:
    assert_activations_agree(dataset, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*zoo.names()])
def test_activations_and_gates_of_the_zoo_are_those_of_plain_tensors(dataset: Dataset, name: str) -> None:
    assert_activations_agree(dataset, name)


def test_forget_gates_are_those_of_the_formula(dataset: Dataset) -> None:
    subject, _, plain = seen_by(dataset, "forget_gate")
    (found,) = measured(subject, ForgetGate(windows=WINDOWS))
    logs = [layer for (layer,) in plain.forgets.values()]  # [batch, time, heads]
    kept = [layer.exp().mean((0, 1)).tolist() for layer in logs]
    half = [(math.log(2) / -layer.mean((0, 1))).tolist() for layer in logs]
    assert found.grids[f"forget_gate_{WINDOWS}"].values == [pytest.approx(row, rel=1e-9) for row in kept]
    assert found.grids[f"forget_gate_half_life_{WINDOWS}"].values == [pytest.approx(row, rel=1e-9) for row in half]
    assert found.values[f"forget_gate_{WINDOWS}"] == pytest.approx(mean([mean(row) for row in kept]))
    assert found.values[f"forget_gate_half_life_{WINDOWS}"] == pytest.approx(statistics.median(half[0] + half[1]))
    decays = found.grids[f"forget_gate_map_{WINDOWS}"]
    assert decays.columns == [1, 2, 4, 8, 16]
    for layer, row in zip(logs, decays.values, strict=True):
        for far, value in zip(decays.columns, row, strict=True):
            products = [layer[:, i - far + 1 : i + 1].exp().prod(1) for i in range(far, CONTEXT)]
            assert value == pytest.approx(float(torch.stack(products).mean()), rel=1e-9)


@pytest.mark.parametrize("name", ["retnet", "gated_delta_net", "gla"])
def test_decays_of_recurrences_are_those_of_a_forget_gate(dataset: Dataset, name: str) -> None:
    subject = make_subject(about_of(dataset, name))
    (found,) = measured(subject, ForgetGate(windows=WINDOWS))
    grid = found.grids[f"forget_gate_{WINDOWS}"]
    assert grid.rows == [0, 1]
    assert all(0 < value < 1 for row in grid.values for value in row)
    if name == "retnet":
        heads = [1 - 2.0 ** (-5 - head) for head in range(len(grid.columns))]  # arXiv:2307.08621, eq. 8
        assert grid.values == [pytest.approx(heads, rel=1e-6)] * 2
        decays = found.grids[f"forget_gate_map_{WINDOWS}"]
        assert decays.values[0][4] == pytest.approx(mean([kept**16 for kept in heads]), rel=1e-6)


@pytest.mark.parametrize("name", ["sinks", "layers_differ"])
def test_effective_ranks_are_those_of_singular_values(dataset: Dataset, name: str) -> None:
    subject, _, plain = seen_by(dataset, name)
    (found,) = measured(subject, EffectiveRank(windows=WINDOWS))
    expected = []
    for ((_, _, out),) in plain.weights.values():
        ranks = []
        for head in range(out.shape[1]):
            s = torch.linalg.svdvals(out[:, head].flatten(0, 1))
            p = s / s.sum()
            ranks.append(float((-(p * p.log()).sum()).exp()))
        expected.append(ranks)
    values = [[x for x in row if x is not None] for row in found.grids[f"effective_rank_{WINDOWS}"].values]
    assert values == [pytest.approx(ranks, rel=1e-6) for ranks in expected]
    assert found.values[f"effective_rank_{WINDOWS}"] == pytest.approx(mean([mean(ranks) for ranks in expected]))


def test_router_load_is_the_count_of_assignments(dataset: Dataset) -> None:
    spec = small()
    spec["block"]["ffn"] = {"type": "moe", "experts": 4, "top_k": 2, "width": 8}
    subject = make_subject(make_about(dataset, spec))
    model: Any = subject.model
    asked = sample(subject.about, False, WINDOWS)
    counts: list[list[float]] = []

    def count(module: Any, given: Any, logits: Tensor) -> None:
        chosen = logits.topk(2).indices.flatten().tolist()
        counts.append([4 * chosen.count(expert) / len(chosen) for expert in range(4)])

    hooks = [layer.ffn.router.register_forward_hook(count) for layer in model.block]
    with torch.no_grad():
        model.eval().hidden(torch.from_numpy(asked.tokens))
    for hook in hooks:
        hook.remove()
    (found,) = measured(subject, RouterLoad(windows=WINDOWS))
    assert found.grids[f"router_load_{WINDOWS}"].values == [pytest.approx(row) for row in counts]
    assert found.values[f"router_load_max_{WINDOWS}"] == pytest.approx(mean([max(row) for row in counts]))
    assert found.values[f"router_dropped_{WINDOWS}"] == 0


def test_gradient_norms_are_those_of_one_backward_pass(dataset: Dataset) -> None:
    subject = make_subject(make_about(dataset, small(), batch=2))  # two passes for three windows
    asked, model = sample(subject.about, False, WINDOWS), subject.model
    logits = model.eval()(torch.from_numpy(asked.tokens))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(asked.targets).flatten()).backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    (found,) = measured(subject, GradientNorms(windows=WINDOWS))
    grid = found.grids[f"gradient_norms_{WINDOWS}"]
    assert (grid.rows, grid.columns, grid.n) == ([0, 1], ["attention", "ffn"], WINDOWS)
    for layer, row in zip(grid.rows, grid.values, strict=True):
        for branch, value in zip(grid.columns, row, strict=True):
            own = [grad.norm() ** 2 for name, grad in gradients.items() if name.startswith(f"block.{layer}.{branch}.")]
            assert value == pytest.approx(float(sum(own)) ** 0.5, rel=1e-9)
    total = sum(float(grad.norm() ** 2) for grad in gradients.values()) ** 0.5
    assert found.values[f"gradient_norm_{WINDOWS}"] == pytest.approx(total, rel=1e-9)
    assert found.values[f"gradient_norm_embedding_{WINDOWS}"] == pytest.approx(float(gradients["embedding"].norm()))
    assert all(value.grad is None for value in model.parameters()), "nothing is left behind"
