"""A study in several files: it is the study that one file would be, wherever a study's file is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

import archlab as package
from archlab.arch_dsl.language import plugins
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.source import read_text
from archlab.cli.completion import variants as complete_variants
from archlab.cli.main import main
from archlab.dashboards.library import Library
from archlab.dashboards.pages.actions import file_of
from archlab.dashboards.pages.write import _opened, _starts
from archlab.search.executors.resources import resources_in
from archlab.search.planning.plan import plan
from archlab.search.running.draft import draft
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from archlab.search.study.schema import study_schema
from tests.arch_dsl.language.test_plugins import GAIN
from tests.cli.test_cli import archlab
from tests.docs_kit import ROOT, blocks, examine
from tests.search.study_files import TINY_MODEL, study_text, write_study

STUDY = "study: gates\ninclude: common.yaml\nvariants:\n  gated: [gate]\ntrain: {tokens: 2k}\n"
TRAIN = "train: {data: {text: corpus.txt}, tokens: 1k, context: 16, batch: 4, lr: 1e-2}"
COMMON = {"study": "study: common", "variants": "variants:\n  baseline: {}", "model": TINY_MODEL, "train": TRAIN}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study that takes most of what it says from another file, which is a study too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARCHLAB_STORE", raising=False)
    write_study(
        tmp_path, "common.yaml", **{**COMMON, "resources": "resources: {cpus: 2}", "evaluate": "evaluate: perplexity"}
    )
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path / "study.yaml"


def test_its_trials_are_those_of_the_study_in_one_file(study: Path, tmp_path: Path) -> None:
    whole = {**COMMON, "study": "study: gates", "train": TRAIN.replace("1k", "2k")}
    del whole["variants"]
    one = write_study(tmp_path, "one.yaml", **whole)
    planned, same = (plan(load_study(file), tmp_path / "data") for file in (study, one))
    keys = [
        [(each.name, each.trial(seed).key) for each in made.variants for seed in (0, 1)] for made in (planned, same)
    ]
    assert keys[0] == keys[1] and len(keys[0]) == 4
    assert planned.record()["include"] == ["common.yaml"] and "include" not in same.record()
    assert load_study(study).study == "gates", "never the name of what it includes"


def test_a_name_is_never_included(study: Path) -> None:
    study.write_text("include: common.yaml\n")
    with pytest.raises(SpecError, match=r"study.yaml:1:1: study: is missing: study needs it"):
        load_study(study)


def test_what_is_wrong_is_told_in_the_file_where_it_stands(study: Path, tmp_path: Path) -> None:
    write_study(tmp_path, "common.yaml", **{**COMMON, "train": TRAIN.replace("lr: 1e-2", "lr: fast")})
    study.write_text(STUDY.replace("[gate]", "[gates]"))
    with pytest.raises(SpecError) as caught:
        load_study(study)
    places = {problem.path: Path(problem.mark.file).name for problem in caught.value.problems if problem.mark}
    assert places == {"train.lr": "common.yaml", "variants.gated": "study.yaml"}


def test_a_scale_may_stand_in_an_included_file(study: Path, tmp_path: Path) -> None:
    scales = "scales:\n  small: {}\n  large: {train: {tokens: 4k}}"
    write_study(tmp_path, "common.yaml", **{**COMMON, "scales": scales})
    assert load_study(study, {"scale": "large"}).train.tokens == 4000
    assert load_study(study).study == "gates-small"
    write_study(tmp_path, "common.yaml", **{**COMMON, "scales": "scales: {small: {include: other.yaml}}"})
    with pytest.raises(SpecError, match=r"scales.small.include: is the same at every scale"):
        load_study(study)


def test_what_is_included_is_no_matter_of_one_command(study: Path) -> None:
    with pytest.raises(SpecError, match=r"^include: can't be set for one command"):
        load_study(study, {"include": "other.yaml"})


def test_a_mapping_includes_files_of_the_current_folder(study: Path) -> None:
    made = load_study(read_text(STUDY).plain())
    assert made.text == load_study(study).text
    assert made.train == load_study(study).train


def test_it_goes_the_whole_way_as_one_study(study: Path, tmp_path: Path) -> None:
    assert archlab("run", "study.yaml", "--inline", "--no-track", "--set", "train.tokens=256").exit_code == 0
    with Store.open(tmp_path / ".archlab", create=False) as store:
        text = store.study_yaml("gates")
    assert load_study(read_text(text).plain()).train.tokens == 2000, "the text is the file's, without what --set said"
    assert read_text(text).plain()["variants"] == {"baseline": {}, "gated": ["gate"]} and "include: " not in text
    result = archlab("report", "study.yaml")
    assert result.exit_code == 0 and "has changed since" not in result.output
    assert "includes common.yaml" in archlab("plan", "study.yaml").output
    assert resources_in("study.yaml").cpus == 2
    assert json.loads(archlab("eval", "study.yaml", "--json").output.splitlines()[0])
    context = main.make_context("archlab", ["report", "study.yaml"], resilient_parsing=True)
    context.params["study"] = "study.yaml"
    assert [item.value for item in complete_variants(context, main.params[0], "")] == ["baseline", "gated"]
    assert package.report(load_study(study)) == package.report("gates")

    library = Library(tmp_path / ".archlab")
    assert file_of(library.study("gates"), library) == (tmp_path, "study.yaml")
    assert _opened(library, "gates", "")[:2] == ("study.yaml", STUDY), "the file itself is what one goes on writing"
    (tmp_path / "common.yaml").write_text((tmp_path / "common.yaml").read_text().replace("batch: 4", "batch: 8"))
    assert "has changed since it was run" in archlab("report", "study.yaml").output
    assert "study.yaml has changed since it was run" in file_of(library.study("gates"), library)[1]
    assert _opened(library, "gates", "")[1] == text
    (tmp_path / "common.yaml").unlink()
    assert "study.yaml has changed since it was run" in file_of(library.study("gates"), library)[1]


def test_a_study_that_was_run_in_a_folder_below_its_store_is_found_from_above(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, below = [*tmp_path.iterdir()], tmp_path / "mine"
    below.mkdir()
    for each in files:
        each.rename(below / each.name)
    monkeypatch.chdir(below)
    few = ("--inline", "--no-track", "--set", "train.tokens=256", "--store", "../.archlab")
    assert archlab("run", "study.yaml", *few).exit_code == 0
    monkeypatch.chdir(tmp_path)
    library = Library(tmp_path / ".archlab")
    assert file_of(library.study("gates"), library) == (tmp_path, "mine/study.yaml")
    assert _opened(library, "gates", "")[:2] == ("mine/study.yaml", STUDY)
    assert _opened(library, "", "mine/study.yaml")[:2] == ("mine/study.yaml", STUDY)
    assert "mine/study.yaml" in str(_starts(library))


def test_contrasts_that_were_added_are_all_that_changed(study: Path) -> None:
    assert archlab("run", "study.yaml", "--inline", "--no-track", "--set", "train.tokens=256").exit_code == 0
    study.write_text(STUDY + "report: {contrasts: [[gated, baseline]]}\n")
    result = archlab("report", "study.yaml")
    assert result.exit_code == 0 and "has changed since" not in result.output


def test_a_plugin_of_an_included_file_needs_leave_and_lies_beside_that_file(study: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    marker = tmp_path / "executed"
    (parts / "my_gate.py").write_text(GAIN + f"\nopen({str(marker)!r}, 'w').close()\n")
    listed = study_text(**COMMON) + "plugins: [my_gate.py]\n"
    (parts / "gates.yaml").write_text(listed.replace("corpus.txt", "../corpus.txt"))
    study.write_text(
        STUDY.replace("common.yaml", "parts/gates.yaml").replace(
            "[gate]", "{block.attention.gate: {position: sdpa, type: tanh_gain}}"
        )
    )
    with pytest.raises(SpecError, match=r"gates.yaml:\d+:11: plugins.0: parts/my_gate.py is Python .* --allow-plugins"):
        load_study(study)
    assert not marker.exists()
    try:
        assert load_study(study, allow_plugins=True).plugins == ("parts/my_gate.py",)
        assert marker.exists()
    finally:
        for plugin in plugins.loaded():
            plugins.unload(plugin)


def test_a_draft_tells_of_an_included_file_which_one(study: Path, tmp_path: Path) -> None:
    write_study(tmp_path, "common.yaml", **{**COMMON, "train": TRAIN.replace("lr: 1e-2", "lr: fast")})
    (problem,) = draft(STUDY, "study.yaml", tmp_path / ".archlab")["problems"]
    line = (tmp_path / "common.yaml").read_text()[: (tmp_path / "common.yaml").read_text().index("train:")].count(
        "\n"
    ) + 1
    assert problem["line"] == 0 and problem["message"].startswith(f"common.yaml:{line}:")
    (problem,) = draft(STUDY.replace("common", "comon"), "study.yaml", tmp_path / ".archlab")["problems"]
    assert problem["line"] == 2 and "did you mean 'common.yaml'?" in problem["message"]


def test_an_editor_asks_for_nothing_that_may_be_included() -> None:
    valid = Draft7Validator(study_schema())
    assert valid.is_valid({"study": "a", "include": "common.yaml"})
    assert valid.is_valid({"study": "a", "include": ["common.yaml", "../b.yml"], "variants": {"b": {"train.lr": 1}}})
    assert not valid.is_valid({"study": "a"})
    assert not valid.is_valid({"include": "common.yaml"})
    assert not valid.is_valid({"study": "a", "include": "common.txt"})
    assert not valid.is_valid({"study": "a", "include": []})


PAGE = ROOT / "docs" / "reference" / "study" / "include.md"


def test_the_example_of_the_page_is_a_study_and_its_answers_are_true(tmp_path: Path) -> None:
    parts = [block.text for block in blocks(PAGE.read_text()) if block.language == ""]
    for text in parts:
        if named := re.match(r"# (\w+\.yaml)\n", text):
            (tmp_path / named[1]).write_text(text)
    study, common = tmp_path / "gates.yaml", tmp_path / "common.yaml"
    loaded = load_study(study)
    assert examine(loaded) == 2 and loaded.seeds == 3
    assert loaded.train.tokens == 200_000 and loaded.train.batch == 8
    said, whole = PAGE.read_text(), common.read_text()
    common.write_text(whole.replace("lr: 3e-3", "lr: fast"))
    assert refusal(study).replace(f"{tmp_path}/", "") in said
    common.write_text("include: gates.yaml\n" + whole)
    assert "goes in a circle" in refusal(study) and refusal(study).partition(": ")[2] in said
    common.write_text(whole)
    for wrong in ("comon.yaml", "corpus.txt"):
        study.write_text(study.read_text().replace(load_name(study), wrong))
        assert refusal(study).partition(": ")[2] in said, wrong
    assert "include: can't be set for one command" in said


def load_name(study: Path) -> str:
    """What a study's file includes, as written."""
    return str(read_text(study.read_text()).plain()["include"])


def refusal(study: Path) -> str:
    """The first line of what is said of a wrong study."""
    with pytest.raises(SpecError) as caught:
        load_study(study)
    return str(caught.value).splitlines()[0]
