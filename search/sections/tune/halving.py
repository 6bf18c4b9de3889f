"""Which values a variant tries, and how far each of them is trained, as a pure function of their validation losses.

1. Successive halving (K. Jamieson and A. Talwalkar, arXiv:1502.07943, with rungs at shares of the training): all values
   come to the first rung, the best part of them goes on to the next one, and so on to the end. It waits for all values
   at a rung, so that the answer does not depend on timing.
2. The best is the lowest loss at the end. Its neighbours in every number that is tuned are trained to their end as
   well, until none of them is better: losses at a rung are a hint, those at the end decide.
3. Where nothing was tried on one side of the best, the next value there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from archlab.search.sections.tune.spec import Tune, short
from archlab.search.utils.canonical import canonical_json

Point = dict[str, Any]  # one value for every tuned path
# A point's losses in nats/token at each rung and at the end; None where it was not yet, infinity where it has none.
Losses = Callable[[Point], Sequence[float | None]]


@dataclass
class Tuned:
    """What is known of one variant's tuning. `reach` says for each point, by its name, at which rung it stops: as many
    as there are `rungs` is the end. It is `settled` when nothing is missing."""

    losses: Losses
    rungs: int
    points: dict[str, Point] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)
    settled: bool = True
    _seen: dict[str, Sequence[float | None]] = field(default_factory=dict)

    def add(self, point: Point, reach: int) -> None:
        """Wants a new point up to a rung."""
        name = canonical_json(point)
        self.points[name] = point
        self.want(name, reach)

    def want(self, name: str, reach: int) -> None:
        """Wants a point up to a rung from now on."""
        self.reach[name] = reach
        self.settled &= self.at(name, reach) is not None

    def at(self, name: str, rung: int) -> float | None:
        """A point's loss at a rung or the end; None where it was not yet."""
        if name not in self._seen:
            self._seen[name] = self.losses(self.points[name])
        return self._seen[name][rung]

    def end(self, name: str) -> float:
        """The loss that the choice goes by: infinite for what was not sent to its end, whatever another study knows."""
        loss = self.at(name, self.rungs) if self.reach[name] == self.rungs else None
        return math.inf if loss is None else loss


def tuned(tune: Tune, rungs: int, losses: Losses, possible: Callable[[Point], bool] = lambda point: True) -> Tuned:
    """What `tune` asks of one variant by now. `possible` says whether a value beyond the ends makes sense."""
    found = Tuned(losses, rungs)
    for point in tune.points:
        found.add(point, 0)
    _halve(found, tune.brackets.keep if tune.brackets else 1.0)
    while found.settled and found.points:
        best = min(found.points, key=found.end)
        if math.isfinite(found.end(best)):
            if not enclose(tune, found, best, possible):
                break
        elif stopped := _stopped(found):
            found.want(stopped[0], rungs)
        else:
            break
    return found


def enclose(tune: Tune, found: Tuned, best: str, possible: Callable[[Point], bool]) -> list[str]:
    """Wants to their end the neighbours of a point that stopped at a rung; where there are none, the next values on the
    sides on which nothing was tried. The names of those; none where the point is enclosed."""
    if more := _near(tune, found, best):
        for name in more:
            found.want(name, found.rungs)
        return more
    fresh = [point for point in _beyond(tune, found, best) if possible(point)]
    for point in fresh:
        found.add(point, found.rungs)
    return [canonical_json(point) for point in fresh]


def _halve(found: Tuned, keep: float) -> None:
    """Sends the best of the points from rung to rung as far as their losses are known."""
    standing = list(found.points)
    for rung in range(found.rungs):
        if not found.settled:
            return
        known = {name: loss for name in standing if (loss := found.at(name, rung)) is not None}
        ranked = sorted(standing, key=lambda name: known[name])
        standing = [name for name in ranked[: math.ceil(keep * len(ranked))] if math.isfinite(known[name])]
        for name in standing:
            found.want(name, rung + 1)


def _stopped(found: Tuned) -> list[str]:
    """The points that stopped at a rung with a finite loss, those that came furthest and were best there first."""
    stopped = [(-reach, found.at(name, reach), name) for name, reach in found.reach.items() if reach < found.rungs]
    alive = [(rung, loss, name) for rung, loss, name in stopped if loss is not None and math.isfinite(loss)]
    return [name for *_, name in sorted(alive)]


def _line(tune: Tune, found: Tuned, best: str) -> Iterator[tuple[str, list[tuple[Any, str]]]]:
    """For every number that is tuned: its path and its values, ascending, among the points that differ in it alone."""
    at = found.points[best]
    for path, axis in tune.axes.items():
        if axis.is_ordered:
            others = {key: value for key, value in at.items() if key != short(path)}
            same = [(p[short(path)], name) for name, p in found.points.items() if others.items() <= p.items()]
            yield path, sorted(same)


def _near(tune: Tune, found: Tuned, best: str) -> list[str]:
    """The neighbours of the best point that stopped at a rung."""
    stopped = set(_stopped(found))
    lines = [[name for _, name in line] for _, line in _line(tune, found, best)]
    places = [(line, line.index(best)) for line in lines]
    return [name for line, place in places for name in line[max(place - 1, 0) : place + 2] if name in stopped]


def _beyond(tune: Tune, found: Tuned, best: str) -> Iterator[Point]:
    """The next point on each side of the best one on which nothing was tried."""
    at = found.points[best]
    for path, line in _line(tune, found, best):
        value, axis = at[short(path)], tune.axes[path]
        for up, end in ((False, line[0]), (True, line[-1])):
            further = [v for v in axis.beyond(up, tune.steps(path)) if (v > value if up else v < value)]
            if end[1] == best and further:
                yield {**at, short(path): further[0]}
