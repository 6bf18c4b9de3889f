"""What the sections of a study get wrong together, beyond what each of them gets wrong alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.search.store.lock import is_study_name
from archlab.search.study.study import Study
from archlab.search.variants.mistakes import no_name, no_variant, quoted
from archlab.search.variants.zoo import ZOO

_FOUND = re.compile(r"found(-[0-9]+)?|search-[0-9]+")
MAX_CELLS = 100_000


def problems_in(study: Study) -> Iterator[Problem]:
    """What the sections of a study get wrong together."""
    if not is_study_name(study.study):
        message = f"{quoted(study.study)} is no study name: lower-case letters, digits, '.', '_' and '-', at most 63"
        yield Problem("study", message, study.mark("study"))
    if not (study.variants or study.design or study.ablate):
        yield Problem("variants", "holds none: a study compares at least one variant", study.mark("variants"))
    if not study.keep.final and study.evaluate.evaluated:
        names = ", ".join(measure.label for measure in study.evaluate.evaluated)
        message = f"must be true for what `evaluate` measures of the final weights: {names}"
        yield Problem("keep.final", message, study.keep.mark("final"))
    yield from unknown_components(study)
    for name, component in study.components.items():
        if component.components:
            message = "a component is a mapping of paths, not of other components"
            yield Problem(f"components.{name}", message, study.mark(f"components.{name}"))
    yield from study.resources.problems()
    yield from _check_names(study)
    yield from _check_grid(study)
    for section in study.sections:
        yield from section.problems(study)


def unknown_components(study: Study) -> Iterator[Problem]:
    """Components that variants name and that there are not."""
    for name, variant in study.variants.items():
        for setting in variant.settings:
            if not setting.path and setting.source not in study.components:
                message = unknown(setting.source, "component", study.components)
                yield Problem(f"variants.{name}", message, setting.mark)


def _check_names(study: Study) -> Iterator[Problem]:
    for name in study.variants:
        mark = study.mark(f"variants.{name}")
        if message := no_name(name):
            yield Problem("variants", message, mark)
        elif study.search and _FOUND.fullmatch(name):
            yield Problem("variants", f"'{name}' is what a search calls its own; choose another name", mark)
    if study.variants and study.report.baseline not in study.variants:
        mark, message = study.report.mark("baseline"), no_variant(study.report.baseline, list(study.variants))
        if mark is None:
            mark = study.mark("variants")
            first = next(iter(study.variants))
            message += f"; add `{study.report.baseline}: {{}}` to them, or say `report: {{baseline: {first}}}`"
        yield Problem("report.baseline", message, mark)


def _check_grid(study: Study) -> Iterator[Problem]:
    if ZOO in study.grid:
        message = "names models, and those are variants: write `variants: {llama: {zoo: llama}}`"
        yield Problem(f"grid.{ZOO}", message, study.mark(f"grid.{ZOO}"))
    if study.grid and study.search:
        yield Problem(
            "grid", "a search takes its variants from `space:`; make each axis one of its axes", study.mark("grid")
        )
    cells = study.ladder.rungs if study.ladder else 1
    for axis in study.axes:
        cells *= len(axis)
    if cells * max(len(study.variants), 1) > MAX_CELLS:
        section = "grid" if study.grid else "ladder" if study.ladder else "recipes"
        message = f"makes {cells * len(study.variants):,} variants; at most {MAX_CELLS:,}"
        yield Problem(section, message, study.mark(section))
