"""The least squares fit of one layout [variant, seed] with missing cells, y[v, s] = mu_v + beta_s, in time that is
proportional to its rows.

The variants' means are projected out; what is left is a regression on the seeds. Its normal equations are sums over the
rows, and rows that miss the same cells add the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TINY = 1e-9
"""The part of the largest eigenvalue below which one is none."""


@dataclass(frozen=True)
class Fit:
    """Of a layout without an empty row.

    `count` are the cells of each row, `residual` [variant, seed] what the fit leaves, zero in missing cells, and `rank`
    the number of seeds' effects that it could tell. `kind` is the pattern of missing cells that each row has, `rows`
    how many have each, and `projection` [pattern, seed, seed] of each what makes effects of its centred losses.
    """

    count: NDArray[np.intp]
    residual: Floats
    rank: int
    kind: NDArray[np.intp]
    rows: NDArray[np.intp]
    projection: Floats


def fit(losses: Floats) -> Fit:
    """The fit of losses [variant, seed], no row empty; NaN: a missing cell."""
    here = np.isfinite(losses)
    count = here.sum(1)
    known = np.where(here, losses, 0.0)
    centred = np.where(here, known - (known.sum(1) / count)[:, None], 0.0)
    patterns, kind, rows = np.unique(here, axis=0, return_inverse=True, return_counts=True)
    kind = kind.reshape(-1)
    cells = patterns.sum(1)[:, None, None]
    gram = patterns[:, :, None] * np.eye(losses.shape[1]) - patterns[:, :, None] * patterns[:, None, :] / cells
    values, vectors = np.linalg.eigh(np.tensordot(rows, gram, 1))
    told = values > TINY * values.max(initial=0.0)
    inverse = (vectors[:, told] / values[told]) @ vectors[:, told].T
    effect = inverse @ centred.sum(0)
    residual = np.where(here, centred - effect + (here @ effect / count)[:, None], 0.0)
    return Fit(count, residual, int(told.sum()), kind, rows, gram @ inverse)
