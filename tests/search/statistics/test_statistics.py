"""The intervals of a table hold what they say: critical values against tables and scipy, coverage by simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from archlab.search.statistics.contrast import document_variance, satterthwaite, simultaneous_critical
from archlab.search.statistics.dunnett import dunnett_critical, dunnett_probability
from archlab.search.statistics.intervals import analyse, pooled_spread, unbalanced_residual_variance, uneven_noise
from archlab.search.statistics.moderated import BASELINE_PRIOR_DF, PRIOR_DF, row_variances
from tests.search.noise_kit import noise

# C. W. Dunnett, Biometrics 20 (1964), two-sided, joint 95%: (comparisons, degrees of freedom, value)
PUBLISHED = [
    (1, 5, 2.57),
    (2, 5, 3.03),
    (3, 5, 3.29),
    (9, 5, 3.97),
    (1, 10, 2.23),
    (2, 10, 2.57),
    (5, 10, 2.99),
    (9, 10, 3.24),
    (5, 20, 2.73),
    (9, 20, 2.95),
    (2, 60, 2.27),
    (2, np.inf, 2.21),
    (5, np.inf, 2.51),
    (9, np.inf, 2.69),
]


@pytest.mark.parametrize(("comparisons", "df", "value"), PUBLISHED, ids=lambda x: str(x))
def test_critical_value_is_the_published_one(comparisons: int, df: float, value: float) -> None:
    assert dunnett_critical(comparisons, df) == pytest.approx(value, abs=0.0051)


@pytest.mark.parametrize("df", [1.0, 2.5, 7.0, 1e4, np.inf], ids=str)
def test_critical_value_of_one_comparison_is_students(df: float) -> None:
    assert dunnett_critical(1, df) == pytest.approx(stats.t.ppf(0.975, min(df, 1e8)), rel=1e-7)
    assert dunnett_probability(stats.t.ppf(0.975, min(df, 1e8)), 1, df) == pytest.approx(0.95, abs=1e-8)


@pytest.mark.parametrize(("comparisons", "df", "correlation"), [(2, 4, 0.5), (4, 10, 0.5), (3, 7, 0.2)], ids=str)
def test_probability_agrees_with_scipys_multivariate_t(comparisons: int, df: int, correlation: float) -> None:
    shape = np.full((comparisons, comparisons), correlation) + (1 - correlation) * np.eye(comparisons)
    law = stats.multivariate_t(shape=shape, df=df, seed=1)
    limit = np.full(comparisons, 2.9)
    theirs = law.cdf(limit, lower_limit=-limit, maxpts=400_000, random_state=1)
    assert dunnett_probability(2.9, comparisons, df, correlation) == pytest.approx(theirs, abs=2e-4)


def test_interval_agrees_with_scipys_dunnett() -> None:
    """Scipy's test has no seeds in common: its degrees of freedom are ours for a one-way layout."""
    rng = np.random.default_rng(3)
    control, *others = rng.normal(size=(4, 6))
    theirs = stats.dunnett(*others, control=control, random_state=np.random.default_rng(0)).confidence_interval(0.95)
    df = 4 * 5
    sd = np.sqrt(sum(g.var(ddof=1) * 5 for g in (control, *others)) / df)
    half = dunnett_critical(3, df) * sd * np.sqrt(2 / 6)
    mean = np.array([g.mean() - control.mean() for g in others])
    np.testing.assert_allclose(theirs.low, mean - half, atol=2e-3)
    np.testing.assert_allclose(theirs.high, mean + half, atol=2e-3)


def test_less_correlated_comparisons_have_a_larger_critical_value_below_bonferronis() -> None:
    values = [dunnett_critical(5, 10.0, r) for r in (0.9, 0.5, 0.2, 0.0)]
    assert values == sorted(values)
    assert values[-1] < stats.t.ppf(1 - 0.05 / 10, 10)


@pytest.mark.parametrize("bad", [(0, 5.0, 0.5), (2, 0.0, 0.5), (2, float("nan"), 0.5), (2, 5.0, 1.0)], ids=str)
def test_impossible_critical_value_is_refused(bad: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="comparisons >= 1, df > 0"):
        dunnett_critical(*bad)


