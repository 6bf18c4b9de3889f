"""The Pareto front of points that are all to be small, and how much of the space it dominates."""

from __future__ import annotations

from collections.abc import Sequence

Point = Sequence[float]


def dominates(one: Point, other: Point) -> bool:
    """Whether `one` is nowhere worse, and somewhere better."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def front(points: Sequence[Point]) -> list[int]:
    """The indices of the points that no other one dominates; of equal ones the first."""
    return [
        index
        for index, point in enumerate(points)
        if not any(dominates(other, point) for other in points)
        and not any(tuple(other) == tuple(point) for other in points[:index])
    ]


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The volume between the points and `reference`, by slices along the last axis (Zitzler and Thiele, 1999)."""
    inside = [tuple(point) for point in points if all(a < b for a, b in zip(point, reference, strict=True))]
    return _volume([inside[index] for index in front(inside)], reference)


def _volume(inside: list[tuple[float, ...]], reference: Point) -> float:
    if len(reference) == 1 or not inside:
        return reference[0] - min(point[0] for point in inside) if inside else 0.0
    inside.sort(key=lambda point: point[-1])
    ends = [*(point[-1] for point in inside[1:]), reference[-1]]
    return sum(
        (end - point[-1]) * _volume([each[:-1] for each in inside[: index + 1]], reference[:-1])
        for index, (point, end) in enumerate(zip(inside, ends, strict=True))
        if end > point[-1]
    )


def spanning(points: Sequence[Point], reference: Point, count: int) -> list[int]:
    """The indices of at most `count` points that dominate most together, chosen one by one.

    The first is the one with the least first coordinate, which is what a reader asks for first.
    """
    left = front(points)
    chosen = [min(left, key=lambda index: tuple(points[index]))] if left else []
    while len(chosen) < min(count, len(left)):
        mine = [points[index] for index in chosen]
        rest = [index for index in left if index not in chosen]
        chosen.append(max(rest, key=lambda index: (hypervolume([*mine, points[index]], reference), -index)))
    return chosen
