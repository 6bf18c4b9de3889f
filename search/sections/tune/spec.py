"""What variants choose for themselves on validation: the `tune:` section of a study.

    tune: {lr: {grid: 1-2-5, from: 5e-4, to: 2e-3}}
    tune: {lr: [2e-3, 4e-3, 8e-3], block.attention.head_dim: [32, 64], extend: 1, brackets: {rungs: [0.2], keep: 0.5}}

Every key but `extend` and `brackets` is a path; several paths are tuned together, all combinations of their values.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from archlab.arch_dsl.language.errors import Problem, unknown
from archlab.arch_dsl.language.parse import INVALID, parse_value, refuse
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.language.spec import Positive, Range, Spec, fields_of, set_marks
from archlab.arch_dsl.model.model import DecoderModel, EncoderDecoderModel
from archlab.arch_dsl.tree.identity import brief_text
from archlab.search.results.selection import TUNE_OPTIONS, saved_by_brackets
from archlab.search.variants.asks import Planned, Question
from archlab.search.variants.section import Section

GRIDS = {"1-2-5": (1, 2, 5), "1-3": (1, 3)}
EXTEND = 2  # values that a grid may grow by on each side
RATE = "train.lr"
MAX_POINTS = 1000
_EXPONENTS = range(-12, 13)
_MODEL = {*fields_of(DecoderModel), *fields_of(EncoderDecoderModel)}


class Brackets(Spec):
    """Values wait where others are better: at each of `rungs`, shares of a trial's steps, the best part of those that
    came there goes on, `keep` of them, rounded up."""

    title: ClassVar[str] = "brackets"
    rungs: tuple[Annotated[float, Range(above=0, below=1)], ...] = (0.2,)
    keep: Annotated[float, Range(above=0, max=1)] = 0.5


@dataclass(frozen=True)
class Values:
    """What one path may be: a list, or the members of a 1-2-5 or 1-3 grid. Numbers ascend, and may be extended."""

    values: tuple[Any, ...]
    grid: str = ""
    nodes: tuple[Node, ...] = ()  # where each was written

    @property
    def is_ordered(self) -> bool:
        """Whether it makes sense to ask what lies beyond the ends."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    def beyond(self, up: bool, steps: int) -> list[Any]:
        """The next `steps` values after the largest or before the smallest one: of the grid, or by the last ratio."""
        if not self.is_ordered or steps < 1:
            return []
        if self.grid:
            members = _members(self.grid)
            end = self.values[-1] if up else self.values[0]
            found = [m for m in members if (m > end * 1.001 if up else m < end * 0.999)]
            return [_same_kind(m, self.values) for m in (found[:steps] if up else found[: -steps - 1 : -1])]
        if len(self.values) < 2 or min(self.values) <= 0:
            return []
        near, end = self.values[-2:] if up else (self.values[1], self.values[0])
        found = [_same_kind(float(f"{end * (end / near) ** step:.6g}"), self.values) for step in range(1, steps + 1)]
        return [value for value in found if value > 0 and (value > end if up else value < end)]


