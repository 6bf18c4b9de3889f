"""Rank correlations of two measures of the same variants, Spearman's rho and Kendall's tau-b. Needs no numpy.

The intervals are Fisher's, tanh(artanh(r) ± 1.96 se): for rho with se^2 = (1 + rho^2 / 2) / (n - 3) (D. G. Bonett and
T. A. Wright, 2000, Psychometrika 65, pages 23-28), for tau with 0.437 / (n - 4) (E. C. Fieller, H. O. Hartley and E. S.
Pearson, 1957, Biometrika 44, pages 470-481). At |r| = 1, where artanh is infinite, its inner end is that of the next
value that n ranks can have, one swap of two neighbours: 1 - 12 / (n^3 - n) of rho, 1 - 4 / (n^2 - n) of tau.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, mean
from typing import Any

FEWEST = 4  # pairs; with fewer there is no interval, and any rho says next to nothing


@dataclass(frozen=True)
class Correlation:
    """rho (or tau) over `n` pairs, and the ends of its 95% interval; None where ranks or pairs do not allow it."""

    n: int
    rho: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.rho is None:
            return "there is none: " + (f"{self.n} pairs are too few" if self.n < FEWEST else "all are equal")
        return f"{self.rho:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {"n": self.n, "rho": self.rho, "low": self.low, "high": self.high}


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each, 1 for the lowest; equal ones share the mean of theirs. Infinite ones have ranks too."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed([*enumerate(ordered, 1)])}
    last = {value: place for place, value in enumerate(ordered, 1)}
    return [(first[value] + last[value]) / 2 for value in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> Correlation:
    """Pearson's correlation of the ranks of pairs, none of them NaN."""
    n = len(one)
    if n < FEWEST:
        return Correlation(n)
    a, b = ([rank - mean(found) for rank in found] for found in (ranks(one), ranks(other)))
    spread = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    if not spread:
        return Correlation(n)
    rho = max(-1.0, min(1.0, sum(x * y for x, y in zip(a, b, strict=True)) / spread))
    return _with_interval(n, rho, math.sqrt((1 + rho * rho / 2) / (n - 3)), 1 - 12 / (n**3 - n))


def kendall(one: Sequence[float], other: Sequence[float]) -> Correlation:
    """tau-b of pairs, none of them NaN: concordant less discordant pairs of pairs over the geometric mean of those that
    each of the two tells apart."""
    n = len(one)
    if n < FEWEST:
        return Correlation(n)
    signs = [  # which is larger; infinite ones are equal to each other
        tuple((values[i] > values[j]) - (values[i] < values[j]) for values in (one, other))
        for i, j in combinations(range(n), 2)
    ]
    apart = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    if not apart:
        return Correlation(n)
    tau = max(-1.0, min(1.0, sum(a * b for a, b in signs) / apart))
    if n == FEWEST:  # too few for an interval
        return Correlation(n, tau)
    return _with_interval(n, tau, math.sqrt(0.437 / (n - 4)), 1 - 4 / (n**2 - n))


def _with_interval(n: int, value: float, error: float, swapped: float) -> Correlation:
    """A correlation with Fisher's interval, given the error of artanh and what one swap of two neighbours leaves."""
    inner, half = min(abs(value), swapped), NormalDist().inv_cdf(0.975) * error
    low, high = math.tanh(math.atanh(inner) - half), math.tanh(math.atanh(inner) + half) if inner == abs(value) else 1.0
    return Correlation(n, value, *((low, high) if value >= 0 else (-high, -low)))
