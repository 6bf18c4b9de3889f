"""Training on every objective: whole batches whatever the parts, the same bits after a stop, what studies refuse."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archlab.api import compare
from archlab.arch_dsl import canonical, compile, load, resolve
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.parts.context import Call
from archlab.search.data.batches import IGNORE, Batch, batch
from archlab.search.data.dataset import Dataset, write
from archlab.search.data.tokenizers.family import Bytes
from archlab.search.objectives import has_encoder
from archlab.search.planning.plan import plan
from archlab.search.recipe.fits import positions
from archlab.search.recipe.recipe import Recipe, load_recipe
from archlab.search.running.run import run
from archlab.search.store.store import Store
from archlab.search.study.load import load_study, parse_study
from archlab.search.training.held_out import evaluate, held_out, losses
from archlab.search.training.loop import Loop
from archlab.search.training.module import build_model
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from tests.search.study_files import study_text, write_study

BLOCK = {"norm": "rmsnorm", "attention": {"heads": 2, "positional": "rope"}, "ffn": {"type": "glu", "width": 32}}


def decoder(mask: Any) -> dict[str, Any]:
    """A model without an encoder."""
    attention = {"heads": 2, "positional": "rope", "mask": mask}
    return {"d_model": 16, "n_layers": 2, "block": {**BLOCK, "attention": attention}}


ENCODER_DECODER = {
    "d_model": 16,
    "encoder": {"n_layers": 1, "block": {**BLOCK, "attention": {"heads": 2, "mask": "full"}}},
    "decoder": {"n_layers": 1, "block": {**BLOCK, "cross_attention": {"heads": 2}}},
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "prefix": (decoder("prefix"), "prefix"),
    "prefix, read causally": (decoder("causal"), "prefix"),
    "masked": (decoder("full"), "masked"),
    "span_corruption": (decoder("prefix"), "span_corruption"),
    "denoisers": (decoder("prefix"), "denoisers"),
    "ul2r": (decoder("prefix"), "ul2r"),
    "encoder, prefix": (ENCODER_DECODER, "prefix"),
    "encoder, span_corruption": (ENCODER_DECODER, "span_corruption"),
    "encoder, denoisers": (ENCODER_DECODER, "denoisers"),
    "encoder, masked_encoder": (ENCODER_DECODER, {"type": "masked_encoder", "weight": 0.5}),
}
every_case = pytest.mark.parametrize(("model", "objective"), CASES.values(), ids=CASES)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads of one process that wait for another's take minutes where the processors are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one prepared data set, `data`: bytes of sums."""
    root = tmp_path_factory.mktemp("store")
    (root / "data").mkdir()
    texts = {
        name: [f"{i} + {i * k} = {i + i * k}\n".encode() for i in range(count)]
        for k, (name, count) in enumerate([("train", 300), ("validation", 40), ("test", 50)], start=2)
    }
    write(root / "data", Bytes().train([], "tokenizer"), texts, {})
    return root


def recipe_of(objective: Any, **fields: Any) -> Recipe:
    """A recipe of eight steps."""
    short = {"tokens": 8 * 6 * 24, "context": 24, "batch": 6, "lr": 0.01, "objective": objective}
    return load_recipe(short | fields)


def spec_of(model: dict[str, Any], recipe: Recipe) -> Any:
    """The model with the vocabulary and the positions that the recipe needs."""
    spec = load(model)
    return resolve(spec, vocab=recipe.vocab(257), max_positions=positions(recipe, spec))


def trial_in(folder: Path, model: dict[str, Any], recipe: Recipe) -> Path:
    """A folder with a trial."""
    folder.mkdir()
    (folder / "trial.json").write_text(Trial(canonical(spec_of(model, recipe)), canonical(recipe), "data", 0).to_json())
    return folder


def stop_after(steps: int) -> Callable[[], bool]:
    """Asks for a stop after this many steps."""
    calls = iter(range(1, 10**6))
    return lambda: next(calls) >= steps


