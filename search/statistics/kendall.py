"""Kendall's rank correlation tau-b of two measures of the same variants, with its interval. Needs no numpy.

The interval is Fisher's, tanh(artanh(tau) ± 1.96 se), with se^2 = 0.437 / (n - 4) (E. C. Fieller, H. O. Hartley and
E. S. Pearson, 1957, Biometrika 44, pages 470-481). At |tau| = 1, where artanh is infinite, its inner end is that of the
next value that n ranks can have, 1 - 4 / (n^2 - n): one swap of two neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist

from archlab.search.statistics.spearman import FEWEST, Correlation

FEWEST_FOR_INTERVAL = 5


def kendall(one: Sequence[float], other: Sequence[float]) -> Correlation:
    """tau-b of pairs, none of them NaN: concordant less discordant pairs of pairs over the geometric mean of those that
    each of the two tells apart."""
    n = len(one)
    if n < FEWEST:
        return Correlation(n)
    signs = [(_sign(one[i], one[j]), _sign(other[i], other[j])) for i, j in combinations(range(n), 2)]
    apart = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    if not apart:
        return Correlation(n)
    tau = max(-1.0, min(1.0, sum(a * b for a, b in signs) / apart))
    if n < FEWEST_FOR_INTERVAL:
        return Correlation(n, tau)
    inner = min(abs(tau), 1 - 4 / (n**2 - n))
    half = NormalDist().inv_cdf(0.975) * math.sqrt(0.437 / (n - 4))
    low, high = math.tanh(math.atanh(inner) - half), math.tanh(math.atanh(inner) + half) if inner == abs(tau) else 1.0
    return Correlation(n, tau, *((low, high) if tau >= 0 else (-high, -low)))


def _sign(one: float, other: float) -> int:
    """Which is larger; infinite ones are equal to each other."""
    return (one > other) - (one < other)
