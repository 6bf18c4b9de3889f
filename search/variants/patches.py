"""The values that a study file spells in its own way: patches, times, sizes, the axes of a grid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node
from archlab.arch_dsl.patching.patch import Setting, settings_of
from archlab.arch_dsl.tree.identity import brief_text
from archlab.search.formatting.words import shortest

_NAME = re.compile(r"(?=.{1,40}$)[^\s\[\]=,]+( [^\s\[\]=,]+)*")


@dataclass(frozen=True)
class Patch:
    """Changes to the base, in the order given; what a component or a variant is made of.

    A setting without a path stands for the component that its source names. A variant of a design says so, and which
    variant it is compared with where that is not the study's baseline.
    """

    settings: tuple[Setting, ...] = ()
    components: tuple[str, ...] = ()
    designed: bool = False
    against: str = ""

    @property
    def is_pure(self) -> bool:
        """Whether it is nothing but components."""
        return len(self.settings) == len(self.components)

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of paths, or a list of component names and such mappings."""
        items = node.value if isinstance(node.value, list) else [node]
        settings: list[Setting] = []
        names: list[str] = []
        before = len(problems)
        for item in items:
            if isinstance(item.value, str):
                if item.value in names:
                    problems.append(Problem(path, f"names the component '{item.value}' twice", item.mark))
                names.append(item.value)
                settings.append(Setting("", item, item.value, item.mark))
            elif not isinstance(item.value, dict | None):
                message = f"must be a mapping from paths to values or a list of components, found {item.kind}"
                problems.append(Problem(path, message, item.mark))
            elif item.value and "" in item.value:
                problems.append(Problem(path, "a path must not be empty", item.key_marks.get("", item.mark)))
            else:
                own = settings_of(item, path)
                settings += own
                problems += misplaced(own)
        return INVALID if len(problems) > before else cls(tuple(settings), tuple(names))


def misplaced(settings: Iterable[Setting]) -> Iterator[Problem]:
    """Settings whose paths begin where no path does, with how they would be written."""
    for setting in settings:
        head, _, rest = setting.path.partition(".")
        if head == "model" and rest:
            yield Problem(setting.path, f"a path begins inside the model; write '{rest}'", setting.mark)
        elif setting.path in ("train", "model") and isinstance(setting.node.value, dict):
            inner = [name if head == "model" else f"train.{name}" for name in setting.node.value]
            message = f"is no path that can be set; write {', '.join(map(repr, inner)) or 'paths'}"
            yield Problem(setting.path, message, setting.mark)


@dataclass(frozen=True)
class AtScale:
    """What a study changes at one of its scales: archlab.search.study.scales."""

    change: Node

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From what stands there, which archlab.search.study.scales has checked."""
        return cls(node)


@dataclass(frozen=True)
class Axis:
    """The values that one path takes in a grid, each with the place where it was written, and what they are called."""

    nodes: tuple[Node, ...]
    names: tuple[str, ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a list of at least one value, each once, or from {named: {name: value}}."""
        before = len(problems)
        if isinstance(node.value, dict) and [*node.value] == ["named"]:
            nodes = _named(node.value["named"], f"{path}.named", problems)
        elif isinstance(node.value, list) and node.value:
            nodes = [(brief_text(child.plain()), child) for child in node.value]
        else:
            found = "an empty one" if isinstance(node.value, list) else node.kind
            message = f"must be a list of values, or {{named: {{name: value}}}}, found {found}"
            problems.append(Problem(path, message, node.mark))
            return INVALID
        seen: set[str] = set()
        for _, child in nodes:
            spelled = json.dumps(child.plain(), sort_keys=True)
            if spelled in seen:
                problems.append(Problem(path, f"holds {brief_text(child.plain())} twice", child.mark))
            seen.add(spelled)
        return INVALID if len(problems) > before else cls(tuple(n for _, n in nodes), tuple(name for name, _ in nodes))


def _named(node: Node, path: str, problems: list[Problem]) -> list[tuple[str, Node]]:
    """Values of a grid by their names."""
    if not isinstance(node.value, dict) or not node.value:
        found = "an empty one" if isinstance(node.value, dict) else node.kind
        problems.append(Problem(path, f"must be a mapping of names to values, found {found}", node.mark))
        return []
    for name in node.value:
        if not _NAME.fullmatch(name):
            message = f"{name!r} is no name of a value: 1 to 40 characters, words and single spaces, none of []=,"
            problems.append(Problem(path, message, node.key_marks.get(name, node.mark)))
    return [*node.value.items()]


def cells_of(grid: Mapping[str, Axis], path: str) -> list[tuple[str, Node]]:
    """The values of one axis of a grid, each with the text that names it."""
    name = shortest(path, grid)
    return [(f"{name}={called}", node) for called, node in zip(grid[path].names, grid[path].nodes, strict=True)]


@dataclass(frozen=True)
class Changes:
    """What a second recipe has that the study's has not: paths of `train` with their values."""

    settings: tuple[Setting, ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a mapping of at least one path, each without the `train.` that variants write."""
        if not isinstance(node.value, dict) or not node.value:
            found = "an empty one" if isinstance(node.value, dict) else node.kind
            problems.append(Problem(path, f"must be a mapping of paths of `train`, found {found}", node.mark))
            return INVALID
        before = len(problems)
        for name in node.value:
            mark = node.key_marks.get(name, node.mark)
            if not name:
                problems.append(Problem(path, "a path must not be empty", mark))
            elif name.split(".")[0] == "train":
                short = name.partition(".")[2] or "its parts"
                problems.append(Problem(f"{path}.{name}", f"paths are those of `train` already: write {short}", mark))
        return INVALID if len(problems) > before else cls(tuple(settings_of(node, "the screen")))


def spelt(settings: Iterable[Setting]) -> list[str]:
    """Changes as a study writes them."""
    return [f"{setting.path}: {brief_text(setting.node.plain())}" for setting in settings]