class Tune(Section):
    """Paths with the values that every variant chooses from, on validation and with the first seed.

    `extend` is by how many values they may grow on each side while the best lies at the edge; without it grids grow by
    two, lists don't. `brackets` ends values early that are behind; without it grids do so, lists don't.
    """

    key = "tune"
    title: ClassVar[str] = "tune"
    axes: dict[str, Values] = field(default_factory=dict)
    extend: int | None = None
    brackets: Brackets | None = None

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of paths, with `extend` and `brackets` among them."""
        if not isinstance(node.value, dict):
            return refuse(problems, path, f"must be a mapping from paths to values, found {node.kind}", node.mark)
        before = len(problems)
        options = {name: child for name, child in node.value.items() if name in TUNE_OPTIONS}
        axes: dict[str, Values] = {}
        for name, child in node.value.items():
            if name not in TUNE_OPTIONS:
                full = _full(name)
                mark = node.key_marks.get(name, child.mark)
                if full in axes:
                    refuse(problems, f"{path}.{name}", f"is {full}, which stands here already", mark)
                if "." not in full and full not in _MODEL:
                    refuse(problems, f"{path}.{name}", unknown(name, "key of tune", ("lr", *TUNE_OPTIONS)), mark)
                axes[full] = _values(full, child, f"{path}.{name}", problems)
        if not axes:
            refuse(problems, path, "holds no path: there is nothing to choose", node.mark)
        kind = Annotated[int, Range(min=0, max=20)]
        extend = parse_value(kind, options["extend"], f"{path}.extend", problems) if "extend" in options else None
        brackets = _brackets(options.get("brackets"), f"{path}.brackets", problems)
        if len(problems) > before:
            return INVALID
        gridded = any(axis.grid for axis in axes.values())
        found = cls(axes=axes, extend=extend, brackets=Brackets() if brackets is None and gridded else brackets or None)
        marks = {_full(name): node.key_marks.get(name, child.mark) for name, child in node.value.items()}
        set_marks(found, {name: mark for name, mark in {**marks, "": node.mark}.items() if mark})
        problems.extend(found._complaints(path))
        return found if len(problems) == before else INVALID

    def problems(self, study: Question) -> Iterator[Problem]:
        """A value that a variant sets would be ignored where each variant takes its best one."""
        if study.search:
            yield Problem("tune", "a search chooses rates by an axis `train.lr` of its space", study.mark("tune"))
        patches = {f"variants.{name}": patch for name, patch in study.variants.items()}
        patches |= {f"components.{name}": patch for name, patch in study.components.items()}
        for path in self.axes:
            what = "rate" if short(path) == "lr" else short(path)
            message = f"`tune` chooses the {what} of every variant; this one would be ignored"
            for place, patch in patches.items():
                for setting in patch.settings:
                    if setting.path == path:
                        yield Problem(f"{place}.{path}", message, setting.mark)
            if path in study.grid:
                yield Problem(f"grid.{path}", message, study.mark(f"grid.{path}"))

    def _complaints(self, path: str) -> Iterator[Problem]:
        count = math.prod(len(axis.values) for axis in self.axes.values())
        if count > MAX_POINTS:
            yield Problem(path, f"makes {count:,} combinations of values; at most {MAX_POINTS:,}", self.mark())
        if self.extend and not any(axis.beyond(True, 1) or axis.beyond(False, 1) for axis in self.axes.values()):
            message = "needs a grid, or a list of at least two numbers above 0"
            yield Problem(f"{path}.extend", message, self.mark("extend"))

    def steps(self, path: str) -> int:
        """By how many values a path may grow on each side."""
        return (EXTEND if self.axes[path].grid else 0) if self.extend is None else self.extend

    @property
    def points(self) -> list[dict[str, Any]]:
        """All combinations of the values, the last path's changing fastest."""
        names = [short(path) for path in self.axes]
        return [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*(axis.values for axis in self.axes.values()))
        ]

    def reach(self, path: str) -> tuple[Any, ...]:
        """The values of a path, and those beyond the ends."""
        axis, steps = self.axes[path], self.steps(path)
        return (*axis.values, *axis.beyond(False, steps), *axis.beyond(True, steps))

    @property
    def saved(self) -> float:
        """How many whole trials the brackets save of a variant's points; less where neighbours go on after all."""
        return saved_by_brackets(len(self.points), self.brackets.rungs, self.brackets.keep) if self.brackets else 0.0

    def record(self, planned: Planned) -> dict[str, Any]:
        return self.plain()

    def plain(self) -> dict[str, Any]:
        """Values by path (`lr` for train.lr), and the options where they do something."""
        found: dict[str, Any] = {short(path): list(axis.values) for path, axis in self.axes.items()}
        if any(self.steps(path) for path in self.axes):
            found["extend"] = {short(path): self.steps(path) for path in self.axes}
        if self.brackets:
            found["brackets"] = {"rungs": list(self.brackets.rungs), "keep": self.brackets.keep}
        return found


def short(path: str) -> str:
    """The name of a path in the settings of a trial."""
    return "lr" if path == RATE else path


