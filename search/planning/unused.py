"""What is wrong with a study's variants, each mistake once, and with those of its parts that no variant uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.patching.patch import Setting
from archlab.search.sections.search.space import Space, probes
from archlab.search.study.changes import changed, value_at
from archlab.search.study.study import Study


def idle_problems(study: Study) -> Iterator[Problem]:
    """What is wrong with the parts of a study that no variant uses: spare components, the axes of a search."""
    used = {name for patch in study.variants.values() for name in patch.components}
    for name, component in study.components.items():
        if name not in used:
            yield from _refusals(study, component.settings)
    if study.space:
        yield from _space_problems(study, study.space)


def _space_problems(study: Study, space: Space) -> Iterator[Problem]:
    """What the base refuses of a search: unknown paths, wrong values, conditions on what is not there."""
    told: set[tuple[object, str]] = set()
    for path, settings in probes(space, study.components):
        for problem in _refusals(study, settings):
            if (key := (problem.mark, problem.message)) not in told:
                told.add(key)
                yield dataclasses.replace(problem, path=f"space.{path}")
    for path, axis in space.axes.items():
        for asked in [at for at in axis.when.paths if at in space.needs] if axis.when else []:
            try:
                value_at(study, asked)
            except SpecError as error:
                for problem in error.problems:
                    yield Problem(f"space.{path}.when", problem.message, axis.mark("when"))


def _refusals(study: Study, settings: Iterable[Setting]) -> tuple[Problem, ...]:
    try:
        changed(study, settings)
    except SpecError as error:
        return error.problems
    return ()
