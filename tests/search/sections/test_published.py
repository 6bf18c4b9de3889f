"""Published tables: files that are read strictly, rows beside ours, correlations of the two orders."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from archlab.arch_dsl.language.errors import SpecError
from archlab.search.comparison.compare import compare, load_comparison
from archlab.search.planning.plan import plan
from archlab.search.reporting.report import report, to_plain
from archlab.search.results.comparison import Comparison
from archlab.search.results.measured import is_number
from archlab.search.running.run import run
from archlab.search.sections.published.spec import Published, Table, published_record, read_published
from archlab.search.statistics.rank_correlation import kendall
from archlab.search.store.store import Store
from archlab.search.study.load import load_study
from tests.search.compare_kit import end_as, make_study, pick
from tests.search.study_files import write_study

STUDIES = Path(__file__).parents[3] / "studies"
FILE = """\
source: {title: A paper, arxiv: '2501.00001', printed: its pages}
tables:
  table1:
    caption: a caption
    columns: [gate, added_m, ppl, attention, diverged]
    measures:
      ppl: perplexity
      added_m: {number: added_parameters, times: 1e-6}
      attention: first_token_attention
      diverged: diverged
    rows:
      baseline: [null, 0, 6.0, 0.5, false]
      g1: [sigmoid, 201, 5.4, 0.1, false]
      g2: [sigmoid, 25, 5.7, null, false]
      g3: [sigmoid, 25, 6.1, null, false]
      g4: [sigmoid, 25, null, null, true]
    claims:
      - {claim: G1 helps., where: section 1, lower: [g1], than: [baseline, g2]}
