"""Intervals that hold at every number of seeds at once: seeds may be added until a difference is resolved.

A fixed-n interval that is looked at after every seed excludes the truth far more often than it says. Here all intervals
of a table hold together at all n >= 2 with 95%, however the seeds were stopped (a confidence sequence).

The layout is that of `intervals`: y[v, s] = mu_v + beta_s + eps_vs, a linear model, in which the mean paired
difference d over n seeds has variance v sigma^2, v = 2 / n, and sigma^2 is estimated by s^2 on nu degrees of freedom,
pooled over all variants. Against delta = delta_0 stands the mixture of all delta ~ N(delta_0, g sigma^2). With the
right-invariant prior on the rest (the other means, the seeds' effects, log sigma) the ratio of the marginal likelihoods
of t = (d - delta_0) / (s sqrt(v)) is, with r = v / (v + g),

    E_n = sqrt(r) [(1 + t^2 / nu) / (1 + r t^2 / nu)]^((nu + 1) / 2).

It is a martingale in n of expectation 1 under delta_0, whatever the nuisances (M. Lindon, D. W. Ham, M. Tingley and I.
Bojinov, arXiv:2210.08589; for one mean T. L. Lai, 1976, and H. Wang and A. Ramdas, arXiv:2310.03722). It exceeds
1 / alpha at any n with a chance of at most alpha (J. Ville, 1939): what it leaves over is the interval, whose
half-width has a closed form. Where nu is too small for E_n to reach 1 / alpha at all, there is no interval yet.

g is a choice that must not look at the data; it moves the width from few seeds to many. It is the one that makes the
interval narrowest at TUNED_AT seeds of a complete table. Each of the m comparisons has alpha = 0.05 / m (Bonferroni).

The variance of the documents is added as in a table of fixed seeds: the test set is drawn once, so that its critical
value is that of one look, and the two parts' own are weighted by their variances.

A variant that saw other batches than its baseline pairs with nothing. Seeds of one number are taken as pairs all the
same, and the interval is that of one mean with the differences' own variance on n - 1 degrees of freedom: exact for
unequal noise too, and wide below five seeds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from functools import lru_cache

import numpy as np
import scipy  # its optimize is imported when it is used: half a second

from archlab.search.statistics.contrast import Contrast, Floats, resolve

MINIMUM_PAIRS = 2
TUNED_AT = 4
"""The number of seeds at which the interval is as narrow as its kind can be."""


def mixture_critical(df: float, alpha: float, spread: float) -> float:
    """The |t| at which E_n = 1 / alpha; `spread` is g / v. Infinite where E_n stays below for every t.

    E_n = 1 / alpha gives (1 + x) / (1 + r x) = A = (1 / (alpha^2 r))^(1 / (nu + 1)) for x = t^2 / nu.
    """
    if not df > 0 or not 0 < alpha < 1 or not spread > 0:
        raise ValueError(f"needs df > 0, 0 < alpha < 1 and spread > 0; received {df}, {alpha}, {spread}")
    ratio = math.exp((math.log1p(spread) - 2 * math.log(alpha)) / (df + 1))
    left = 1 - ratio / (1 + spread)
    return math.sqrt(df * (ratio - 1) / left) if left > 0 else math.inf


@lru_cache(maxsize=1024)
def narrowest_spread(df: float, alpha: float) -> float:
    """The spread g / v with the smallest critical value."""

    def critical(log_spread: float) -> float:
        return min(mixture_critical(df, alpha, math.exp(log_spread)), 1e9 - log_spread)

    return math.exp(
        scipy.optimize.minimize_scalar(critical, bounds=(0.0, 30.0), method="bounded", options={"xatol": 1e-9}).x
    )


def always_valid_critical(pairs: int, df: float, planned_df: float, comparisons: int) -> float:
    """The critical value of a difference over `pairs` seeds; `planned_df` is that of the whole table at TUNED_AT seeds.

    g stays the same while seeds are added, so g / v grows with the pairs.
    """
    alpha = 0.05 / comparisons
    return mixture_critical(df, alpha, narrowest_spread(planned_df, alpha) * pairs / TUNED_AT)


def planned_df(groups: Iterable[Hashable]) -> int:
    """The degrees of freedom of a complete table at TUNED_AT seeds, given the batches of each of its rows."""
    found = list(groups)
    return (len(found) - len(set(found))) * (TUNED_AT - 1)


def always_difference(
    ours: Floats,
    base: Floats,
    pooled: tuple[float | None, int, int] | None,
    documents: tuple[float, int],
    comparisons: int,
) -> Contrast | None:
    """The mean difference over the seeds that both have, with its always-valid interval where there can be one.

    `pooled` is the noise of one trial with its degrees of freedom, now and as planned; None: what does not pair has the
    differences' own variance.
    """
    both = np.isfinite(ours) & np.isfinite(base)
    count = int(both.sum())
    if not count:
        return None
    differences = (ours - base)[both]
    contrast = Contrast(count, float(differences.mean()))
    if pooled is not None:
        sigma2, df, planned = pooled
        variance = 2 * (sigma2 or 0.0) / count
    else:
        variance, df, planned = float(differences.var(ddof=1)) / count if count > 1 else 0.0, count - 1, TUNED_AT - 1
    if count < MINIMUM_PAIRS or df <= 0:
        return contrast
    critical = always_valid_critical(count, df, planned, comparisons)
    return resolve(contrast, variance, critical, documents, comparisons) if math.isfinite(critical) else contrast
