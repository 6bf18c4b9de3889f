"""Numbers by row and column that measures find: kept, averaged over seeds, reported."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from archlab.search.comparison.compare import compare
from archlab.search.evaluation.measures import Curve, Found, Grid
from archlab.search.reporting.report import report, to_plain
from tests.search.compare_kit import make_study


def grid(values: list[list[float | None]], rows: list[int] | None = None) -> Grid:
    return Grid(rows or list(range(len(values))), ["a", "b"], "layer", "head", values, 7)


def finding(found: Found, label: str = "needle", version: int = 1) -> dict[str, Any]:
    """As a store has it."""
    plain: dict[str, Any] = json.loads(json.dumps(found.plain()))
    return {"measure": label, "version": version, **plain}


def test_a_grid_is_json_and_what_is_not_finite_is_none() -> None:
    found = Found(grids={"share": grid([[1.0, math.nan], [None, math.inf]])}).plain()
    shape = {"rows": [0, 1], "columns": ["a", "b"], "row": "layer", "column": "head", "n": 7}
    assert json.loads(json.dumps(found, allow_nan=False))["grids"] == {
        "share": {**shape, "values": [[1, None], [None] * 2]}
    }


@pytest.mark.parametrize("values", [[[1.0, 2.0]], [[1.0, 2.0], [1.0]], []], ids=str)
def test_a_grid_of_another_shape_than_its_labels_is_refused(values: list[list[float | None]]) -> None:
    with pytest.raises(ValueError, match=r"a grid of 2 x 2 has as many values; received rows of"):
        Grid([1, 2], ["a", "b"], "layer", "head", values, 1)


def test_grids_are_averaged_over_seeds_and_are_in_every_report() -> None:
    record, trials = make_study({"base": 0.0, "sdpa": -0.1}, seeds=2, rates=())
    for trial in trials:
        seed, gated = trial["seed"], trial["variant"] == "sdpa"
        share = grid([[0.1 + seed, 0.2], [0.3, None], [0.5, 0.6]]) if gated else grid([[1, 1], [0, 0], [0, 0]])
        depths = Grid([0.25, 1.5], [128], "length", "depth", [[0.5], [1.0]], 3)
        trial["measures"] = [finding(Found(grids={"share": share, "found": depths}))]
    comparison = compare(record, trials)
    plain = to_plain(comparison)
    assert [(each["variant"], each["name"]) for each in plain["grids"]] == [
        (variant, name) for variant in ("base", "sdpa") for name in ("share", "found")
    ]
    own, other = plain["grids"][2:]
    assert (own["row"], own["rows"], own["column"], own["columns"]) == ("layer", [0, 1, 2], "head", ["a", "b"])
    assert (own["n"], own["cases"], other["cases"]) == (2, 7, 3)
    assert own["mean"] == [[pytest.approx(0.6), 0.2], [0.3, None], [0.5, 0.6]]
    assert own["std"] == [[pytest.approx(math.sqrt(0.5)), 0], [0, None], [0, 0]]
    assert (other["rows"], other["columns"], other["mean"]) == ([0.25, 1.5], [128], [[0.5], [1.0]])
    assert all(isinstance(row, int) for row in json.loads(report(comparison, "json"))["grids"][0]["rows"])
    text = report(comparison)
    assert "Measured: share" in text
    assert "columns: layer; means over head, of 7 cases each" in text
    block = text.split("Measured: share")[1].split("Measured")[0].splitlines()
    (line,) = (line.split() for line in block if line.strip().startswith("sdpa"))
    assert [float(cell) for cell in line[1:]] == pytest.approx([0.4, 0.3, 0.55])


def test_of_layers_by_what_differs_in_kind_columns_are_printed() -> None:
    record, trials = make_study({"base": 0.0}, seeds=2, rates=())
    for trial in trials:
        norms = Grid([0, 1], ["stream", "attention"], "layer", "node", [[1.0, 0.1], [3.0, None]], 20)
        trial["measures"] = [finding(Found(grids={"norms": norms}))]
    block = report(compare(record, trials)).split("Measured: norms")[1]
    (head, line) = (next(x for x in block.splitlines() if x.strip().startswith(start)) for start in ("variant", "base"))
    assert head.split()[1:] == ["stream", "attention"]
    assert [float(cell) for cell in line.split()[1:]] == [2.0, 0.1]
    assert "columns: node; means over layer, of 20 cases each" in block


def test_a_curve_over_layers_is_printed_by_layer() -> None:
    record, trials = make_study({"base": 0.0, "deep": 0.0}, seeds=2, rates=())
    for trial in trials:
        layers = [0, 1, 2] if trial["variant"] == "deep" else [0, 1]
        tall: list[float | None] = [1.0, 30.0, 500.0]
        largest = Curve(layers, tall[: len(layers)], [640] * len(layers))
        trial["measures"] = [finding(Found({"massive_activations": 9.0}, {"massive_activations_by_layer": largest}))]
    block = report(compare(record, trials)).split("Measured: massive_activations_by_layer")[1]
    lines = {line.split()[0]: line.split()[1:] for line in block.splitlines() if line.split()}
    assert lines["variant"] == ["0", "1", "2"]
    assert lines["base"] == ["1", "30", "\N{EN DASH}"]
    assert lines["deep"] == ["1", "30", "500"]
    assert "columns: layer; over 640 tokens each" in block


def test_of_a_large_grid_eight_rows_are_printed() -> None:
    record, trials = make_study({"base": 0.0}, seeds=2, rates=())
    for trial in trials:
        values: list[list[float | None]] = [[place / 100, place / 100] for place in range(48)]
        trial["measures"] = [finding(Found(grids={"share": grid(values)}))]
    text = report(compare(record, trials))
    assert "8 of 48, the others and every cell are in --json" in text
    (line,) = (line for line in text.split("share")[1].splitlines() if line.strip().startswith("base"))
    assert [float(cell) for cell in line.split()[1:]] == [0, 0.07, 0.13, 0.20, 0.27, 0.34, 0.40, 0.47]


def test_findings_from_before_there_were_grids_have_none() -> None:
    record, trials = make_study({"base": 0.0}, seeds=2, rates=())
    for trial in trials:
        trial["measures"] = [{"measure": "perplexity_8", "version": 1, "values": {"perplexity_8": 3.0}, "curves": {}}]
    assert to_plain(compare(record, trials))["grids"] == []