def residual_variance(losses: np.ndarray) -> tuple[np.ndarray, int]:
    """The closed form for complete layouts [..., variant, seed]: sigma^2 and its df = (K - 1)(n - 1)."""
    variant, seed = losses.mean(-1, keepdims=True), losses.mean(-2, keepdims=True)
    residual = losses - variant - seed + losses.mean((-2, -1), keepdims=True)
    df = (losses.shape[-2] - 1) * (losses.shape[-1] - 1)
    return (residual**2).sum((-2, -1)) / df, df


def test_complete_layout_has_the_variance_of_the_least_squares_fit() -> None:
    losses = np.random.default_rng(0).normal(size=(5, 4))
    closed, df = residual_variance(losses)
    fitted, fitted_df = unbalanced_residual_variance(losses)
    assert (df, fitted_df) == (12, 12)
    assert fitted == pytest.approx(float(closed), rel=1e-12)


def test_missing_cells_lower_the_degrees_of_freedom_and_leave_the_variance_unbiased() -> None:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(2000):
        losses = rng.normal(size=(4, 4)) * 0.3 + rng.normal(size=(1, 4)) + rng.normal(size=(4, 1))
        losses[1, 2] = losses[3, 0] = losses[3, 1] = np.nan
        variance, df = unbalanced_residual_variance(losses)
        assert df == 9 - 3
        found.append(variance)
    assert np.mean(found) == pytest.approx(0.09, abs=4 * 0.09 * np.sqrt(2 / 6 / 2000))


@pytest.mark.parametrize(
    ("losses", "df"),
    [
        (np.full((3, 3), np.nan), 0),
        (np.array([[1.0, np.nan], [np.nan, 2.0]]), 0),
        (np.ones((3, 1)), 0),
        (np.ones((1, 3)), 0),
    ],
    ids=["empty", "disconnected", "one seed", "one variant"],
)
def test_layout_without_residuals_has_no_variance(losses: np.ndarray, df: int) -> None:
    assert unbalanced_residual_variance(losses) == (None, df)


def test_spread_over_seeds_pools_the_rows() -> None:
    losses = np.array([[1.0, 2.0, 3.0], [1.0, 1.0, np.nan], [5.0, np.nan, np.nan]])
    assert pooled_spread(losses) == pytest.approx(np.sqrt((2.0 + 0.0) / 3))
    assert pooled_spread(losses[2:]) is None


def test_document_variance_is_that_of_the_token_weighted_mean() -> None:
    """Against the spread of the difference itself over freshly drawn documents."""
    rng = np.random.default_rng(2)

    def draw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = rng.integers(20, 400, 300).astype(float)
        hard = rng.normal(3.0, 1.0, 300)
        effect = rng.normal(0.02, 0.1, 300)
        return tokens, tokens * hard, tokens * (hard + effect)

    differences, estimates = [], []
    for _ in range(3000):
        tokens, base, ours = draw()
        differences.append((ours.sum() - base.sum()) / tokens.sum())
        estimates.append(document_variance(ours, tokens, base, tokens)[0])
    assert np.mean(estimates) == pytest.approx(np.var(differences), rel=0.08)


def test_document_variance_of_other_documents_is_the_sum_of_both() -> None:
    tokens = np.array([10.0, 20.0, 30.0])
    nll, base = np.array([11.0, 19.0, 33.0]), np.array([12.0, 24.0, 30.0, 1.0])
    base_tokens = np.array([10.0, 20.0, 30.0, 1.0])
    none = np.zeros(3)
    paired, df = document_variance(nll, tokens, none, tokens)
    other, _ = document_variance(base, base_tokens, np.zeros(4), base_tokens)
    both, both_df = document_variance(nll, tokens, base, base_tokens)
    assert both == pytest.approx(paired + other)
    assert (df, both_df) == (2, 2)
    assert document_variance(nll[:1], tokens[:1], nll[:1], tokens[:1]) == (0.0, 0)