def left_by(folder: Path) -> tuple[Any, ...]:
    """All that a trial left but timings: weights, lines, measures, documents."""
    model = checkpoint.load(folder, checkpoint.steps_in(folder)[0])["model"]
    data = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(model.items()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timings = ("time", "attempt", "tokens_per_s")
    kept = [{name: value for name, value in line.items() if name not in timings} for line in lines]
    result, documents = json.loads((folder / "result.json").read_text()), np.load(folder / "test_documents.npz")
    arrays = {name: documents[name].tolist() for name in documents}
    return hashlib.sha256(data).hexdigest(), kept, result["validation"], result["test"], arrays


@every_case
def test_continued_trial_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], objective: Any
) -> None:
    monkeypatch.setattr(
        "archlab.search.training.loop.LOG_LINES", 3
    )  # a line every other step, so that sums go through the checkpoint
    recipe = recipe_of(objective, accumulate=2, z_loss=1e-2)
    whole, parts = (trial_in(tmp_path / name, model, recipe) for name in ("whole", "parts"))
    result = train(whole, data_root, 1, lambda: False)
    assert result["state"] == "complete"
    with pytest.raises(Interrupted):
        train(parts, data_root, 1, stop_after(3))
    assert train(parts, data_root, 2, lambda: False)["bit_exact"]
    assert left_by(parts) == left_by(whole)
    training = [line for line in left_by(whole)[1] if "loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6, 8]
    beside = {"z_loss", "encoder"} if recipe.objective.encoder_weight else {"z_loss"}
    assert all(line.keys() == {"step", "tokens", "loss", "lr", "grad_norm", *beside} for line in training)
    assert training[-1]["tokens"] == 8 * 6 * 24, "tokens of text, whatever is made of it"
    assert set(result["test"]) == {"loss", "perplexity"}, "not every byte is predicted"
    assert training[-1]["loss"] < training[0]["loss"]


def loop_of(data_root: Path, folder: Path, model: dict[str, Any], recipe: Recipe) -> Loop:
    """A loop before its first step; the model computes in double precision."""
    module = compile(spec_of(model, recipe), seed=1).double()
    return Loop(folder, "key", 1, recipe, Dataset.open(data_root, "data"), module, 0)


@every_case
def test_gradients_are_those_of_the_whole_batch_in_any_parts(
    tmp_path: Path, data_root: Path, model: dict[str, Any], objective: Any
) -> None:
    found = []
    for accumulate in (1, 2, 6):
        recipe = recipe_of(objective, accumulate=accumulate, z_loss=0.1)
        loop = loop_of(data_root, tmp_path, model, recipe)
        loss = loop.gradients(0)
        gradients = torch.cat([parameter.grad.flatten() for parameter in loop.parameters])
        found.append((loss, gradients, *loop.sums.values()))
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-6, atol=1e-9)


def asked_of(data_root: Path, model: dict[str, Any], objective: Any) -> tuple[Any, Batch]:
    """A model in double precision, and what it is asked about the validation split."""
    recipe, dataset = recipe_of(objective), Dataset.open(data_root, "data")
    module = compile(spec_of(model, recipe), seed=1).double()
    return module, held_out(dataset, "validation", 24, recipe.objective, has_encoder(module), 6)


