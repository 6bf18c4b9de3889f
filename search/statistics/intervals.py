"""How far can a table of a few seeds be trusted? Pooled seed noise, document noise, and intervals that hold together.

The losses of a study are a randomized block: seed s gives every variant the same initial values where they share
parameters and the same batches, so that y[v, s] = mu_v + beta_s + eps_vs. A variant's difference to the baseline is
a mean over seeds of paired differences, in which beta_s cancels. Its variance has two parts:

* seeds: (sigma_v^2 + sigma_b^2) / n. Three seeds of one variant say next to nothing about its own noise, and pooling
  that of all is wrong where one is noisier: each row has its own variance, moderated by that of the whole table
  (archlab.search.statistics.moderated). Variants with other batches have other beta_s: each set of batches is a layout
  of its own, and the table's variance is that of all layouts, squares and degrees of freedom summed.
* documents: the test set is a sample of documents, and a variant may be better on some of them only. This is the
  variance of the token-weighted mean of per-document paired differences, each averaged over the seeds.

They are added. Averaged over finitely many seeds, a document's difference still holds seed noise that is already in
the first part; the interval is therefore wide (conservative) where that noise varies from document to document.

The intervals of one table hold together, with 95% confidence for all comparisons with the baseline at once
(C. W. Dunnett, 1955, doi:10.1080/01621459.1955.10501294), each with its own degrees of freedom. The differences are
taken to be as correlated as the baseline's share in the row's variance, a half at most. With documents, the critical
value is the mean of the two parts' own ones, weighted by their variances (W. G. Cochran and G. M. Cox, 1950). The null
simulation in the tests holds us to this.

A variant that saw other batches than its baseline does not pair and gets Welch's interval. Where a table has both
kinds, the error of 5% is split by their numbers, m' of m: Dunnett's level is 1 - 0.05 m'/m, each Welch's 1 - 0.05/m.

A bootstrap over three seeds would not do. Three paired differences that happen to have one sign, which is one case in
four without any effect, have only resampled means of that sign: its "95%" covers 75% for one comparison, and 31% for
the five comparisons of a table together.

Seeds that are added until a difference is resolved have one variance, pooled over all rows: where one is noisier its
interval is too short and the others' are too long; `uneven_noise` tests for that, and the report says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its special is imported when it is used: an eighth of a second
from numpy.typing import NDArray

from archlab.search.statistics.contrast import MINIMUM_SEEDS, Contrast, Floats, paired_difference, welch_difference
from archlab.search.statistics.dunnett import dunnett_critical
from archlab.search.statistics.layouts import fit
from archlab.search.statistics.moderated import Layouts, RowNoise, moderate
from archlab.search.statistics.sequential import always_difference, planned_df

Documents = Sequence[tuple[float, int] | None] | None
Baselines = int | Sequence[int]  # one row for all, or a row for each
Keys = NDArray[np.object_]


@dataclass(frozen=True)
class Analysis:
    """All comparisons of one table. Standard deviations are in the unit of the losses, None where nothing tells them.

    `seed_sd` is the noise of one trial around its variant and its seed (sigma; around its variant where no two rows
    pair), pooled over `pooled` variants with `df`; by it each row's own is `moderated`. `seed_spread` is that around
    its variant alone (beta_s included), `document_sd` the root mean document variance of a difference. `unpaired` are
    the rows with Welch's interval.
    """

    contrasts: tuple[Contrast | None, ...]
    seed_sd: float | None
    seed_spread: float | None
    df: int
    document_sd: float | None
    comparisons: int
    pooled: int
    unpaired: tuple[int, ...] = ()
    uneven: tuple[int, float] | None = None
    always_valid: bool = False  # the intervals hold at every number of seeds at once
    moderated: bool = False  # each row's noise is its own as far as its seeds tell; else one for all

    @property
    def resolvable(self) -> float | None:
        """The widest half-width: a larger observed difference leaves the noise in every row that has an interval."""
        widths = [c.half_width for c in self.contrasts if c is not None and c.half_width is not None]
        return max(widths, default=None)


def unbalanced_residual_variance(losses: Floats) -> tuple[float | None, int]:
    """sigma^2 and df of one layout [variant, seed] with missing cells (NaN), by least squares; None without df."""
    losses = losses[np.isfinite(losses).any(1)]
    if not losses.size:
        return None, 0
    found = fit(losses)
    df = int(found.count.sum() - len(losses) - found.rank)
    return (float((found.residual**2).sum() / df), df) if df else (None, 0)


def pooled_spread(losses: Floats) -> float | None:
    """The standard deviation over seeds within a variant, pooled over the rows of [variant, seed]; NaN is missing."""
    rows = [row[np.isfinite(row)] for row in losses]
    df = sum(max(len(row) - 1, 0) for row in rows)
    squares = sum(float(((row - row.mean()) ** 2).sum()) for row in rows if len(row) > 1)
    return float(np.sqrt(squares / df)) if df else None


def uneven_noise(losses: Floats) -> tuple[Floats, NDArray[np.intp], Floats]:
    """Is one variant noisier than the others? For layouts [..., variant, seed] with at least three variants.

    Returns (p, which, ratio): Bonferroni-corrected p-value, the noisiest variant, and its noise (sd) over the others'.
    With q_v = K/(K-1) times a row's residual squares, q_v has n - 1 degrees of freedom and the rest of the residual
    sum of squares, independent of it, (K - 2)(n - 1); their ratio is an exact F under equal noise.
    """
    variants, seeds = losses.shape[-2:]
    if variants < 3 or seeds < 2:
        raise ValueError(f"three variants and two seeds are needed, received {variants} and {seeds}")
    variant, seed = losses.mean(-1, keepdims=True), losses.mean(-2, keepdims=True)
    squares = ((losses - variant - seed + losses.mean((-2, -1), keepdims=True)) ** 2).sum(-1)
    row = squares * variants / (variants - 1)
    rest = np.maximum(squares.sum(-1, keepdims=True) - row, 1e-300)
    ratio = row * (variants - 2) / rest
    which = ratio.argmax(-1)
    top = np.take_along_axis(ratio, which[..., None], -1)[..., 0]
    p = np.minimum(1.0, variants * scipy.special.fdtrc(seeds - 1, (variants - 2) * (seeds - 1), top))
    return p, which, np.sqrt(top)


def analyse(
    losses: Floats,
    baseline: Baselines,
    documents: Documents = None,
    batches: Sequence[Hashable] | None = None,
    keys: Keys | None = None,
    always_valid: bool = False,
) -> Analysis:
    """The comparisons of [variant, seed] losses with row `baseline`, or each row's own; NaN: a missing trial.

    A baseline is compared with itself, which is no comparison, or with another baseline: what lacks a component with
    what has all, and that with what has none. A row pairs with its baseline where `batches` (a value per row; None: all
    equal) has the same value for both; other rows get Welch's interval. `documents` holds per variant what
    `document_variance` gave, or None. `keys` names the trial of each cell: one that stands in two rows enters the
    variance once.
    Missing cells: a variant's difference takes its complete pairs, variances come from the unbalanced fit, and the
    correlation of the differences is the smallest of any two of them (fewer shared seeds, less correlated, wider
    intervals; none between different baselines).
    Intervals that are `always_valid` hold at every number of seeds at once (archlab.search.statistics.sequential), for
    all comparisons, finished or not: what is corrected for must not depend on what was seen.
    """
    bases = np.broadcast_to(np.asarray(baseline, np.intp), len(losses))
    assert (bases[bases[bases]] == bases[bases]).all(), "the baseline of a baseline has no other baseline"
    groups: Sequence[Hashable] = [0] * len(losses) if batches is None else batches
    known = [each or (0.0, 0) for each in ([None] * len(losses) if documents is None else documents)]
    others = [v for v, base in enumerate(bases) if v != base]
    paired = [v for v in others if groups[v] == groups[bases[v]]]
    unpaired = [v for v in others if v not in paired]
    pool = sorted({*paired, *(int(bases[v]) for v in paired)})
    layouts = layouts_of(losses, groups, pool, keys)
    sigma2, df = pooled_variance(layouts)
    if always_valid:
        comparisons, planned = len(others), planned_df(groups[v] for v in pool)
        contrasts: list[Contrast | None] = [None] * len(losses)
        for v in others:
            pooled = (sigma2, df, planned) if v in paired else None
            contrasts[v] = always_difference(losses[v], losses[bases[v]], pooled, known[v], comparisons)
    else:
        noise = row_noise(layouts, bases, pool, keys)
        contrasts, comparisons = _of_fixed_seeds(losses, bases, paired, unpaired, noise, known)
    spread, enter = pooled_spread(losses), [layout for _, layout in layouts] if paired else [losses]
    pooled_rows = sum(int(np.isfinite(rows).any(1).sum()) for rows in enter)
    return Analysis(
        contrasts=tuple(contrasts),
        seed_sd=(None if sigma2 is None else float(np.sqrt(sigma2))) if paired else spread,
        seed_spread=spread,
        df=df if paired else int(np.maximum(np.isfinite(losses).sum(1) - 1, 0).sum()),
        document_sd=_document_sd(contrasts, known),
        comparisons=comparisons,
        pooled=pooled_rows,
        unpaired=tuple(unpaired),
        uneven=_uneven(layouts) if always_valid else None,
        always_valid=always_valid,
        moderated=bool(paired) and not always_valid and pooled_rows > 2,
    )


def _of_fixed_seeds(
    losses: Floats,
    bases: NDArray[np.intp],
    paired: list[int],
    unpaired: list[int],
    noise: RowNoise | None,
    documents: Sequence[tuple[float, int]],
) -> tuple[list[Contrast | None], int]:
    """The contrasts of a table whose number of seeds was not chosen by its results, and how many have an interval."""
    here = np.isfinite(losses)
    pairs = here & here[bases]
    sure = [v for v in paired if pairs[v].sum() >= MINIMUM_SEEDS and noise is not None]
    welch = [v for v in unpaired if min(here[v].sum(), here[bases[v]].sum()) >= MINIMUM_SEEDS]
    comparisons = len(sure) + len(welch)
    level = 1 - 0.05 * len(sure) / max(comparisons, 1)  # their share of the error is that of their comparisons
    most = _smallest_correlation(pairs[sure], bases[sure]) if sure else 0.0
    contrasts: list[Contrast | None] = [None] * len(losses)
    for v in paired:
        variance, critical = None, 0.0
        if noise is not None and v in sure:
            variance, df, correlation = noise.of_difference(v, int(bases[v]))
            critical = dunnett_critical(len(sure), _down(df, 20), _down(min(correlation, most), 20), level)
        contrasts[v] = paired_difference(losses[v], losses[bases[v]], variance, critical, documents[v], comparisons)
    for v in unpaired:
        ours, base = (losses[row][here[row]] for row in (v, bases[v]))
        contrasts[v] = welch_difference(ours, base, documents[v], comparisons if v in welch else 0)
    return contrasts, comparisons


def _down(number: float, steps: int) -> float:
    """To the next lower of so many steps to one: a wider interval, and few critical values to compute for a table."""
    return float(np.floor(number * steps + 1e-9) / steps)


def row_noise(layouts: Layouts, bases: NDArray[np.intp], pool: list[int], keys: Keys | None) -> RowNoise | None:
    """The moderated noise of the rows of `pool`, which stand in `layouts`; None without degrees of freedom."""
    sigma2, df = pooled_variance(layouts)
    if sigma2 is None:
        return None
    placed = [int(row) for rows, _ in layouts for row in rows]
    twins = {}
    if keys is not None:
        owners = {key: row for row in reversed(placed) for key in keys[row] if key is not None}
        lost = {row: [owners[key] for key in keys[row] if key in owners] for row in pool if row not in placed}
        twins = {row: found[0] for row, found in lost.items() if found}
    return moderate(layouts, sigma2, df, bases, twins)


def layouts_of(losses: Floats, groups: Sequence[Hashable], pool: list[int], keys: Keys | None) -> Layouts:
    """The rows of `pool` by batches, as (rows, losses), no trial twice, no row alone."""
    losses = losses.copy()
    if keys is not None:
        seen: set[object] = {None}
        for row in pool:
            losses[row, [key is not None and key in seen for key in keys[row]]] = np.nan
            seen.update(keys[row])
    found = []
    for group in dict.fromkeys(groups[v] for v in pool):
        rows = np.array([v for v in pool if groups[v] == group and np.isfinite(losses[v]).any()], np.intp)
        if len(rows) > 1:
            found.append((rows, losses[rows]))
    return found


def pooled_variance(layouts: Layouts) -> tuple[float | None, int]:
    """sigma^2 over several layouts and its df, both summed over them; None without df."""
    parts = [unbalanced_residual_variance(layout) for _, layout in layouts]
    df = sum(part for _, part in parts)
    return (sum((variance or 0.0) * part for variance, part in parts) / df if df else None), df


def _smallest_correlation(pairs: NDArray[np.bool_], bases: NDArray[np.intp]) -> float:
    """Of any two mean differences: half of the seeds that both have, over the geometric mean of those they have.

    Differences to different baselines count as 0, whatever trials they share: independence is the worst case for
    simultaneous two-sided intervals (Sidak 1967, JASA 62, pages 626-633).
    """
    different = np.unique(np.column_stack([bases, pairs]), axis=0)  # few, however many rows there are
    bases, pairs = different[:, 0], different[:, 1:].astype(np.bool_)
    shared = pairs.astype(np.float64) @ pairs.T.astype(np.float64)
    counts = np.diag(shared)
    related = bases[:, None] == bases[None, :]
    return float((0.5 * related * shared / np.sqrt(np.outer(counts, counts))).min())


def _document_sd(contrasts: Sequence[Contrast | None], documents: Sequence[tuple[float, int]]) -> float | None:
    """The root mean document variance of the differences with an interval, as far as it is known."""
    both = zip(contrasts, documents, strict=True)
    known = [variance for each, (variance, df) in both if each is not None and each.half_width is not None and df > 0]
    return float(np.sqrt(np.mean(known))) if known else None


def _uneven(layouts: Layouts) -> tuple[int, float] | None:
    """The variant whose noise is larger than its layout's others' (p < 0.01), and by what factor; None: no such."""
    found = []
    for rows, losses in layouts:
        seeds = np.isfinite(losses).all(0)
        if len(rows) > 2 and seeds.sum() > 1:
            p, which, ratio = uneven_noise(losses[:, seeds])
            found.append((float(p), int(rows[int(which)]), float(ratio)))
    if not found:
        return None
    least, row, factor = min(found)
    return (row, factor) if least * len(found) < 0.01 else None
