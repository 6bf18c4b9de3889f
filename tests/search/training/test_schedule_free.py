"""A trial under schedule-free AdamW: trained at one point, evaluated and saved at the mean of the weights."""

import json

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import canonical
from archlab.search.data.dataset import Dataset
from archlab.search.recipe.recipe import load_recipe
from archlab.search.training.held_out import evaluate
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from tests.search.training.test_train import RECIPE as BASE
from tests.search.training.test_train import Tiny, data_root, lines, make, never, run, stop_after, weights  # noqa: F401

RECIPE = {
    "optimizer": {"type": "schedule_free", "betas": [0.8, 0.95]},
    "schedule": {"type": "constant", "warmup": 0.2},
    "clip": None,
}
STEPS = 12


@pytest.fixture(scope="module")
def whole(data_root, tmp_path_factory):  # noqa: F811
    """The folder of a trial that nothing interrupted, and its result."""
    folder = make(tmp_path_factory.mktemp("trials") / "whole", **RECIPE)
    return folder, run(folder, data_root)


@pytest.mark.parametrize("step", [1, 5, 11])
def test_a_continued_trial_ends_with_the_same_bits(data_root, tmp_path, whole, step):  # noqa: F811
    folder = make(tmp_path / "trial", **RECIPE)
    with pytest.raises(Interrupted):
        run(folder, data_root, should_stop=stop_after(step))
    result = run(folder, data_root, attempt=2)
    assert weights(folder) == weights(whole[0])
    assert lines(folder) == lines(whole[0])
    assert (result["test"], result["validation"]) == (whole[1]["test"], whole[1]["validation"])


def held_out_loss(state, data_root):  # noqa: F811
    """The test loss of some weights."""
    model = Tiny(0)
    model.load_state_dict(state)
    return evaluate(model, Dataset.open(data_root, "data"), "test", 16, 4)[0]["loss"]


def test_what_is_saved_is_what_was_tested(data_root, whole):  # noqa: F811
    state = checkpoint.load(whole[0], STEPS)
    assert "trained" not in state and "optimizer" not in state
    assert held_out_loss(state["model"], data_root) == whole[1]["test"]["loss"]


def test_a_checkpoint_on_the_way_holds_both_points(data_root, tmp_path):  # noqa: F811
    folder = make(tmp_path / "trial", **RECIPE)
    with pytest.raises(Interrupted):
        run(folder, data_root, should_stop=stop_after(6))
    state = checkpoint.load(folder, 6)
    order = [name for name, _ in Tiny(0).named_parameters()]
    groups = state["optimizer"]["param_groups"]
    kept = {number: state["optimizer"]["state"][number]["z"] for group in groups for number in group["params"]}
    for name in order:
        trained, mean = state["trained"][name], state["model"][name]
        (z,) = (value for value in kept.values() if value.shape == trained.shape)
        torch.testing.assert_close(0.2 * z + 0.8 * mean, trained, rtol=1e-5, atol=1e-7)
        assert not torch.equal(mean, trained)
    assert torch.equal(state["model"]["calls"], state["trained"]["calls"])


def test_validation_and_weights_that_are_put_aside_are_at_the_mean(data_root, tmp_path):  # noqa: F811
    """After the first step the mean is z, whatever b1 is; under b1 near 1 what is trained has hardly moved from x."""
    folder = make(tmp_path / "trial", **RECIPE)
    (folder / "keep.json").write_text(json.dumps({"log2": True, "final": True}))
    run(folder, data_root)
    kept = checkpoint.load(folder / "weights", 8)["model"]
    again = make(tmp_path / "again", **RECIPE)
    with pytest.raises(Interrupted):
        run(again, data_root, should_stop=stop_after(8))
    state = checkpoint.load(again, 8)
    assert all(torch.equal(kept[name], state["model"][name]) for name in kept)
    assert held_out_loss(kept, data_root) != held_out_loss(state["trained"], data_root)


def test_its_warm_up_is_all_that_its_rate_does():
    recipe = load_recipe({"tokens": 10**6, "lr": 1e-2} | RECIPE)
    rates = [recipe.lr_at(step) for step in range(recipe.steps)]
    assert rates == sorted(rates) and rates[-1] == 1e-2


def test_a_stage_that_follows_begins_at_the_mean(data_root, tmp_path):  # noqa: F811
    after = {"tokens": 64, "lr": 1e-12, "optimizer": {"type": "adamw", "weight_decay": 0.0}, "schedule": "constant"}
    model = canonical(arch_dsl.resolve(arch_dsl.load(MODEL)))
    found = []
    for name, stages in (("alone", []), ("followed", [after])):
        folder = tmp_path / name
        folder.mkdir()
        trial = Trial(model, canonical(load_recipe(BASE | RECIPE | {"stages": stages})), "data", 0)
        (folder / "trial.json").write_text(trial.to_json())
        train(folder, data_root, 1, never)
        found.append(checkpoint.load(folder, STEPS + len(stages))["model"])
    torch.testing.assert_close(found[1], found[0])


MODEL = {
    "d_model": 8,
    "n_layers": 1,
    "vocab": 257,
    "max_positions": 16,
    "block": {"norm": "rmsnorm", "attention": {"heads": 2}, "ffn": {"type": "mlp"}},
}
