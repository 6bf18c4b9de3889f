"""The Python side of the command line: the functions of the door, loaded when asked for, on the same store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import archlab
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read, read_text
from archlab.cli.main import main
from archlab.search.store.store import Store, StoreError
from tests.search.study_files import write_study


def test_the_door_has_every_name_that_it_lists_and_no_others() -> None:
    assert {"compare", "load_study", "plan", "report", "run", "Model", "SpecError"} <= set(archlab.__all__)
    for name in archlab.__all__:
        assert getattr(archlab, name) is not None
    assert archlab.zoo.load is not None and archlab.Model is archlab.arch_dsl.Model
    with pytest.raises(AttributeError, match="module 'archlab' has no attribute 'compere'"):
        archlab.compere  # noqa: B018


def test_importing_the_store_and_the_lock_is_light() -> None:
    code = """
import sys
import archlab
from archlab.search.running import status
from archlab.search.store import lock, store
from archlab.search.trial import trial
sys.exit(sorted({"torch", "ray", "optuna", "mlflow", "pandas", "numpy"} & set(sys.modules)) or 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=Path(__file__).parents[2])


def test_study_is_planned_run_compared_and_reported(tmp_path: Path) -> None:
    study = archlab.load_study(write_study(tmp_path), {"train.tokens": 256, "train.context": 16, "model.d_model": 16})
    store = tmp_path / "store"
    with pytest.raises(StoreError, match="no store at"):
        archlab.compare(study, store)
    frame = archlab.plan(study, store).frame()
    assert list(frame["variant"]) == ["baseline", "gated"]
    assert archlab.run(study, store, executor="inline", track=False).exit_code == 0
    comparison = archlab.compare("gates", store)
    assert list(comparison.table["variant"]) == ["baseline", "gated"]
    assert comparison.table["n"].tolist() == [2, 2]
    assert comparison.table["parameters"].tolist() == frame["parameters"].tolist()
    assert "gated" in archlab.report(comparison, "md")


def test_a_model_is_shown_as_the_command_shows_it(tmp_path: Path) -> None:
    file = write_study(tmp_path)
    gated = archlab.show(file, "gated", tmp_path / "store")
    told = (
        CliRunner().invoke(main, ["show", str(file), "--variant", "gated", "--store", str(tmp_path / "store")]).output
    )
    assert repr(gated) == told.rstrip() and "sdpa" in told
    assert repr(archlab.show(archlab.load_study(file), store=tmp_path / "store")) != repr(gated)
    mapping = {"d_model": 16, "n_layers": 1, "block": {"attention": {"heads": 2}, "ffn": "<b>"}}
    with pytest.raises(SpecError, match=r"block\.ffn"):
        archlab.show(mapping)
    mapping["block"] = {"attention": {"heads": 2}, "ffn": "swiglu"}
    assert repr(archlab.show(mapping)) == repr(archlab.show(archlab.load(mapping)))
    assert "<pre>model  d_model 16" in archlab.show(mapping)._repr_html_()
    assert "gpt2" in archlab.show("gpt2")._repr_html_()


def test_a_mapping_is_a_study_as_its_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_study(tmp_path, match="match: {parameters: baseline, by: block.ffn.width}")
    monkeypatch.chdir(tmp_path)
    written = read(file).plain()
    short = {"train.tokens": 256, "train.context": 16, "model.d_model": 16}
    study, same = archlab.load_study(written, short), archlab.load_study(file, short)
    made = archlab.plan(study, "store")
    assert [v.trial(0).key for v in made.variants] == [v.trial(0).key for v in archlab.plan(same, "store").variants]
    assert repr(made) == "Plan(gates: 2 variants, 4 trials)" and "<td>gated</td>" in made._repr_html_()
    assert made.frame()["block.ffn.width"].notna().all(), "the baseline has a width too, which nobody solved"
    monkeypatch.setenv("ARCHLAB_STORE", str(tmp_path / "store"))
    archlab.run(study, executor="inline", track=False)
    assert "complete  gated lr=0.001 seed 1: validation loss" in capsys.readouterr().err
    archlab.run(study, executor="inline", track=False, quiet=True)
    assert capsys.readouterr().err == ""
    found = archlab.compare(study)
    assert repr(found) == "Comparison(gates: 2 variants, 4 trials)" and "difference, nats/token" in found._repr_html_()
    assert "nan" not in found._repr_html_()
    with Store.open(tmp_path / "store") as opened:
        assert archlab.load_study(read_text(opened.study_yaml("gates")).plain(), short) == study
    assert archlab.report(study) == archlab.report("gates") == archlab.report(found)
    drawn = archlab.figures(study)
    assert "differences" in drawn and "<svg" in drawn["differences"]._repr_html_()
    assert drawn._repr_html_().count("<figcaption>") == len(drawn)
    with pytest.raises(StoreError, match="has no study 'nope' \\(known: gates\\)"):
        archlab.figures("nope")
    with pytest.raises(SpecError, match="did you mean 'variants'"):
        archlab.load_study({**written, "variant": {}})


def test_planning_prepares_data_and_trains_nothing(tmp_path: Path) -> None:
    archlab.plan(write_study(tmp_path), tmp_path / "store")
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["data"]


def test_store_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHLAB_STORE", str(tmp_path / "elsewhere"))
    archlab.plan(write_study(tmp_path))
    assert (tmp_path / "elsewhere" / "data").is_dir()


def test_mistakes_of_a_study_are_spec_errors(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"report\.baseline: 'none' is not a variant"):
        archlab.run(write_study(tmp_path, report="report: {baseline: none}"), tmp_path / "store", executor="inline")
    assert not (tmp_path / "store").exists()


def test_a_run_sends_the_table_to_the_trackers_that_show_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("ARCHLAB_MLFLOW", "off")
    monkeypatch.setenv("ARCHLAB_TENSORBOARD", str(tmp_path / "events"))
    study = archlab.load_study(write_study(tmp_path), {"train.tokens": 256, "train.context": 16, "model.d_model": 16})
    assert archlab.run(study, tmp_path / "store", quiet=True, executor="inline").exit_code == 0
    read = EventAccumulator(str(tmp_path / "events" / "gates")).Reload()
    (table,) = read.Tensors("table/text_summary")
    assert "| gated |" in table.tensor_proto.string_val[0].decode()
    assert len([*(tmp_path / "events" / "gates").glob("*/*/events*")]) == 4
