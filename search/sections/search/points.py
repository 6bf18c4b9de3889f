"""Points of a search space: all of them, random ones, neighbours of one; and where they lie on each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archlab.search.sections.search.axes import Axis, Choice, Floats, Integers
from archlab.search.sections.search.space import Space
from archlab.search.statistics.effects import NONE, Array
from archlab.search.utils.canonical import canonical_json

Values = Mapping[str, Any]


class Points:
    """The points of a space; `given` has the base's values of the paths in `space.needs`."""

    def __init__(self, space: Space, given: Values) -> None:
        self._space, self._given = space, given
        self._axes = space.ordered()

    @property
    def numeric(self) -> NDArray[np.bool_]:
        """Which axes are numbers: `[axes]`."""
        return np.array([not isinstance(axis, Choice) for _, axis in self._axes])

    def places(self, points: Sequence[Values]) -> Array:
        """`[points, axes]`: the number of the choice, 0 to 1 along an axis of numbers, NONE where it has no value."""
        rows = [[_place(axis, point[path]) if path in point else NONE for path, axis in self._axes] for point in points]
        return np.array(rows, dtype=np.float64).reshape(len(points), len(self._axes))

    def all(self, most: int) -> list[dict[str, Any]] | None:
        """All points; None where there are more than `most`."""
        steps: list[Sequence[Any]] = []
        for _, axis in self._axes:
            if (count := _count(axis)) is None or count > most:
                return None
            steps.append([*_steps(axis)])
        found: list[dict[str, Any]] = [{}]
        for (path, _), values in zip(self._axes, steps, strict=True):
            found = [
                {**point, path: value} if takes else point
                for point in found
                for takes in [self._space.active(path, point, self._given)]
                for value in (values if takes else [None])
            ]
            if len(found) > most:
                return None
        return found

    def random(self, generator: np.random.Generator) -> dict[str, Any]:
        """A point, each axis by itself, evenly."""
        return self._completed({}, generator)

    def near(self, point: Values, generator: np.random.Generator) -> dict[str, Any]:
        """The point with one or two of its axes drawn anew; an axis of numbers moves by a tenth of it or so."""
        there = [path for path, _ in self._axes if path in point]
        several = 2 if len(there) > 1 and generator.random() < 0.5 else 1
        moved = {there[index] for index in generator.choice(len(there), several, replace=False)}
        kept = {path: value for path, value in point.items() if path not in moved}
        for path in moved:
            if not isinstance(axis := self._space.axes[path], Choice):
                share = _place(axis, point[path]) + 0.1 * generator.standard_normal()
                kept[path] = _value(axis, min(max(share, 0.0), 1.0))
        return self._completed(kept, generator)

    def completed(self, values: Values) -> dict[str, Any]:
        """A point with these values where its axes take them; others are in the middle, or at their first choice."""
        return self._completed(values, None)

    def _completed(self, values: Values, generator: np.random.Generator | None) -> dict[str, Any]:
        point: dict[str, Any] = {}
        for path, axis in self._axes:
            if self._space.active(path, point, self._given):
                if path in values and axis.holds(values[path]):
                    point[path] = values[path]
                elif isinstance(axis, Choice):
                    at = 0 if generator is None else int(generator.integers(len(axis.values)))
                    point[path] = axis.values[at]
                else:
                    point[path] = _value(axis, 0.5 if generator is None else float(generator.random()))
        return point


def _place(axis: Axis, value: Any) -> float:
    if isinstance(axis, Choice):
        return float([canonical_json(each) for each in axis.values].index(canonical_json(value)))
    if axis.log:
        return math.log(value / axis.low) / math.log(axis.high / axis.low)
    return float((value - axis.low) / (axis.high - axis.low))


def _value(axis: Integers | Floats, share: float) -> Any:
    """The value of an axis of numbers at a share of its length."""
    if axis.log:
        value = axis.low * (axis.high / axis.low) ** share
    elif axis.step:
        steps = math.floor((axis.high - axis.low) / axis.step + 1e-9)
        value = axis.low + axis.step * min(math.floor(share * (steps + 1)), steps)
    else:
        value = axis.low + share * (axis.high - axis.low)
    value = min(max(value, axis.low), axis.high)
    return round(value) if isinstance(axis, Integers) else value


def _count(axis: Axis) -> int | None:
    """How many values an axis has; None without end."""
    if isinstance(axis, Choice):
        return len(axis.values)
    if axis.log or not axis.step:
        return None
    return math.floor((axis.high - axis.low) / axis.step + 1e-9) + 1


def _steps(axis: Axis) -> Iterator[Any]:
    if isinstance(axis, Choice):
        yield from axis.values
    elif axis.step:
        count = math.floor((axis.high - axis.low) / axis.step + 1e-9) + 1
        yield from (axis.low + index * axis.step for index in range(count))
