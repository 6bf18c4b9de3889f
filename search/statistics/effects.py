"""Losses of points of a space as main effects of its axes and effects of their pairs: a Gaussian process.

The kernel is additive (Duvenaud, Nickisch and Rasmussen 2011, arXiv:1112.4394, eq. 5, of degree one and two): with
z_a the kernel of axis a, `k = 1 + sum_a z_a + g sum_{a<b} z_a z_b`. Two points are alike on an axis of choices where
they have the same one, on an axis of numbers by a squared exponential of half the axis. Variances of axes, the weight
g of pairs and the noise are those of the highest posterior density, under wide log-normal priors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

Array = NDArray[np.float64]

NONE = -1.0  # the place of a point on an axis on which it has no value
_REACH = 0.5  # of numbers: the share of an axis over which losses are alike
_WIDE = 1.5  # the standard deviation of each prior, in natural logarithms
_PAIRS, _NOISE = 0.3, 0.1  # what the priors expect: variance of pairs and of noise, beside that of the axes
_JITTER = 1e-8
_FITTED = 100  # points that variances are fitted to
_CLIP = 1.5  # quartile distances above the upper quartile: losses beyond count as if they were there


@dataclass(frozen=True)
class Effects:
    """What is known of a space after some losses. Make it with `fitted`."""

    places: Array  # [points, axes]
    numeric: NDArray[np.bool_]  # [axes]
    axes: Array  # [axes]: the variance that each explains
    pairs: float
    noise: float  # variance, in units of the standardised losses
    factor: Array  # [points, points], the lower Cholesky factor
    weights: Array  # [points]
    center: float
    scale: float

    def at(self, places: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the loss that points would have without noise: `[points]` each, of places
        `[points, axes]`."""
        cross = self._kernel(places, self.places)
        mean = self.center + self.scale * (cross @ self.weights)
        inner = solve_triangular(self.factor, cross.T, lower=True)
        whole = self.axes.sum() + self.pairs * _pairs(self.axes[:, None, None]).item()
        variance = np.maximum(1.0 + whole - np.einsum("ij,ij->j", inner, inner), 1e-12)
        return mean, self.scale * np.sqrt(variance)

    def _kernel(self, one: Array, other: Array) -> Array:
        alike = likeness(one, other, self.numeric) * self.axes[:, None, None]
        return np.asarray(1.0 + alike.sum(axis=0) + self.pairs * _pairs(alike))


def likeness(one: Array, other: Array, numeric: NDArray[np.bool_]) -> Array:
    """How alike points are on each axis, from 0 to 1: `[axes, points, others]`."""
    apart = one.T[:, :, None] - other.T[:, None, :]
    alike = (apart == 0).astype(np.float64)
    both = (one.T[:, :, None] != NONE) & (other.T[:, None, :] != NONE)
    smooth = both & numeric[:, None, None]
    alike[smooth] = np.exp(-0.5 * (apart[smooth] / _REACH) ** 2)
    return np.asarray(alike)


def fitted(places: Array, losses: Array, numeric: NDArray[np.bool_]) -> Effects:
    """Effects of `losses` `[points]` at `places` `[points, axes]`: on an axis of choices the number of the choice, on
    one of numbers 0 to 1, and NONE where it takes no value. At least two losses.

    Variances are those of a hundred of the points, evenly spaced, where there are more; the effects are those of all.
    """
    losses = _clipped(losses)
    center = float(losses.mean())
    scale = float(losses.std()) or 1.0
    told, alike = (losses - center) / scale, likeness(places, places, numeric)
    some = np.unique(np.linspace(0, len(told) - 1, _FITTED).round().astype(int)) if len(told) > _FITTED else slice(None)
    axes, pairs, noise = _variances(alike[:, some][:, :, some], told[some])
    factor = cholesky(_covariance(alike * axes[:, None, None], pairs, noise), lower=True)
    return Effects(places, numeric, axes, pairs, noise, factor, cho_solve((factor, True), told), center, scale)


def unknown(places: Array, told: Array, numeric: NDArray[np.bool_]) -> Array:
    """The variance of the loss at `places` `[points, axes]` that is left once it is known at `told`, whatever it is
    there: `[points]`, with the variances that the priors expect."""
    count = places.shape[1]
    pairs = _PAIRS * count**2 / max(count * (count - 1) / 2, 1)
    inside, across = (likeness(told, each, numeric) / count for each in (told, places))
    cross = np.asarray(1.0 + across.sum(axis=0) + pairs * _pairs(across))
    factor = cholesky(_covariance(inside, pairs, _NOISE), lower=True)
    inner = solve_triangular(factor, cross, lower=True)
    whole = 2.0 + pairs * _pairs(np.full((count, 1, 1), 1 / count)).item()
    return np.asarray(whole - np.einsum("ij,ij->j", inner, inner))


def _variances(alike: Array, told: Array) -> tuple[Array, float, float]:
    """The variances of axes, the weight of pairs and the variance of noise with the highest posterior density."""
    count = len(alike)
    expected = np.log([*[1 / count] * count, _PAIRS * count**2 / max(count * (count - 1) / 2, 1), _NOISE])

    def objective(logs: Array) -> tuple[float, Array]:
        kernels = alike * np.exp(logs[:count])[:, None, None]
        pairs, noise = np.exp(logs[count:])
        first, second = kernels.sum(axis=0), _pairs(kernels)
        factor = cholesky(_covariance(kernels, pairs, noise), lower=True)
        inverse = cho_solve((factor, True), np.eye(len(told)))
        weights = inverse @ told
        value = 0.5 * told @ weights + np.log(np.diag(factor)).sum()
        pull = inverse - np.outer(weights, weights)
        slopes = [0.5 * np.sum(pull * each * (1 + pairs * (first - each))) for each in kernels]
        slopes += [0.5 * pairs * np.sum(pull * second), 0.5 * noise * np.trace(pull)]
        away = (logs - expected) / _WIDE
        return float(value + 0.5 * away @ away), np.asarray(slopes) + away / _WIDE

    bounds = [(each - 8, each + 8) for each in expected]
    found: Any = minimize(objective, expected, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
    variances = np.exp(found.x)
    return variances[:count], float(variances[count]), float(variances[-1])


def _covariance(kernels: Array, pairs: float, noise: float) -> Array:
    """Of losses: the kernel of kernels of axes `[axes, points, points]`, and noise."""
    return np.asarray(
        1.0 + kernels.sum(axis=0) + pairs * _pairs(kernels) + (noise + _JITTER) * np.eye(kernels.shape[1])
    )


def _pairs(kernels: Array) -> Array:
    """The sum over all pairs of axes of the products of their kernels `[axes, points, others]`."""
    return np.asarray((kernels.sum(axis=0) ** 2 - (kernels**2).sum(axis=0)) / 2)


def _clipped(losses: Array) -> Array:
    """Losses without outliers above: a trial that went astray says that it is bad, not how differences are scaled."""
    lower, upper = np.quantile(losses, [0.25, 0.75])
    return np.asarray(np.minimum(losses, upper + _CLIP * max(upper - lower, 1e-12)))
