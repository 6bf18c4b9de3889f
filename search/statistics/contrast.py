"""The difference of two variants from their losses by seed, paired or not, with both parts of its variance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy  # its special is imported when it is used: an eighth of a second
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MINIMUM_SEEDS = 3
"""With fewer pairs of seeds there is no interval."""


@dataclass(frozen=True)
class Contrast:
    """One variant's difference to the baseline; `half_width` is None where the seeds do not allow an interval."""

    pairs: int
    difference: float
    variance: float | None = None
    critical: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half the length of the interval, in the unit of the losses."""
        if self.variance is None or self.critical is None:
            return None
        return float(self.critical * np.sqrt(self.variance))


def document_variance(nll: Floats, size: Floats, nll_base: Floats, size_base: Floats) -> tuple[float, int]:
    """Variance of the difference of two loss ratios sum(nll) / sum(size) over documents, and its df = documents - 1.

    `nll` and `size` are [documents] of one test text, averaged over seeds; `size` counts tokens (or bytes). The same
    number of documents means the same documents, and the two ratios are linearised together (paired); otherwise the
    two samples are independent. Returns (0, 0) for fewer than two documents: nothing tells the variance then.
    """
    ours, theirs = _linearised(nll, size), _linearised(nll_base, size_base)
    count = min(len(ours), len(theirs))
    if count < 2:
        return 0.0, 0
    parts = [ours - theirs] if len(ours) == len(theirs) else [ours, theirs]
    return sum(float(len(e) / (len(e) - 1) * (e**2).sum()) for e in parts), count - 1


def _linearised(nll: Floats, size: Floats) -> Floats:
    """Each document's share in the error of sum(nll) / sum(size)."""
    total = size.sum()
    share: Floats = (nll - nll.sum() / total * size) / total
    return share


def satterthwaite(seeds: float, seeds_df: float, documents: float, documents_df: float) -> float:
    """Effective degrees of freedom of the sum of two independent variance estimates (F. E. Satterthwaite, 1946)."""
    below = seeds**2 / seeds_df + (documents**2 / documents_df if documents_df > 0 else 0.0)
    return (seeds + documents) ** 2 / below if below > 0 else seeds_df


def simultaneous_critical(
    seeds: Floats | float, documents: Floats | float, seeds_critical: float, documents_df: int, comparisons: int
) -> Floats:
    """The critical value for a variance with two parts: each part's own one, weighted by the variances.

    `seeds` and `documents` are the two parts of the variance of a difference. The documents' critical value is
    Bonferroni's t: every comparison has its own document variance, which Dunnett's common one is not.
    """
    if documents_df < 1:
        return np.full(np.shape(seeds), seeds_critical, np.float64)
    theirs = float(scipy.special.stdtrit(documents_df, 1 - 0.05 / (2 * comparisons)))
    a, b = np.asarray(seeds, np.float64), np.asarray(documents, np.float64)
    total = a + b
    share = np.divide(b, total, out=np.zeros(np.shape(total)), where=total > 0)
    return np.asarray(seeds_critical + share * (theirs - seeds_critical), np.float64)


def paired_difference(
    ours: Floats, base: Floats, variance: float | None, critical: float, documents: tuple[float, int], comparisons: int
) -> Contrast | None:
    """The mean paired difference over the seeds that both have; `variance` is that of one pair, None: unknown.

    None without a pair, and no interval with fewer than MINIMUM_SEEDS of them.
    """
    both = np.isfinite(ours) & np.isfinite(base)
    count = int(both.sum())
    if not count:
        return None
    contrast = Contrast(count, float((ours - base)[both].mean()))
    if variance is None or count < MINIMUM_SEEDS:
        return contrast
    return resolve(contrast, variance / count, critical, documents, comparisons)


def welch_difference(ours: Floats, base: Floats, documents: tuple[float, int], comparisons: int) -> Contrast | None:
    """The difference of two independent samples; with `comparisons` its Bonferroni-corrected interval."""
    count = min(len(ours), len(base))
    if not count:
        return None
    contrast = Contrast(count, float(ours.mean() - base.mean()))
    if not comparisons:
        return contrast
    one, other = (float(r.var(ddof=1)) / len(r) for r in (ours, base))
    df = satterthwaite(one, len(ours) - 1, other, len(base) - 1)
    critical = float(scipy.special.stdtrit(df, 1 - 0.05 / (2 * comparisons)))
    return resolve(contrast, one + other, critical, documents, comparisons)


def resolve(
    contrast: Contrast, seeds: float, critical: float, documents: tuple[float, int], comparisons: int
) -> Contrast:
    """`contrast` with its variance (both parts) and critical value."""
    variance, documents_df = documents
    return replace(
        contrast,
        variance=float(seeds + variance),
        critical=float(simultaneous_critical(seeds, variance, critical, documents_df, comparisons)),
    )