@dataclass(frozen=True)
class Setting:
    """A simulated study. Standard deviations in nats/token; `noisier` multiplies the last variant's seed noise."""

    variants: int = 6
    seeds: int = 3
    document_sd: float = 0.0
    document_seed_sd: float = 0.0
    documents: int = 60
    noisier: float = 1.0
    planted: float = 0.0
    studies: int = 8000
    seed_sd: float = 0.01


@dataclass(frozen=True)
class Outcome:
    together: float
    each: np.ndarray
    found: float
    uneven: float
    losses: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray
    half_width: np.ndarray


def simulate(setting: Setting) -> Outcome:
    """Coverage of the intervals over many studies whose true differences are 0, variant 1's `planted`."""
    rng = np.random.default_rng(20)
    k, n, d = setting.variants, setting.seeds, setting.documents
    tokens = rng.integers(50, 400, d).astype(float)
    seed_noise = rng.normal(size=(setting.studies, k, n)) * setting.seed_sd
    seed_noise[:, -1] *= setting.noisier
    seed_noise += rng.normal(size=(setting.studies, 1, n)) * 5 * setting.seed_sd
    seed_noise[:, 1] += setting.planted
    # nats of a document, averaged over seeds; its noise from seed to seed enters through its mean and its weighted sum
    effect = rng.normal(size=(setting.studies, k, d)) * setting.document_sd
    losses = seed_noise + (effect @ tokens / tokens.sum())[..., None]
    if setting.document_seed_sd:
        own = rng.normal(size=(setting.studies, k, n, d)) * setting.document_seed_sd
        losses = losses + own @ tokens / tokens.sum()
        effect = effect + own.mean(2)
    documents = (effect + seed_noise.mean(-1, keepdims=True)) * tokens
    seeds_part, value = noise.of_rows(losses, noise.chosen_prior(k))
    share = documents / tokens.sum()
    share = share - share.sum(-1, keepdims=True) * tokens / tokens.sum()
    documents_part = d / (d - 1) * ((share[:, 1:] - share[:, :1]) ** 2).sum(-1)
    critical = simultaneous_critical(seeds_part, documents_part, value, d - 1, k - 1)
    half = critical * np.sqrt(seeds_part + documents_part)
    delta = (losses[:, 1:] - losses[:, :1]).mean(-1)
    truth = np.array([setting.planted] + [0.0] * (k - 2))
    inside = np.abs(delta - truth) <= half
    uneven = (uneven_noise(losses)[0] < 0.01).mean() if k > 2 else 0.0
    found = float((delta[:, 0] + half[:, 0] < 0).mean())
    return Outcome(float(inside.all(-1).mean()), inside.mean(0), found, float(uneven), losses, documents, tokens, half)


def binomial(rate: float, studies: int) -> tuple[float, float]:
    """Where a proportion with this rate lies in 999 of 1,000 simulations."""
    low, high = stats.binom.interval(0.999, studies, rate)
    return low / studies, high / studies


@pytest.mark.parametrize(("variants", "seeds"), [(2, 3), (3, 3), (6, 3), (12, 3), (6, 5), (3, 8)], ids=str)
def test_null_coverage_of_seed_noise_lies_between_95_and_98_percent(variants: int, seeds: int) -> None:
    """Documents without an effect of their own: all intervals of a table cover together in 95% to 98% of studies."""
    setting = Setting(variants, seeds)
    assert binomial(0.95, setting.studies)[0] <= simulate(setting).together <= binomial(0.98, setting.studies)[1]


@pytest.mark.parametrize("document_sd", [0.02, 0.06, 0.3], ids=["small", "equal", "dominant"])
@pytest.mark.parametrize(("variants", "seeds"), [(2, 3), (6, 3), (6, 5), (12, 3)], ids=str)
def test_null_coverage_with_documents_lies_between_95_and_98_percent(
    variants: int, seeds: int, document_sd: float
) -> None:
    setting = Setting(variants, seeds, document_sd=document_sd, studies=4000)
    assert binomial(0.95, setting.studies)[0] <= simulate(setting).together <= binomial(0.98, setting.studies)[1]


