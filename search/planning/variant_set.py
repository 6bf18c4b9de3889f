"""All variants of a study: built, held against each other, and what makes no sense or is there twice left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.patching.patch import Setting
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.formatting.words import shortest
from archlab.search.planning.auto_settings import AUTO, Settled, kept_in, settle
from archlab.search.planning.builder import Builder
from archlab.search.sections.design.spec import ALL
from archlab.search.sections.ladder.rungs import climbed
from archlab.search.sections.ladder.width_transfer import Coordinates, transfer_rungs
from archlab.search.sections.search.space import Space, probes
from archlab.search.study.asked import asked_variants
from archlab.search.study.changes import changed, value_at
from archlab.search.study.study import Study
from archlab.search.utils.canonical import canonical_json
from archlab.search.variants.asked import Asked
from archlab.search.variants.mistakes import TWIN, Mistakes
from archlab.search.variants.variant import Variant


def variant_set(builder: Builder) -> VariantSet:
    """What a study asks for, settled and built. Raises SpecError with everything that is wrong with any variant."""
    study = builder.study
    asked = climbed(study.ladder, builder, asked_variants(study))
    builder.settled = _settled(builder, asked)
    found = VariantSet(builder, asked)
    for item in sorted(asked, key=lambda item: study.match is None or item.base != study.match.to):
        found.add(item)
    found.finish()
    if study.ladder and study.ladder.transfer != "none":
        root = builder.data_root.parent
        found.variants, found.coordinates = transfer_rungs(found.variants, root, study.ladder.mark("transfer"))
    optional = {item.name for item in asked if item.impossible != "refuse"}
    found.variants = _without_twins(found.variants, study, optional, found.omitted)
    return found


class VariantSet:
    """The variants of a study and what was found in making them, the targets of matching first."""

    def __init__(self, builder: Builder, asked: list[Asked]) -> None:
        self.builder, self.study = builder, builder.study
        self.variants: list[Variant] = []  # once all are there, in the order of the table
        self.made: dict[str, tuple[Asked, Variant | None]] = {}  # what each was made of, and what it was matched to
        self.omitted: dict[str, str] = {}  # combinations of a design that make no sense, and why
        self.coordinates: dict[str, Coordinates] = {}  # of what transfers along a ladder, by series
        self._mistakes = Mistakes(len(asked))
        self._impossible: list[tuple[Asked, SpecError]] = []
        self._targets: dict[str, Variant] = {}  # by cell, or one for all
        self._places: dict[str, float] = {item.name: index for index, item in enumerate(asked)}

    def add(self, item: Asked) -> None:
        """Builds a variant, beside it as it is written where matching changes it, or notes why it can't be built."""
        match = self.study.match
        cell = "" if match and match.all_cells else item.cell
        target = self._targets.get(cell)
        try:
            variant = self.builder.variant(item, target)
        except SpecError as error:
            if item.impossible == "refuse":
                self._mistakes.add(error.problems, item.name)
            else:
                self._impossible.append((item, error))
            return
        self.made[item.name] = item, target
        if match and item.base == match.to:
            self._targets.setdefault(cell, variant)
        self.variants.append(variant)
        if match and match.report_unmatched and variant.matched:
            label = f" [{item.cell}]" if item.cell else ""
            row = f"{item.base} unmatched"  # the same variant as it is written
            series = item.series and f"{row}{item.series.removeprefix(item.base)}"
            written = replace(item, name=f"{row}{label}", series=series, row=row)
            found = self.builder.variant(written, self._targets[cell], matched=False)
            if found.trial(0).key != variant.trial(0).key:
                self.variants.append(found)
                self.made[written.name] = written, self._targets[cell]
                self._places[written.name] = self._places[item.name] + 0.5

    def finish(self) -> None:
        """Sorts the variants into the order of the study. Raises SpecError."""
        self._refuse_needed()
        asks = {canonical_json(canonical(variant.recipe.objective)) for variant in self.variants}
        if self.study.prune and len(asks) > 1:
            message = "holds trials against each other, and losses of different objectives do not compare"
            raise SpecError.of("prune", message, self.study.mark("prune"))
        idle = self.builder.matcher.problems() if self.builder.matcher and not self._mistakes.found else ()
        if problems := [*self._mistakes.problems(), *_idle_problems(self.study), *idle]:
            raise SpecError(problems)
        self.variants.sort(key=lambda variant: self._places[variant.name])
        for item, error in self._impossible:
            first = error.problems[0]
            self.omitted[item.name] = f"{first.path}: {first.message}" if first.path else first.message

    def _refuse_needed(self) -> None:
        """Notes what cannot be left out: what others are compared with, and a component that no variant would have."""
        used = {name for variant in self.variants for name, on in variant.components.items() if on}
        for item, error in self._impossible:
            lost = {name for name, on in item.components.items() if on} - used
            if why := _needed(item.base, self.study):
                problems = [replace(each, message=f"{each.message}; {why}") for each in error.problems]
                self._mistakes.add(problems, item.name)
            elif lost:
                self._mistakes.add(error.problems, item.name)


