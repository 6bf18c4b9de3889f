"""Learning curves with known truth: a library of simulated variants whose losses, noise and rates look like real ones.

    python benchmarks/pruners.py                # error rate and saved tokens of the paired pruner

A trial of variant v, learning rate r and seed s has after a share x of its steps the validation loss

    L(x) = E + q_v + A (x + x0)^-a (1 + p_v) + k_v ln(r / r_v)^2 h(x) + seed_s + own_vs + drift_vs(x) + window_v(x)

with E + q_v where a variant ends, p_v how its path differs from the baseline's on the way (slow or early learners), r_v
its best rate, h(x) = 1 + c (1 - x) how much more a wrong rate costs before the schedule comes down, seed_s what a seed
does to all variants, own_vs the noise of a trial, drift_vs a random walk that has come back by half at the end, and
window_v(x) the noise of the few windows of the curve, which is the same at all points but for a part.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from archlab.search.sections.prune.spec import PairedPruner, Seen

POINTS = tuple(point / 10 for point in range(1, 11))


@dataclass(frozen=True)
class Noise:
    """Standard deviations in nats per token: of a trial around its variant and seed, of a seed, of the drift of a
    curve, and of the difference of two curves that the windows make."""

    own: float = 0.005
    seed: float = 0.01
    drift: float = 0.01
    windows: float = 0.01


class Library:
    """Variants around a baseline, number 0: ends, paths and best rates drawn once, trials by seed and rate."""

    def __init__(self, variants: int, spread: float, noise: Noise, rng: np.random.Generator) -> None:
        """`spread` is the standard deviation of where variants end, nats per token."""
        self.noise, self.rng = noise, rng
        self.ends = np.concatenate([[0.0], rng.normal(0.0, spread, variants)])
        self.paths = np.concatenate([[0.0], rng.normal(0.0, 0.1, variants)])
        self.best = np.exp(np.concatenate([[0.0], rng.normal(0.0, 0.4, variants)]))
        self.curvature = 0.05 * np.exp(rng.normal(0.0, 0.3, variants + 1))
        self.shift = rng.normal(0.0, noise.windows / math.sqrt(2), variants + 1)
        self.seeds: dict[int, float] = {}

    def truth(self, variant: int, rate: float = 1.0) -> float:
        """Where a variant ends in the mean over all seeds and all text; `rate` in units of the baseline's best."""
        return float(2.5 + self.ends[variant] + self.curvature[variant] * math.log(rate / self.best[variant]) ** 2)

    def curve(self, variant: int, rate: float, seed: int) -> list[float]:
        """The validation losses at POINTS."""
        noise, rng = self.noise, self.rng
        shared = self.seeds.setdefault(seed, rng.normal(0.0, noise.seed))
        own = rng.normal(0.0, noise.own)
        walk = np.cumsum(rng.normal(0.0, noise.drift / math.sqrt(len(POINTS)), len(POINTS)))
        losses = []
        for place, share in enumerate(POINTS):
            path = 0.5 * ((share + 0.05) ** -0.5 - 1.05**-0.5) * (1 + self.paths[variant])
            wrong = self.curvature[variant] * math.log(rate / self.best[variant]) ** 2 * (1 - share)
            jitter = rng.normal(0.0, noise.windows / 4)
            drift = walk[place] - 0.5 * share * walk[-1]
            losses.append(
                self.truth(variant, rate) + path + wrong + shared + own + drift + self.shift[variant] + jitter
            )
        return losses


@dataclass(frozen=True)
class Outcome:
    """Of so many simulated trials: those better than the baseline by more than the margin, how many of these were
    pruned, and the share of all steps that pruning saved."""

    trials: int
    better: int
    wrong: int
    saved: float


def paired(
    pruner: PairedPruner, libraries: int, noise: Noise, spread: float, margin: float, seed: int = 0, knows: bool = True
) -> Outcome:
    """Runs the pruner on trials of variants at their own best rate against the baseline at its own.

    A pruned trial is a mistake if its variant is better than the baseline by more than `margin`. Without `knows` the
    pruner is told nothing of the seeds' noise, as in a store's first study.
    """
    rng = np.random.default_rng(seed)
    trials = better = wrong = 0
    saved = 0.0
    for _ in range(libraries):
        library = Library(8, spread, noise, rng)
        base = [(round(100 * share), loss) for share, loss in zip(POINTS, library.curve(0, 1.0, 0), strict=True)]
        errors = dict.fromkeys((step for step, _ in base), noise.windows)
        for variant in range(1, 9):
            rate = float(library.best[variant])
            losses = library.curve(variant, rate, 0)
            history = [(step, loss) for (step, _), loss in zip(base, losses, strict=True)]
            is_better = library.truth(variant, rate) < library.truth(0) - margin
            trials, better = trials + 1, better + is_better
            for end in range(1, len(history)):
                seen = Seen(str(variant), history[:end], {}, 100, base, errors, noise.own if knows else 0.0)
                if pruner.decide(seen):
                    wrong, saved = wrong + is_better, saved + 1 - POINTS[end - 1]
                    break
    return Outcome(trials, better, wrong, saved / trials)


def main() -> None:
    """Prints the paired pruner's error rate and savings at several noise levels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=int, default=500, help="of 8 variants each")
    parser.add_argument("--spread", type=float, default=0.05, help="of where variants end, nats per token")
    parser.add_argument("--margin", type=float, default=0.01, help="nats per token")
    given = parser.parse_args()
    print("noise   seeds known  trials  better  pruned of these        saved")
    for scale in (0.3, 1.0, 3.0):
        noise = Noise(0.005 * scale, 0.01 * scale, 0.01 * scale, 0.01 * scale)
        for knows in (True, False):
            found = paired(PairedPruner(), given.libraries, noise, given.spread, given.margin, knows=knows)
            share = f"{found.wrong} ({found.wrong / max(found.better, 1):.2%})"
            print(f"x{scale:<6g} {knows!s:<12} {found.trials:<7} {found.better:<7} {share:<22} {found.saved:.0%}")


if __name__ == "__main__":
    main()
