"""Copies of one variant, really trained, are called different no more often than is said; a planted one is found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from archlab.search.running.run import run
from archlab.search.store.store import Store

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "calibration.py"


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    """The benchmark that made the losses."""
    spec = importlib.util.spec_from_file_location("calibration", BENCHMARK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def losses(calibration: ModuleType) -> dict[str, Any]:
    """The test losses of its trials."""
    found: dict[str, Any] = json.loads(calibration.LOSSES.read_text())["losses"]
    return found


def test_copies_of_a_variant_are_rarely_called_different_and_a_planted_one_is_found(
    calibration: ModuleType, losses: dict[str, Any]
) -> None:
    assert sum(map(len, losses["copies"])) >= 60
    found = calibration.rates(losses, studies=150, seed=1)
    assert {(row["seeds"], row["copies"]) for row in found} == {(s, c) for s in ("3", "5", "2 to 8") for c in (2, 4)}
    for row in found:
        assert row["false"] <= row["limit"], row
        assert row["found"] > {"3": 0.25, "5": 0.7, "2 to 8": 0.7}[row["seeds"]], row


@pytest.mark.slow
def test_the_losses_of_the_calibration_are_those_that_trials_have(
    calibration: ModuleType, losses: dict[str, Any], tmp_path: Path
) -> None:
    """Two data seeds, trained anew; on another processor the last digits may differ."""
    text = calibration.STUDY
    numbers = ", ".join(map(str, range(calibration.DATA_SEEDS)))
    (tmp_path / "study.yaml").write_text(f"{text.replace(numbers, '3, 11')}seeds: 2\nreport: {{baseline: copies}}\n")
    run(tmp_path / "study.yaml", tmp_path / "store", executor="inline", track=False)
    with Store.open(tmp_path / "store", create=False) as store:
        rows = store.study_trials("calibration")
    assert len(rows) == 4
    for row in rows:
        known = losses["copies"][3 if "=3]" in row["variant"] else 11][row["seed"]]
        assert row["result"]["test"]["loss"] == pytest.approx(known, abs=2e-3)
