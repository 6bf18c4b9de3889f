"""The table in the shape that a reader gives it: the same numbers as the frames, whatever is shown of them."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from archlab.search.comparison.compare import compare
from archlab.search.formatting.filters import BadFilter
from archlab.search.formatting.tables import with_error
from archlab.search.reporting.main_table import column_names, kept_rows, main_block, trial_cells
from archlab.search.reporting.report import report
from archlab.search.reporting.shape import Shape, read_shape
from archlab.search.results.comparison import Comparison
from tests.search.compare_kit import end_as, make_study, pick

SDPA = "varied.block.attention.sdpa"


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Three variants with three seeds, one of which diverged at a rate that was not chosen."""
    record, trials = make_study({"baseline": 0.0, "sdpa": -0.05, "value": 0.02})
    record["variants"][1]["changes"] = [["block.attention.sdpa", "[]", "[gate]"], ["block.ffn.width", "340", "339"]]
    end_as(pick(trials, "value", role="tune", lr=2e-3), "diverged", "loss is not finite")
    return compare(record, trials)


def cells(comparison: Comparison, key: str, **shape: object) -> list[str]:
    """The texts of one column."""
    block = main_block(comparison, Shape(**shape))  # type: ignore[arg-type]
    return [cell.text for column in block.columns if column.key == key for cell in column.cells]


@pytest.mark.parametrize("error", ["std", "se", "interval"])
def test_the_error_behind_a_mean_is_that_of_its_seeds(comparison: Comparison, error: str) -> None:
    trials = comparison.trials[comparison.trials["reported"]]
    for text, name in zip(cells(comparison, "perplexity", error=error), comparison.table["variant"], strict=True):
        values = trials[trials["variant"] == name]["test_perplexity"].to_numpy()
        wanted = {
            "std": np.std(values, ddof=1),
            "se": stats.sem(values),
            "interval": np.mean(values) - stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))[0],
        }
        assert text == f"{np.mean(values):.3f} ± {wanted[error]:.3f}" or text == (
            f"{np.mean(values):.2f} ± {wanted[error]:.2f}"
        )


def test_columns_are_chosen_by_their_keys(comparison: Comparison) -> None:
    names = column_names(comparison)
    assert names["component.sdpa_gate"] == ("sdpa_gate", True) and names["memory"][1] is False
    block = main_block(comparison, Shape(columns=("delta", "varied.block.attention.sdpa", "memory")))
    assert [column.key for column in block.columns] == ["variant", "varied.block.attention.sdpa", "delta", "memory"]
    assert [cell.text for cell in block.columns[1].cells] == ["[]", "[gate]", "[]"]
    assert "varied.block.ffn.width" not in names, "what was solved to match is no difference of its own"
    with pytest.raises(ValueError, match="columns: there is no 'nonsense' here"):
        main_block(comparison, Shape(columns=("nonsense",)))


@pytest.mark.parametrize(
    ("error", "asked", "shape"),
    [
        ("", "", Shape()),
        ("ci", " delta, sdpa_gate ,sdpa", Shape("interval", ("delta", "component.sdpa_gate", SDPA))),
        ("sem", "perplexity", Shape("se", ("perplexity",))),
        ("sd", "variant", Shape("std", ("variant",))),
    ],
)
def test_words_ask_for_a_shape(comparison: Comparison, error: str, asked: str, shape: Shape) -> None:
    assert read_shape(column_names(comparison), error, asked, "seed=0") == (replace(shape, where="seed=0"), [])


@pytest.mark.parametrize(
    ("error", "asked", "said"),
    [
        ("intervall", "", "'intervall' is no error of a mean; did you mean 'interval'? (std, se, interval)"),
        ("mad", "", "'mad' is no error of a mean"),
        ("", "n,perplexty", "columns: there is no 'perplexty' here; did you mean 'perplexity'? (there is: variant, "),
    ],
)
def test_words_that_ask_for_nothing_are_said(comparison: Comparison, error: str, asked: str, said: str) -> None:
    shape, (wrong,) = read_shape(column_names(comparison), error, asked)
    assert wrong.startswith(said) and shape == Shape(columns=("n",) if asked else None)


@pytest.mark.parametrize(
    ("where", "variants", "trials"),
    [
        ("", ["baseline", "sdpa", "value"], 15),
        ("verdict=better", ["sdpa"], 5),
        ("state=diverged", ["value"], 1),
        ("sdpa_gate=yes", ["sdpa"], 5),
        ("sdpa=[gate] state=complete", ["sdpa"], 5),
        ("seed=2", ["baseline", "sdpa", "value"], 3),
        ("role=repeat", ["baseline", "sdpa", "value"], 9),
        ("role=tune", ["baseline", "sdpa", "value"], 9),
        ("verdict=worse seed=17", [], 0),
    ],
)
def test_a_filter_keeps_variants_with_a_trial_that_it_keeps(
    comparison: Comparison, where: str, variants: list[str], trials: int
) -> None:
    assert cells(comparison, "variant", where=where) == variants
    assert sum(kept_rows(comparison, where)[1]) == trials
    found = trial_cells(comparison, Shape(where=where))
    assert sum(map(len, found.values())) == trials
    printed = list(csv.DictReader(io.StringIO(report(comparison, "csv", Shape(where=where)))))
    assert [row["variant"] for row in printed] == variants


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.5934, 0.0131, "0.593 ± 0.013"),
        (0.08601, 0.0032, "0.0860 ± 0.0032"),
        (123.4, 23.4, "123 ± 23"),
        (2.4, 0.0, "2.4 ± 0"),
        (2.39871, math.nan, "2.399"),
        (math.nan, 0.1, "\N{EN DASH}"),
        (3.1e9, 2.2e8, "3.1e+09 ± 2.2e+08"),
        (1.0, 1e-9, "1 ± 1e-09"),
    ],
)
def test_a_mean_has_the_decimals_of_its_error(mean: float, half: float, text: str) -> None:
    assert with_error(mean, half) == text


def test_what_is_best_stays_so_in_a_part_of_the_table(comparison: Comparison) -> None:
    block = main_block(comparison, Shape(where="-variant=sdpa"))
    assert not any(cell.strong for column in block.columns for cell in column.cells)
    assert "**" in report(comparison, "md", Shape()) and "**" not in report(comparison, "md", Shape(where="seed=9"))


def test_a_wrong_filter_is_refused_before_anything_is_printed(comparison: Comparison) -> None:
    for form in ("text", "md", "latex", "csv"):
        with pytest.raises(BadFilter, match="did you mean 'verdict'"):
            report(comparison, form, Shape(where="verdit=better"))


def test_values_are_what_the_frames_hold(comparison: Comparison) -> None:
    for column in main_block(comparison).columns:
        if column.key == "delta":
            exact = [None if math.isnan(value) else value for value in comparison.table["delta"]]
            assert list(column.values) == exact
