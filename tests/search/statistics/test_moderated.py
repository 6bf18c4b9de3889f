"""Noise per variant: estimates against closed forms and simulation, intervals against 95% where noise differs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy import optimize, special, stats

from archlab.search.statistics.contrast import Contrast
from archlab.search.statistics.dunnett import dunnett_critical
from archlab.search.statistics.intervals import Analysis, analyse, unbalanced_residual_variance
from archlab.search.statistics.moderated import BASELINE_PRIOR_DF, PRIOR_DF, expected_df, moderate, row_variances
from tests.search.noise_kit import noise


def rows_of(analysis: Analysis) -> list[Contrast]:
    """The contrasts that have an interval."""
    return [c for c in analysis.contrasts if c is not None and c.half_width is not None]


def limit(rate: float, studies: int) -> float:
    """The lowest share that is compatible with a rate (99.9% of the binomial law)."""
    return float(stats.binom.ppf(0.001, studies, rate)) / studies


@pytest.mark.parametrize("kind", noise.NOISES)
@pytest.mark.parametrize(("variants", "seeds"), [(2, 3), (3, 3), (6, 4), (14, 5)], ids=str)
def test_a_table_covers_together_whichever_variants_are_noisier(kind: str, variants: int, seeds: int) -> None:
    """In 95% of the tables; 94% where few variants have three seeds, as docs/concepts/intervals.md says."""
    studies = 4000
    found = noise.family(kind, variants, seeds, studies, ["moderated"])["moderated"]
    assert found[0] >= limit(0.945, studies)


def test_pooling_would_not_cover_where_the_baseline_is_noisier_and_own_variances_would_resolve_little() -> None:
    """What the moderated ones are for."""
    pooled, own, moderated = noise.family("the baseline", 6, 3, 3000, ["pooled", "own", "moderated"]).values()
    assert pooled[0] < 0.85
    assert moderated[0] > 0.935
    equal = noise.family("equal", 6, 3, 3000, ["own", "moderated"])
    assert equal["moderated"][1] > 2 * equal["own"][1]
    assert moderated[2] < own[2]


@pytest.mark.parametrize(("variants", "seeds"), [(2, 3), (3, 4), (7, 3)], ids=str)
def test_one_study_analysed_is_the_simulated_one(variants: int, seeds: int) -> None:
    """What the report calls gives the intervals whose coverage was simulated, but for steps of critical values."""
    losses = noise.draw(np.random.default_rng(1), "one variant", (20, variants, seeds))
    halves = noise.moderated(losses)
    for study, half in zip(losses + np.random.default_rng(2).normal(size=(20, 1, seeds)), halves, strict=True):
        widths = np.array([c.half_width for c in rows_of(analyse(study, 0))])
        np.testing.assert_allclose(widths, half, rtol=0.02)


@pytest.mark.parametrize(("rows", "seeds"), [(5, 30), (300, 20)])
def test_rows_of_a_complete_layout_have_grubbs_estimates(rows: int, seeds: int) -> None:
    """In terms of differences: s_v^2 is the mean of half its pairs' variances, less what the others tell of theirs."""
    scales = np.resize([1.0, 1.5, 0.9, 1.2, 1.1], rows)[:, None]
    losses = np.random.default_rng(3).normal(size=(rows, seeds)) * scales
    found, df = row_variances(losses)
    pair = np.array([[np.var(a - b, ddof=1) for b in losses] for a in losses])
    expected = (pair.sum(1) - pair.sum() / 2 / (rows - 1)) / (rows - 2)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(df, (seeds - 1) * (1 - 1 / rows))