def _full(name: str) -> str:
    return RATE if name == "lr" else name


def _members(grid: str) -> list[float]:
    return [float(f"{step}e{power}") for power in _EXPONENTS for step in GRIDS[grid]]


def _same_kind(value: float, values: tuple[Any, ...]) -> Any:
    """A whole number where all the others are."""
    return round(value) if all(isinstance(each, int) for each in values) else value


def _brackets(node: Node | None, path: str, problems: list[Problem]) -> Any:
    """The brackets that are asked for, False where there shall be none, None where nothing is said."""
    if node is None:
        return None
    if isinstance(node.value, bool):
        return Brackets() if node.value else False
    found = parse_value(Brackets, node, path, problems)
    if found is not INVALID and list(found.rungs) != sorted(set(found.rungs)):
        refuse(problems, f"{path}.rungs", "must ascend, each once", found.mark("rungs"))
    if found is not INVALID and not found.rungs:
        refuse(problems, f"{path}.rungs", "holds none", found.mark("rungs"))
    return found


def _values(full: str, node: Node, path: str, problems: list[Problem]) -> Any:
    """The values of one path."""
    if isinstance(node.value, dict) and ({"grid", "from", "to"} & set(node.value) or full == RATE):
        return _grid(full, node, path, problems)
    nodes = node.value if isinstance(node.value, list) else [node]
    if not nodes or (full != RATE and not isinstance(node.value, list)) or node.value is None:
        found = "nothing" if node.value is None else "an empty list" if not nodes else node.kind
        what = "rate" if full == RATE else "value"
        return refuse(problems, path, f"must be a list of at least one {what}, found {found}", node.mark)
    if full == RATE:
        rates = parse_value(tuple[Positive, ...], node, path, problems)
        if rates is INVALID:
            return INVALID
        values = list(rates)
    else:
        values = [child.plain() for child in nodes]
    seen: set[str] = set()
    for value, child in zip(values, nodes, strict=True):
        spelled = json.dumps(value, sort_keys=True)
        if spelled in seen:
            mark = node.mark if full == RATE else child.mark
            return refuse(problems, path, f"holds {brief_text(value)} twice", mark)
        seen.add(spelled)
    listed = Values(tuple(values), nodes=tuple(nodes))
    if not listed.is_ordered:
        return listed
    order = sorted(range(len(values)), key=lambda index: values[index])
    return Values(tuple(values[index] for index in order), nodes=tuple(nodes[index] for index in order))


def _grid(full: str, node: Node, path: str, problems: list[Problem]) -> Any:
    """The members of a 1-2-5 or 1-3 grid between two ends, both included."""
    assert isinstance(node.value, dict)
    keys = ("grid", "from", "to")
    before = len(problems)
    for name in node.value:
        if name not in keys:
            mark = node.key_marks.get(name, node.mark)
            refuse(problems, f"{path}.{name}", unknown(name, f"key of {short(full)}", keys), mark)
    what = "rate" if full == RATE else "value"
    for name in keys:
        if name not in node.value:
            refuse(problems, f"{path}.{name}", f"is missing: a grid of {what}s needs it", node.mark)
    kind = node.value.get("grid")
    if kind and (not isinstance(kind.value, str) or kind.value not in GRIDS):
        named = kind.value if isinstance(kind.value, str | int | float) else kind.kind
        refuse(problems, f"{path}.grid", unknown(named, "grid", GRIDS), kind.mark)
    ends = [
        parse_value(Positive, node.value[name], f"{path}.{name}", problems) for name in keys[1:] if name in node.value
    ]
    if len(problems) > before:
        return INVALID
    assert kind is not None
    low, high = ends
    found = tuple(value for value in _members(str(kind.value)) if low * 0.999 <= value <= high * 1.001)
    if not found:
        message = f"holds no {what}: none of the grid {kind.value} lies between {low:g} and {high:g}"
        return refuse(problems, path, message, node.mark)
    if full != RATE and all(value.is_integer() for value in found):
        found = tuple(int(value) for value in found)
    return Values(found, str(kind.value), (node,) * len(found))