def test_seed_noise_within_documents_makes_the_interval_conservative() -> None:
    """It is in both parts of the variance, as the module says."""
    setting = Setting(document_sd=0.06, document_seed_sd=0.2, studies=1000)
    assert simulate(setting).together >= 0.97


def test_a_noisier_variant_is_covered_as_the_others_are() -> None:
    outcome = simulate(Setting(noisier=3.0))
    assert outcome.together >= binomial(0.945, 8000)[0]
    assert (outcome.each > 0.97).all()
    assert 0.15 <= outcome.uneven <= 0.30, "three seeds show it in one study of five"


def test_uneven_noise_is_a_false_alarm_in_at_most_one_study_of_a_hundred() -> None:
    setting = Setting()
    assert simulate(setting).uneven <= binomial(0.01, setting.studies)[1]


def test_one_seed_says_nothing_about_uneven_noise() -> None:
    assert analyse(np.array([[1.0], [1.2], [1.1]]), 0, always_valid=True).uneven is None


def test_a_planted_difference_is_found() -> None:
    outcome = simulate(Setting(document_sd=0.02, planted=-0.09, studies=2000))
    assert outcome.found > 0.99
    assert outcome.together >= binomial(0.95, 2000)[0]


def test_one_study_analysed_is_the_simulated_one() -> None:
    """What the report calls gives the intervals whose coverage was simulated."""
    outcome = simulate(Setting(document_sd=0.06, studies=20))
    for study in range(20):
        nll = outcome.documents[study]
        documents = [document_variance(row, outcome.tokens, nll[0], outcome.tokens) for row in nll]
        analysis = analyse(outcome.losses[study], 0, documents)
        widths = [c.half_width for c in analysis.contrasts if c is not None]
        np.testing.assert_allclose(widths, outcome.half_width[study], rtol=0.02)
        assert analysis.resolvable == max(width for width in widths if width is not None)


def test_fewer_than_three_pairs_have_a_difference_and_no_interval() -> None:
    losses = np.random.default_rng(0).normal(size=(4, 3))
    losses[2, 0] = np.nan
    losses[3] = np.nan
    analysis = analyse(losses, 0)
    base, whole, two, none = analysis.contrasts
    assert base is None
    assert none is None
    assert whole is not None and whole.half_width is not None
    assert two is not None and (two.pairs, two.half_width) == (2, None)
    assert two.difference == pytest.approx((losses[2] - losses[0])[1:].mean())
    assert (analysis.comparisons, analysis.df) == (1, 3)
    assert analysis.document_sd is None


def test_two_seeds_resolve_nothing() -> None:
    analysis = analyse(np.random.default_rng(0).normal(size=(4, 2)), 0)
    assert analysis.resolvable is None
    assert analysis.seed_sd is not None


def test_missing_pairs_widen_the_interval() -> None:
    losses = np.random.default_rng(0).normal(size=(4, 6))
    gone = losses.copy()
    gone[1, :3] = np.nan
    full, less = analyse(losses, 0).contrasts, analyse(gone, 0).contrasts
    assert full[1] is not None and full[2] is not None and less[1] is not None and less[2] is not None
    assert less[1].pairs == 3
    assert less[1].half_width is not None and full[1].half_width is not None
    assert less[1].half_width > 1.2 * full[1].half_width


def test_unpaired_comparison_is_welchs() -> None:
    rng = np.random.default_rng(1)
    losses = rng.normal(size=(2, 5)) * np.array([[1.0], [4.0]])
    (_, contrast) = analyse(losses, 0, batches="ab").contrasts
    theirs = stats.ttest_ind(losses[1], losses[0], equal_var=False).confidence_interval(0.95)
    assert contrast is not None and contrast.half_width is not None
    assert contrast.difference - contrast.half_width == pytest.approx(theirs.low)
    assert contrast.difference + contrast.half_width == pytest.approx(theirs.high)


