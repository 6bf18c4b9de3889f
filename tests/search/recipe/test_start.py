"""Studies that start from weights: what is taken, what is fresh, what is hashed, and the same bits after a stop."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl import SpecError
from archlab.arch_dsl.weights.files import write_weights
from archlab.search.comparison.notes import start_notes
from archlab.search.planning.plan import plan
from archlab.search.recipe.initial_weights import kept, start_lines
from archlab.search.recipe.recipe import load_recipe
from archlab.search.study.load import load_study
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from tests.search.study_files import SECTIONS, write_study

TRAIN = SECTIONS["train"]


@pytest.fixture
def folder(tmp_path):
    """A folder with weights of the study's base model, and that model's module."""
    write_study(tmp_path)
    base = plan(load_study(tmp_path / "study.yaml"), tmp_path / "data").variants[0].model
    module = arch_dsl.compile(base, seed=99)
    write_weights(tmp_path / "start.safetensors", base, dict(module.state_dict()))
    return tmp_path


def planned(folder, init="{from: start.safetensors}", **sections):
    """The variants of a study that starts from these weights, by name."""
    train_text = f"{TRAIN}\n  init: {init}" if init else TRAIN
    path = write_study(folder, **{"train": train_text, "tune": None, **sections})
    return {variant.name: variant for variant in plan(load_study(path), folder / "data").variants}


def trained(folder, variant, name="trial", stop=None):
    """Trains a variant; `stop` interrupts it once after so many steps."""
    place = folder / name
    place.mkdir()
    (place / "trial.json").write_text(variant.trial(0).to_json())
    calls = iter(range(1, 10_000))
    if stop:
        with pytest.raises(Interrupted):
            train(place, folder / "data", 1, lambda: next(calls) >= stop)
    train(place, folder / "data", 2, lambda: False)
    return checkpoint.load_newest(place).state["model"]


def test_key_without_weights_is_what_it_was_before_there_were_any(folder):
    recipe = planned(folder, init=None)["baseline"].trial(0).recipe
    assert "init" not in recipe


def test_content_of_the_weights_is_hashed_and_their_place_is_not(folder):
    first = planned(folder)["baseline"].trial(0)
    assert set(first.recipe["init"]) == {"sha256"}
    shutil.copy(folder / "start.safetensors", folder / "copy.safetensors")
    assert planned(folder, "{from: copy.safetensors}")["baseline"].trial(0).key == first.key
    digest = first.recipe["init"]["sha256"]
    assert planned(folder, f"{{sha256: {digest}}}")["baseline"].trial(0).key == first.key
    model = load_study(folder / "study.yaml").model
    model = arch_dsl.resolve(model, vocab=257, max_positions=32)
    write_weights(folder / "copy.safetensors", model, dict(arch_dsl.compile(model, seed=1).state_dict()))
    assert planned(folder, "{from: copy.safetensors}")["baseline"].trial(0).key != first.key
    assert planned(folder, None)["baseline"].trial(0).key != first.key


def test_changes_of_a_start_have_the_key_that_a_study_writes(folder):
    shutil.copy(folder / "start.safetensors", folder / "copy.safetensors")
    none, copy = "{train.init: null}", "[gate, {train.init: {from: copy.safetensors}}]"
    made = planned(folder, variants=f"variants:\n  baseline: {{}}\n  none: {none}\n  gated: {copy}")
    assert str(made["none"].changes[-1]) == "train.init: {from: start.safetensors} → null"
    assert str(made["gated"].changes[-1]) == "train.init.from: start.safetensors → copy.safetensors"


def test_what_is_shared_is_taken_and_what_is_new_is_fresh(folder):
    variants = planned(folder)
    gate = "block.0.attention.sdpa.gate.projection.weight"
    assert (variants["baseline"].start.fresh, variants["baseline"].start.unused) == ((), ())
    assert (variants["gated"].start.fresh, variants["gated"].start.unused) == ((gate,), ())
    assert list(start_lines("baseline", variants["baseline"].start)) == [
        "baseline: every parameter starts from the file"
    ]
    assert list(start_lines("gated", variants["gated"].start)) == [
        "gated: freshly initialised: block.*.attention.sdpa.gate.projection.weight"
    ]


def test_a_shape_that_the_variant_changed_is_fresh(folder):
    wide = "variants:\n  baseline: {}\n  wide: {block.ffn.width: 40}"
    start = planned(folder, variants=wide, components=None)["wide"].start
    names = {f"block.0.ffn.{name}_projection.weight" for name in ("gate", "input", "output")}
    assert set(start.fresh) == set(start.unused) == names


def test_training_begins_at_the_weights(folder):
    """One step with a rate of almost nothing moves nothing."""
    given = arch_dsl.weights.files.read_weights(folder / "start.safetensors")[1]
    section = TRAIN.replace("tokens: 1k", "tokens: 128").replace("lr: 1e-3", "lr: 1e-12")
    variants = planned(folder, None, train=f"{section}\n  init: {{from: start.safetensors}}")
    found = trained(folder, variants["gated"])
    for name, value in given.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-6)
    assert found.keys() - given.keys() == {"block.0.attention.sdpa.gate.projection.weight"}


@pytest.mark.parametrize("stop", [1, 3])
def test_a_stopped_trial_ends_with_the_same_bits(folder, stop):
    variant = planned(folder)["gated"]
    whole, continued = trained(folder, variant), trained(folder, variant, "stopped", stop)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_a_trial_says_all_that_a_worker_needs(folder):
    """The study's file and its weights may be gone: the store keeps a copy."""
    variant = planned(folder)["baseline"]
    (folder / "start.safetensors").unlink()
    recipe = load_recipe(json.loads(variant.trial(0).to_json())["recipe"])
    assert kept(folder / "data", recipe.init.sha256).is_file()
    trained(folder, variant)


