"""Weights that an optimizer step is followed by a constraint on: trained, continued to the bit, started from a file."""

import pytest
import torch

from archlab.arch_dsl import SpecError, canonical, compile, load, resolve
from archlab.arch_dsl.compiler.modules import stored
from archlab.arch_dsl.compiler.width_transfer import transferred
from archlab.arch_dsl.weights.files import write_weights
from archlab.search.recipe.fits import refusals
from archlab.search.recipe.initial_weights import keep_weights, load_start
from archlab.search.recipe.parameter_groups import decay_groups
from archlab.search.recipe.recipe import load_recipe
from archlab.search.recipe.stages import Part
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.trial import Trial
from tests.search.training.test_routers import RECIPE, data_root  # noqa: F401

DECAYS = {"parameters": ["block.*"], "weight_decay": 0.3}
BLOCK = {
    "attention": {"heads": 2, "query": ["rope"], "key": ["rope"], "join": "nlerp"},
    "glu": {"width": 16, "join": "nlerp", "share": "stack"},
}


def model(**more):
    """A resolved model with tied tables and a feed-forward that layers share."""
    sizes = {"d_model": 16, "n_layers": 2, "vocab": 257, "max_positions": 16, "constraint": "unit_norm"}
    return resolve(load({**sizes, "block": BLOCK, "init": {"std": 0.02}, **more}))


def make(folder):
    """A folder for a trial."""
    folder.mkdir(parents=True)
    recipe = load_recipe(RECIPE | {"accumulate": 2, "optimizer": {"type": "adamw", "weight_decay": 0.5}})
    (folder / "trial.json").write_text(Trial(canonical(model()), canonical(recipe), "data", 0).to_json())
    return folder


def state(folder):
    """The weights of a trial after its last checkpoint."""
    return checkpoint.load(folder, checkpoint.steps_in(folder)[0])["model"]


def assert_on_the_sphere(weights):
    """That every matrix has vectors of length one along the stream."""
    matrices = {name: value for name, value in weights.items() if value.ndim == 2}
    assert len(matrices) == 1 + 2 * 4 + 2 * 3  # what layers share is there under both names
    for name, value in matrices.items():
        along = 0 if "output_projection" in name else 1
        torch.testing.assert_close(value.norm(dim=along), torch.ones(value.shape[1 - along]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data_root):  # noqa: F811
    """A trial that nothing interrupted."""
    folder = make(tmp_path_factory.mktemp("whole") / "a")
    assert train(folder, data_root, 1, lambda: False)["state"] == "complete"
    return folder


def test_what_is_trained_ends_on_the_sphere(whole):
    weights = state(whole)
    assert_on_the_sphere(weights)
    start = compile(model()).state_dict()
    assert (weights["embedding"] - start["embedding"]).abs().max() > 0.01


def test_a_trial_is_continued_to_the_same_bits(tmp_path, data_root, whole):  # noqa: F811
    folder, asked = make(tmp_path / "a"), iter([False] * 16 + [True] * 99)
    with pytest.raises(Interrupted):
        train(folder, data_root, 1, lambda: next(asked))
    assert_on_the_sphere(state(folder))
    assert train(folder, data_root, 2, lambda: False)["resumed_from"] == [17]
    one, parts = state(whole), state(folder)
    assert one.keys() == parts.keys() and all(torch.equal(one[name], parts[name]) for name in one)


def test_weights_from_a_file_are_put_on_the_sphere(tmp_path):
    free = model(constraint=None)
    write_weights(
        tmp_path / "model.safetensors", free, {k: v.detach() for k, v in stored(compile(free, seed=3)).items()}
    )
    recipe = load_recipe(RECIPE | {"init": {"from": str(tmp_path)}})
    start = keep_weights(recipe.init, None, tmp_path / "data")
    module = compile(model())
    load_start(module, start, tmp_path / "data")
    assert_on_the_sphere(module.state_dict())
    direction = torch.nn.functional.normalize(compile(free, seed=3).embedding, dim=1)
    torch.testing.assert_close(module.embedding, direction)


def test_a_stage_begins_on_the_sphere():
    module, free = compile(model()), compile(model(constraint=None), seed=3)
    part = Part(load_recipe(RECIPE), canonical(model()), "data", ())
    part.take_over(module, {name: value.detach() for name, value in stored(free).items()})
    assert_on_the_sphere(module.state_dict())


def test_no_group_of_the_recipe_has_weights_on_the_sphere_decay():
    groups = load_recipe(RECIPE | {"optimizer": {"type": "adamw", "groups": [DECAYS]}}).optimizer.groups
    named = list(compile(model()).named_parameters())
    decaying = {
        id(value) for group in decay_groups(named, 0.5, groups) if group["weight_decay"] for value in group["params"]
    }
    assert decaying and not any(id(value) in decaying for _, value in named if hasattr(value, "constrained"))


def test_a_mean_of_weights_is_refused():
    recipe = load_recipe(RECIPE | {"optimizer": "schedule_free"})
    (problem,) = refusals(recipe, model())
    assert (problem.path, "not for the mean that is evaluated" in problem.message) == ("train.optimizer", True)
    assert not list(refusals(recipe, model(constraint=None)))


def test_transfer_of_width_is_refused():
    with pytest.raises(SpecError, match="constraint: unit_norm sets the size of weights itself"):
        transferred(model(d_model=32), model())
