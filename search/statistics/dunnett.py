"""Dunnett's critical value: several differences to one baseline, two-sided, all at once, for any real df."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import scipy  # its special and its optimize are imported when they are used: half a second
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def dunnett_probability(critical: float, comparisons: int, df: float, correlation: float = 0.5) -> float:
    """P(max_i |T_i| <= critical) of a multivariate t with `comparisons` equicorrelated members and any real df > 0.

    With a common standard normal z and s = chi_df / sqrt(df), the members are independent:
    P = E_s E_z [Phi((sqrt(r) z + c s) / sqrt(1 - r)) - Phi((sqrt(r) z - c s) / sqrt(1 - r))]^k.
    Gauss-Legendre over log s, trapezoids over z, in which it is even; right to 1e-9 for df >= 1. `df` may be infinite.
    """
    z = np.linspace(0.0, 9.0, 73)
    weight_z = np.exp(-0.5 * z * z) * np.sqrt(2 / np.pi) * (z[1] - z[0])
    weight_z[0] /= 2
    s, weight_s = _chi_nodes(df)
    shift = np.sqrt(correlation) * z
    scale = np.sqrt(1 - correlation)
    reach = critical * s[:, None]
    inside = scipy.special.ndtr((shift + reach) / scale) - scipy.special.ndtr((shift - reach) / scale)
    return float(weight_s @ (inside**comparisons @ weight_z))


@lru_cache(maxsize=1024)
def _chi_nodes(df: float) -> tuple[Floats, Floats]:
    """Nodes s and weights of the law of chi_df / sqrt(df)."""
    if df > 1e7:
        return np.ones(1), np.ones(1)
    low, high = np.log(np.sqrt(scipy.special.chdtri(df, np.array([1 - 1e-13, 1e-13])) / df))
    x, weight = _legendre()
    x = 0.5 * (high - low) * x + 0.5 * (high + low)
    log_density = (
        df * x - 0.5 * df * np.exp(2 * x) + np.log(2.0) + 0.5 * df * np.log(df / 2) - scipy.special.gammaln(df / 2)
    )
    return np.exp(x), weight * 0.5 * (high - low) * np.exp(log_density)


@cache
def _legendre() -> tuple[Floats, Floats]:
    """Nodes and weights of Gauss and Legendre in [-1, 1]."""
    x, weight = np.polynomial.legendre.leggauss(128)
    return x, weight


@lru_cache(maxsize=4096)
def dunnett_critical(comparisons: int, df: float, correlation: float = 0.5, level: float = 0.95) -> float:
    """The two-sided simultaneous critical value of `comparisons` differences to one baseline, for any real df.

    Raises ValueError for fewer than one comparison, df <= 0, or a correlation outside [0, 1).
    """
    if comparisons < 1 or not df > 0 or not 0 <= correlation < 1:
        raise ValueError(
            f"a critical value needs comparisons >= 1, df > 0 and correlation in [0, 1); "
            f"received {comparisons}, {df}, {correlation}"
        )
    bounded = min(df, 1e8)
    one = float(scipy.special.stdtrit(bounded, 0.5 + level / 2))
    if comparisons == 1:
        return one
    bonferroni = float(scipy.special.stdtrit(bounded, 1 - (1 - level) / (2 * comparisons)))

    def excess(critical: float) -> float:
        """0 at the critical value; as a logarithm it is nearly straight, which takes fewer steps."""
        return float(np.log((1 - dunnett_probability(critical, comparisons, df, correlation)) / (1 - level)))

    return float(scipy.optimize.brentq(excess, 0.99 * one, 1.01 * bonferroni, xtol=1e-10))
