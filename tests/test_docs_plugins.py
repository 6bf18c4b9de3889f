"""The pages on plug-ins are under test: their files are plug-ins, their studies train, their primitives are right."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from archlab.arch_dsl.language import plugins
from archlab.cli.main import main
from tests.docs_kit import ROOT, blocks, plugins_of

PAGE = ROOT / "docs" / "guides" / "plugins.md"
PAPER = ROOT / "docs" / "guides" / "from-a-paper.md"
DATA = "train.data={type: stdlib, bytes: 400k, validation_bytes: 8k, test_bytes: 8k}"
SMALL = ("train.tokens=2k", "train.context=32", "train.batch=4", "seeds=1", "model.d_model=16", DATA)


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Path]:
    """The page's study beside the page's plug-in."""
    text = next(block.text for block in blocks(PAGE.read_text()) if block.language == "yaml")
    (tmp_path / "my_study.yaml").write_text(text)
    with plugins_of(PAGE, tmp_path):
        yield tmp_path / "my_study.yaml"


def test_the_study_of_the_page_trains_with_the_plugin_of_the_page(study: Path, tmp_path: Path) -> None:
    small = [word for setting in SMALL for word in ("--set", setting)]
    options = ["--store", str(tmp_path / "store"), "--allow-plugins", "--inline", "--no-track"]
    result = CliRunner().invoke(main, ["run", str(study), *options, *small])
    assert result.exit_code == 0, result.output
    assert "3 complete" in result.output


def test_the_primitive_of_the_page_is_right(study: Path) -> None:
    result = CliRunner().invoke(main, ["check-primitive", str(study.parent / "my_gate.py")])
    assert result.exit_code == 0, result.output
    assert "ok     every field changes the result" in result.output
    assert "stands in a model: block.attention.query, " in result.output
    assert "block.ffn.post" not in result.output, "it needs heads"


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[Path]:
    """The files of the page that goes from a paper to a table."""
    text = next(block.text for block in blocks(PAPER.read_text()) if block.language == "yaml")
    (tmp_path / "differ.yaml").write_text(text)
    with plugins_of(PAPER, tmp_path):
        yield tmp_path


def test_the_formula_of_the_paper_is_computed(paper: Path) -> None:
    runpy.run_path(str(paper / "test_differ.py"))["test_it_computes_its_formula"]()


@pytest.mark.slow
def test_the_primitive_of_the_paper_is_right_and_a_wrong_cost_is_found(paper: Path) -> None:
    runpy.run_path(str(paper / "test_differ.py"))["test_it_is_what_a_primitive_must_be"]()
    said = next(block.text for block in blocks(PAPER.read_text()) if block.text.startswith("  wrong  "))
    for plugin in plugins.loaded():
        plugins.unload(plugin)
    file = paper / "differ.py"
    file.write_text(file.read_text().replace("Cost(parameters=4 * spec.sizes().head_dim, ", "Cost("))
    result = CliRunner().invoke(main, ["check-primitive", str(file)])
    assert result.exit_code == 1 and said in result.output


def test_the_study_of_the_paper_trains(paper: Path, tmp_path: Path) -> None:
    small = [word for setting in SMALL[:4] + SMALL[5:] for word in ("--set", setting)]
    options = ["--store", str(tmp_path / "store"), "--allow-plugins", "--inline", "--no-track"]
    result = CliRunner().invoke(main, ["run", str(paper / "differ.yaml"), *options, *small])
    assert result.exit_code == 0, result.output
    assert "2 complete" in result.output
