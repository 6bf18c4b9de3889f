"""`archlab import` and `archlab export`: published weights in, trained weights out, a study between them."""

from __future__ import annotations

import json
import os

import pytest
import torch
from click.testing import CliRunner

from archlab import arch_dsl
from archlab.arch_dsl import zoo
from archlab.arch_dsl.weights.conversion import export_tensors
from archlab.arch_dsl.weights.files import read_checkpoint, read_weights, write_tensors
from archlab.arch_dsl.weights.layout import FOLDER, load_layout
from archlab.cli.main import main
from archlab.search.running.run import run
from tests.search.study_files import write_study

LLAMA = zoo.load("llama", "tiny")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in a folder of one's own, in which `theirs` is a checkpoint of Llama's tiny size."""
    monkeypatch.chdir(tmp_path)
    model = arch_dsl.resolve(LLAMA)
    values = dict(arch_dsl.compile(model, seed=5).state_dict())
    (tmp_path / "theirs").mkdir()
    write_tensors(
        tmp_path / "theirs" / "model.safetensors", export_tensors(load_layout("llama"), model, values), {"format": "pt"}
    )
    return tmp_path


def archlab(*arguments, code=0):
    """What a command prints."""
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_import_writes_weights_and_a_spec_that_a_study_can_read(here):
    told = json.loads(archlab("import", "theirs", "--zoo", "llama/tiny", "-o", "ours", "--json"))
    assert told["file"] == "ours/model.safetensors" and told["fresh"] == told["ignored"] == []
    model, values = read_weights(here / "ours")
    assert model == arch_dsl.resolve(LLAMA) == arch_dsl.resolve(arch_dsl.load(here / "ours" / "model.yaml"))
    assert told["parameters"] == sum(value.numel() for value in values.values()) == arch_dsl.cost(model).parameters


def test_what_was_imported_is_exported_as_it_was(here):
    archlab("import", "theirs", "--zoo", "llama/tiny", "-o", "ours.safetensors")
    assert "wrote back.safetensors" in archlab("export", "ours.safetensors", "--map", "llama", "-o", "back.safetensors")
    given, back = read_checkpoint(here / "theirs"), read_checkpoint(here / "back.safetensors")
    assert given.keys() == back.keys() and all(torch.equal(given[name], back[name]) for name in given)


def test_spec_of_a_file_and_a_map_of_a_file_do_as_well(here):
    (here / "model.yaml").write_text(arch_dsl.dump(LLAMA))
    (here / "own.yaml").write_text((FOLDER / "llama.yaml").read_text())
    archlab("import", "theirs", "--spec", "model.yaml", "--map", "own.yaml", "-o", "ours")
    assert read_weights(here / "ours")[0] == arch_dsl.resolve(LLAMA)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("import", "theirs", "-o", "x"), "say which model it is of"),
        (("import", "theirs", "--spec", "theirs/model.safetensors", "-o", "x"), "--spec needs a --map"),
        (("import", "theirs", "--zoo", "lama", "-o", "x"), "did you mean 'llama'"),
        (("import", "theirs", "--zoo", "gpt2/tiny", "-o", "x"), r"transformer.wte.weight: is not in the checkpoint"),
        (("import", "theirs", "--zoo", "llama/tiny", "-o", "theirs"), "weights are never overwritten"),
        (("export", "nothing", "-o", "x.safetensors"), "no store at"),
        (("export", "theirs", "-o", "x.safetensors"), "does not say which model it is of"),
        (("export", "theirs", "-o", "x.bin"), "does not end in .safetensors"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(here, arguments, message):
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    assert message in archlab(*arguments, code=2)
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("size", [0, 100])
def test_a_checkpoint_that_is_empty_or_cut_off_is_told(here, name, size):
    tensors = read_checkpoint(here / "theirs")
    (here / "theirs" / "model.safetensors").unlink()
    if name.endswith(".bin"):
        torch.save(tensors, here / "theirs" / name)
    else:
        write_tensors(here / "theirs" / name, tensors, {})
    os.truncate(here / "theirs" / name, size)
    for given in ("theirs", f"theirs/{name}"):
        told = archlab("import", given, "--zoo", "llama/tiny", "-o", "ours", code=2)
        assert f"theirs/{name}: is " in told and ("is empty" in told) == (size == 0)
    assert not (here / "ours").exists()


def test_a_start_that_is_empty_is_told_and_not_kept(here):
    (here / "empty.safetensors").touch()
    study = write_study(here)
    told = archlab("plan", str(study), "--set", "train.init={from: empty.safetensors}", code=2)
    assert "empty.safetensors: is empty" in told
    assert not list(here.rglob(".archlab/data/weights/*"))


def test_trained_weights_are_exported_by_study_by_key_and_by_file(here):
    run(write_study(here), here / "store", executor="inline", track=False)
    archlab("export", "gates/gated/1", "--store", "store", "-o", "a.safetensors")
    model, values = read_weights(here / "a.safetensors")
    module = arch_dsl.compile(model)
    module.load_state_dict(values)
    (folder,) = (
        path.parent
        for path in here.glob("store/trials/*/*/trial.json")
        if (trial := json.loads(path.read_text()))["seed"] == 1 and "gate" in json.dumps(trial["model"])
    )
    checkpoint = next(folder.glob("checkpoint-*.pt"))
    sources = {"b": folder.name[:12], "c": str(folder), "d": str(checkpoint)}
    for name, source in sources.items():
        archlab("export", source, "--store", "store", "-o", f"{name}.safetensors")
        assert (here / f"{name}.safetensors").read_bytes() == (here / "a.safetensors").read_bytes()
    for source, message in {
        "gates/none": "'none' is not a variant of gates with a result",
        "gates/gated/7": "gated has no result with seed 7",
        "abc": "not the start of one trial's key",
        "theirs/x.pt": "no study 'theirs'",
    }.items():
        assert message in archlab("export", source, "--store", "store", "-o", "e.safetensors", code=2)
