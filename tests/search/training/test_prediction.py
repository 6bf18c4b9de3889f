"""A trial that predicts further tokens: what is logged, what is measured, what is exported."""

import json

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import canonical
from archlab.arch_dsl.model.model import kept
from archlab.arch_dsl.weights.files import read_weights
from archlab.search.data.dataset import Dataset
from archlab.search.models.weights import export_weights
from archlab.search.recipe.fits import refusals
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.held_out import evaluate
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from tests.search.training.test_train import RECIPE, data_root, lines, never, stop_after, weights  # noqa: F401

MODEL = {
    "d_model": 8,
    "n_layers": 2,
    "vocab": 257,
    "max_positions": 16,
    "block": {"norm": "rmsnorm", "attention": {"heads": 2, "positional": "rope"}, "ffn": {"type": "mlp"}},
    "predict": {"type": "sequential", "tokens": 3},
}


def spec(**changes):
    return arch_dsl.resolve(arch_dsl.load(MODEL | changes))


def make(folder, **recipe):
    folder.mkdir()
    trial = Trial(canonical(spec()), canonical(load_recipe(RECIPE | recipe)), "data", 0)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


@pytest.fixture(scope="module")
def whole(data_root, tmp_path_factory):  # noqa: F811
    folder = make(tmp_path_factory.mktemp("trials") / "whole")
    return folder, train(folder, data_root, 1, never)


def test_heads_are_trained_and_logged_beside_the_loss(whole):
    folder, result = whole
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "loss" in line]
    assert all({"predict.2", "predict.3"} <= line.keys() for line in steps)
    assert steps[-1]["predict.2"] < steps[0]["predict.2"]
    assert result["parameters"] == arch_dsl.cost(spec(), 16).parameters


def test_losses_are_those_of_the_model_that_is_kept(whole, data_root, tmp_path):  # noqa: F811
    folder, result = whole
    done = export_weights(str(folder), tmp_path, None, tmp_path / "out.safetensors")
    model, tensors = read_weights(tmp_path / "out.safetensors")
    assert model == kept(spec()) == spec(predict=None)
    assert done.parameters == arch_dsl.cost(model, 16).parameters < result["parameters"]
    module = arch_dsl.compile(model)
    module.load_state_dict(tensors)
    found = evaluate(module, Dataset.open(data_root, "data"), "test", 16, 4)[0]
    assert found["loss"] == result["test"]["loss"]


def test_a_continued_trial_ends_with_the_same_bits(whole, data_root, tmp_path):  # noqa: F811
    folder = make(tmp_path / "trial")
    with pytest.raises(Interrupted):
        train(folder, data_root, 1, stop_after(5))
    train(folder, data_root, 2, never)
    assert weights(folder) == weights(whole[0]) and lines(folder) == lines(whole[0])


def test_micro_batches_train_heads_as_the_batch_does(whole, data_root, tmp_path):  # noqa: F811
    folder = make(tmp_path / "parts", accumulate=2)
    train(folder, data_root, 1, never)
    found, expected = (checkpoint.load(each, 12)["model"] for each in (folder, whole[0]))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_matrices_of_heads_are_hidden_matrices(optimizer, data_root, tmp_path):  # noqa: F811
    folder = make(tmp_path / "trial", optimizer=optimizer)
    assert train(folder, data_root, 1, never)["state"] == "complete"


@pytest.mark.parametrize(("objective", "refused"), [("causal", []), ("prefix", ["predict"])])
def test_only_causal_text_has_further_tokens(objective, refused):
    found = list(refusals(load_recipe(RECIPE | {"objective": objective}), spec()))
    assert [problem.path for problem in found] == refused
    assert all(
        problem.message.startswith(f"predicts further tokens under causal, not under {objective}") for problem in found
    )
