"""Effects of axes and of their pairs: against formulas written out point by point, and on losses of known effects."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from archlab.search.statistics.effects import NONE, Array, Effects, fitted

NUMERIC = np.array([False, False, True])


def some(count: int, seed: int = 0) -> tuple[Array, Array]:
    """Random points on two axes of three choices and one of numbers, on which one point has no value; and losses."""
    draw = np.random.default_rng(seed)
    places = np.column_stack([draw.integers(3, size=count), draw.integers(3, size=count), draw.random(count)])
    places = places.astype(np.float64)
    places[0, 2] = NONE
    losses = 0.2 * (places[:, 0] == 1) - 0.1 * (places[:, 1] == 2) + 0.3 * (places[:, 2] - 0.4) ** 2
    return places, losses + 0.01 * draw.standard_normal(count)


def kernel(found: Effects, one: Array, other: Array) -> float:
    """arXiv:1112.4394, eq. 5, for degrees one and two."""
    each = []
    for variance, numeric, a, b in zip(found.axes, NUMERIC, one, other, strict=True):
        near = numeric and NONE not in (a, b)
        each.append(variance * (math.exp(-((a - b) ** 2) / (2 * 0.5**2)) if near else float(a == b)))
    return 1 + sum(each) + found.pairs * sum(a * b for a, b in itertools.combinations(each, 2))


def standardised(losses: Array) -> Array:
    """Losses as they are modelled: none far above the upper quartile, of mean 0 and variance 1."""
    lower, upper = np.quantile(losses, [0.25, 0.75])
    told = np.minimum(losses, upper + 1.5 * (upper - lower))
    return np.asarray((told - told.mean()) / told.std())


def test_means_and_deviations_are_those_of_the_gaussian_process() -> None:
    places, losses = some(12)
    found = fitted(places, losses, NUMERIC)
    told = standardised(losses)
    inside = np.array([[kernel(found, a, b) for b in places] for a in places]) + (found.noise + 1e-8) * np.eye(12)
    for asked in some(5, seed=1)[0]:
        across = np.array([kernel(found, asked, b) for b in places])
        mean, deviation = found.at(asked[None])
        assert (mean[0] - found.center) / found.scale == pytest.approx(across @ np.linalg.solve(inside, told), abs=1e-9)
        variance = kernel(found, asked, asked) - across @ np.linalg.solve(inside, across)
        assert deviation[0] / found.scale == pytest.approx(math.sqrt(variance), rel=1e-6)


def posterior(places: Array, losses: Array, found: Effects) -> float:
    """The logarithm of the density of variances, up to a constant, by its definition."""
    told = standardised(losses)
    inside = np.array([[kernel(found, a, b) for b in places] for a in places])
    inside += (found.noise + 1e-8) * np.eye(len(places))
    likelihood = -0.5 * told @ np.linalg.solve(inside, told) - 0.5 * np.linalg.slogdet(inside)[1]
    logs = np.log([*found.axes, found.pairs, found.noise])
    expected = np.log([1 / 3, 1 / 3, 1 / 3, 0.3 * 9 / 3, 0.1])
    return float(likelihood - 0.5 * np.sum(((logs - expected) / 1.5) ** 2))


def test_variances_are_the_most_likely_ones() -> None:
    places, losses = some(20)
    found = fitted(places, losses, NUMERIC)
    best = posterior(places, losses, found)
    for factor in (0.8, 1.25):
        for axis in range(3):
            axes = found.axes.copy()
            axes[axis] *= factor
            assert posterior(places, losses, replace(found, axes=axes)) < best
        assert posterior(places, losses, replace(found, pairs=found.pairs * factor)) < best
        assert posterior(places, losses, replace(found, noise=found.noise * factor)) < best


def test_an_axis_without_effect_explains_little_and_an_outlier_changes_little() -> None:
    places, losses = some(60)
    places = np.column_stack([places, np.arange(60) % 2])
    numeric = np.array([*NUMERIC, False])
    found = fitted(places, losses, numeric)
    assert found.axes[3] < 0.1 * found.axes[0]
    whole = np.array([*itertools.product(range(3), range(3), [0.1, 0.4, 0.9], range(2))], dtype=np.float64)
    before = found.at(whole)[0]
    losses = np.append(losses, 50.0)
    after = fitted(np.vstack([places, [0, 0, 0.4, 0]]), losses, numeric).at(whole)[0]
    assert np.corrcoef(before, after)[0, 1] > 0.95 and after[before.argmin()] - after.min() < 0.02


def test_many_points_are_all_looked_at() -> None:
    places, losses = some(150)
    found = fitted(places, losses, NUMERIC)
    assert len(found.weights) == 150
    mean, _ = found.at(places)
    assert np.abs(mean - losses).mean() < 0.02
