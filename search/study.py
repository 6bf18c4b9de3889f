"""A study is a question: a base model, variants of it, a recipe, and how they are compared. This is its file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from arch_dsl.errors import Problem, SpecError, unknown
from arch_dsl.identity import brief_text
from arch_dsl.model import Model
from arch_dsl.parse import INVALID, parse, parse_record, parse_value
from arch_dsl.patch import Setting, settings_of
from arch_dsl.source import Node, read
from arch_dsl.spec import Count, Positive, Spec
from search.prune import Pruner
from search.recipe import Recipe
from search.space import Space

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}$")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d)$")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_CELLS = 100_000


@dataclass(frozen=True)
class Patch:
    """Changes to the base, in the order given; what a component or a variant is made of."""

    settings: tuple[Setting, ...] = ()
    components: tuple[str, ...] = ()

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of paths, or a list of component names and such mappings."""
        items = node.value if isinstance(node.value, list) else [node]
        settings: list[Setting] = []
        names: list[str] = []
        for item in items:
            if isinstance(item.value, str):
                names.append(item.value)
                settings.append(Setting("", item, item.value, item.mark))
                continue
            try:
                settings += settings_of(item, path.split(".", 1)[-1])
            except SpecError as error:
                problems.extend(error.problems)
                return INVALID
        return cls(tuple(settings), tuple(names))


@dataclass(frozen=True)
class Duration:
    """A time: `30m`, `2h`, `90s`."""

    seconds: float

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a number with a unit."""
        match = _DURATION.match(str(node.value))
        if match is None:
            problems.append(Problem(path, f"must be a time such as 90s, 30m or 2h, found {node.value!r}", node.mark))
            return INVALID
        return cls(float(match[1]) * _SECONDS[match[2]])


@dataclass(frozen=True)
class Rates:
    """Learning rates to choose from, ascending: a list, or `{grid: 1-2-5, from: 5e-4, to: 2e-3}`."""

    values: tuple[float, ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a list of rates or a 1-2-5 grid."""
        if isinstance(node.value, dict):
            grid = parse_value(_Grid, node, path, problems)
            return INVALID if grid is INVALID else cls(grid.values())
        values = parse_value(tuple[Positive, ...], node, path, problems)
        if values is INVALID:
            return INVALID
        if len(set(values)) < len(values) or not values:
            problems.append(Problem(path, "needs rates that differ, at least one", node.mark))
            return INVALID
        return cls(tuple(sorted(values)))


class _Grid(Spec):
    title: ClassVar[str] = "grid"
    grid: Literal["1-2-5", "1-3"]
    low: Positive
    high: Positive

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        names = {"from": "low", "to": "high"}
        assert isinstance(node.value, dict)
        renamed = {names.get(key, key): child for key, child in node.value.items()}
        return parse_record(cls, Node(renamed, node.mark, node.key_marks), path, problems)

    def values(self) -> tuple[float, ...]:
        """The grid's members between the two ends, both included."""
        steps = (1, 2, 5) if self.grid == "1-2-5" else (1, 3)
        found = [float(f"{step}e{power}") for power in range(-12, 3) for step in steps]
        return tuple(value for value in found if self.low * 0.999 <= value <= self.high * 1.001)


class Match(Spec):
    """Makes variants comparable: solves the integer field `by` so that each has the parameters of the variant named."""

    title: ClassVar[str] = "match"
    parameters: str
    by: str


class Tune(Spec):
    """What each variant chooses for itself on validation, with the first seed."""

    title: ClassVar[str] = "tune"
    lr: Rates


class Search(Spec):
    """Optuna proposes `trials` variants from `space:`, judged by validation loss; the best is repeated with all seeds."""

    title: ClassVar[str] = "search"
    sampler: Literal["tpe", "random"] = "tpe"
    trials: Count
    minimize: Literal["perplexity"] = "perplexity"
    seed: int = 0


class Budget(Spec):
    """What a run may spend before it stops with what it has: seconds of wall time, trials started."""

    title: ClassVar[str] = "budget"
    wall: Duration | None = None
    trials: Count | None = None


class Resources(Spec):
    """What one trial gets: CPU cores, each with one torch thread."""

    title: ClassVar[str] = "resources"
    cpus: Count = 1


class ReportOptions(Spec):
    """How results are shown: the variant that the others are compared with."""

    title: ClassVar[str] = "report"
    baseline: str = "baseline"


class Study(Spec):
    """A question and everything that answering it takes."""

    title: ClassVar[str] = "study"
    study: str
    question: str = ""
    model: Model
    components: dict[str, Patch] = field(default_factory=dict)
    variants: dict[str, Patch] = field(default_factory=dict)
    grid: dict[str, Axis] = field(default_factory=dict)
    match: Match | None = None
    train: Recipe
    tune: Tune | None = None
    seeds: Count = 3
    evaluate: tuple[Literal["perplexity"], ...] = ("perplexity",)
    search: Search | None = None
    space: Space | None = None
    prune: Pruner | None = None
    budget: Budget = Budget()
    report: ReportOptions = ReportOptions()
    resources: Resources = Resources()

    @property
    def file(self) -> Path | None:
        """The file it came from."""
        mark = self.mark()
        return Path(mark.file) if mark else None


