"""Contrasts of two variants hold what they say: coverage together by simulation, one of them against Student's t."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t

from archlab.search.statistics.pairs import pair_difference

PAIRS = [(1, 2), (2, 3), (3, 4), (1, 4)]  # they share variants
ROWS = 5


def keys(seeds: int) -> np.ndarray:
    return np.array([[f"{row} {seed}" for seed in range(seeds)] for row in range(ROWS)], object)


def differences(losses: np.ndarray, batches: list[int], always_valid: bool = False) -> list:
    seeds = losses.shape[1]
    return [
        pair_difference(losses, row, base, [0] * ROWS, None, batches, keys(seeds), len(PAIRS), always_valid)
        for row, base in PAIRS
    ]


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("batches", [[0] * ROWS, [0, 0, 0, 1, 1]], ids=["paired", "two batches"])
@pytest.mark.parametrize("always_valid", [False, True], ids=["fixed", "sequential"])
def test_contrasts_cover_together(seeds: int, batches: list[int], always_valid: bool) -> None:
    draw = np.random.default_rng(seeds)
    missed, studies = 0, 400
    for _ in range(studies):
        shared = {group: draw.normal(size=seeds) for group in set(batches)}
        losses = np.stack([shared[group] + 0.3 * draw.normal(size=seeds) for group in batches])
        found = differences(losses, batches, always_valid)
        told = [each for each in found if each is not None and each.half_width is not None]
        missed += any(abs(each.difference) > each.half_width for each in told)
        assert always_valid or len(told) == len(PAIRS)
    assert missed / studies <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / studies)


def test_one_contrast_with_equal_noise_is_students_interval() -> None:
    """Without another variant in the pool, its degrees of freedom are those of the pair."""
    losses = np.random.default_rng(3).normal(size=(2, 8))
    found = pair_difference(losses, 1, 0, [0, 1], None, [0, 0], np.array([[*"abcdefgh"], [*"ijklmnop"]], object), 1)
    assert found is not None and found.half_width is not None
    paired = losses[1] - losses[0]
    expected = t.ppf(0.975, 7) * paired.std(ddof=1) / np.sqrt(8)
    assert found.difference == pytest.approx(paired.mean())
    assert found.half_width == pytest.approx(expected, rel=0.02)
