"""Which variance keeps 95% where variants are not equally noisy, and what the seed that chose the rate does to a table.

    python benchmarks/noise.py                    # both, a minute or two on one core
    python benchmarks/noise.py --studies 1000     # coarser

Simulated are tables of fixed seeds of K variants, the first of them the baseline, with the noise of a trial 1: equal;
five times as large (sd) in one variant, in the baseline, or in half of the variants; or five times as large in one
trial of twenty. Counted are the tables of which every interval covers its true difference, the variants that are
resolved at a true difference of 3, and the mean half-width of an interval. The ways to the variance of a difference:

* pooled: the residuals of all variants x seeds, Dunnett's critical value;
* own: that of the paired differences, t on n - 1 degrees of freedom, Bonferroni;
* limma: that of the paired differences, moderated (G. K. Smyth, 2004), d0 and s0 by the moments of log s^2;
* by moments: row variances of the two-way layout, moderated with that d0;
* moderated: row variances with d0 = 1, half of it for the baseline (archlab.search.statistics.moderated).

The second simulation has equal variants of which each takes the best of several rates by the validation loss of the
first seed. The loss is quadratic in the log rate, the best rate lies anywhere on the grid, and its neighbours are worse
by 0 to 3; noise of validation and test have the correlation 0.9. Counted are the tables with an interval that misses
the true difference of the variants at the rates that they took, and those with one that misses 0, the difference of the
variants at one rate: the largest share over the curvatures. That seed counts as a repeat; it counts, and a
parabola through the losses of all rates chooses; it is left out; other seeds are the repeats; or it counts, and a
second seed decides between its two best rates, as in a study, or two seeds or all of them choose among all rates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import special

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from archlab.search.statistics.dunnett import dunnett_critical  # noqa: E402
from archlab.search.statistics.moderated import BASELINE_PRIOR_DF, PRIOR_DF  # noqa: E402

Floats = NDArray[np.float64]
VARIANTS, SEEDS = (2, 3, 4, 6, 10, 14), (3, 4, 5)
LOUDER, PLANTED = 5.0, 3.0
DF = np.array([0.5, 0.7, 1, 1.2, 1.5, 1.8, 2, 2.3, 2.6, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 100, 1e8])
CORRELATIONS = np.linspace(0, 0.5, 6)


def draw(rng: np.random.Generator, noise: str, shape: tuple[int, int, int]) -> Floats:
    """The noise of trials [study, variant, seed]; what a seed does to all variants drops out of everything here."""
    found = rng.normal(size=shape)
    rows = {
        "one variant": slice(1, 2),
        "the baseline": slice(0, 1),
        "half of the variants": slice(1, 1 + shape[1] // 2),
    }
    if noise in rows:
        found[:, rows[noise]] *= LOUDER
    if noise == "bad seeds":
        found *= np.where(rng.random(shape) < 0.05, LOUDER, 1.0)
    return found


NOISES = ("equal", "one variant", "the baseline", "half of the variants", "bad seeds")


@lru_cache(maxsize=64)
def _criticals(comparisons: int) -> Floats:
    """Logarithms of Dunnett's critical values [correlation, degrees of freedom], these from many to few."""
    table = [[dunnett_critical(comparisons, df, r) for df in DF[::-1]] for r in CORRELATIONS]
    return np.log(table)


def critical(comparisons: int, df: Floats, correlation: Floats | float = 0.5) -> Floats:
    """Dunnett's, between tabulated ones; right to half a percent."""
    shape = np.broadcast_shapes(np.shape(df), np.shape(correlation))
    inverse, place = 1 / np.clip(np.broadcast_to(df, shape), DF[0], DF[-1]), np.broadcast_to(correlation, shape) * 10
    low = np.clip(place.astype(int), 0, len(CORRELATIONS) - 2)
    table = np.stack([np.interp(inverse, 1 / DF[::-1], row) for row in _criticals(comparisons)])
    ends = [np.take_along_axis(table, (low + step)[None], 0)[0] for step in (0, 1)]
    return np.asarray(np.exp(ends[0] + (place - low) * (ends[1] - ends[0])))


def pooled(losses: Floats) -> Floats:
    """Half-widths [study, variant but the baseline], of one variance for all."""
    studies, rows, seeds = losses.shape
    df = (rows - 1) * (seeds - 1)
    sigma2 = row_squares(losses).sum(1) / df
    half = critical(rows - 1, np.array([float(df)])) * np.sqrt(2 * sigma2 / seeds)
    return np.broadcast_to(half[:, None], (studies, rows - 1))


def row_squares(losses: Floats) -> Floats:
    """The squared residuals of the two-way layouts, summed over the seeds."""
    centred = losses - losses.mean(2, keepdims=True)
    return np.asarray(((centred - centred.mean(1, keepdims=True)) ** 2).sum(2))


