"""Matching: the integer fields at which a variant has the parameters, the FLOPs or the speed of another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Count, alternatives
from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.parts.context import Cost
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.tree.paths import get, update
from archlab.search.objectives import Lengths
from archlab.search.training.step_times import Timed, Timings
from archlab.search.variants.asked import Asked
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.mistakes import no_variant
from archlab.search.variants.section import Section

if TYPE_CHECKING:
    from archlab.search.variants.variant import Variant

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
    it is written, unless that is what matching gives. A cell of a grid has its own target, with `all_cells` all have
    the first cell's.
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
    all_cells: bool = False

    def problems(self, study: Question) -> Iterator[Problem]:
        if len(self.kinds) != 1:
            found = " and ".join(self.kinds) or "none"
            message = f"names the variant to match under one of {', '.join(KINDS)}; found {found}"
            yield Problem("match", message, study.mark("match"))
            return
        if not self.by:
            yield Problem("match.by", "is an empty list: name the integer fields to solve", self.mark("by"))
        if self.all_cells and study.ladder:
            message = "the rungs of a ladder are to differ in size: each is matched to its own target"
            yield Problem("match.all_cells", message, self.mark("all_cells"))
        if study.variants and self.to not in study.variants:
            mark = self.mark(self.kind) or study.mark("variants")
            yield Problem(f"match.{self.kind}", no_variant(self.to, list(study.variants)), mark)

    def record(self, planned: Planned) -> dict[str, Any]:
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


class Matcher:
    """Solves the fields of a match, each variant's from where the one before it ended; models are timed once."""

    def __init__(self, match: Match, timings: Timings) -> None:
        self.match, self.timings = match, timings
        self.guesses = {False: 1, True: SCALE}  # of one field, and of several
        self.idle = set(match.by) if len(match.by) > 1 else set()  # paths that no variant has had so far

    def mismatch(self, timed: Timed, size: int, target: Variant) -> float:
        """How far a model is from what it is to be matched to, as a share of that."""
        return (self.timings.ratio(timed, target.timed) if self.match.kind == "step_time" else size / target.size) - 1

    def refuse_own_size(self, model: Model, base: Model, asked: Asked) -> None:
        """Raises SpecError if a variant sets a field that matching solves: its value would be ignored."""
        for by in self.match.by:
            try:
                own, before = (get(spec, tuple(by.split("."))) for spec in (model, base))
            except SpecError:
                continue  # a path by knobs or with `*`
            if own not in (None, before):
                setting = next((s for s in asked.settings if by.startswith(s.path)), None)
                message = f"`match` solves {by} for this variant; the {own} that is set here would be ignored"
                raise SpecError.of(by, message, setting.mark if setting else self.match.mark("by"))

    def fields(self, model: Model) -> tuple[str, ...]:
        """What is solved of a model: the one path, or those of several that it has."""
        if len(self.match.by) == 1:
            return self.match.by
        found = []
        for path in self.match.by:
            with suppress(SpecError):
                get(model, tuple(path.split(".")))
                found.append(path)
        self.idle -= set(found)
        return tuple(found)

    def problems(self) -> Iterator[Problem]:
        """The paths that would be ignored, once all variants are solved."""
        for path in sorted(self.idle):
            yield Problem("match.by", f"no variant that is matched has {path}", self.match.mark("by"))

    def solved(
        self, model: Model, target: Variant, sizes: tuple[int, int], lengths: Lengths, timed: Timed
    ) -> tuple[Model, dict[str, int]]:
        """The model with the integer fields of a match solved, and these. Raises SpecError."""
        match, mark, context = self.match, self.match.mark("by"), timed.recipe.context
        known = {"vocab": model.vocab or sizes[0], "max_positions": model.max_positions or sizes[1]}
        if not (fields := self.fields(model)):
            return model, {}
        several = len(fields) > 1
        steps = [_integer_field(model, by, mark) for by in fields]
        given = _values(resolve(model, vocab=sizes[0], max_positions=sizes[1]), fields, match) if several else []

        def at(size: int) -> Model:
            values = zip(fields, match.values(size, given), strict=True)
            return apply(model, [Setting(by, Node(value, mark), "match", mark) for by, value in values])

        def sized(size: int) -> Model:  # the same as a rule, and faster
            changed = model
            for path, value in zip(steps, match.values(size, given), strict=True):
                changed = update(changed, type(changed), path, _always(value))
            return changed

        def count(model: Model) -> int:
            return match.counted(cost(model.replace(**known), lengths.tokens, lengths.source or None), context)

        def counted(size: int) -> int:
            return count((sized if all(steps) else at)(size))

        def ratio(size: int) -> float:
            own = resolve(at(size), vocab=sizes[0], max_positions=sizes[1])
            return self.timings.ratio(dataclasses.replace(timed, model=own), target.timed)

        try:
            if match.kind == "step_time":
                # from what the one field is in the model that is matched to
                start = SCALE if several else max(1, _values(target.model, fields, match)[0] // match.multiple)
                found = solve_time(ratio, start)
            elif all(steps) and count(model) == target.size:  # the only answer, where the width changes nothing of it
                kept = _values(resolve(model, vocab=sizes[0], max_positions=sizes[1]), fields, match)
                return model, dict(zip(fields, kept, strict=True))
            else:
                found, _ = solve(counted, target.size, self.guesses[several])
        except SpecError as error:
            own = model.replace(**known).check()  # what is wrong with the model explains it better
            said = [Problem("match.by", f"{', '.join(match.by)}: {p.message}", mark) for p in error.problems]
            raise SpecError(own or said) from error
        self.guesses[several] = found
        return at(found), dict(zip(fields, match.values(found, given), strict=True))


def _values(model: Model, fields: Iterable[str], match: Match) -> list[int]:
    """The fields of a match in a resolved model. Raises SpecError for a path that names none, or several."""
    found = []
    for by in fields:
        try:
            value = get(model, tuple(by.split(".")))
        except SpecError:
            value = None
        if not isinstance(value, int):
            message = f"{by} is no single field with a number: several fields are scaled from what they are"
            raise SpecError.of("match.by", message, match.mark("by"))
        found.append(value)
    return found


def _always(value: int) -> Callable[[Any, Any], int]:
    return lambda old, annotation: value


def _integer_field(model: Model, by: str, mark: Mark | None) -> tuple[str, ...]:
    """The steps to the integer field `by`; none where it is a path by knobs or with `*`, or one that matches nothing,
    as the patch will say. Raises SpecError if it is another kind of field."""
    steps = tuple(by.split("."))
    try:
        get(model, steps)
    except SpecError:
        return ()
    found: list[Any] = []

    def keep(old: Any, annotation: Any) -> Any:
        found.append(annotation)
        return old

    update(model, type(model), steps, keep)
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in alternatives(found[0])]
    if int not in kinds:
        raise SpecError.of("match.by", f"{by} is no integer field: there is nothing to solve", mark)
    return steps


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
        # where a straight line from low to high would reach the target, inside of both
        middle = low + (target - at(low)) * (high - low) // (at(high) - at(low))
        middle = (low + high) // 2 if halve else min(max(middle, low + 1), high - 1)
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
                message = f"even a width of 1 has {at(1):,}, more than the {target:,} to match{_flat(at)}"
                raise SpecError.of("", message)
            return 1, 1
        fall = at(high) - at(low)
        reach = high - (at(high) - target) * (high - low) // fall - 1 if fall > 0 else 1
        low, high = max(min(reach, low - 1), 1), low
    while at(high) < target:
        if high >= LARGEST:
            raise SpecError.of("", f"no width up to {LARGEST:,} reaches the {target:,} to match{_flat(at)}")
        rise = at(high) - at(low)
        reach = low - (target - at(low)) * (high - low) // -rise if rise > 0 else 0
        low, high = high, min(max(reach, high + 1 + (high - low)), LARGEST)
    return low, high


def _flat(at: Callable[[int], int]) -> str:
    """What is said beside a width that changes nothing of what is matched."""
    return f"; whatever it is, there are {at(1):,}" if at(1) == at(2) == at(LARGEST) else ""


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