"""


def put(folder: Path, text: str = FILE, name: str = "paper") -> Path:
    """Writes a file of published tables beside studies of a folder."""
    path = folder / "published" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Files


def tables() -> list[Any]:
    found = {path.stem: read_published(path).tables for path in sorted((STUDIES / "published").glob("*.yaml"))}
    return [
        pytest.param(table, id=f"{file}.{name}") for file, several in found.items() for name, table in several.items()
    ]


def mean_of(row: dict[str, Any], columns: list[str]) -> float:
    """Of what a row prints in some columns."""
    return math.inf if row.get("diverged") else statistics.mean(row[column] for column in columns)


@pytest.mark.parametrize("table", tables())
def test_every_claim_is_true_of_the_figures_that_were_printed(table: Table) -> None:
    for claim in table.claims:
        columns = [name for name, ours in table.measures.items() if ours.number == claim.on]
        columns = columns or [name for name, ours in table.measures.items() if ours.number.startswith(f"{claim.on}_")]
        assert claim.where
        if not columns:
            assert "here in perplexity" in claim.claim or table.columns == ("relative_speed",)
            continue
        printed = {name: dict(zip(table.columns, row, strict=True)) for name, row in table.rows.items()}
        for pair in claim.pairs:
            one, other = (mean_of(printed[row], columns) for row in pair)
            assert abs(math.log(one / other)) < claim.margin if claim.margin else one < other


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "source: {title",
            "source: {titel",
            "paper.yaml:1:10: source.titel: 'titel' is not a key of source; did you mean 'title'?",
        ),
        (
            "201, 5.4, 0.1, false]",
            "201, 5.4]",
            "paper.yaml:13:7: tables.table1.rows.g1: has 3 values, and there are 5 columns",
        ),
        (
            "added_m: {",
            "added: {",
            "paper.yaml:8:7: tables.table1.measures: 'added' is not a column; did you mean 'added_m'?",
        ),
        (
            "attention: first_",
            "attention: frist_",
            "attention: 'frist_token_attention' is not a number of ours; did you",
        ),
        ("added_parameters", "added", "'added' is not a number of ours; did you mean 'added_parameters'?"),
        ("than: [baseline, g2]", "than: [baseline, g5]", "claims.0.than: 'g5' is not a row of the table; did you mean"),
        ("than: [baseline, g2]", "than: [g1]", "claims.0: compares 'g1' with itself"),
        (", than: [baseline, g2]", "", "claims.0: says either `lower` and `than`, or `equal` (two rows or more) and"),
        ("than: [baseline, g2]", "equal: [baseline, g2], margin: 0.1", "claims.0: says either `lower` and `than`"),
        ("than: [baseline, g2]", "than: [g2], on: lr", "must be perplexity or what was measured of each trial, found"),
        ("than: [baseline, g2]", "than: [g2], on: gaets.gate_mean", "'gaets.gate_mean' is not a number of ours"),
        (
            "than: [baseline, g2]",
            "than: [g2], testable: {number: gates.gate_mean, of: base, at_least: 3}",
            "claims.0.testable.of: 'base' is not a row of the table; did you mean 'baseline'?",
        ),
        (
            "than: [baseline, g2]",
            "than: [g2], testable: {number: perplexity, of: baseline, at_least: 6}",
            "claims.0.testable.number: must be what was measured of each trial, found 'perplexity'",
        ),
    ],
    ids=lambda text: text[:20],
)
def test_a_wrong_file_is_told_where(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in FILE
    with pytest.raises(SpecError) as caught:
        read_published(put(tmp_path, FILE.replace(old, new)))
    told = " ".join(str(caught.value).split())
    assert message in told
    assert f"{tmp_path}/published/paper.yaml:" in told, "with its line"


# Studies


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ("{table: papre.table1}", "report.published.table: 'papre' is not a file with published tables; it is"),
        ("{table: paper.table2}", "report.published.table: 'table2' is not a table of"),
        ("{table: paper}", "report.published.table: 'paper' is not a file with published tables; it is"),
        (
            "{table: paper.table1, rows: {gatd: g1}}",
            "report.published.rows: 'gatd' is not a variant; did you mean 'gated'?",
        ),
        ("{table: paper.table1, rows: {gated: g9}}", "rows.gated: 'g9' is not a row of paper.table1; did you mean"),
        ("{table: paper.table1, rows: {gated: []}}", "rows.gated: must name a row of paper.table1, found nothing"),
        ("{table: paper.table1, rows: {gated: g1, baseline: g1}}", "report.published.rows: gives the row 'g1' twice"),
        ("{table: paper.table1, without: [gated]}", "'gated' is not a variant with a row of the table"),
        (
            "{table: paper.table1, row: {}}",
            "report.published.row: 'row' is not a key of published; did you mean 'rows'?",
        ),
        ("{rows: {gated: g1}}", "report.published.table: is missing: published needs it"),
        ("{table: []}", "report.published.table: names no table"),
        (
            "{table: [paper.table1, paper.table1]}",
            "report.published.table: the column 'gate' is in two of paper.table1",
        ),
        ("{table: [paper.table1, other.table1]}", "paper.table1, other.table1 are of several files; a study shows"),
        ("{table: [paper.table1, paper.table7]}", "report.published.table: 'table7' is not a table of"),
    ],
    ids=lambda text: text[:40],
)
def test_a_wrong_table_is_refused_before_anything_is_trained(published: str, message: str, tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, name="other")
    study = write_study(tmp_path, report=f"report:\n  published: {published}")
    with pytest.raises(SpecError) as caught:
        run(study, tmp_path / "store", executor="inline", track=False)
    told = " ".join(str(caught.value).split())
    assert message in told
    assert f"{study}:23:" in told
    assert not list((tmp_path / "store").glob("trials/*"))


def test_several_tables_of_a_paper_stand_as_one(tmp_path: Path) -> None:
    second = """\
  table2:
    caption: downstream
    columns: [piqa]
    measures: {piqa: {number: bits_per_byte, times: 100}}
    rows: {g1: [64.5], baseline: [61.0], g9: [50.0]}
    claims: [{claim: G1 answers., lower: [g1], than: [baseline]}]
