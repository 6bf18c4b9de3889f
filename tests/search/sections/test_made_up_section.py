"""What a new section of a study takes: one file, and nothing else of archlab knows of it (tests/…/made_up)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from archlab.arch_dsl.language.errors import SpecError
from archlab.search import sections
from archlab.search.comparison.compare import compare
from archlab.search.planning.edits import _changed
from archlab.search.planning.page import print_plan
from archlab.search.planning.plan import plan
from archlab.search.reporting.report import report, to_plain
from archlab.search.results.told import Told
from archlab.search.sections import rooms
from archlab.search.study.load import load_study
from archlab.search.study.schema import study_schema
from archlab.search.variants.section import Section
from tests.search.plan_kit import simulate
from tests.search.study_files import write_study

VARIANTS = "variants:\n  baseline: {}\n  wide: {block.ffn.width: 64}\n  thin: {block.ffn.width: 8}\n"


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(Path(__file__).parent / "made_up")])
    rooms.files.cache_clear()
    yield
    for known in (Section.known, Told.known):
        known.pop("challenge", None)
    sys.modules.pop("archlab.search.sections.challenge", None)
    rooms.files.cache_clear()


def study_with(folder: Path, challenge: str | None) -> Path:
    return write_study(folder, components=None, variants=VARIANTS, seeds="seeds: 2", challenge=challenge)


def by_width(variant: str, settings: dict[str, object], seed: int, share: float) -> float:
    return 5.0 - {"wide": 1.0, "thin": -1.0}.get(variant, 0.0) + 0.01 * seed - share


def test_a_section_in_one_file_takes_part_from_the_file_to_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(load_study(study_with(tmp_path, "challenge: {champion: wide}")), tmp_path / "data")
    print_plan(made, tmp_path)
    assert "challenge: wide first, 1 others if it loses" in capsys.readouterr().out
    trials = simulate(made, by_width)
    assert {row["variant"] for row in trials} == {"baseline", "wide"}, "the others are not trained"
    assert made.trials == 4 and made.record()["challenge"] == {"champion": "wide"}
    found = compare(made.record(), trials)
    assert dict(zip(found.table["variant"], found.table["verdict"], strict=True))["thin"] == "left out"
    text = report(found)
    for said in ("challenge: thin had to do nothing", "Challenged", "spared"):
        assert said in text
    assert to_plain(found)["challenged"] == ["thin"]
    head, *rows = [line.split(",") for line in report(found, "csv").splitlines()]
    assert [dict(zip(head, row, strict=True))["challenge.spared"] for row in rows] == ["", "", "True"]


def test_its_mistakes_have_a_place_and_editors_know_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"challenge\.champion: 'wild' is not a variant; did you mean 'wide'\?"
    ) as wrong:
        load_study(study_with(tmp_path, "challenge: {champion: wild}"))
    assert "study.yaml:" in str(wrong.value)
    with pytest.raises(SpecError, match="'champ' is not a key of challenge; did you mean 'champion'"):
        load_study(study_with(tmp_path, "challenge: {champ: wide}"))
    with pytest.raises(SpecError, match="'challeng' is not a key of study; did you mean 'challenge'"):
        load_study(study_with(tmp_path, "challeng: {champion: wide}"))
    assert "champion" in study_schema()["definitions"]["challenge"]["properties"]


def test_a_study_without_it_is_as_before(tmp_path: Path) -> None:
    made = plan(load_study(study_with(tmp_path, None)), tmp_path / "data")
    assert "challenge" not in made.record() and not made.parts
    assert {row["variant"] for row in simulate(made, by_width)} == {"baseline", "wide", "thin"}
    assert not list(_changed(made.record(), made.record()))
