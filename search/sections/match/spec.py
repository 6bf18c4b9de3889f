"""Matching: the integer fields at which a variant has the parameters, the FLOPs or the speed of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, get_args

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.spec import Count
from archlab.arch_dsl.parts.context import Cost
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.mistakes import no_variant
from archlab.search.variants.section import Section

LARGEST = 2**24
SCALE = 10_000  # what a scale of 1 is counted as, where several fields are scaled together
_TIMED = 6  # models that are timed for one variant
_NEAR = 0.01  # a step time as near as this is as near as timing tells

Kind = Literal["parameters", "active_parameters", "flops_per_token", "cache_bytes", "step_time"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Match(Section):
    """Makes variants comparable: solves the integer field `by` so that each costs what the variant named costs.

    `parameters` counts all of them, `active_parameters` those that one token meets, which is fewer with experts;
    `flops_per_token` those of a forward pass, mask-aware; `cache_bytes` what decoding keeps of one context, in float32;
    `step_time` is measured, once. Several fields keep their proportions; a variant is solved by those that it has, and
    stays as it is without any. `multiple` is what every field is a multiple of; `report_unmatched` adds each variant as
    it is written, unless that is what matching gives.
    """

    key = "match"
    title: ClassVar[str] = "match"
    parameters: str | None = None
    active_parameters: str | None = None
    flops_per_token: str | None = None
    cache_bytes: str | None = None
    step_time: str | None = None
    by: tuple[str, ...]
    multiple: Count = 1
    report_unmatched: bool = False

    def problems(self, study: Question) -> Iterator[Problem]:
        """That it is not one kind, has nothing to solve, or names no variant."""
        if len(self.kinds) != 1:
            found = " and ".join(self.kinds) or "none"
            message = f"names the variant to match under one of {', '.join(KINDS)}; found {found}"
            yield Problem("match", message, study.mark("match"))
            return
        if not self.by:
            yield Problem("match.by", "is an empty list: name the integer fields to solve", self.mark("by"))
        if study.variants and self.to not in study.variants:
            mark = self.mark(self.kind) or study.mark("variants")
            yield Problem(f"match.{self.kind}", no_variant(self.to, list(study.variants)), mark)

    def record(self, planned: Planned) -> dict[str, Any]:
        """What is matched, to which variant, by which fields."""
        return {"kind": self.kind, "to": self.to, "by": list(self.by)}

    @property
    def kinds(self) -> list[Kind]:
        """What is matched; a study that is right has one."""
        return [kind for kind in KINDS if getattr(self, kind) is not None]

    @property
    def kind(self) -> Kind:
        """What is matched."""
        return self.kinds[0]

    @property
    def to(self) -> str:
        """The variant that the others are matched to."""
        return str(getattr(self, self.kind))

    def goal(self, size: int, key: str) -> list[Any]:
        """What is asked of every variant, given the size and the trial key of the one that they are matched to."""
        by = self.by[0] if len(self.by) == 1 else list(self.by)
        more = [self.kind] if self.kind != "parameters" else []
        return [by, key if self.kind == "step_time" else size, *more, *([self.multiple] if self.multiple > 1 else [])]

    def counted(self, total: Cost, context: int) -> int:
        """What matching counts of a model that costs `total` over a window of `context` tokens; 0 for a time."""
        figures = total.figures(context)
        return {**figures, "parameters": total.parameters, "cache_bytes": 4 * total.cache}.get(self.kind, 0)

    def values(self, size: int, given: Sequence[int]) -> list[int]:
        """The fields at `size`: one in units of `multiple`, or several at size / SCALE of their `given` values."""
        if not given:
            return [self.multiple * size]
        return [self.multiple * max(1, round(value * size / (SCALE * self.multiple))) for value in given]


def solve(measure: Callable[[int], int], target: int, guess: int = 1) -> tuple[int, int]:
    """The integer width >= 1 whose `measure` is nearest to `target`, and that measure; `measure` must not fall.

    Begins at `guess`, which decides how long it takes, not what is found. Interpolates, since parameters are all but
    linear in a width, and halves where that gains little: three measures as a rule from a near guess. Raises
    SpecError if no width comes near: the target is below the measure at width 1, or beyond the largest width.
    """
    at = cache(measure)
    low, high = _bracket(at, target, guess)
    halve = False
    while high - low > 1:
        middle = (low + high) // 2 if halve else _between(at, target, low, high)
        before = high - low
        low, high = (middle, high) if at(middle) < target else (low, middle)
        halve = not halve and 2 * (high - low) > before
    best = min((low, high), key=lambda width: abs(at(width) - target))
    return best, at(best)


def _bracket(at: Callable[[int], int], target: int, guess: int) -> tuple[int, int]:
    """Widths low < high with at(low) < target <= at(high), or both 1 where that is the target."""
    low, high = guess, guess + 1
    while at(low) >= target:
        if low == 1:
            if at(1) > target:
                raise SpecError.of("", f"even a width of 1 has {at(1):,}, more than the {target:,} to match")
            return 1, 1
        fall = at(high) - at(low)
        reach = high - (at(high) - target) * (high - low) // fall - 1 if fall > 0 else 1
        low, high = max(min(reach, low - 1), 1), low
    while at(high) < target:
        if high >= LARGEST:
            raise SpecError.of("", f"no width up to {LARGEST:,} reaches the {target:,} to match")
        rise = at(high) - at(low)
        reach = low - (target - at(low)) * (high - low) // -rise if rise > 0 else 0
        low, high = high, min(max(reach, high + 1 + (high - low)), LARGEST)
    return low, high


def _between(at: Callable[[int], int], target: int, low: int, high: int) -> int:
    """Where a straight line from low to high would reach the target, inside of both."""
    guess = low + (target - at(low)) * (high - low) // (at(high) - at(low))
    return min(max(guess, low + 1), high - 1)


def solve_time(ratio: Callable[[int], float], guess: int) -> int:
    """The size >= 1 whose `ratio` of step times is nearest to 1 of the few that are timed, from `guess` on.

    Times are all but linear in a width: the next size is where the line through the two nearest ones reaches 1.
    """
    at = cache(ratio)
    tried = [guess]
    while len(tried) < _TIMED:
        near, *others = sorted(tried, key=lambda size: abs(at(size) - 1))
        rise = (at(near) - at(others[0])) / (near - others[0]) if others else 0.0
        if rise <= 0:  # one point, or two whose times tell nothing: through the origin, which is a step too short
            rise = at(near) / near
        if abs(at(near) - 1) <= _NEAR:
            break
        following = min(max(round(near + (1 - at(near)) / rise), near // 2, 1), 2 * near, LARGEST)
        if following in tried:
            break
        tried.append(following)
    return min(tried, key=lambda size: abs(at(size) - 1))
