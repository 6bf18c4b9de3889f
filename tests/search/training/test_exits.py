"""A trial whose tokens exit from a loop: what is logged, what is measured, what is exported and what is refused."""

import json

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import Call, canonical
from archlab.arch_dsl.model.model import kept
from archlab.arch_dsl.weights.files import read_weights
from archlab.search.data.dataset import Dataset
from archlab.search.executors.process_group import Parallel
from archlab.search.models.weights import export_weights
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.held_out import evaluate
from archlab.search.training.parallel.rules import problems
from archlab.search.training.train import Interrupted, train
from archlab.search.trial.trial import Trial
from tests.search.training.test_train import RECIPE, data_root, lines, never, stop_after, weights  # noqa: F401

MODEL = {
    "d_model": 8,
    "n_layers": 1,
    "vocab": 257,
    "max_positions": 16,
    "block": {"norm": "rmsnorm", "attention": {"heads": 2, "positional": "rope"}, "ffn": {"type": "mlp"}},
}


def spec(exit=0.1):
    loop = {"turns": 3, "final": "each", "exit": exit}
    return arch_dsl.resolve(arch_dsl.load({**MODEL, "loop": loop}))


def make(folder, model, **recipe):
    folder.mkdir()
    trial = Trial(canonical(model), canonical(load_recipe(RECIPE | recipe)), "data", 0)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


@pytest.fixture(scope="module")
def whole(data_root, tmp_path_factory):  # noqa: F811
    folder = make(tmp_path_factory.mktemp("trials") / "whole", spec())
    return folder, train(folder, data_root, 1, never)


def test_the_loss_of_each_turn_and_the_mean_turn_are_logged(whole):
    folder, result = whole
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in [line for line in logged if "loss" in line]:
        turns = [step[f"loop.exit.loss.{turn}"] for turn in (1, 2, 3)]
        assert min(turns) <= step["loss"] <= max(turns) and 1 < step["loop.exit.turn"] < 3
        assert step["loop.exit.entropy"] < 0
    assert result["parameters"] == arch_dsl.cost(spec(), 16).parameters


@pytest.mark.parametrize("exit", [0.1, {"entropy": 0.1, "threshold": 0.6}])
def test_losses_are_those_of_the_model_that_is_exported(exit, data_root, tmp_path):  # noqa: F811
    folder = make(tmp_path / "trial", spec(exit))
    result = train(folder, data_root, 1, never)
    done = export_weights(str(folder), tmp_path, None, tmp_path / "out.safetensors")
    model, tensors = read_weights(tmp_path / "out.safetensors")
    assert model == kept(spec(exit))
    assert done.parameters == arch_dsl.cost(model, 16).parameters
    module = arch_dsl.compile(model)
    module.load_state_dict(tensors)
    found = evaluate(module, Dataset.open(data_root, "data"), "test", 16, 4)[0]
    assert found["loss"] == result["test"]["loss"]


def test_a_continued_trial_ends_with_the_same_bits(whole, data_root, tmp_path):  # noqa: F811
    folder = make(tmp_path / "trial", spec())
    with pytest.raises(Interrupted):
        train(folder, data_root, 1, stop_after(5))
    train(folder, data_root, 2, never)
    assert weights(folder) == weights(whole[0]) and lines(folder) == lines(whole[0])


def test_losses_of_rows_add_up_over_micro_batches():
    module = arch_dsl.compile(spec())
    tokens = torch.randint(257, (4, 17), generator=torch.Generator().manual_seed(0))

    def total(rows):
        call = Call()
        loss = module.loss(rows[:, :-1], rows[:, 1:], call, z_loss=0.1)
        return sum(call.losses.values(), loss)

    torch.testing.assert_close(total(tokens), sum(total(part) for part in tokens.split(2)) / 2)


@pytest.mark.parametrize("name", ["data", "shard", "tensor"])
def test_a_gate_is_not_divided(name):
    found = problems(Parallel(**{name: 2}), spec(), load_recipe(RECIPE))
    told = [item for item in found if item.message.startswith("loop.exit: what tokens exit by is not divided")]
    assert [item.path for item in told] == ([] if name == "data" else [f"resources.parallel.{name}"])