def test_what_a_layout_takes_grows_with_its_rows_and_not_with_their_pairs() -> None:
    losses = np.random.default_rng(6).normal(size=(20_000, 3))
    losses[::7, 2] = losses[::11, 1] = np.nan
    tracemalloc.start()
    found, df = row_variances(losses)
    analyse(losses, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.mean() == pytest.approx(1, rel=0.05) and df.sum() == unbalanced_residual_variance(losses)[1]
    assert peak < 2e8, "an array of the pairs of rows has 3.2 GB"


def test_estimates_are_unbiased_under_unequal_noise_with_missing_trials() -> None:
    rng, sd = np.random.default_rng(4), np.array([1.0, 1.2, 0.9, 1.1, 1.0, 1.3])
    found = []
    for _ in range(1500):
        losses = rng.normal(size=(6, 8)) * sd[:, None] + rng.normal(size=8) * 5 + rng.normal(size=(6, 1))
        losses[1, 2] = losses[4, 0] = losses[4, 1] = np.nan
        variances, df = row_variances(losses)
        found.append(variances)
    assert df.sum() == pytest.approx(unbalanced_residual_variance(losses)[1])
    np.testing.assert_allclose(np.mean(found, axis=0), sd**2, rtol=0.07)


def test_the_difference_is_smyths_moderated_variance_with_satterthwaites_degrees_of_freedom() -> None:
    losses = np.random.default_rng(5).normal(size=(6, 4)) * np.arange(1, 7)[:, None]
    sigma2, common_df = unbalanced_residual_variance(losses)
    assert sigma2 is not None
    own, df = row_variances(losses)
    moderated = [
        (d0 * sigma2 + d * s2) / (d0 + d)
        for d0, d, s2 in zip([BASELINE_PRIOR_DF, *[PRIOR_DF] * 5], df, own, strict=True)
    ]
    found = moderate([(np.arange(6), losses)], sigma2, common_df, np.zeros(6, np.intp), {})
    total, effective, correlation = found.of_difference(3, 0)
    assert total == pytest.approx(moderated[3] + moderated[0])
    assert correlation == pytest.approx(moderated[0] / total)
    shares = np.array([moderated[0], moderated[3]]) / total
    common = (BASELINE_PRIOR_DF / (BASELINE_PRIOR_DF + df[0]) + PRIOR_DF / (PRIOR_DF + df[3])) * sigma2 / total
    inverse = shares[0] ** 2 / (BASELINE_PRIOR_DF + df[0]) + shares[1] ** 2 / (PRIOR_DF + df[3]) + common**2 / 15
    assert effective == pytest.approx(1 / inverse)


def test_two_variants_alone_have_the_paired_t_interval() -> None:
    losses = np.random.default_rng(6).normal(size=(2, 5)) * np.array([[1.0], [9.0]])
    (contrast,) = rows_of(analyse(losses, 0))
    theirs = stats.ttest_rel(losses[1], losses[0]).confidence_interval(0.95)
    assert contrast.half_width is not None
    assert contrast.difference + contrast.half_width == pytest.approx(theirs.high)
    assert not analyse(losses, 0).moderated and analyse(np.vstack([losses, losses[:1] * 2]), 0).moderated


def test_a_noisier_variant_has_the_wider_interval() -> None:
    losses = np.random.default_rng(7).normal(size=(6, 5))
    losses[4] *= 8
    halves = [c.half_width or 0.0 for c in rows_of(analyse(losses, 0))]
    assert halves[3] == max(halves) and halves[3] > 3 * np.median(halves)


def test_trials_without_noise_have_intervals_of_no_length() -> None:
    found = rows_of(analyse(np.ones((4, 3)) * np.arange(4)[:, None], 0))
    assert [c.difference for c in found] == [1, 2, 3]
    assert all(c.half_width == pytest.approx(0, abs=1e-12) for c in found)


def test_a_lost_trial_widens_the_intervals_of_its_variant_and_of_the_table() -> None:
    losses = np.random.default_rng(8).normal(size=(4, 4))
    lost = losses.copy()
    lost[2, 1] = np.nan
    found = analyse(lost, 0)
    assert found.df == 8 and len(rows_of(found)) == 3
    variances, df = row_variances(lost)
    assert df.sum() == pytest.approx(8) and (df[2] < df[[0, 1, 3]]).all() and (variances > 0).all()


@pytest.mark.parametrize("cells", [2, 4], ids=str)
def test_a_grid_of_pairs_covers_together_where_one_cell_is_noisier(cells: int) -> None:
    """Two variants in each cell, which saw batches of their own."""
    rng, studies, covered = np.random.default_rng(9), 1000, 0
    bases, groups = np.repeat(np.arange(cells) * 2, 2), np.repeat(np.arange(cells), 2).tolist()
    for losses in rng.normal(size=(studies, 2 * cells, 4)):
        losses[:2] *= 4
        covered += all(abs(c.difference) <= (c.half_width or 0) for c in rows_of(analyse(losses, bases, None, groups)))
    assert covered / studies >= limit(0.95, studies)


def test_a_row_that_nothing_is_known_of_has_the_noise_of_the_table() -> None:
    """Its trials are those of its baseline, which no other row of these batches has."""
    losses = np.random.default_rng(10).normal(size=(5, 4))
    losses[4] = losses[3]
    keys = np.array([[f"{min(v, 3)} {s}" for s in range(4)] for v in range(5)], object)
    last = analyse(losses, [0, 0, 0, 3, 3], None, "aaabb", keys).contrasts[4]
    assert last is not None and last.half_width is not None and last.difference == 0 and last.variance is not None
    assert last.variance == pytest.approx(2 * (unbalanced_residual_variance(losses[:3])[0] or 0) / 4)


def test_equally_noisy_rows_have_the_degrees_of_freedom_that_a_plan_expects() -> None:
    rng = np.random.default_rng(11)
    quiet = rng.normal(size=(200, 8, 40))
    found = [row_variances(losses) for losses in quiet]
    assert np.mean([variances for variances, _ in found]) == pytest.approx(1, abs=0.01)
    assert expected_df(2, 1, 5) == 4
    assert 4 < expected_df(6, 1, 3) < 10
    assert dunnett_critical(5, expected_df(6, 1, 3)) > dunnett_critical(5, 10)


def test_moments_are_those_of_limma_and_near_the_maximum_of_the_likelihood() -> None:
    """s^2 ~ s0^2 F(d, d0), of many rows; equal ones have an infinite d0."""
    rng, d, d0, s0 = np.random.default_rng(12), 4, 5.0, 0.3
    variances = s0 * stats.f(d, d0).rvs(3000, random_state=rng)
    (prior,), (common,) = noise.moments(variances[None], d)
    explained = special.polygamma(1, prior / 2) + special.polygamma(
        1, d / 2
    )  # the variance of the logarithm of such an F
    assert explained == pytest.approx(np.log(variances).var(ddof=1))

    def unlikelihood(logs: np.ndarray) -> float:
        return -float(stats.f(d, np.exp(logs[0]), scale=np.exp(logs[1])).logpdf(variances).sum())

    best = np.exp(optimize.minimize(unlikelihood, np.log([3.0, 1.0]), method="Nelder-Mead").x)
    assert (prior, common) == (pytest.approx(best[0], rel=0.2), pytest.approx(best[1], rel=0.05))
    (prior,), (common,) = noise.moments(np.full((1, 9), 0.7), d)
    assert (prior, common) == (np.inf, pytest.approx(0.7))
