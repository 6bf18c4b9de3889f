"""The compute-equivalent gain of a variant over its baseline along a ladder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from archlab.search.statistics.power_laws import Estimate, Floats, Linear, Unidentified, distinct, exp

_STEPS = 100  # of Gauss and Newton
_FLAT = "the loss does not fall with compute by more than its scatter, so that no compute makes up"


@dataclass(frozen=True)
class Gain:
    """A compute-equivalent gain, common to all rungs; `trend` is by what power of the compute it grows, and `rungs`
    what it is at each of them: how far along the common curve the two losses of a rung are apart."""

    gain: Estimate
    trend: Estimate
    rungs: tuple[float, ...]


def gain(base_compute: Floats, base_loss: Floats, compute: Floats, loss: Floats) -> Gain:
    """The factor of compute that a baseline needs for the losses of a variant (arXiv:2312.07413, section 2: the
    compute-equivalent gain): above 1 where the variant is better. Both have the same rungs, in one order.

    One curve, log L = u - b z + c z^2, c where there are three computes: z is log C of the baseline, and log C + log
    gain of the variant. A straight curve makes it the relative potency of a parallel-line assay. For the trend the gain
    is a power of C. Raises Unidentified.
    """
    if min(len(base_compute), len(compute)) < 2 or min(distinct(base_compute), distinct(compute)) < 2:
        raise Unidentified("a gain needs two computes of the baseline and of the variant")
    x = np.log(np.concatenate([base_compute, compute]))
    x = x - x.mean()
    y = np.log(np.concatenate([base_loss, loss]))
    ours = np.arange(len(x)) >= len(base_compute)
    of_ours: Floats = ours.astype(np.float64)
    bent = distinct(base_compute) > 2 and len(x) > 4
    fit, (found,) = _shifted(x, y, [of_ours], bent)
    if found.low is None and not found.exact:
        raise Unidentified(_FLAT)
    trend = Estimate(math.nan)
    if len(x) > 4 + bent:
        with suppress(Unidentified):
            trend = _shifted(x, y, [of_ours, x * of_ours], bent)[1][1]
    ahead = [_place(fit.solution, loss) - at for loss, at in zip(y, x, strict=True)]
    many = len(base_compute)  # a rung's own baseline: what both share of its scatter (seed, batches) is no gain
    rungs = (mine - theirs for mine, theirs in zip(ahead[many:], ahead[:many], strict=True))
    return Gain(found.exp(), trend, tuple(exp(each) for each in rungs))


def _shifted(x: Floats, y: Floats, moves: Sequence[Floats], bent: bool) -> tuple[Linear, list[Estimate]]:
    """The curve y = u - b z + c z^2, z = x + sum of s_i moves_i, and the s_i, by Gauss-Newton. Raises Unidentified.

    At the end a step is 0, and its interval Fieller's: of the ratio of a term of slope times move over b.
    """
    width, shifts, steep = 2 + bent, np.zeros(len(moves)), np.ones(len(x))
    for _ in range(_STEPS):
        z = x + shifts @ np.stack(moves)
        columns = [np.ones(len(x)), -z, *([z * z] if bent else []), *(-steep * move for move in moves)]
        fit = Linear.of(np.stack(columns, 1), y)
        slope = float(fit.solution[1])
        if slope <= 0:
            raise Unidentified(_FLAT)
        change = fit.solution[width:] / slope
        if abs(change).max() < 1e-9:
            each = np.eye(len(columns))
            steps = (fit.ratio(each[width + i], each[1]) for i in range(len(moves)))
            return fit, [step.plus(float(shift)) for step, shift in zip(steps, shifts, strict=True)]
        shifts = shifts + change
        steep = 1 - 2 * float(fit.solution[2]) / slope * (x + shifts @ np.stack(moves)) if bent else steep
    raise Unidentified("no factor of compute brings the curves of the baseline and of the variant together")


def _place(curve: Floats, y: float) -> float:
    """Where u - b z + c z^2 is y, on the side that falls; NaN where it never is."""
    level, slope, bend = float(curve[0]), float(curve[1]), float(curve[2]) if len(curve) > 3 else 0.0
    square = slope**2 - 4 * bend * (level - y)
    return 2 * (level - y) / (slope + math.sqrt(square)) if square >= 0 else math.nan
