"""What the losses of a champion and a challenger say, at any number of seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy  # its special is imported when it is used

from archlab.search.statistics.contrast import Floats
from archlab.search.statistics.intervals import unbalanced_residual_variance
from archlab.search.statistics.sequential import MINIMUM_PAIRS, TUNED_AT, mixture_critical, narrowest_spread

FUTILE = 0.05  # the chance of error at which a challenger is given up as worse, or as equivalent
_ALIKE = 0.95  # up to this quantile of F a pair's own noise is taken for that of all
_KNOWN_DF = 2  # below that nothing is said
_PLANNED_DF = 2 * (TUNED_AT - 1)  # of a round alone: three rows at so many seeds


@dataclass(frozen=True)
class Seen:
    """The mean paired difference over `seeds` seeds, in nats per token (negative: the challenger has the lower loss).

    `to_keep` and `to_give_up` are its half-widths at the level that keeping it takes and at FUTILE's, infinite where
    there is no interval yet; `needed` is the first at the most seeds that it may get, `error` its standard error now.
    """

    seeds: int
    difference: float
    error: float
    to_keep: float
    to_give_up: float
    needed: float

    def verdict(self, margin: float | None) -> str | None:
        """better, worse, equivalent within ±margin, or hopeless; None while more seeds may tell.

        It is hopeless where it would not be kept after all its seeds, were it better by a standard error than it
        seems. To stop there makes no keep more likely: the level of keeping holds whenever one stops.
        """
        if self.difference < -self.to_keep:
            return "better"
        if self.difference > self.to_give_up:
            return "worse"
        if margin is not None and abs(self.difference) + self.to_give_up < margin:
            return "equivalent"
        return "hopeless" if self.difference - self.error > -self.needed else None

    def shown(self, verdict: str) -> float | None:
        """The half-width of the interval that the verdict rests on."""
        half = self.to_keep if verdict == "better" else self.to_give_up
        return half if np.isfinite(half) else None


def judge(losses: Floats, row: int, base: int, level: float, most: int) -> Seen | None:
    """Row less base of validation losses [variant, seed], NaN where there is none; None without a paired seed, or where
    next to nothing is known of the noise.

    The interval is that of archlab.search.statistics.sequential, valid at every number of seeds, with the noise of all
    rows: what was tried earlier helps to know it. A pair that is noisier than chance has it counts with its own noise.
    `most` seeds are as many as it may get.
    """
    paired = np.isfinite(losses[row]) & np.isfinite(losses[base])
    count = int(paired.sum())
    variance, df = unbalanced_residual_variance(losses)
    if not count or variance is None or df < _KNOWN_DF:
        return None
    differences = (losses[row] - losses[base])[paired]
    noise, own = 2 * variance, float(differences.var(ddof=1)) if count > 1 else 0.0
    if count > 1 and own > noise * float(scipy.special.fdtri(count - 1, df, _ALIKE)):
        noise = own
    _, before = unbalanced_residual_variance(np.delete(losses, row, axis=0))

    def half_width(pairs: int, df: int, level: float) -> float:
        if pairs < MINIMUM_PAIRS:
            return math.inf
        spread = narrowest_spread(before + _PLANNED_DF, level) * pairs / TUNED_AT
        return math.sqrt(noise / pairs) * mixture_critical(df, level, spread)

    return Seen(
        seeds=count,
        difference=float(differences.mean()),
        error=math.sqrt(noise / count),
        to_keep=half_width(count, df, level),
        to_give_up=half_width(count, df, FUTILE),
        needed=half_width(most, df + most - count, level),
    )
