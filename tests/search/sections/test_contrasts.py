"""Contrasts stand in the report: of each cell, with the reason where two variants do not compare."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from archlab.arch_dsl.language.errors import SpecError
from archlab.cli.main import main
from archlab.search.comparison.compare import compare
from archlab.search.reporting.report import report, to_plain
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.compare_kit import make_study
from tests.search.study_files import write_study

EFFECTS = {"baseline": 0.0, "a": -0.1, "b": -0.05, "c": -0.1}


def test_a_contrast_is_the_difference_of_its_two_rows() -> None:
    record, trials = make_study(EFFECTS, rates=())
    found = compare({**record, "contrasts": [["a", "b"], ["a", "c"]]}, trials)
    first, second = found.contrasts.to_dict("records")
    means = found.table.set_index("variant")["loss_mean"]
    assert first["delta"] == pytest.approx(means["a"] - means["b"]) and first["verdict"] == "better"
    assert second["verdict"] == "within noise" and second["low"] < 0 < second["high"]
    alone = compare({**record, "contrasts": [["a", "b"]]}, trials).contrasts.to_dict("records")[0]
    assert alone["high"] - alone["low"] < first["high"] - first["low"], "two hold together, so each is wider"
    assert "a         b" in report(found) and to_plain(found)["contrasts"][0]["against"] == "b"
    assert "Contrasts" not in report(compare(record, trials))


def test_two_variants_are_compared_in_every_cell_and_cells_with_each_other() -> None:
    names = {f"{name} [kv={kv}]": 0.0 for kv in (4, 1) for name in ("baseline", "a", "b")}
    record, trials = make_study(names, rates=())
    pairs = [["a", "b"], ["a [kv=4]", "a [kv=1]"]]
    rows = compare({**record, "contrasts": pairs}, trials).contrasts.to_dict("records")
    assert [(row["variant"], row["against"], row["cell"]) for row in rows] == [
        ("a", "b", "kv=4"),
        ("a", "b", "kv=1"),
        ("a [kv=4]", "a [kv=1]", ""),
    ]


def test_what_was_tested_on_other_text_is_not_compared() -> None:
    record, trials = make_study(EFFECTS, rates=())
    record["variants"][1]["test"] = "another"
    (row,) = compare({**record, "contrasts": [["a", "b"]]}, trials).contrasts.to_dict("records")
    assert row["verdict"] == "other test text" and row["delta"] != row["delta"]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ("[[gated, basline]]", r"report\.contrasts\.0: 'basline' is not a variant; did you mean 'baseline'"),
        ("{gated: baseline}", r"report\.contrasts: must be a list of pairs, \[\[one, other\]\]; found a mapping"),
        ("[[gated]]", r"report\.contrasts\.0: must be two variants, found gated"),
        ("[[gated, gated]]", r"report\.contrasts\.0: must be two variants, found gated, gated"),
    ],
)
def test_mistakes_have_a_place(tmp_path: Path, pairs: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_study(write_study(tmp_path, report=f"report: {{contrasts: {pairs}}}"))


def test_a_report_needs_no_run_for_a_contrast_that_is_added(tmp_path: Path) -> None:
    file = write_study(tmp_path)
    run = CliRunner().invoke
    store = str(tmp_path / "store")
    short = ["--set", "train.tokens=256", "--set", "train.context=16", "--set", "model.d_model=16"]
    assert run(main, ["run", str(file), "--inline", "--no-track", "--store", store, *short]).exit_code == 0
    file.write_text(file.read_text() + "report: {contrasts: [[gated, baseline]]}\n")
    answer = run(main, ["report", str(file), "--store", store])
    assert answer.exit_code == 0 and "Contrasts" in answer.stdout and "has changed" not in answer.stderr
    file.write_text(file.read_text().replace("[[gated, baseline]]", "[[gated, bassline]]"))
    answer = run(main, ["report", str(file), "--store", store])
    assert answer.exit_code == 2 and "did you mean 'baseline'" in answer.output
    with Store.open(tmp_path / "store", create=False) as opened:
        assert "contrasts" not in opened.study_yaml("gates"), "a report writes nothing"
