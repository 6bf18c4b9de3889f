"""Scaling laws fitted to the rungs of a ladder. Pure functions of parameters N, tokens D, FLOPs C and losses L > 0.

Intervals are at 95%. None as an end of one means that the data bounds nothing there. What the data cannot tell raises
Unidentified with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its special and its optimize are imported when they are used: half a second
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95
HUBER = 1e-3  # of log L, as arXiv:2203.15556 (appendix D.3) has it
EXPONENTS = (0.01, 3.0)  # that a fit looks at
COLLINEAR = 0.98  # correlation of log N and log D from which on the two are one axis
EQUAL = 0.05  # by which computes may differ that count as one
_GRID: list[float] = np.geomspace(*EXPONENTS, 14).tolist()


class Unidentified(ValueError):
    """What the rungs that are there cannot tell; the message says why."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; `exact` where nothing is left over to make one from."""

    value: float
    low: float | None = None
    high: float | None = None
    exact: bool = False

    def plus(self, step: float) -> Estimate:
        """This and a known number."""
        low, high = (None if end is None else end + step for end in (self.low, self.high))
        return Estimate(self.value + step, low, high, self.exact)

    def exp(self) -> Estimate:
        """The number that this is the logarithm of."""
        low, high = (None if end is None else exp(end) for end in (self.low, self.high))
        return Estimate(exp(self.value), low, high, self.exact)


def exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def power_law(x: Floats, loss: Floats) -> dict[str, Estimate]:
    """a and b of L = a x^-b by least squares in logarithms, with t intervals. Two points have none."""
    fit, centre = _power(x, loss)
    line = fit.estimate(np.array([1.0, centre]))  # log a is the line's value at log x = 0
    return {"a": line.exp(), "b": fit.estimate(np.array([0.0, 1.0]))}


def power_line(x: Floats, loss: Floats, at: Floats) -> list[Estimate]:
    """The same law at other x, each with the t interval of its mean there."""
    fit, centre = _power(x, loss)
    return [fit.estimate(np.array([1.0, centre - math.log(each)])).exp() for each in at]


def _power(x: Floats, loss: Floats) -> tuple[Linear, float]:
    """log L = c - b (log x - centre), and the centre."""
    if len(x) < 2 or distinct(x) < 2:
        raise Unidentified("the rungs that are there do not differ in it")
    centre = float(np.log(x).mean())
    return Linear.of(np.stack([np.ones(len(x)), centre - np.log(x)], 1), np.log(loss)), centre


@dataclass(frozen=True)
class Linear:
    """Least squares: the solution, the covariance of its errors, and the degrees of freedom that it is known by."""

    solution: Floats
    covariance: Floats
    df: int

    @classmethod
    def of(cls, design: Floats, values: Floats) -> Linear:
        found: Any = np.linalg.lstsq(design, values, rcond=None)
        solution, _, rank, _ = found
        if rank < design.shape[1]:
            raise Unidentified("the rungs do not tell the terms apart")
        df = len(values) - design.shape[1]
        variance = float(((values - design @ solution) ** 2).sum()) / df if df else math.nan
        inverse: Any = np.linalg.inv(design.T @ design)
        return cls(solution, variance * inverse, df)

    @property
    def critical(self) -> float:
        return float(scipy.special.stdtrit(self.df, 0.5 + LEVEL / 2))

    def estimate(self, weights: Floats) -> Estimate:
        """A weighted sum of the solution."""
        value = float(weights @ self.solution)
        if not self.df:
            return Estimate(value, exact=True)
        half = self.critical * math.sqrt(float(weights @ self.covariance @ weights))
        return Estimate(value, value - half, value + half)

    def ratio(self, above: Floats, below: Floats) -> Estimate:
        """The ratio of two weighted sums, with Fieller's interval (E. C. Fieller, 1954, JRSS B 16, pages 175-185)."""
        top, bottom = float(above @ self.solution), float(below @ self.solution)
        if not self.df:
            return Estimate(top / bottom, exact=True)
        square = self.critical**2
        a = bottom**2 - square * float(below @ self.covariance @ below)
        b = top * bottom - square * float(above @ self.covariance @ below)
        c = top**2 - square * float(above @ self.covariance @ above)
        if a <= 0:  # the denominator may be 0: the ratio may be anything
            return Estimate(top / bottom)
        root = math.sqrt(max(b * b - a * c, 0.0))
        return Estimate(top / bottom, (b - root) / a, (b + root) / a)


