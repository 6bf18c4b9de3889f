"""A study is a question: a base model, variants of it, a recipe, and how they are compared. This is its file."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from arch_dsl.errors import Problem, SpecError, nearest, unknown
from arch_dsl.identity import brief_text
from arch_dsl.model import Model
from arch_dsl.parse import INVALID, parse_value
from arch_dsl.patch import Setting, apply
from arch_dsl.source import Node, read
from arch_dsl.spec import Count, Positive, Spec
from search.ablate import Ablate, with_base
from search.design import Design
from search.designed import written_out
from search.goals import Search
from search.goals import study_problems as search_problems
from search.keep import Keep
from search.ladder import Ladder, filled
from search.ladder import given as given_to_recipe
from search.ladder import problems_of as ladder_problems
from search.match import KINDS, Match
from search.measures import Measures, Perplexity
from search.plugin_files import load_listed
from search.prune import Pruner
from search.published_options import Published, problems_of
from search.recipe import Recipe
from search.resources import Resources
from search.rungs import Rung, rungs_of, written_sizes
from search.scales import at_scale
from search.screen import Screen
from search.seeds import Seeds
from search.selection import shortest
from search.space import Space
from search.study_values import AtScale, Axis, Duration, Patch
from search.tune import Tune, short
from search.zoo_variants import ZOO, with_sizes

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_VARIANT = re.compile(r"[^\s\[\]]+( [^\s\[\]]+)*")
_FOUND = re.compile(r"found(-[0-9]+)?|search-[0-9]+")
_NAMED = 40  # variants that an error lists
_QUOTED = 40  # characters of a wrong name that an error shows
MAX_CELLS = 100_000
_MOST_CELLS = 1000  # whose variants a published table may name


class Budget(Spec):
    """What may be spent before a run stops with what it has. `wall` is the time of one run.

    The others count over all runs of the study: `trials` started, `tokens` trained on, `gpu_hours` in which trials held
    a GPU. What other studies have trained is free.
    """

    title: ClassVar[str] = "budget"
    wall: Duration | None = None
    trials: Count | None = None
    tokens: Count | None = None
    gpu_hours: Positive | None = None


class ReportOptions(Spec):
    """How results are shown: the variant that the others are compared with, and the table of a paper beside ours."""

    title: ClassVar[str] = "report"
    baseline: str = "baseline"
    published: Published | None = None


class Study(Spec):
    """A question and everything that answering it takes."""

    title: ClassVar[str] = "study"
    study: str
    question: str = ""
    plugins: tuple[str, ...] = ()
    scale: str | None = None
    scales: dict[str, AtScale] = field(default_factory=dict)
    model: Model
    ablate: Ablate | None = None
    components: dict[str, Patch] = field(default_factory=dict)
    design: Design | None = None
    variants: dict[str, Patch] = field(default_factory=dict)
    grid: dict[str, Axis] = field(default_factory=dict)
    ladder: Ladder | None = None
    match: Match | None = None
    train: Recipe
    tune: Tune | None = None
    seeds: Seeds = 3
    evaluate: Measures = Measures((Perplexity(),))
    search: Search | None = None
    space: Space | None = None
    screen: Screen | None = None
    prune: Pruner | None = None
    keep: Keep = Keep()
    budget: Budget = Budget()
    report: ReportOptions = ReportOptions()
    resources: Resources = Resources()

    @property
    def file(self) -> Path | None:
        """The file it came from."""
        mark = self.mark()
        return Path(mark.file) if mark else None


@dataclass(frozen=True)
class Asked:
    """A variant as the study asks for it, before it is applied: one variant in one cell of the grid."""

    name: str
    base: str
    cell: str
    settings: tuple[Setting, ...]
    components: Mapping[str, bool] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)  # of the grid, by the names that stand in `cell`
    impossible: str = "refuse"  # what becomes of it if it makes no sense
    against: str = ""  # the variant it is compared with; the study's baseline without one
    rung: Rung | None = None  # what a ladder changes in the base
    over: tuple[Setting, ...] = ()  # paths of the recipe, whatever the settings say of them
    series: str = ""  # what all rungs of a ladder have in common of its name
    row: str = ""  # its name before it was crossed, where components do not say all that it changes


def load_study(path: str | Path, overrides: Mapping[str, Any] | None = None, allow_plugins: bool = False) -> Study:
    """A study from its file. `overrides` replaces values by dotted path (`train.tokens`), as `--set` does.

    Of a study with `scales` it is the one at its first, or at the override `scale`; other overrides come after that.
    The Python files that it lists under `plugins` are executed if `allow_plugins`, and refused otherwise. Raises
    SpecError with everything that is wrong with it, each with line and column.
    """
    overrides = dict(overrides or {})
    scale = overrides.pop("scale", None)
    node = at_scale(read(path), None if scale is None else Node.of(scale))
    for dotted, value in overrides.items():
        node = _overridden(node, dotted.split("."), Node.of(value), dotted)
    load_listed(node, Path(path).parent, allow_plugins)
    return parse_study(node)


def parse_study(node: Node) -> Study:
    """A study from a node tree. Raises SpecError."""
    if not isinstance(node.value, dict):
        raise SpecError.of(
            "", f"a study is a mapping with `study`, `model`, `variants`, `train`; found {node.kind}", node.mark
        )
    problems: list[Problem] = []
    given = set(node.value)
    node = with_sizes(with_base(node, problems))
    study = parse_value(Study, filled(node), "", problems)
    if "ablate" in given:
        problems = list(_of_ablate(problems, "model" in given))
    if study is INVALID or problems:
        raise SpecError([*problems, *_model_mistakes(node, problems)])
    study, problems = written_out(study)
    study = written_sizes(study, node, problems)
    if study.search and not study.variants:
        study = study.replace(variants={study.report.baseline: Patch()})
    if problems := [
        *problems,
        *_check(study),
        *ladder_problems(study, given_to_recipe(node)),
        *study.train.problems("train"),
    ]:
        raise SpecError([*problems, *_model_mistakes(node, problems)])
    return study


def _of_ablate(problems: Iterable[Problem], has_model: bool) -> Iterator[Problem]:
    """The problems of a study with `ablate`, whose own mistakes say why there is no base, and whose `from` is it."""
    for problem in problems:
        head, *rest = problem.path.split(".")
        if head != "model" or has_model:
            yield problem
        elif rest or not problem.message.startswith("is missing"):
            yield dataclasses.replace(problem, path=".".join(["ablate", "from", *rest]))


def _model_mistakes(node: Node, known: list[Problem]) -> list[Problem]:
    """What is wrong with the models of a study whose file has other mistakes already, so that all are said at once."""
    from search.mistakes import model_mistakes  # which is about studies, and imports this module

    assert isinstance(node.value, dict)
    sections = ("study", "model", "ablate", "components", "design", "variants", "grid")
    if any(problem.path.split(".")[0] in sections for problem in known):
        return []
    kept = {name: node.value[name] for name in sections if name in node.value}
    recipe = Node.of({"tokens": 1, "lr": 1.0})
    study = parse_value(Study, Node({**kept, "train": recipe}, node.mark, node.key_marks), "", [])
    if study is INVALID:
        return []
    study, problems = written_out(study)
    return [] if problems else model_mistakes(study)


def _overridden(node: Node, steps: list[str], value: Node, dotted: str) -> Node:
    if not steps:
        return value
    if not isinstance(node.value, dict):
        raise SpecError.of(dotted, "leads into a value that has no parts", node.mark)
    # a path is itself a key: `grid.train.batch`, `model.block.attention.heads` where the model is one of the zoo
    if (rest := ".".join(steps)) in node.value or ("zoo" in node.value and steps[0] not in node.value):
        steps = [rest]
    child = node.value.get(steps[0], Node({}, node.mark))
    new = {**node.value, steps[0]: _overridden(child, steps[1:], value, dotted)}
    return Node(new, node.mark, {k: v for k, v in node.key_marks.items() if k != steps[0]})


def _check(study: Study) -> Iterator[Problem]:
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
    cells = itertools.islice(itertools.product(*(_cells(study, path) for path in study.grid)), _MOST_CELLS)
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


def asked_variants(study: Study) -> list[Asked]:
    """Every variant in every cell of the grid at every rung, in the order in which the table shows them.

    The rungs of a ladder have no names before they are counted: search.ladder.climbed.
    """
    used = {name for patch in study.variants.values() for name in patch.components}
    components = [name for name in study.components if name in used]
    return [
        _asked(study, name, patch, cell, components, rung)
        for cell in itertools.product(*(_cells(study, path) for path in study.grid))
        for rung in rungs_of(study.ladder)
        for name, patch in study.variants.items()
    ]


def _cells(study: Study, path: str) -> list[tuple[str, Setting]]:
    """The values of one axis, each with the text that names it."""
    short, mark = shortest(path, study.grid), study.mark(f"grid.{path}")
    nodes = study.grid[path].nodes
    return [(f"{short}={brief_text(node.plain())}", Setting(path, node, "the grid", mark)) for node in nodes]


def _asked(
    study: Study,
    name: str,
    patch: Patch,
    cell: tuple[tuple[str, Setting], ...],
    components: list[str],
    rung: Rung | None,
) -> Asked:
    settings: list[Setting] = []
    for setting in patch.settings:
        settings += [setting] if setting.path else _of_component(study, setting.source)
    label = ", ".join(text for text, _ in cell)
    return Asked(
        name=f"{name} [{label}]" if label else name,
        base=name,
        cell=label,
        settings=(*settings, *(setting for _, setting in cell)),
        components={component: component in patch.components for component in components},
        axes={text.partition("=")[0]: text.partition("=")[2] for text, _ in cell},
        impossible=study.design.impossible if study.design and patch.designed else "refuse",
        against=patch.against,
        rung=rung,
        series=(f"{name} [{label}]" if label else name) if rung else "",
        row="" if components and patch.is_pure else name,
    )


def _of_component(study: Study, name: str) -> list[Setting]:
    return [Setting(s.path, s.node, f"component {name}", s.mark) for s in study.components[name].settings]