@pytest.mark.parametrize(("model", "objective"), [*(case for case in CASES.values() if case[1] != "masked")])
def test_no_loss_depends_on_the_targets_that_follow(data_root: Path, model: dict[str, Any], objective: Any) -> None:
    module, made = asked_of(data_root, model, objective)
    before = losses(module, made, 6)
    for row in range(len(made)):
        scored = np.flatnonzero(made.targets[row] != IGNORE)
        middle = scored[len(scored) // 2]
        tokens = made.tokens.copy()
        tokens[row, middle + 1 :] = 7
        after = losses(module, replace(made, tokens=tokens), 6)
        np.testing.assert_allclose(after[row, : middle + 1], before[row, : middle + 1], rtol=1e-9)
        if len(scored) > 3:
            assert (after[row] != before[row]).any()


def test_prefix_masks_read_the_source_both_ways_and_causal_ones_do_not(data_root: Path) -> None:
    for mask, differs in (("prefix", True), ("causal", False)):
        module, made = asked_of(data_root, decoder(mask), "span_corruption")
        assert made.prefix is not None
        tokens, _, call = made.tensors()
        other = tokens.clone()
        other[:, made.prefix[0] - 2] = 7  # the last of the source but one, whose length is that of all rows
        changed = (module.hidden(tokens, call) != module.hidden(other, call)).any(-1)
        assert bool(changed[:, 0].all()) is differs
        assert bool(changed[:, 0].any()) is differs


def test_trained_loss_is_cross_entropy_and_all_that_is_beside_it(tmp_path: Path, data_root: Path) -> None:
    recipe = recipe_of({"type": "masked_encoder", "weight": 0.5}, z_loss=0.1)
    loop = loop_of(data_root, tmp_path, ENCODER_DECODER, recipe)
    loss = loop.gradients(0)
    given = torch.cat([parameter.grad.flatten() for parameter in loop.parameters])
    rows = batch(Dataset.open(data_root, "data").split("train"), 0, 0, 6, 24)
    made = recipe.objective.batch(rows, 0, 0, 257, True)
    tokens, targets, call = made.tensors()
    logits = loop.model(tokens, call).log_softmax(-1)
    log_z = loop.model.logits(loop.model.hidden(tokens, call)).logsumexp(-1)
    kept = targets != IGNORE
    entropy = -logits[kept].gather(-1, targets[kept][:, None]).mean()
    squares = log_z[kept].square().mean()
    asked = torch.from_numpy(made.source_targets)
    source = loop.model.logits(
        loop.model.encode(Call(source_tokens=call.source_tokens, source_padding=call.source_padding))
    )
    own = torch.nn.functional.cross_entropy(source.flatten(0, 1), asked.flatten())
    total = entropy + 0.1 * squares + 0.5 * own
    expected = torch.autograd.grad(total, loop.parameters)
    torch.testing.assert_close(loss.double(), entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(given, torch.cat([each.flatten() for each in expected]), rtol=1e-6, atol=1e-9)
    assert float(loop.sums["z_loss"]) == pytest.approx(0.1 * float(squares.detach()), rel=1e-6)
    assert float(loop.sums["encoder"]) == pytest.approx(0.5 * float(own.detach()), rel=1e-6)


@every_case
def test_evaluation_asks_the_same_of_everyone_and_charges_documents(
    data_root: Path, model: dict[str, Any], objective: Any
) -> None:
    recipe, dataset = recipe_of(objective), Dataset.open(data_root, "data")
    module = compile(spec_of(model, recipe), seed=1)
    first = evaluate(module, dataset, "test", 24, 4, objective=recipe.objective)
    again = evaluate(module, dataset, "test", 24, 7, objective=recipe.objective)
    assert first[0] == pytest.approx(again[0], rel=1e-6)
    measures, documents = first
    assert documents["nll"].sum() / documents["tokens"].sum() == pytest.approx(measures["loss"])
    assert measures["perplexity"] == pytest.approx(math.exp(measures["loss"]))
    asked = held_out(dataset, "test", 24, recipe.objective, has_encoder(module))
    assert documents["tokens"].sum() == asked.scored
    assert len(documents["nll"]) == 50 and (documents["nll"][documents["tokens"] == 0] == 0).all()
    assert len(asked) == (dataset.tokens["test"] - 1) // 24, "whole windows alone"


# Studies


def planned(folder: Path, **sections: str) -> Any:
    """The plan of a small study."""
    return plan(load_study(write_study(folder, **sections)), folder / "data")


ONE = "{norm: rmsnorm, attention: {heads: 2, positional: rope, mask: %s}, ffn: glu}"
TWO = "{norm: rmsnorm, attention: {heads: 2}, cross_attention: {heads: 2}, ffn: glu}"
MODELS = {
    **{mask: f"model: {{d_model: 32, n_layers: 1, block: {ONE % mask}}}" for mask in ("full", "prefix")},
    "encoder": f"""\
model:
  d_model: 32
  encoder: {{n_layers: 1, block: {ONE % "full"}}}
  decoder: {{n_layers: 1, block: {TWO}}}""",
}
STUDIES = {
    "prefix": ("prefix", "prefix", 257),
    "share": ("prefix", "{type: prefix, share: 0.5}", 257),
    "masked": ("full", "{type: masked, density: 0.2}", 258),
    "span_corruption": ("prefix", "span_corruption", 259),
    "denoisers": ("prefix", "denoisers", 260 + 5),
    "ul2r": ("prefix", "ul2r", 260 + 5),
    "T5": ("encoder", "{type: span_corruption, sentinels: 100}", 357),
    "UL2": ("encoder", "{type: denoisers, mode_tokens: false}", 257 + 5),
    "AlphaCode": ("encoder", "masked_encoder", 258),
}


@pytest.mark.parametrize(("model", "objective", "vocab"), STUDIES.values(), ids=STUDIES)
def test_study_of_every_objective_runs_from_its_file_to_its_table(
    tmp_path: Path, model: str, objective: str, vocab: int
) -> None:
    train_section = (
        f"train: {{data: {{text: corpus.txt}}, tokens: 512, context: 32, batch: 4, lr: 1e-3, objective: {objective}}}"
    )
    path = write_study(
        tmp_path, model=MODELS[model], train=train_section, variants="variants: {baseline: {}}", components=None,
        seeds="seeds: 1",
    )  # fmt: skip
    made = plan(load_study(path), tmp_path / "data")
    assert made.variants[0].model.vocab == vocab
    run(path, tmp_path / "store", executor="inline", track=False)
    table = compare(load_study(path), tmp_path / "store").table
    assert table["perplexity_mean"].notna().all() and table["bits_per_byte_mean"].isna().all()


def test_objectives_are_variants_that_are_not_compared(tmp_path: Path) -> None:
    variants = "variants:\n  baseline: {}\n  span: {train.objective: span_corruption, block.attention.mask: prefix}"
    made = planned(tmp_path, components=None, variants=variants)
    baseline, span = made.variants
    assert (baseline.model.vocab, span.model.vocab) == (257, 259)
    assert baseline.batches != span.batches and baseline.test_text != span.test_text
    assert "objective" not in baseline.record() and span.record()["objective"]["type"] == "span_corruption"
    assert "train.objective: causal → span_corruption" in [str(change) for change in span.changes]


def test_model_of_a_fixed_vocabulary_must_have_room(tmp_path: Path) -> None:
    model = MODELS["prefix"].replace("d_model: 32,", "d_model: 32, vocab: 257,")
    section = "train: {data: {text: corpus.txt}, tokens: 512, context: 32, batch: 4, lr: 1e-3, objective: denoisers}"
    with pytest.raises(SpecError, match="vocab: 257 is less than the 265 that the data and the recipe need"):
        planned(tmp_path, model=model, train=section, components=None, variants="variants: {baseline: {}}")


def test_search_and_pruning_hold_no_losses_of_different_objectives_against_each_other(tmp_path: Path) -> None:
    text = study_text(
        variants=None, components=None, search="search: {trials: 3}",
        space="space:\n  train.objective: {choice: [causal, prefix]}",
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"space\.train\.objective: losses of different objectives do not compare"):
        parse_study(read_text(text))
    variants = "variants:\n  baseline: {}\n  other: {train.objective: prefix}"
    with pytest.raises(SpecError, match=r"prune: holds trials against each other, .* different objectives"):
        planned(tmp_path, components=None, variants=variants, prune="prune: median", tune="tune: {lr: [1e-3, 2e-3]}")


# Learning


T5 = """\
study: t5
model:
  d_model: 64
  encoder:
    n_layers: 1
    block:
      norm: rmsnorm
      attention: {heads: 4, mask: full, positional: {type: t5_buckets, bidirectional: true}}
      ffn: {type: mlp, activation: relu}
  decoder:
    n_layers: 1
    block:
      norm: rmsnorm
      attention: {heads: 4, positional: {type: t5_buckets}}
      cross_attention: {heads: 4}
      ffn: {type: mlp, activation: relu}
variants: {baseline: {}}
train: {data: {type: stdlib, bytes: 1M}, tokens: 614400, context: 192, batch: 16, optimizer: muon, lr: 3e-2,
        objective: span_corruption}
seeds: 1
"""


@pytest.mark.slow
def test_a_t5_reconstructs_better_than_the_unigram_distribution(tmp_path: Path) -> None:
    """200 steps on the standard library: what was cut out is predicted from the rest, not from frequencies alone."""
    path, root = tmp_path / "t5.yaml", tmp_path / "store"
    path.write_text(T5)
    run(path, root, executor="inline", track=False)
    variant = plan(load_study(path), root / "data").variants[0]
    trial, dataset = variant.trial(0), variant.dataset
    assert variant.recipe.steps == 200
    with Store.open(root, create=False) as store:
        folder = store.trial_folder(trial.key)
    model = build_model(trial, variant.recipe, torch.device("cpu"))
    model.load_state_dict(checkpoint.load(folder, 200)["model"])
    asked = held_out(dataset, "test", 192, variant.recipe.objective, True, 200)
    text = (asked.targets != IGNORE) & (asked.targets < dataset.eod)  # sentinels and ends come too easily
    counts = np.bincount(dataset.split("train"), minlength=dataset.vocab) + 1.0
    unigram = -np.log(counts / counts.sum())[asked.targets[text]].mean()
    assert losses(model, asked, 16)[text].mean() < unigram - 0.1