def surface(parameters: Floats, tokens: Floats, loss: Floats) -> dict[str, Estimate]:
    """E, A, B, alpha and beta of L = E + A N^-alpha + B D^-beta (arXiv:2203.15556, equation 2), and a = beta / (alpha +
    beta), the exponent of the best size N ~ C^a (equation 4).

    The Huber loss of log L is summed over the points (a mean stops the search too early: arXiv:2404.10102, section 4)
    from several starts. Intervals are by profile likelihood of normal errors of log L, as a bootstrap over so few
    rungs covers too little: all values at which the best other ones leave at most S (1 + F / df), with S the least
    sum of squares, F of 1 and df = n - 5 degrees of freedom.
    """
    _check_surface(parameters, tokens)
    centre = np.exp(np.log(parameters).mean()), np.exp(np.log(tokens).mean())
    space = _Space(parameters / centre[0], tokens / centre[1], loss)
    best = space.huber()
    a, b, e, alpha, beta = best
    low = space.least()
    limit = low.square * (1 + float(scipy.special.fdtri(1, len(loss) - 5, LEVEL)) / (len(loss) - 5))
    ends = {
        "E": _profile(space.of_floor, low.floor, (0.0, float(loss.min()) * (1 - 1e-6)), limit),
        "alpha": _profile(lambda x: _along(lambda beta: space.square(x, beta)), low.alpha, EXPONENTS, limit),
        "beta": _profile(lambda x: _along(lambda alpha: space.square(alpha, x)), low.beta, EXPONENTS, limit),
        "a": _profile(
            lambda share: _along(lambda both: space.square(2 * both * (1 - share), 2 * both * share)),
            low.beta / (low.alpha + low.beta),
            (0.01, 0.99),
            limit,
        ),
    }
    values = {"E": e, "alpha": alpha, "beta": beta, "a": beta / (alpha + beta)}
    values |= {"A": a * float(centre[0]) ** alpha, "B": b * float(centre[1]) ** beta}
    return {name: Estimate(value, *ends.get(name, (None, None))) for name, value in values.items()}


def _check_surface(parameters: Floats, tokens: Floats) -> None:
    """Raises Unidentified."""
    if len(parameters) < 6:
        raise Unidentified(f"its five constants need six rungs, found {len(parameters)}")
    for name, x in (("sizes", parameters), ("lengths", tokens)):
        if (found := distinct(x)) < 3:
            raise Unidentified(f"an exponent above a floor needs three {name}, found {found}")
    if abs(np.corrcoef(np.log(parameters), np.log(tokens))[0, 1]) > COLLINEAR:
        raise Unidentified("tokens follow the parameters along all rungs, so that the two terms are one; cross them")


def distinct(x: Floats) -> int:
    """How many values there are that differ by more than rounding to whole steps."""
    return 1 + int((np.diff(np.log(np.sort(x))) > math.log1p(EQUAL)).sum())


@dataclass(frozen=True)
class _Least:
    """A minimum of the sum of squares and where it is."""

    square: float
    alpha: float
    beta: float
    floor: float


@dataclass(frozen=True)
class _Space:
    """The surface over N and D, both of about 1. Given the exponents it is linear in E, A, B >= 0 (variable projection,
    arXiv:2603.22339), and the error of log L is that of model / L - 1."""

    n: Floats
    d: Floats
    loss: Floats

    def linear(self, alpha: float, beta: float) -> tuple[Floats, float]:
        """E, A, B >= 0 at these exponents, and the sum of squares that they leave."""
        terms = np.stack([np.ones(len(self.n)), self.n**-alpha, self.d**-beta], 1) / self.loss[:, None]
        found, norm = scipy.optimize.nnls(terms, np.ones(len(self.n)))
        return found, float(norm) ** 2

    def square(self, alpha: float, beta: float) -> float:
        return self.linear(alpha, beta)[1]

    def least(self) -> _Least:
        """The minimum over all."""
        starts = sorted((self.square(alpha, beta), alpha, beta) for alpha in _GRID for beta in _GRID)[:3]
        square, alpha, beta = min(_descend(self.square, alpha, beta) for _, alpha, beta in starts)
        return _Least(square, alpha, beta, float(self.linear(alpha, beta)[0][0]))

    def huber(self) -> tuple[float, ...]:
        """A, B, E, alpha, beta with the least Huber loss of log L."""
        low = self.least()
        starts = [(low.alpha, low.beta), *((alpha, beta) for alpha in (0.2, 0.5, 1.0) for beta in (0.2, 0.5, 1.0))]
        how: Any = {"loss": "huber", "f_scale": HUBER, "x_scale": "jac", "max_nfev": 300}
        ends: Any = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-12)
        with np.errstate(over="ignore", invalid="ignore"):  # a step that leads so far is taken back
            fits = [
                scipy.optimize.least_squares(self._residuals, self._start(*at), self._jacobian, **how, **ends)
                for at in starts
            ]
        x = min(fits, key=lambda fit: float(fit.cost)).x
        return tuple(float(value) for value in (*np.exp(x[:3]), x[3], x[4]))

    def _start(self, alpha: float, beta: float) -> Floats:
        floor, a, b = np.maximum(self.linear(alpha, beta)[0], 1e-3 * self.loss.min())
        return np.array([*np.log([a, b, floor]), alpha, beta])

    def _terms(self, x: Floats) -> Floats:
        return np.stack([np.exp(x[0]) * self.n ** -x[3], np.exp(x[1]) * self.d ** -x[4], np.exp(x[2]) + 0 * self.n])

    def _residuals(self, x: Floats) -> Floats:
        return np.asarray(np.log(self._terms(x).sum(0)) - np.log(self.loss))

    def _jacobian(self, x: Floats) -> Floats:
        terms = self._terms(x)
        rows = [*terms, -terms[0] * np.log(self.n), -terms[1] * np.log(self.d)]
        return np.asarray(np.stack(rows, 1) / terms.sum(0)[:, None])

    def of_floor(self, floor: float) -> float:
        """The least sum of squares at this E."""

        def square(alpha: float, beta: float) -> float:
            terms = np.stack([self.n**-alpha, self.d**-beta], 1) / self.loss[:, None]
            return float(scipy.optimize.nnls(terms, 1 - floor / self.loss)[1]) ** 2

        start = min((square(alpha, beta), alpha, beta) for alpha in _GRID[3::2] for beta in _GRID[3::2])
        return _descend(square, *start[1:])[0]


