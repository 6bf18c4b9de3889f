"""Spearman's rank correlation of two measures of the same variants, with its interval. Needs no numpy.

The interval is Fisher's, tanh(artanh(rho) ± 1.96 se), with se^2 = (1 + rho^2 / 2) / (n - 3) (D. G. Bonett and T. A.
Wright, 2000, Psychometrika 65, pages 23-28). At |rho| = 1, where artanh is infinite, its inner end is that of the next
value that n ranks can have, 1 - 12 / (n^3 - n): one swap of two neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean
from typing import Any

FEWEST = 4  # pairs; with fewer there is no interval, and any rho says next to nothing


@dataclass(frozen=True)
class Correlation:
    """rho over `n` pairs, and the ends of its 95% interval; None where ranks or pairs do not allow it."""

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
    inner = min(abs(rho), 1 - 12 / (n**3 - n))
    half = NormalDist().inv_cdf(0.975) * math.sqrt((1 + rho * rho / 2) / (n - 3))
    low, high = math.tanh(math.atanh(inner) - half), math.tanh(math.atanh(inner) + half) if inner == abs(rho) else 1.0
    return Correlation(n, rho, *((low, high) if rho >= 0 else (-high, -low)))