def own(losses: Floats) -> Floats:
    """Half-widths of paired t intervals, corrected by Bonferroni."""
    rows, seeds = losses.shape[1:]
    sd = (losses[:, 1:] - losses[:, :1]).std(2, ddof=1)
    return np.asarray(sd / np.sqrt(seeds) * special.stdtrit(seeds - 1, 1 - 0.025 / (rows - 1)))


def moments(variances: Floats, df: float) -> tuple[Floats, Floats]:
    """d0 and s0^2 of rows of variances on `df` degrees of freedom, by the moments of their logarithms (limma's fit)."""
    logs = np.log(np.maximum(variances, 1e-300)) - special.psi(df / 2) + np.log(df / 2)
    spread = logs.var(1, ddof=1) - special.polygamma(1, df / 2) if variances.shape[1] > 1 else np.zeros(len(logs))
    half, finite = inverse_trigamma(np.maximum(spread, 1e-9)), spread > 1e-6
    s0 = np.where(finite, np.exp(logs.mean(1) + special.psi(half) - np.log(half)), variances.mean(1))
    return np.where(finite, 2 * half, np.inf), s0


def inverse_trigamma(values: Floats) -> Floats:
    """By Newton's method, as limma does."""
    found = 0.5 + 1 / values
    for _ in range(50):
        there = special.polygamma(1, found)
        found = found + there * (1 - there / values) / special.polygamma(2, found)
    return np.asarray(found)


def limma(losses: Floats) -> Floats:
    """Half-widths of moderated variances of the paired differences, on d0 + n - 1 degrees of freedom."""
    rows, seeds = losses.shape[1:]
    variances = (losses[:, 1:] - losses[:, :1]).var(2, ddof=1)
    d0, s0 = (each[:, None] for each in moments(variances, seeds - 1))
    if rows == 2:
        d0 = np.zeros_like(d0)
    weight = 1 / (1 + (seeds - 1) / np.maximum(d0, 1e-9))
    df = np.minimum(d0 + seeds - 1, (rows - 1) * (seeds - 1))
    return critical(rows - 1, df) * np.sqrt((weight * s0 + (1 - weight) * variances) / seeds)


def of_rows(losses: Floats, d0: Floats) -> tuple[Floats, Floats]:
    """The seeds' part of the variance and its critical value [study, variant but the baseline], given d0 of each row:
    archlab.search.statistics.moderated for many complete tables at once."""
    rows, seeds = losses.shape[1:]
    squares, common_df = row_squares(losses), (rows - 1) * (seeds - 1)
    s0 = squares.sum(1, keepdims=True) / common_df
    df = (seeds - 1) * (1 - 1 / rows)
    raw = squares / df
    unbiased = raw
    if rows > 2:
        unbiased = (rows * squares / (seeds - 1) - s0) / (rows - 2)
    each = np.clip(unbiased, raw / 2, raw * 2)
    weight = 1 / (1 + df / d0)
    variance = weight * s0 + (1 - weight) * each
    both = variance[:, 1:] + variance[:, :1]
    share = variance[:, :1] / both
    prior = np.minimum(d0 + df, common_df)
    inverse = (1 - share) ** 2 / prior[:, 1:] + share**2 / prior[:, :1]
    inverse += (((weight * s0)[:, 1:] + (weight * s0)[:, :1]) / both) ** 2 / common_df
    effective = np.minimum(1 / inverse, common_df)
    return both / seeds, critical(rows - 1, effective, np.minimum(share, 0.5))


def by_moments(losses: Floats) -> Floats:
    """Half-widths of row variances, moderated with the d0 that they themselves tell."""
    rows, seeds = losses.shape[1:]
    df = (seeds - 1) * (1 - 1 / rows)
    d0, _ = moments(row_squares(losses) / df, df)
    variance, value = of_rows(losses, np.broadcast_to(np.clip(d0, 1e-9, 1e9)[:, None], losses.shape[:2]))
    return np.asarray(value * np.sqrt(variance))


def chosen_prior(rows: int) -> Floats:
    """d0 of each row, the first being the baseline."""
    return np.where(np.arange(rows) > 0, PRIOR_DF, BASELINE_PRIOR_DF)[None, :]


def moderated(losses: Floats) -> Floats:
    """Half-widths of the intervals that a report has."""
    variance, value = of_rows(losses, chosen_prior(losses.shape[1]))
    return np.asarray(value * np.sqrt(variance))


METHODS: dict[str, Callable[[Floats], Floats]] = {
    "pooled": pooled,
    "own": own,
    "limma": limma,
    "by moments": by_moments,
    "moderated": moderated,
}


def family(noise: str, rows: int, seeds: int, studies: int, methods: Sequence[str]) -> dict[str, Floats]:
    """Of each method: the coverage of the family, the share resolved at PLANTED, and the mean half-width."""
    losses = draw(np.random.default_rng([rows, seeds]), noise, (studies, rows, seeds))
    error = (losses[:, 1:] - losses[:, :1]).mean(2)
    found = {}
    for name in methods:
        half = METHODS[name](losses)
        covered, resolved = (np.abs(error) <= half).all(1).mean(), (np.abs(error + PLANTED) > half).mean()
        found[name] = np.array([covered, resolved, half.mean()])
    return found


