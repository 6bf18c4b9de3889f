"""The variants of a study at the sizes that its `match:` asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from archlab.arch_dsl.language.errors import Mark, Problem, SpecError
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import alternatives
from archlab.arch_dsl.model.model import Model, cost, resolve
from archlab.arch_dsl.patching.patch import Setting, apply
from archlab.arch_dsl.tree.paths import get, update
from archlab.search.objectives import Lengths
from archlab.search.sections.match.spec import SCALE, Match, solve, solve_time
from archlab.search.training.step_times import Timed, Timings
from archlab.search.variants.asked import Asked

if TYPE_CHECKING:
    from archlab.search.variants.variant import Variant


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

        def counted(size: int) -> int:
            changed = (sized if all(steps) else at)(size).replace(**known)
            return match.counted(cost(changed, lengths.tokens, lengths.source or None), context)

        def ratio(size: int) -> float:
            own = resolve(at(size), vocab=sizes[0], max_positions=sizes[1])
            return self.timings.ratio(dataclasses.replace(timed, model=own), target.timed)

        try:
            if match.kind == "step_time":
                found = solve_time(ratio, SCALE if several else _first_value(target.model, fields, match))
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


def _first_value(model: Model, fields: Iterable[str], match: Match) -> int:
    """Where timing begins: at what the one field is in the model that is matched to, in units of `multiple`."""
    return max(1, _values(model, fields, match)[0] // match.multiple)


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
