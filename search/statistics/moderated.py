"""Noise per variant: each row's own seed variance, drawn towards that of the whole table.

y[v, s] = mu_v + beta_s + eps_vs, where eps_vs has a variance of its own in each row v. The residuals of a layout's
least squares fit give each row an estimate s_v^2 that is unbiased whatever the others' noise is: E[q] = A sigma^2, with
q_v the sum of a row's squared residuals, and A_vw the sum of the squared entries of the residual projection between two
rows (MINQUE, C. R. Rao, 1971; in complete layouts F. E. Grubbs, 1948). It has d_v = n_v - 1 - h_v degrees of freedom,
h_v the row's leverage on the seeds' effects; they add up to the D of all layouts. It is held within a factor of two of
q_v / d_v.

Few seeds say little of one row, so that it is moderated (G. K. Smyth, 2004, doi:10.2202/1544-6115.1027) by the variance
s_0^2 of all rows, on d0 degrees of freedom that are chosen here and not estimated:

    s~_v^2 = (d0 s_0^2 + d_v s_v^2) / (d0 + d_v),    on d0 + d_v degrees of freedom.

d0 = 1, and half of that for a baseline, whose error stands in every row. Estimated by the moments of log s_v^2, d0 is
infinite in most tables of three to five seeds, also where one variant is five times as noisy as the others.
`benchmarks/noise.py` compares the choices.

A row that no layout tells anything of has s_0^2 alone. The difference of two rows has the variance
(s~_v^2 + s~_b^2) / n. With w the two shares of it and c the part of it that comes from s_0^2, it has
1 / (w_v^2 / (d0_v + d_v) + w_b^2 / (d0_b + d_b) + c^2 / D) degrees of freedom (F. E. Satterthwaite, 1946), and D at
most. Two variants alone keep the t interval of their paired differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archlab.search.statistics.contrast import Floats
from archlab.search.statistics.layouts import TINY, fit

PRIOR_DF = 1.0
BASELINE_PRIOR_DF = 0.5

Layouts = list[tuple[NDArray[np.intp], Floats]]


def row_variances(losses: Floats) -> tuple[Floats, Floats]:
    """s_v^2 and d_v of the rows of one layout [variant, seed]; NaN: a missing cell. No row is empty."""
    found = fit(losses)
    squares = (found.residual**2).sum(1)
    leverage = np.trace(found.projection, axis1=1, axis2=2)
    df = found.count - 1 - leverage[found.kind]
    told = df > 1e-9
    pooled = np.divide(squares, df, out=np.zeros(len(df)), where=told)
    between = np.asarray(np.tensordot(found.projection, found.projection, ([1, 2], [2, 1])), np.float64)
    alone = np.zeros(len(leverage))
    alone[found.kind] = found.count - 1 - 2 * leverage[found.kind]
    own = _solved(between, alone, found.kind, found.rows, squares)
    return np.clip(own, pooled / 2, pooled * 2), np.where(told, df, 0.0)


def _solved(between: Floats, alone: Floats, kind: NDArray[np.intp], rows: NDArray[np.intp], squares: Floats) -> Floats:
    """sigma^2 of E[q] = A sigma^2, where A is `between` the patterns of two rows, plus `alone` of its own pattern on
    the diagonal; of several solutions the shortest.

    Rows of one pattern differ in `alone` only, so that A falls apart: into their means, and what is left of each row.
    """
    size = np.sqrt(rows)
    whole = between * np.outer(size, size) + np.diag(alone)
    total = np.bincount(kind, squares)
    means = np.linalg.pinv(whole, rcond=TINY, hermitian=True) @ (total / size) / size
    known = np.abs(alone) > TINY * np.linalg.norm(whole, 2)
    factor = np.divide(1.0, alone, out=np.zeros(len(alone)), where=known)
    found: Floats = means[kind] + (squares - (total / rows)[kind]) * factor[kind]
    return found


@dataclass(frozen=True)
class RowNoise:
    """Of each row of a table: its moderated variance, the degrees of freedom of that, and the part of it that is the
    table's, s_0^2 on `common_df`."""

    variance: Floats
    df: Floats
    common: Floats
    common_df: int

    def of_difference(self, row: int, base: int) -> tuple[float, float, float]:
        """s~_v^2 + s~_b^2, its degrees of freedom, and the correlation of differences to this baseline that have this
        row's noise."""
        both = [row, base]
        total = float(self.variance[both].sum())
        share = self.variance[both] / total if total > 0 else np.full(2, 0.5)
        common = float(self.common[both].sum()) / total if total > 0 else 1.0
        inverse = float((share**2 / self.df[both]).sum()) + common**2 / self.common_df
        return total, float(min(1 / inverse, self.common_df)), float(share[1])


def moderate(
    layouts: Layouts, sigma2: float, common_df: int, bases: NDArray[np.intp], twins: dict[int, int]
) -> RowNoise:
    """The noise of each row, given the layouts that rows stand in, whose pooled variance is `sigma2` on `common_df`.

    `bases` names the baseline of each row (itself: none). `twins` are rows without a trial of their own, with the row
    that has the same trials.
    """
    own, df = np.zeros(len(bases)), np.zeros(len(bases))
    for places, losses in layouts:
        own[places], df[places] = row_variances(losses)
    for twin, owner in twins.items():
        own[twin], df[twin] = own[owner], df[owner]
    prior = np.full(len(bases), PRIOR_DF)
    prior[bases[bases != np.arange(len(bases))]] = BASELINE_PRIOR_DF
    common = prior * sigma2 / (prior + df)
    return RowNoise(common + df * own / (prior + df), prior + df, common, common_df)


def expected_df(rows: int, layouts: int, seeds: int) -> float:
    """The degrees of freedom of a difference in a complete table of so many rows, were they equally noisy."""
    prior, df = np.array([PRIOR_DF, BASELINE_PRIOR_DF]), (seeds - 1) * (1 - layouts / rows)
    alike = RowNoise(np.ones(2), prior + df, prior / (prior + df), (rows - layouts) * (seeds - 1))
    return alike.of_difference(0, 1)[1]
