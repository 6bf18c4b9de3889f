"""Levels of an endless stream of tests: their shares, and the false ones among what they reject."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archlab.search.statistics.online import level, share


def test_shares_are_at_most_one_in_all() -> None:
    first = sum(share(number) for number in range(1, 100_001))
    rest = 1 / (share(1) * math.log(2) ** -2 / share(1) * 0 + 3.387735532 * math.log(100_001))
    assert first < 1 and first + rest == pytest.approx(1, abs=1e-3)


def test_a_level_grows_with_rejections_and_is_never_above_the_share_that_is_allowed() -> None:
    assert level(5, 1, 0.1) == pytest.approx(2 * level(5, 0, 0.1))
    assert level(1, 100, 0.1) == 0.1
    with pytest.raises(ValueError, match="numbered from 1"):
        level(0, 0, 0.1)


def test_few_rejections_are_false_although_all_tests_share_their_noise() -> None:
    """e-values exp(z - 1/2) of normal z with a common part: of 400 streams with one true effect in ten."""
    generator, shares, found = np.random.default_rng(0), [], 0
    for _ in range(400):
        common, false, kept = generator.normal(), 0, 0
        for number in range(1, 41):
            true = number % 10 == 0
            z = 0.6 * common + 0.8 * generator.normal() + (6.0 if true else 0.0)
            if math.exp(3 * z - 4.5) >= 1 / level(number, kept, 0.1):
                kept, false = kept + 1, false + (not true)
                found += true
        shares.append(false / max(kept, 1))
    assert np.mean(shares) <= 0.1
    assert found > 800  # of 1,600: it rejects what is there
