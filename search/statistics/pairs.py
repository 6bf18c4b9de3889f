"""The difference of two rows of a table that were named beforehand, by the noise of the whole table."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import scipy  # its special is imported when it is used: an eighth of a second

from archlab.search.statistics.contrast import Contrast, Floats, paired_difference, welch_difference
from archlab.search.statistics.intervals import Keys, layouts_of, pooled_variance, row_noise
from archlab.search.statistics.sequential import always_difference, planned_df


def pair_difference(
    losses: Floats,
    row: int,
    base: int,
    bases: Sequence[int],
    documents: tuple[float, int] | None,
    batches: Sequence[Hashable],
    keys: Keys,
    comparisons: int,
    always_valid: bool = False,
) -> Contrast | None:
    """Row less base of [variant, seed] losses, one of so many `comparisons` that hold together at 95%; None without a
    seed that both have.

    The noise of a row is that of the table, moderated as for the differences to its baselines, which `bases` names by
    row. Each interval has Bonferroni's level, 1 - 0.05 / comparisons, whatever the pairs share. `documents`, `batches`,
    `keys` and `always_valid` as in `archlab.search.statistics.intervals.analyse`.
    """
    known, everyone = documents or (0.0, 0), list(range(len(losses)))
    if batches[row] != batches[base]:
        if always_valid:
            return always_difference(losses[row], losses[base], None, known, comparisons)
        ours, theirs = (losses[place][np.isfinite(losses[place])] for place in (row, base))
        return welch_difference(ours, theirs, known, comparisons if min(len(ours), len(theirs)) > 2 else 0)
    layouts = layouts_of(losses, batches, everyone, keys)
    if always_valid:
        sigma2, df = pooled_variance(layouts)
        pooled = sigma2, df, planned_df(batches)
        return always_difference(losses[row], losses[base], pooled, known, comparisons)
    noise, variance, critical = row_noise(layouts, np.asarray(bases, np.intp), everyone, keys), None, 0.0
    if noise is not None:
        variance, own_df, _ = noise.of_difference(row, base)
        critical = float(scipy.special.stdtrit(own_df, 1 - 0.05 / (2 * comparisons)))
    return paired_difference(losses[row], losses[base], variance, critical, known, comparisons)
