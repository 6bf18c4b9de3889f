"""Matching: the integer width at which a variant has the parameters of another one."""

from __future__ import annotations

from collections.abc import Callable

from arch_dsl.errors import SpecError

LARGEST = 2**24


def solve(measure: Callable[[int], int], target: int) -> tuple[int, int]:
    """The integer width >= 1 whose `measure` is nearest to `target`, and that measure; `measure` must not fall.

    Raises SpecError if no width comes near: the target is below the measure at width 1, or beyond the largest width.
    """
    low, high = 1, 2
    if measure(low) > target:
        raise SpecError.of("", f"even a width of 1 has {measure(low):,}, more than the {target:,} to match")
    while measure(high) < target:
        low, high = high, high * 2
        if high > LARGEST:
            raise SpecError.of("", f"no width up to {LARGEST:,} reaches the {target:,} to match")
    while high - low > 1:
        middle = (low + high) // 2
        if measure(middle) < target:
            low = middle
        else:
            high = middle
    best = min((low, high), key=lambda width: abs(measure(width) - target))
    return best, measure(best)