@dataclass(frozen=True)
class Axis:
    """The values that one path takes in a grid, each with the place where it was written."""

    nodes: tuple[Node, ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a list of at least one value."""
        if not isinstance(node.value, list) or not node.value:
            problems.append(Problem(path, f"must be a list of values, found {node.kind}", node.mark))
            return INVALID
        return cls(tuple(node.value))


@dataclass(frozen=True)
class Asked:
    """A variant as the study asks for it, before it is applied: one variant in one cell of the grid."""

    name: str
    base: str
    cell: str
    settings: tuple[Setting, ...]
    components: Mapping[str, bool] = field(default_factory=dict)


def load_study(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Study:
    """A study from its file. `overrides` replaces values by dotted path (`train.tokens`), as `--set` does.

    Raises SpecError with everything that is wrong with it, each with line and column.
    """
    node = read(path)
    for dotted, value in (overrides or {}).items():
        node = _overridden(node, dotted.split("."), Node.of(value), dotted)
    return parse_study(node)


def parse_study(node: Node) -> Study:
    """A study from a node tree. Raises SpecError."""
    if not isinstance(node.value, dict):
        raise SpecError.of("", f"a study is a mapping with `study`, `model`, `variants`, `train`; found {node.kind}", node.mark)
    study = parse(Study, node)
    if problems := [*_check(study), *study.train.problems("train")]:
        raise SpecError(problems)
    return study


def _overridden(node: Node, steps: list[str], value: Node, dotted: str) -> Node:
    if not steps:
        return value
    if not isinstance(node.value, dict):
        raise SpecError.of(dotted, "leads into a value that has no parts", node.mark)
    child = node.value.get(steps[0], Node({}, node.mark))
    new = {**node.value, steps[0]: _overridden(child, steps[1:], value, dotted)}
    return Node(new, node.mark, {k: v for k, v in node.key_marks.items() if k != steps[0]})


def _check(study: Study) -> Iterator[Problem]:
    """What the sections of a study get wrong together."""
    if not _NAME.match(study.study) or ".." in study.study:
        message = f"'{study.study}' is no study name: lower-case letters, digits, '.', '_' and '-', at most 63"
        yield Problem("study", message, study.mark("study"))
    if not study.variants and not study.search:
        yield Problem("variants", "is missing: a study compares at least one variant", study.mark())
    if (study.search is None) != (study.space is None):
        given, missing = ("search", "space") if study.search else ("space", "search")
        yield Problem(given, f"needs `{missing}:` beside it", study.mark(given))
    for name, variant in study.variants.items():
        for setting in variant.settings:
            if not setting.path and setting.source not in study.components:
                message = unknown(setting.source, "component", study.components or ["none are defined"])
                yield Problem(f"variants.{name}", message, setting.mark)
    for name, component in study.components.items():
        if component.components:
            yield Problem(f"components.{name}", "a component is a mapping of paths, not of other components", study.mark("components"))
    yield from _check_names(study)


def _check_names(study: Study) -> Iterator[Problem]:
    for section, field_name, name in (("report", "baseline", study.report.baseline),) + (
        (("match", "parameters", study.match.parameters),) if study.match else ()
    ):
        owner = getattr(study, section)
        if name not in study.variants:
            mark = owner.mark(field_name) or study.mark("variants")
            message = unknown(name, "variant", study.variants or ["none are defined"])
            yield Problem(f"{section}.{field_name}", message, mark)
    if study.tune and study.search:
        yield Problem("tune", "a search chooses rates by an axis `train.lr` of its space", study.mark("tune"))
    cells = 1
    for axis in study.grid.values():
        cells *= len(axis.nodes)
    if cells * max(len(study.variants), 1) > MAX_CELLS:
        yield Problem("grid", f"makes {cells * len(study.variants):,} variants; at most {MAX_CELLS:,}", study.mark("grid"))


def asked_variants(study: Study) -> list[Asked]:
    """Every variant in every cell of the grid, in the order in which the table shows them."""
    return [
        _asked(study, name, patch, cell)
        for cell in itertools.product(*(_cells(path, axis) for path, axis in study.grid.items()))
        for name, patch in study.variants.items()
    ]


def _cells(path: str, axis: Axis) -> list[tuple[str, Setting]]:
    short = path.rsplit(".", 1)[-1]
    return [(f"{short}={brief_text(node.plain())}", Setting(path, node, "the grid", node.mark)) for node in axis.nodes]


def _asked(study: Study, name: str, patch: Patch, cell: tuple[tuple[str, Setting], ...]) -> Asked:
    settings: list[Setting] = []
    for setting in patch.settings:
        settings += [setting] if setting.path else _of_component(study, setting.source)
    label = ", ".join(text for text, _ in cell)
    return Asked(
        name=f"{name} [{label}]" if label else name,
        base=name,
        cell=label,
        settings=(*settings, *(setting for _, setting in cell)),
        components={component: component in patch.components for component in study.components},
    )


def _of_component(study: Study, name: str) -> list[Setting]:
    return [Setting(s.path, s.node, f"component {name}", s.mark) for s in study.components[name].settings]


