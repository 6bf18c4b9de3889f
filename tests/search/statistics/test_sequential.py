"""Always-valid intervals: the closed form against the integral, the coverage at all numbers of seeds by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy import integrate, stats

from archlab.search.sections.seeds.decide import decision
from archlab.search.statistics.contrast import Floats
from archlab.search.statistics.intervals import Analysis, analyse
from archlab.search.statistics.sequential import (
    TUNED_AT,
    always_valid_critical,
    mixture_critical,
    narrowest_spread,
)

MOST = 8
Noise = Callable[[np.random.Generator, int], Floats]


def evidence(x: Floats, g: float) -> float:
    """The marginal likelihood of x ~ N(mu, s^2), mu ~ N(0, g s^2) over that of mu = 0, both with ds / s, integrated."""
    n = len(x)
    covariance = np.eye(n) + g

    def density(log_s: float, matrix: Floats) -> float:
        return float(stats.multivariate_normal(np.zeros(n), matrix * math.exp(2 * log_s)).pdf(x))

    above, below = (integrate.quad(density, -8, 8, args=(m,), limit=400)[0] for m in (covariance, np.eye(n)))
    return above / below


@pytest.mark.parametrize(("n", "g"), [(3, 2.0), (4, 5.0), (8, 1.0)], ids=str)
def test_critical_value_is_where_the_evidence_reaches_one_over_alpha(n: int, g: float) -> None:
    rng = np.random.default_rng(n)
    x = rng.normal(size=n)
    x = (x - x.mean()) / x.std(ddof=1)  # mean 0 and variance 1: the mean is t / sqrt(n)
    alpha = 0.2
    t = mixture_critical(n - 1, alpha, g * n)
    assert evidence(x + t / math.sqrt(n), g) == pytest.approx(1 / alpha, rel=1e-6)
    assert evidence(x + 0.9 * t / math.sqrt(n), g) < 1 / alpha


@pytest.mark.parametrize(("df", "alpha"), [(3, 0.05), (12, 0.0125), (100, 0.005)], ids=str)
def test_no_other_mixture_is_narrower_where_it_is_tuned(df: int, alpha: float) -> None:
    best = narrowest_spread(df, alpha)
    assert mixture_critical(df, alpha, best) < min(
        mixture_critical(df, alpha, best * f) for f in (0.7, 0.95, 1.05, 1.5)
    )


def test_critical_value_is_larger_than_that_of_one_look_and_infinite_where_nothing_can_be_told() -> None:
    for pairs in range(3, 9):
        df = 4 * (pairs - 1)
        assert always_valid_critical(pairs, df, 4 * (TUNED_AT - 1), 4) > stats.t.ppf(1 - 0.05 / 8, df)
    assert always_valid_critical(2, 1, 3, 1) == math.inf
    with pytest.raises(ValueError, match="df > 0"):
        mixture_critical(0, 0.05, 1.0)


def gaussian(rng: np.random.Generator, variants: int) -> Floats:
    return rng.normal(size=(variants, MOST))


def heavy(rng: np.random.Generator, variants: int) -> Floats:
    return rng.standard_t(3, size=(variants, MOST))


def skewed(rng: np.random.Generator, variants: int) -> Floats:
    return rng.exponential(size=(variants, MOST))


def uneven(rng: np.random.Generator, variants: int) -> Floats:
    """The second variant is twice as noisy as the others."""
    noise: Floats = rng.normal(size=(variants, MOST))
    noise[1] *= 2
    return noise


def looks(
    losses: Floats,
    how: Callable[..., Analysis],
    documents: list[tuple[float, int]] | None = None,
    margin: float | None = 2.5,
) -> list[str]:
    """What is decided about each variant: seeds are added to those that are undecided, and to the first, to the end."""
    counts = np.full(len(losses), 2)
    decided = ["undecided"] * len(losses)
    while True:
        analysis = how(np.where(np.arange(MOST) < counts[:, None], losses, np.nan), 0, documents)
        for v in range(1, len(losses)):
            contrast = analysis.contrasts[v]
            assert contrast is not None
            if decided[v] == "undecided":
                decided[v] = decision(contrast, margin) or "undecided"
        growing = [v for v in range(1, len(losses)) if decided[v] == "undecided" and counts[v] < MOST]
        if not growing:
            return decided[1:]
        counts[growing] += 1
        counts[0] = counts.max()


def false_alarms(studies: int, variants: int, noise: Noise, documents: float) -> float:
    """The share of studies of equal variants in which any one is called better or worse."""
    rng = np.random.default_rng(variants)
    found = 0
    for _ in range(studies):
        losses = noise(rng, variants) + rng.normal(size=MOST)
        known = None
        if documents:
            losses[1:] += rng.normal(size=(variants - 1, 1)) * documents
            known = [(documents**2 * rng.chisquare(60) / 60, 60) for _ in range(variants)]
        found += bool({"better", "worse"} & set(looks(losses, partial(analyse, always_valid=True), known)))
    return found / studies


@pytest.mark.parametrize(
    ("variants", "noise", "documents"),
    [
        *((variants, gaussian, documents) for variants in (2, 5) for documents in (0, 0.5)),
        *((3, heavy, 0), (3, skewed, 0), (4, uneven, 0)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_equal_variants_are_rarely_told_apart_at_any_number_of_seeds(
    variants: int, noise: Noise, documents: float
) -> None:
    studies = 160
    found = false_alarms(studies, variants, noise, documents)
    assert found <= stats.binom.ppf(0.999, studies, 0.05) / studies


def test_fixed_n_intervals_would_not_bear_looking_after_every_seed() -> None:
    """What the always-valid ones are for."""
    rng = np.random.default_rng(0)
    found = [looks(gaussian(rng, 2), analyse, margin=None) != ["undecided"] for _ in range(300)]
    assert np.mean(found) > stats.binom.ppf(0.999, 300, 0.05) / 300


def test_planted_differences_are_found_and_equal_ones_called_equivalent() -> None:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(60):
        losses = gaussian(rng, 4) * 0.5 + rng.normal(size=MOST)
        losses[2] += 6.0
        losses[3] -= 4.0
        found.append(looks(losses, partial(analyse, always_valid=True)))
    kinds = np.array(found)
    assert (kinds[:, 1] == "worse").mean() > 0.95 and (kinds[:, 2] == "better").mean() > 0.95
    assert (kinds[:, 0] == "equivalent").mean() > 0.9


def test_rows_of_other_batches_have_the_variance_of_their_own_differences() -> None:
    """Against the interval of one mean: the baseline's noise and the row's may differ."""
    rng = np.random.default_rng(4)
    losses = rng.normal(size=(3, 6)) * np.array([[1.0], [1.0], [9.0]])
    found = analyse(losses, 0, always_valid=True, batches=["a", "a", "b"])
    contrast = found.contrasts[2]
    differences = losses[2] - losses[0]
    assert contrast is not None and contrast.half_width is not None and found.unpaired == (2,)
    expected = always_valid_critical(6, 5, TUNED_AT - 1, 2) * differences.std(ddof=1) / math.sqrt(6)
    assert contrast.half_width == pytest.approx(expected)


def test_what_did_not_run_yet_does_not_change_the_correction() -> None:
    losses = np.random.default_rng(2).normal(size=(4, 5))
    losses[3] = np.nan
    found = analyse(losses, 0, always_valid=True)
    assert found.comparisons == 3 and found.contrasts[3] is None
    first, second = found.contrasts[1], found.contrasts[2]
    assert first is not None and second is not None
    assert first.critical == second.critical == always_valid_critical(5, found.df, 3 * (TUNED_AT - 1), 3)