def test_altered_copy_in_the_store_is_refused(folder):
    variant = planned(folder)["baseline"]
    place = kept(folder / "data", variant.recipe.init.sha256)
    place.write_bytes(place.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match="was altered"):
        trained(folder, variant)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("{from: nothing.safetensors}", r"train\.init\.from: there is no nothing\.safetensors"),
        ("{from: corpus.txt}", r"corpus\.txt is no \.safetensors file"),
        ("{}", "needs `from`"),
        ("{from: start.safetensors, sha256: abc}", "must be 64 hexadecimal digits"),
        ("{from: start.safetensors, sha256: " + "a" * 64 + "}", r"start\.safetensors has sha256 [0-9a-f]{64}, not a+"),
        ("{sha256: " + "a" * 64 + "}", "no weights of this digest are in the store"),
        ("{form: start.safetensors}", r"'form' is not a key of init; did you mean 'from'\? \(from, sha256\)"),
        ("start.safetensors", "train.init: must be a mapping, found a string"),
    ],
)
def test_wrong_starts_are_told(folder, init, message):
    with pytest.raises(SpecError, match=message):
        planned(folder, init)


def test_base_of_other_sizes_is_refused_with_both_shapes(folder):
    model = SECTIONS["model"].replace("d_model: 64", "d_model: 32")
    with pytest.raises(SpecError, match=r"embedding has shape \[257, 64\] in the file, \[257, 32\] here, and \d+ more"):
        planned(folder, model=model)


def test_report_notes_who_starts_from_weights_and_what_is_fresh():
    variants = [
        {"name": "baseline", "start": {"sha256": "a" * 64, "fresh": [], "unused": []}},
        {"name": "gated", "start": {"sha256": "a" * 64, "fresh": ["gate", "gate_2"], "unused": []}},
        {"name": "scratch"},
    ]
    assert list(start_notes({"variants": variants})) == [
        "2 of 3 variants start from weights aaaaaaaaaaaa; freshly initialised tensors: 2 of gated"
    ]
    assert list(start_notes({"variants": variants[2:]})) == []
