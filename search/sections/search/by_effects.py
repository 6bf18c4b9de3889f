"""Proposals by the effects of axes: what is known first, then where the loss is believed to be lowest.

The losses so far are modelled as effects of axes and of their pairs, with noise (`search/statistics/effects.py`). Two
of three proposals have the lowest loss that the model believes in. The third one has the highest expected improvement
(Jones, Schonlau and Welch 1998, J. Global Optimization 13, eq. 15) on the lowest loss that the model believes in, which
is not the lowest that luck has shown; so have all where others are being trained, and with several goals or
constraints. No point is proposed twice while there are others. Several goals become one by a random weighting for each
proposal (ParEGO: Knowles 2006, IEEE TEVC 10(1), eq. 2). A constraint is modelled like a loss, and an improvement counts
as far as it is likely to be kept to (Schonlau, Welch and Jones 1998, "Global versus local search in constrained
optimization").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from archlab.search.sections.search.points import Points, Values
from archlab.search.statistics.effects import Array, Effects, fitted, unknown
from archlab.search.utils.canonical import canonical_json

_MOST = 4096  # points of a space that are all weighed
_DRAWN = 1000  # points of a larger one that are
_PARENTS = 16  # points whose neighbours are weighed
_SUM = 0.05  # ParEGO's weight of the sum beside the largest
_DOUBT = 3  # one of so many proposals is made by expected improvement, where the others go for the lowest loss


@dataclass(frozen=True)
class Told:
    """An earlier proposal: `losses` has a number for each goal if its trial has ended with them, else None. `excess`
    is above 0 for each constraint that it breaks. One that has not `ended` is being trained."""

    values: Values
    losses: tuple[float, ...] | None
    excess: Mapping[str, float]
    ended: bool


def propose(
    points: Points,
    history: Sequence[Told],
    starts: Sequence[Values],
    startup: int,
    generator: np.random.Generator,
) -> Any:
    """The next proposal: the `starts` in their order, `startup` of which these say least, then by the model. None: all
    were tried, or as good as all."""
    tried = {canonical_json(told.values) for told in history}
    for start in starts:
        if canonical_json(start) not in tried:
            return start
    limits = sorted({name for told in history for name in told.excess})
    done = [told for told in history if told.losses is not None]
    losses = _one_goal([told.losses or () for told in done], generator)
    belief = _belief(points, [told.values for told in done], losses)
    if len(history) < len(starts) + startup or (belief is None and not limits):
        return _least_known(points, [told.values for told in history], tried, generator)
    seen = belief.at(belief.places)[0] if belief else losses
    parents = [done[at].values for at in np.argsort(seen)[:_PARENTS]]
    candidates = [*_candidates(points, parents, tried, generator)]
    if not candidates:
        return None
    generator.shuffle(candidates)  # of equal ones any
    score = np.zeros(len(candidates))
    if belief:
        waiting = [told.values for told in history if not told.ended]
        if waiting:  # as if each had ended as the model believes
            there = points.places(waiting)
            belief = fitted(np.vstack([belief.places, there]), np.append(losses, belief.at(there)[0]), points.numeric)
        there = points.places(candidates)
        alone = not limits and not waiting and len(done[0].losses or ()) == 1
        sure = alone and len(history) % _DOUBT > 0
        score = -belief.at(there)[0] if sure else _improvement(belief, there, float(seen.min()))
    for name in limits:
        score += _kept_to(points, history, name, candidates)
    return candidates[int(np.argmax(score))]


def ranked(points: Points, values: Mapping[int, Values], losses: Mapping[int, float]) -> list[int]:
    """The numbers of trials, the best first: by the losses that the model believes they have without noise."""
    numbers = sorted(losses)
    told = np.array([losses[number] for number in numbers])
    belief = _belief(points, [values[number] for number in numbers], told)
    seen = belief.at(belief.places)[0] if belief else told
    return [numbers[at] for at in np.argsort(seen, kind="stable")]


def _belief(points: Points, values: Sequence[Values], losses: Array) -> Effects | None:
    """The effects of losses; None of fewer than two that differ."""
    differ = len(losses) > 1 and np.ptp(losses) > 0
    return fitted(points.places(values), losses, points.numeric) if differ else None


def _one_goal(losses: Sequence[Sequence[float]], generator: np.random.Generator) -> Array:
    """One number for each trial: its loss, or its goals weighted at random, each on the scale of what was found."""
    found = np.array(losses, dtype=np.float64)
    if found.size == 0 or found.shape[1] == 1:
        return found.reshape(len(losses))
    weights = generator.dirichlet(np.ones(found.shape[1]))
    lowest, highest = found.min(axis=0), found.max(axis=0)
    scaled = weights * (found - lowest) / np.where(highest > lowest, highest - lowest, 1.0)
    return np.asarray(scaled.max(axis=1) + _SUM * scaled.sum(axis=1))


def _improvement(belief: Effects, places: Array, best: float) -> Array:
    """The logarithm of the expected improvement on `best`: `[points]`."""
    mean, deviation = belief.at(places)
    z = (best - mean) / deviation
    # log(z cdf(z) + pdf(z)) without cancellation for points far above the best
    near = np.log(np.maximum(z * norm.cdf(z) + norm.pdf(z), 1e-300))
    far = norm.logpdf(z) - 2 * np.log(np.maximum(-z, 1.0))
    return np.asarray(np.log(deviation) + np.where(z > -5, near, far))


def _kept_to(points: Points, history: Sequence[Told], name: str, candidates: Sequence[Values]) -> Array:
    """The logarithm of how likely candidates keep to a constraint: `[points]`."""
    known = [(told.values, told.excess[name]) for told in history if name in told.excess]
    excess = np.array([value for _, value in known])
    if (belief := _belief(points, [values for values, _ in known], excess)) is None:
        return np.zeros(len(candidates))
    mean, deviation = belief.at(points.places(candidates))
    return np.asarray(norm.logcdf(-mean / deviation))


def _candidates(
    points: Points, best: Sequence[Values], tried: set[str], generator: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Points that were not tried: all of a small space, else random ones and neighbours of the best."""
    whole = points.all(_MOST)
    if whole is None:
        whole = [points.random(generator) for _ in range(_DRAWN // 2)]
        near = best or whole
        whole += [points.near(near[index % len(near)], generator) for index in range(_DRAWN // 2)]
    seen = set(tried)
    for point in whole:
        if (key := canonical_json(point)) not in seen:
            seen.add(key)
            yield point


def _least_known(points: Points, told: Sequence[Values], tried: set[str], generator: np.random.Generator) -> Any:
    """A point that was not tried and of whose loss the trials so far say least; None where all were tried."""
    candidates = [*_candidates(points, told, tried, generator)]
    if not candidates:
        return None
    generator.shuffle(candidates)
    if not told:
        return candidates[0]
    return candidates[int(np.argmax(unknown(points.places(candidates), points.places(told), points.numeric)))]