"""
    put(tmp_path, FILE + second)
    options = Published(table=("paper.table1", "paper.table2"), rows={"gated": ("g1",), "other": ("g2",)})
    found = published_record(options, ["baseline", "gated", "other"], write_study(tmp_path))
    assert found["table"] == "paper.table1, paper.table2" and found["caption"] == "a caption; downstream"
    assert found["columns"] == ["gate", "added_m", "ppl", "attention", "diverged", "piqa"]
    assert found["rows"]["g1"] == ["sigmoid", 201, 5.4, 0.1, False, 64.5]
    assert found["rows"]["g2"][-1] is None and found["rows"]["g9"][:5] == [None] * 5, "what a table lacks"
    assert [claim["claim"] for claim in found["claims"]] == ["G1 helps.", "G1 answers."]
    assert {*found["variants"]} == {"baseline", "gated", "other"}


def test_a_table_of_other_rows_is_refused(tmp_path: Path) -> None:
    put(tmp_path, FILE.replace("baseline:", "base:").replace("[baseline, g2]", "[g2]"))
    study = write_study(tmp_path, report="report: {published: {table: paper.table1}}")
    with pytest.raises(SpecError, match=r"no variant is a row of paper.table1; `rows` says which \(base, g1, g2"):
        load_study(study)


def test_the_nearest_file_of_a_name_is_taken(tmp_path: Path) -> None:
    below = tmp_path / "studies" / "mine"
    below.mkdir(parents=True)
    put(tmp_path, FILE.replace("a caption", "the far one"))
    study = write_study(below, report="report: {published: {table: paper.table1}}")

    def caption() -> str:
        options = load_study(study).report.published
        assert options is not None
        return str(published_record(options, ["baseline"], study)["caption"])

    assert caption() == "the far one"
    put(below, FILE.replace("a caption", "the near one"))
    assert caption() == "the near one"


def test_cells_of_a_grid_are_groups_unless_they_are_named(tmp_path: Path) -> None:
    put(tmp_path)
    cells = ["baseline [lr=0.001]", "gated [lr=0.001]", "baseline [lr=0.002]", "gated [lr=0.002]"]
    grid = "grid: {train.lr: [1e-3, 2e-3]}"
    report = "report: {published: {table: paper.table1, rows: {gated: g1}}}"
    made = plan(load_study(write_study(tmp_path, grid=grid, report=report)), tmp_path / "data")
    assert [v.name for v in made.variants] == cells
    found = made.record()["published"]["variants"]
    assert found == {
        name: {"rows": ["g1" if "gated" in name else "baseline"], "group": name.partition(" [")[2][:-1]}
        for name in cells
    }
    named = "{'gated [lr=0.002]': g1, 'gated [lr=0.001]': g2, 'baseline [lr=0.001]': baseline}"
    report = f"report: {{published: {{table: paper.table1, rows: {named}}}}}"
    made = plan(load_study(write_study(tmp_path, grid=grid, report=report)), tmp_path / "data")
    found = made.record()["published"]["variants"]
    assert {name: (each["rows"], each["group"]) for name, each in found.items()} == {
        "baseline [lr=0.001]": (["baseline"], ""),
        "gated [lr=0.001]": (["g2"], ""),
        "gated [lr=0.002]": (["g1"], ""),
    }


def test_cells_that_are_named_without_the_recipe_are_one_group_of_each_recipe(tmp_path: Path) -> None:
    put(tmp_path)
    named = "{'gated [lr=0.002]': g1, 'gated [lr=0.001]': g2, 'baseline [lr=0.001]': baseline}"
    sections = {
        "grid": "grid: {train.lr: [1e-3, 2e-3]}",
        "recipes": "recipes: {as is: {}, small: {batch: 2}}",
        "report": f"report: {{published: {{table: paper.table1, rows: {named}}}}}",
    }
    made = plan(load_study(write_study(tmp_path, **sections)), tmp_path / "data")
    found = made.record()["published"]["variants"]
    assert {name: (each["rows"], each["group"]) for name, each in found.items()} == {
        f"{name} [recipe={recipe}, lr={rate}]": ([row], f"recipe={recipe}")
        for recipe in ("as is", "small")
        for name, rate, row in (("baseline", 0.001, "baseline"), ("gated", 0.001, "g2"), ("gated", 0.002, "g1"))
    }


def test_a_report_needs_no_file_and_an_edited_one_no_training(tmp_path: Path) -> None:
    sections = {"train": "train: {data: {text: corpus.txt}, tokens: 256, context: 32, batch: 4, lr: 1e-3}"}
    file = put(tmp_path)
    study = write_study(tmp_path, **sections)
    plain = {trial.key for variant in plan(load_study(study), tmp_path / "d").variants for trial in [variant.trial(0)]}
    run(study, tmp_path / "store", executor="inline", track=False)
    study = write_study(tmp_path, **sections, report="report: {published: {table: paper.table1, rows: {gated: g1}}}")
    with_table = plan(load_study(study), tmp_path / "d").variants
    assert {variant.trial(0).key for variant in with_table} == plain
    ran = run(study, tmp_path / "store", executor="inline", track=False)
    assert ran.exit_code == 0
    file.unlink()
    with Store.open(tmp_path / "store", create=False) as store:
        assert {trial["attempt"] for trial in store.study_trials("gates")} == {1}, "nothing was trained again"
        found = load_comparison(store, "gates")
    assert found.published["row"].tolist() == ["baseline", "g1"]
    assert found.published["published"].tolist() == [6.0, 5.4]
    assert "Published: a caption (A paper, arXiv:2501.00001)" in report(found, "text")


# Beside ours


EFFECTS = {"baseline": 0.0, "g1": -0.1, "g2": 0.02, "mine": -0.05, "g4": 0.1}


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    record, trials = make_study(EFFECTS)
    put(tmp_path)
    options = Published(table=("paper.table1",), rows={"mine": ("g3",)}, without=("g4",))
    study = write_study(tmp_path)
    record["published"] = published_record(options, list(EFFECTS), study)
    end_as(pick(trials, "g4", role="repeat"), "diverged")
    for name, value in (("baseline", 0.25), ("g1", 0.05)):
        for place, trial in enumerate(pick(trials, name, role="repeat")):
            values = {"first_token_attention": value + 0.01 * place, "first_token_attention_uniform": 0.02}
            each = {"measure": "first_token_attention", "version": 1, "values": values, "curves": {}, "grids": {}}
            trial["measures"] = [each]
    return compare(record, trials)


def test_published_rows_stand_beside_ours(found: Comparison) -> None:
    rows = found.published.set_index("variant")
    table = found.table.set_index("variant")
    assert rows["row"].to_dict() == {"baseline": "baseline", "g1": "g1", "g2": "g2", "mine": "g3", "g4": "g4"}
    for name in ("baseline", "g1", "g2", "mine"):
        assert rows.loc[name, "perplexity"] == table.loc[name, "perplexity_mean"]
        assert rows.loc[name, "verdict"] == table.loc[name, "verdict"]
    np.testing.assert_allclose(rows["delta"], table["delta"])
    np.testing.assert_allclose(rows["published_delta"][:4], np.log(np.array([6.0, 5.4, 5.7, 6.1]) / 6.0))
    assert rows["rank"].tolist() == [3, 1, 4, 2, 5], "a diverged one last"
    assert rows["published_rank"].tolist() == [3, 1, 2, 4, 5]
    added = [rows.loc[name, "numbers"]["added_m"] for name in ("baseline", "g1")]
    assert added == [(0.0, 0.0), (pytest.approx(1e-6), 201.0)], "parameters more than the baseline, in millions"
    assert rows.loc["g1", "numbers"]["attention"] == (pytest.approx(0.06), 0.1)
    assert math.isnan(rows.loc["g2", "numbers"]["attention"][0])


def test_agreement_is_over_all_and_over_resolved_rows(found: Comparison) -> None:
    assert found.published["verdict"].tolist() == ["baseline", "better", "worse", "better", "diverged"]
    told = {(row["rows"], tuple(row["without"])): row for row in found.agreement}
    assert set(told) == {("all", ()), ("all", ("g4",)), ("resolved", ()), ("resolved", ("g4",))}
    ours, theirs = [3, 1, 4, 2, 5], [3, 1, 2, 4, 5]
    for key, some in ((("all", ()), 5), (("all", ("g4",)), 4)):
        row = told[key]
        assert row["n"] == some
        assert row["spearman"] == pytest.approx(stats.spearmanr(ours[:some], theirs[:some]).statistic)
        assert row["kendall"] == pytest.approx(stats.kendalltau(ours[:some], theirs[:some]).statistic)
    assert told["all", ("g4",)]["kendall_low"] is None, "four rows are too few for tau's interval"


def test_unresolved_rows_leave_the_agreement_of_resolved_ones(tmp_path: Path) -> None:
    record, trials = make_study(EFFECTS | {"g2": 0.0001})
    put(tmp_path)
    record["published"] = published_record(Published(table=("paper.table1",)), list(EFFECTS), write_study(tmp_path))
    found = compare(record, trials)
    assert found.published.set_index("variant").loc["g2", "verdict"] == "within noise"
    assert [(row["rows"], row["n"]) for row in found.agreement] == [("all", 4), ("resolved", 3)]


def test_the_published_table_is_never_among_ours(found: Comparison) -> None:
    ours = to_plain(found)["table"]
    assert not any("published" in key for row in ours for key in row)
    for form in ("text", "md", "latex"):
        printed = report(found, form)
        title = "Published: a caption (A paper, arXiv:2501.00001)"
        head, _, below = printed.partition(title)
        assert below, form
        assert "6.1" in below and "Spearman" in below
        assert "Published" not in head
    plain = json.loads(report(found, "json"))
    assert [row["published"] for row in plain["published"]] == [6.0, 5.4, 5.7, 6.1, None]
    assert plain["claims"][0]["claim"] == "G1 helps."
    assert "5.4" not in report(found, "csv")


def test_numbers_are_those_of_the_measure_with_any_options() -> None:
    assert is_number("first_token_attention", "first_token_attention", "first_token_attention")
    assert is_number("lm_eval.piqa_acc", "lm_eval_fox_short", "piqa_acc")
    assert not is_number("first_token_attention", "first_token_attention", "first_token_attention_uniform")
    assert not is_number("gates.gate_mean", "forget_gate", "gate_mean")
    assert is_number("ruler.exact_512", "ruler_256_512_s4", "ruler_256_512_s4_exact_512")
    assert not is_number("ruler.exact", "ruler_256_512_s4", "ruler_256_512_s4_exact_512")


# Rank correlation


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5]),
        ([1, 2, 2, 4, 5, 6, 7], [7, 3, 3, 3, 1, 2, 2]),
        ([1, 2, 3, 4, 5, math.inf, math.inf], [5, 1, 3, 2, 4, math.inf, 6]),
    ],
    ids=["no ties", "ties", "diverged"],
)
def test_kendall_is_scipys_with_the_interval_of_fieller_hartley_and_pearson(
    one: list[float], other: list[float]
) -> None:
    found = kendall(one, other)
    tau = stats.kendalltau([min(x, 99) for x in one], [min(x, 99) for x in other], variant="b").statistic
    assert found.rho == pytest.approx(tau)
    ends = np.tanh(np.arctanh(tau) + stats.norm.ppf([0.025, 0.975]) * np.sqrt(0.437 / (len(one) - 4)))
    assert (found.low, found.high) == pytest.approx(tuple(ends))


def test_kendall_of_equal_orders_is_one_and_of_too_few_rows_none() -> None:
    found = kendall([1, 2, 3, 4, 5, 6], [2, 3, 5, 7, 8, 9])
    assert (found.rho, found.high) == (1.0, 1.0)
    assert found.low is not None and 0.3 < found.low < 1
    assert kendall([1, 2, 3], [1, 2, 3]).rho is None
    assert (kendall([1, 2, 3, 4], [1, 2, 4, 3]).rho, kendall([1, 2, 3, 4], [1, 2, 4, 3]).low) == (
        pytest.approx(2 / 3),
        None,
    )
    assert kendall([1, 1, 1, 1, 1], [1, 2, 3, 4, 5]).rho is None


def test_interval_of_tau_covers_that_of_its_population() -> None:
    rng, r, n, draws = np.random.default_rng(4), 0.6, 12, 1500
    truth = 2 / np.pi * np.arcsin(r)
    sample = rng.multivariate_normal([0, 0], [[1, r], [r, 1]], size=(draws, n))
    intervals = [kendall(x[:, 0].tolist(), x[:, 1].tolist()) for x in sample]
    covered = sum(each.low <= truth <= each.high for each in intervals)  # type: ignore[operator]
    assert stats.binomtest(covered, draws, 0.95).pvalue > 1e-3 or covered / draws > 0.95
