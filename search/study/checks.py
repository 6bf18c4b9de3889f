"""What the sections of a study get wrong together, beyond what each of them gets wrong alone."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator

from archlab.arch_dsl.language.errors import Problem, SpecError, nearest, unknown
from archlab.arch_dsl.patching.patch import apply
from archlab.search.sections.match.spec import KINDS
from archlab.search.sections.published.spec import problems_of
from archlab.search.sections.search.spec import study_problems as search_problems
from archlab.search.sections.tune.spec import short
from archlab.search.study.asked import cells_of
from archlab.search.study.study import Study
from archlab.search.variants.zoo import ZOO

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_VARIANT = re.compile(r"[^\s\[\]]+( [^\s\[\]]+)*")
_FOUND = re.compile(r"found(-[0-9]+)?|search-[0-9]+")
_NAMED = 40  # variants that an error lists
_QUOTED = 40  # characters of a wrong name that an error shows
MAX_CELLS = 100_000
_MOST_CELLS = 1000  # whose variants a published table may name


def problems_in(study: Study) -> Iterator[Problem]:
    """What the sections of a study get wrong together."""
    if not _NAME.fullmatch(study.study) or ".." in study.study:
        message = f"{_quoted(study.study)} is no study name: lower-case letters, digits, '.', '_' and '-', at most 63"
        yield Problem("study", message, study.mark("study"))
    if not (study.variants or study.design or study.ablate):
        yield Problem("variants", "holds none: a study compares at least one variant", study.mark("variants"))
    if not study.keep.final and study.evaluate.evaluated:
        names = ", ".join(measure.label for measure in study.evaluate.evaluated)
        message = f"must be true for what `evaluate` measures of the final weights: {names}"
        yield Problem("keep.final", message, study.keep.mark("final"))
    if (study.search is None) != (study.space is None):
        given, missing = ("search", "space") if study.search else ("space", "search")
        yield Problem(given, f"needs `{missing}:` beside it", study.mark(given))
    for name, variant in study.variants.items():
        for setting in variant.settings:
            if not setting.path and setting.source not in study.components:
                message = unknown(setting.source, "component", study.components)
                yield Problem(f"variants.{name}", message, setting.mark)
    for name, component in study.components.items():
        if component.components:
            message = "a component is a mapping of paths, not of other components"
            yield Problem(f"components.{name}", message, study.mark(f"components.{name}"))
    if study.match and len(study.match.kinds) != 1:
        found = " and ".join(study.match.kinds) or "none"
        message = f"names the variant to match under one of {', '.join(KINDS)}; found {found}"
        yield Problem("match", message, study.mark("match"))
        return
    if study.match and not study.match.by:
        yield Problem("match.by", "is an empty list: name the integer fields to solve", study.match.mark("by"))
    yield from study.resources.problems()
    yield from _check_names(study)
    yield from _check_tuned(study)
    yield from _check_grid(study)
    yield from _check_screen(study)
    if study.report.published:
        yield from problems_of(study.report.published, list(study.variants), _in_cells(study), study.file)
    if study.search and study.space:
        yield from search_problems(study)


def _quoted(name: str) -> str:
    return f"'{name[:_QUOTED]}…' ({len(name)} characters)" if len(name) > _QUOTED else repr(name)


def _check_names(study: Study) -> Iterator[Problem]:
    for name in study.variants:
        mark = study.mark(f"variants.{name}")
        if not _VARIANT.fullmatch(name) or len(name) > 80 or not name.isprintable():
            message = f"{_quoted(name)} is no variant name: 1 to 80 characters, words and single spaces, no brackets"
            yield Problem("variants", message, mark)
        elif study.search and _FOUND.fullmatch(name):
            yield Problem("variants", f"'{name}' is what a search calls its own; choose another name", mark)
    for section, field_name, name in (("report", "baseline", study.report.baseline),) + (
        (("match", study.match.kind, study.match.to),) if study.match else ()
    ):
        owner = getattr(study, section)
        if study.variants and name not in study.variants:
            mark, message = owner.mark(field_name), _no_variant(name, list(study.variants))
            if mark is None:
                mark = study.mark("variants")
                message += f"; add `{name}: {{}}` to them, or say `report: {{baseline: {next(iter(study.variants))}}}`"
            yield Problem(f"{section}.{field_name}", message, mark)
    if study.tune and study.search:
        yield Problem("tune", "a search chooses rates by an axis `train.lr` of its space", study.mark("tune"))


def _no_variant(name: str, names: list[str]) -> str:
    """That a variant is not there, without all names where a design made hundreds."""
    if len(names) <= _NAMED:
        return unknown(name, "variant", names)
    meant = nearest(name, names)
    return f"{unknown(name, 'variant', [meant] if meant else [])[:-1]} and {len(names) - bool(meant)} more)"


def _check_tuned(study: Study) -> Iterator[Problem]:
    """A value that a variant sets would be ignored where each variant takes its best one."""
    patches = {f"variants.{name}": patch for name, patch in study.variants.items()}
    patches |= {f"components.{name}": patch for name, patch in study.components.items()}
    for path in study.tune.axes if study.tune else ():
        what = "rate" if short(path) == "lr" else short(path)
        message = f"`tune` chooses the {what} of every variant; this one would be ignored"
        for place, patch in patches.items():
            for setting in patch.settings:
                if setting.path == path:
                    yield Problem(f"{place}.{path}", message, setting.mark)
        if path in study.grid:
            yield Problem(f"grid.{path}", message, study.mark(f"grid.{path}"))


def _check_grid(study: Study) -> Iterator[Problem]:
    if ZOO in study.grid:
        message = "names models, and those are variants: write `variants: {llama: {zoo: llama}}`"
        yield Problem(f"grid.{ZOO}", message, study.mark(f"grid.{ZOO}"))
    if study.grid and study.search:
        yield Problem(
            "grid", "a search takes its variants from `space:`; make each axis one of its axes", study.mark("grid")
        )
    cells = study.ladder.rungs if study.ladder else 1
    for axis in study.grid.values():
        cells *= len(axis.nodes)
    if cells * max(len(study.variants), 1) > MAX_CELLS:
        section = "grid" if study.grid else "ladder"
        message = f"makes {cells * len(study.variants):,} variants; at most {MAX_CELLS:,}"
        yield Problem(section, message, study.mark(section))


def _in_cells(study: Study) -> list[str]:
    """The names of the variants in the cells of a grid, the first of very many."""
    if not study.grid or study.ladder:
        return []
    cells = itertools.islice(itertools.product(*(cells_of(study, path) for path in study.grid)), _MOST_CELLS)
    labels = [", ".join(text for text, _ in cell) for cell in cells]
    return [f"{name} [{label}]" for label in labels for name in study.variants]


def _check_screen(study: Study) -> Iterator[Problem]:
    """A screen ranks variants that are all known, once each."""
    if study.screen is None:
        return
    for section, what in (
        ("search", "a search proposes its variants one after another"),
        ("ladder", "a ladder trains each of them at several sizes"),
    ):
        if getattr(study, section) is not None:
            message = f"ranks all variants before they are trained, and {what}; leave one of the two out"
            yield Problem("screen", message, study.mark("screen"))
    try:
        apply(study.train, study.screen.train.settings)
    except SpecError as error:
        yield from (dataclasses.replace(each, path=f"screen.train.{each.path}") for each in error.problems)