def _descend(square: Callable[[float, float], float], alpha: float, beta: float) -> tuple[float, float, float]:
    """The minimum near two exponents, and where it is."""
    options = {"xatol": 1e-6, "fatol": 1e-15, "maxiter": 400}
    start = np.log([alpha, beta])
    minimise: Any = scipy.optimize.minimize
    found = minimise(lambda x: square(*_bounded(x)), start, method="Nelder-Mead", options=options)
    return float(found.fun), *_bounded(found.x)


def _bounded(x: Floats) -> tuple[float, float]:
    """Exponents from their logarithms."""
    first, second = np.clip(np.exp(np.clip(x, -20, 20)), *EXPONENTS)
    return float(first), float(second)


def _along(square: Callable[[float], float]) -> float:
    """The minimum over one exponent, of which there may be several local ones."""
    values = [square(at) for at in _GRID]
    best = int(np.argmin(values))
    ends = math.log(_GRID[max(best - 1, 0)]), math.log(_GRID[min(best + 1, len(_GRID) - 1)])
    found: Any = scipy.optimize.minimize_scalar(lambda x: square(math.exp(x)), bounds=ends, method="bounded")
    return min(float(found.fun), values[best])


def _profile(
    least: Callable[[float], float], best: float, bounds: tuple[float, float], limit: float
) -> tuple[float | None, float | None]:
    """Where the least sum of squares crosses its limit on both sides of the best value; None where it does not."""
    limit = max(limit, least(best))  # without noise both are rounding
    ends: list[float | None] = []
    for bound in bounds:
        if abs(best - bound) < 1e-9 or least(bound) <= limit:
            ends.append(None)
        else:
            ends.append(float(scipy.optimize.brentq(lambda x: least(x) - limit, best, bound, xtol=1e-4, rtol=1e-4)))
    return ends[0], ends[1]


@dataclass(frozen=True)
class Minimum:
    """The best size at one compute: a parabola's minimum in log N (arXiv:2203.15556, section 3.2)."""

    compute: float
    parameters: Estimate
    tokens: float
    loss: float


def isoflops(parameters: Floats, compute: Floats) -> Iterator[NDArray[np.intp]]:
    """The rungs of each compute at which there are several sizes, by their places, ascending."""
    order = np.argsort(compute)
    cuts = np.flatnonzero(np.diff(np.log(compute[order])) > math.log1p(EQUAL)) + 1
    yield from (part for part in np.split(order, cuts) if distinct(parameters[part]) > 1)


def minimum(parameters: Floats, tokens: Floats, compute: Floats, loss: Floats) -> Minimum:
    """The best size of the rungs of one compute, with Fieller's interval. Raises Unidentified."""
    if (sizes := distinct(parameters)) < 3:
        raise Unidentified(f"a parabola needs three sizes at a compute, found {sizes}")
    fit, centre = parabola(parameters, loss)
    x = np.log(parameters)
    level, slope, bend = fit.solution
    if bend <= 0:
        raise Unidentified("losses at equal compute have no minimum: they bend downwards")
    found = fit.ratio(np.array([0.0, -0.5, 0.0]), np.array([0.0, 0.0, 1.0]))
    best = found.value + centre
    if not x.min() <= best <= x.max():
        beyond = "more" if best > x.max() else "fewer"
        raise Unidentified(f"at equal compute the best size has {beyond} parameters than any rung")
    at = float(np.exp(np.log(compute).mean()))
    per_product = float(np.exp(np.log(compute / (parameters * tokens)).mean()))  # FLOPs are this times N D
    size = math.exp(best)
    low = float(level + slope * found.value + bend * found.value**2)
    return Minimum(at, found.plus(centre).exp(), at / (per_product * size), low)


def parabola(parameters: Floats, loss: Floats) -> tuple[Linear, float]:
    """L = u + v z + w z^2 with z = log N - centre, and the centre. Raises Unidentified."""
    x = np.log(parameters)
    centre = float(x.mean())
    return Linear.of(np.stack([np.ones(len(x)), x - centre, (x - centre) ** 2], 1), loss), centre


def frontier(compute: Floats, loss: Floats) -> NDArray[np.intp]:
    """The rungs that no rung of less or equal compute is better than, by ascending compute."""
    order = np.lexsort((loss, compute))
    best, found = math.inf, []
    for place in order:
        if loss[place] < best:
            best = float(loss[place])
            found.append(place)
    return np.array(found, np.intp)