def _settled(builder: Builder, asked: list[Asked]) -> Settled | None:
    """What the study's store has settled, or else what its baselines settle; None where no recipe leaves it open."""
    study = builder.study
    set_ = {setting.path for each in asked for setting in each.settings}
    set_ |= {*(study.space.axes if study.space else ()), *(study.tune.axes if study.tune else ())}
    open_ = AUTO in (study.train.precision, study.train.compile)
    if not open_ and not set_ & {"train.precision", "train.compile"}:
        return None
    now = settle(_baselines(builder, asked), study.resources)
    found = kept_in(builder.data_root.parent, study.study)
    return found.beside(now) if found else now


def _baselines(builder: Builder, asked: list[Asked]) -> Iterator[Variant]:
    """What the others are compared with, in every cell, as far as it can be built."""
    for item in asked:
        if item.base == builder.study.report.baseline:
            with suppress(SpecError):  # told when all are built
                yield builder.variant(item, None)


def _needed(base: str, study: Study) -> str:
    """Why a variant cannot be left out, if it cannot: others are compared with it or matched to it."""
    against = [name for name, patch in study.variants.items() if patch.against == base]
    if base == study.report.baseline and not against:
        against = [name for name in study.variants if name != base]
    if against:
        more = f" and {len(against) - 2} more" if len(against) > 2 else ""
        told = f"'{base}' is never left out: {', '.join(map(repr, against[:2]))}{more} would be compared with nothing"
        return f"{told}; take a design without it, such as add_one_in or pairwise" if base == ALL else told
    if study.match and base == study.match.to:
        return f"'{base}' is never left out: the others are matched to it"
    return ""


def _without_twins(variants: list[Variant], study: Study, optional: set[str], omitted: dict[str, str]) -> list[Variant]:
    """Two names for one model and recipe would compare a thing with itself: refused, or left out where a design may."""
    seen: dict[str, Variant] = {}
    kept, problems = [], []
    for variant in variants:
        twin = seen.setdefault(variant.trial(0).key, variant)
        message = f"is the same model and recipe as '{twin.name}'"
        if twin is variant:
            kept.append(variant)
        elif variant.name in optional and not _needed(variant.base, study):
            omitted[variant.name] = message
        else:
            designed = study.variants[variant.base].designed
            mark = study.mark("design" if designed else f"variants.{variant.base}")
            why = _needed(variant.base, study) if variant.name in optional else ""
            told = f"{message}; {why or TWIN}"
            names = {path: shortest(path, study.grid) for path in study.grid}
            own = [path for path, name in names.items() if twin.axes.get(name) != variant.axes.get(name)]
            if own and twin.base == variant.base:
                mark, told = study.mark(f"grid.{own[0]}"), f"{told}; {own[0]} makes no difference here"
            problems.append(Problem(f"variants.{variant.name}", told, mark))
    if problems:
        raise SpecError(problems)
    return kept


def _idle_problems(study: Study) -> Iterator[Problem]:
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
                yield replace(problem, path=f"space.{path}")
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


def in_order(variants: Sequence[Variant], baselines_first: bool) -> list[Variant]:
    """Variants as they are trained: the cell with the longest trials first, and of each its baseline, without which
    nothing compares; with `baselines_first` all baselines before all others."""
    takes = {each.name: each.flops_per_token * float(each.recipe.all_tokens) for each in variants}
    cells: dict[str, float] = {}
    for each in variants:
        cells[each.baseline] = max(cells.get(each.baseline, 0.0), takes[each.name])

    def place(variant: Variant) -> tuple[bool, float, bool, float]:
        other = variant.name not in cells
        return baselines_first and other, -cells[variant.baseline], other, -takes[variant.name]

    return sorted(variants, key=place)