def test_unpaired_intervals_together_cover_at_least_95_percent() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for losses in rng.normal(size=(1500, 4, 4)) * np.array([[1.0], [0.5], [1.0], [3.0]]):
        contrasts = [c for c in analyse(losses, 0, batches="abcd").contrasts if c is not None]
        covered += all(abs(c.difference) <= (c.half_width or 0.0) for c in contrasts)
    assert covered / 1500 >= binomial(0.95, 1500)[0]


def test_satterthwaite_lies_between_its_parts() -> None:
    assert satterthwaite(1.0, 10, 0.0, 0) == pytest.approx(10)
    assert satterthwaite(1.0, 10, 1.0, 10) == pytest.approx(20)
    assert satterthwaite(0.0, 4, 0.0, 9) == 4


def test_layouts_of_other_batches_pool_their_squares_and_their_df() -> None:
    losses = np.random.default_rng(6).normal(size=(5, 3))
    losses[2:] += 9 * np.random.default_rng(7).normal(size=3)
    analysis = analyse(losses, [0, 0, 2, 2, 2], batches="aabbb")
    (one, one_df), (two, two_df) = residual_variance(losses[:2]), residual_variance(losses[2:])
    assert (analysis.df, analysis.pooled, analysis.unpaired) == (one_df + two_df, 5, ())
    assert analysis.seed_sd == pytest.approx(np.sqrt((one * one_df + two * two_df) / 6))
    parts = [row_variances(losses[:2]), row_variances(losses[2:])]
    own, own_df = (np.concatenate(each) for each in zip(*parts, strict=True))
    prior = np.array([BASELINE_PRIOR_DF, PRIOR_DF, BASELINE_PRIOR_DF, PRIOR_DF, PRIOR_DF])
    moderated = (prior * (one * one_df + two * two_df) / 6 + own_df * own) / (prior + own_df)
    last = analysis.contrasts[4]
    assert last is not None and last.variance == pytest.approx((moderated[4] + moderated[2]) / 3)
    assert last.critical is not None and last.critical >= dunnett_critical(3, 6, 0.0), "other cells are uncorrelated"


def test_an_unpaired_row_of_a_paired_table_is_welchs_and_pools_nothing() -> None:
    losses = np.random.default_rng(8).normal(size=(4, 5))
    analysis, alone = analyse(losses, 0, batches="aaab"), analyse(losses[:3], 0)
    assert (analysis.unpaired, analysis.comparisons) == ((3,), 3)
    assert (analysis.df, analysis.seed_sd) == (alone.df, alone.seed_sd)
    welch, paired = analysis.contrasts[3], analysis.contrasts[1]
    assert welch is not None and welch.half_width is not None
    theirs = stats.ttest_ind(losses[3], losses[0], equal_var=False).confidence_interval(1 - 0.05 / 3)
    assert welch.difference + welch.half_width == pytest.approx(theirs.high)
    assert paired is not None and paired.critical is not None
    assert paired.critical >= dunnett_critical(2, 8, 0.5, 1 - 0.05 * 2 / 3)
    assert paired.critical > dunnett_critical(2, 8, 0.5), "part of the error is Welch's row's"


def test_paired_and_unpaired_intervals_together_cover_at_least_95_percent() -> None:
    rng = np.random.default_rng(9)
    covered = 0
    for losses in rng.normal(size=(1000, 5, 4)):
        losses[:3] += 5 * rng.normal(size=4)
        contrasts = [c for c in analyse(losses, [0, 0, 0, 3, 3], batches="aaabc").contrasts if c is not None]
        assert len(contrasts) == 3
        covered += all(abs(c.difference) <= (c.half_width or 0.0) for c in contrasts)
    assert covered / 1000 >= binomial(0.95, 1000)[0]


def test_a_trial_in_two_rows_enters_the_variance_once() -> None:
    losses = np.random.default_rng(10).normal(size=(4, 3))
    losses[3] = losses[2]
    keys = np.array([[f"{min(v, 2)} {s}" for s in range(3)] for v in range(4)], object)
    twice, once = analyse(losses, 0, keys=keys), analyse(losses[:3], 0)
    assert (twice.seed_sd, twice.df, twice.pooled) == (once.seed_sd, once.df, once.pooled)
    assert twice.contrasts[2] == twice.contrasts[3]
