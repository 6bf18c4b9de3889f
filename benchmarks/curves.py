"""A library of learning curves with known truth: what trials of variants at learning rates and seeds would show.

The mean validation loss of variant v at rate lr after a share u of its steps is a power law with an excess that is
quadratic in the log of the rate,

    m(v, lr, u) = L_v + B_v [(u + u_0)^-b - (1 + u_0)^-b] + q_v [ln(lr / lr_v) + g_v ln(u)]^2,

where lr_v is the best rate at the end; on the way another one is (g_v), and a variant that starts fast need not end
well (B_v). Above its largest stable rate a trial diverges. A trial of seed s shows

    y = m + beta_s(u) + (alpha_vs(u) + eps_v,lr,s(u)) / sqrt(2),

of which the batches' noise beta_s is common to all trials of a seed and drops out of differences, alpha is the
variant's own and eps the trial's; alpha and eps have the standard deviation `noise`, beta twice that. Noise is a
stationary Gaussian process in ln u with correlation exp(-|difference|): losses at neighbouring steps are alike. The
test loss has a fifth of `noise` on top. Everything is a pure function of the library's seed and of what is asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHIFT = 0.02  # u_0


@dataclass(frozen=True)
class Variant:
    """The truth of one variant: L_v, B_v, b, lr_v, q_v, g_v, and the largest stable rate."""

    loss: float
    height: float
    power: float
    rate: float
    curvature: float
    drift: float
    stable: float

    def mean(self, lr: float, share: Floats) -> Floats:
        """m(v, lr, u), nats/token; infinite above the largest stable rate."""
        if lr > self.stable:
            return np.full(np.shape(share), np.inf)
        fallen = (share + SHIFT) ** -self.power - (1 + SHIFT) ** -self.power
        off = np.log(lr / self.rate) + self.drift * np.log(share)
        found: Floats = self.loss + self.height * fallen + self.curvature * off**2
        return found

    def best(self, rates: Sequence[float]) -> float:
        """The loss at the end at the best of some rates."""
        return min(float(self.mean(rate, np.ones(1))[0]) for rate in rates)


@dataclass(frozen=True)
class Library:
    """The trials of some variants; `noise` in nats/token."""

    variants: tuple[Variant, ...]
    noise: float
    seed: int

    def trial(self, variant: int, lr: float, seed: int, shares: Sequence[float]) -> tuple[Floats, float]:
        """The validation losses at ascending shares of the steps, the last one 1, and the test loss at the end."""
        u = np.asarray(shares, np.float64)
        batches = self._process(u, "batches", seed) * 2
        own = self._process(u, "variant", variant, seed), self._process(u, "trial", variant, lr, seed)
        losses: Floats = self.variants[variant].mean(lr, u) + self.noise * (batches + sum(own) / np.sqrt(2))
        extra = self._generator("test", variant, lr, seed).normal() * self.noise / 5
        return losses, float(losses[-1] + extra)

    def _process(self, u: Floats, *of: object) -> Floats:
        """A standard Gaussian process at ascending u, drawn from the end backwards: its end does not depend on u."""
        draws = self._generator(*of).normal(size=64)
        found = np.empty(len(u))
        found[-1] = draws[0]
        for place in range(len(u) - 2, -1, -1):
            alike = float(np.exp(-np.log(u[place + 1] / u[place])))
            found[place] = alike * found[place + 1] + np.sqrt(1 - alike**2) * draws[len(u) - 1 - place]
        return found

    def _generator(self, *of: object) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(repr(of).encode())])


def make_library(seed: int, variants: int, spread: float, noise: float) -> Library:
    """Variants whose losses at the end differ by a normal law of standard deviation `spread` around 3 nats/token."""
    rng = np.random.default_rng([seed, 1])
    middle = np.log(2e-3) + rng.uniform(-0.4, 0.4)
    found = []
    for _ in range(variants):
        rate = float(np.exp(middle + rng.normal() * 0.3))
        found.append(
            Variant(
                loss=3.0 + rng.normal() * spread,
                height=0.3 * float(np.exp(rng.normal() * 0.15)),
                power=0.4,
                rate=rate,
                curvature=float(rng.uniform(0.01, 0.05)),
                drift=float(rng.uniform(-0.3, 0.3)),
                stable=rate * float(np.exp(rng.uniform(1.0, 2.5))),
            )
        )
    return Library(tuple(found), noise, seed)
