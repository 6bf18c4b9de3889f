"""What certainty costs: the planner finds the best of simulated variants, with a third of the full grid's tokens."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def certainty() -> Any:
    """The benchmark."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("certainty")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def planned(certainty: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return certainty.make_plan(tmp_path_factory.mktemp("certainty"))


def test_curves_depend_on_what_is_asked_alone_and_pair_by_seed(certainty: Any) -> None:
    library = certainty.make_library(3, 2, 0.03, 0.01)
    once, test = library.trial(0, 1e-3, 0, [0.25, 0.5, 1.0])
    again, same = library.trial(0, 1e-3, 0, [1.0])
    assert once[-1] == again[-1] and test == same
    ends = np.array([[library.trial(v, 1e-3, seed, [1.0])[0][-1] for seed in range(400)] for v in (0, 1)])
    truth = [float(variant.mean(1e-3, np.ones(1))[0]) for variant in library.variants]
    np.testing.assert_allclose(ends.mean(1), truth, atol=4 * 0.023 / 20)
    assert (ends[0] - ends[1]).std(ddof=1) == pytest.approx(0.01 * 2**0.5, rel=0.15)
    assert ends.std(axis=1, ddof=1) == pytest.approx([0.01 * 5**0.5] * 2, rel=0.15)
    assert np.isinf(library.trial(0, 1.0, 0, [1.0])[0]).all()


def test_neighbouring_losses_of_a_trial_are_alike(certainty: Any) -> None:
    library = certainty.make_library(4, 1, 0.0, 0.01)
    noise = np.array([library.trial(0, 1e-3, seed, [0.25, 0.5, 1.0])[0] for seed in range(600)])
    found = np.corrcoef(noise.T)
    assert found[0, 1] == pytest.approx(0.5, abs=0.12) and found[0, 2] == pytest.approx(0.25, abs=0.15)


def test_the_default_finds_the_best_variant_with_a_third_of_the_tokens(certainty: Any, planned: Any) -> None:
    found = certainty.summary(planned, 15, 0.005)
    assert found["engine_right"] >= 14 / 15 and found["engine_ordered"] > 0.95
    assert 0.1 < found["engine_cost"] <= 1 / 3


def test_more_noise_asks_for_more_seeds(certainty: Any, planned: Any) -> None:
    costs = [
        np.mean([certainty.simulate(planned, certainty.make_library(s, 6, 0.03, noise)).cost for s in range(6)])
        for noise in (0.001, 0.03)
    ]
    assert costs[0] < 0.9 * costs[1]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0025, 0.01])
def test_the_default_finds_the_best_variant_in_95_percent_of_studies(
    certainty: Any, planned: Any, noise: float
) -> None:
    found = certainty.summary(planned, 100, noise)
    assert found["engine_right"] >= 0.95 and found["engine_cost"] <= 1 / 3