def print_families(studies: int) -> None:
    """A table for each number of seeds: the lowest coverage over K, mean power and mean half-width."""
    cases = f"{VARIANTS[0]} to {VARIANTS[-1]} variants, {studies} studies of each"
    for seeds in SEEDS:
        print(f"\n{seeds} seeds, {cases}: lowest coverage, mean share resolved, mean half-width\n")
        print("| noise | " + " | ".join(METHODS) + " |\n|" + "---|" * (len(METHODS) + 1))
        for noise in NOISES:
            found = [family(noise, rows, seeds, studies, [*METHODS]) for rows in VARIANTS]
            cells = []
            for name in METHODS:
                each = np.array([one[name] for one in found])
                cells.append(f"{each[:, 0].min():.1%}, {each[:, 1].mean():.0%}, {each[:, 2].mean():.1f}")
            print(f"| {noise} | " + " | ".join(cells) + " |", flush=True)


RULES = ("counts", "curve", "left out", "other seeds", "best two", "two choose", "all choose")
STEPS = (0.0, 0.5, 1.0, 3.0)


def tuned(
    rng: np.random.Generator, shape: tuple[int, int, int, int], step: float, baseline_too: bool
) -> dict[str, tuple[Floats, Floats]]:
    """Of each rule the noise [study, variant, seed] of the trials that are reported, and the true loss at the chosen
    rates. `shape` is [study, variant, rate, seed]; the neighbours of the best rate are worse by `step`."""
    studies, rows, rates, seeds = shape
    offset = rng.uniform(-0.5, 0.5, (studies, 1, 1, 1))
    curve = np.broadcast_to(step * (np.arange(rates)[:, None] - rates // 2 - offset) ** 2, (studies, rows, rates, 1))
    test = rng.normal(size=shape)
    validation = curve + 0.9 * test + np.sqrt(1 - 0.9**2) * rng.normal(size=shape)
    if not baseline_too:
        validation[:, 0] = np.abs(np.arange(rates) - rates // 2)[:, None]
    found = {}
    ranks = validation[..., 0].argsort(2).argsort(2)
    for rule, choosing in (("counts", 1), ("curve", 1), ("best two", 2), ("two choose", 2), ("all choose", seeds)):
        losses = validation[..., :choosing].mean(3)
        if rule == "best two":
            losses = np.where(ranks < 2, losses, np.inf)
        if rule == "curve":  # the lowest point of a parabola through all losses, among the rates
            powers = np.vander(np.arange(rates), 3)
            losses = losses @ (powers @ np.linalg.pinv(powers)).T
        best = losses.argmin(2)[:, :, None, None]
        truth = np.take_along_axis(curve, best, 2)[:, :, 0, 0]
        found[rule] = np.take_along_axis(test, best, 2)[:, :, 0], truth
    repeats, truth = found["counts"]
    return found | {"left out": (repeats[..., 1:], truth), "other seeds": (rng.normal(size=repeats.shape), truth)}


def tuning_errors(shape: tuple[int, int, int, int], step: float, baseline_too: bool) -> dict[str, Floats]:
    """By rule the shares of tables with a miss of the difference at the chosen rates, and with a miss of 0."""
    found = {}
    for rule, (noise, truth) in tuned(np.random.default_rng([*shape]), shape, step, baseline_too).items():
        if noise.shape[2] >= 3:  # else there is no interval
            half, error = moderated(noise), (noise[:, 1:] - noise[:, :1]).mean(2)
            away = error + truth[:, 1:] - truth[:, :1]
            found[rule] = np.array([(np.abs(each) > half).any(1).mean() for each in (error, away)])
    return found


def print_tuning(studies: int) -> None:
    """Errors where the seed that chose the rate counts as a repeat, and where it does not."""
    print("\nEqual variants at chosen rates: a miss of the difference at these rates, and of 0\n")
    print("| variants, seeds, rates | tuned | " + " | ".join(RULES) + " |\n|" + "---|" * (len(RULES) + 2))
    for rows, seeds in ((2, 5), (6, 3), (6, 5)):
        for baseline_too in (True, False):
            for rates in (3, 5):
                found = [tuning_errors((studies, rows, rates, seeds), step, baseline_too) for step in STEPS]
                worst = {rule: np.max([each[rule] for each in found], axis=0) for rule in RULES if rule in found[0]}
                cells = [", ".join(f"{e:.1%}" for e in worst.get(rule, ())) or "none" for rule in RULES]
                told = "all" if baseline_too else "all but the baseline"
                print(f"| {rows}, {seeds}, {rates} | {told} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--studies", type=int, default=10_000, help="tables of each kind")
    options = parser.parse_args()
    print_families(options.studies)
    print_tuning(options.studies)


if __name__ == "__main__":
    main()
