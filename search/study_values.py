"""The values that a study file spells in its own way: patches, times, the axes of a grid."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from arch_dsl.errors import Problem
from arch_dsl.identity import brief_text
from arch_dsl.parse import INVALID
from arch_dsl.patch import Setting, settings_of
from arch_dsl.source import Node

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


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
                settings += settings_of(item, path)
        return INVALID if len(problems) > before else cls(tuple(settings), tuple(names))


@dataclass(frozen=True)
class Duration:
    """A time: `30m`, `2h`, `90s`."""

    seconds: float

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a number with a unit."""
        match = _DURATION.fullmatch(node.value) if isinstance(node.value, str) else None
        if match is None or not float(match[1]):
            found = f"'{node.value}'" if isinstance(node.value, str) else node.plain() or node.kind
            problems.append(Problem(path, f"must be a time such as 90s, 30m or 2h, found {found}", node.mark))
            return INVALID
        return cls(float(match[1]) * _SECONDS[match[2]])


@dataclass(frozen=True)
class Axis:
    """The values that one path takes in a grid, each with the place where it was written."""

    nodes: tuple[Node, ...]

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a list of at least one value, each once."""
        if not isinstance(node.value, list) or not node.value:
            found = "an empty one" if isinstance(node.value, list) else node.kind
            problems.append(Problem(path, f"must be a list of values, found {found}", node.mark))
            return INVALID
        before = len(problems)
        seen: set[str] = set()
        for child in node.value:
            spelled = json.dumps(child.plain(), sort_keys=True)
            if spelled in seen:
                problems.append(Problem(path, f"holds {brief_text(child.plain())} twice", child.mark))
            seen.add(spelled)
        return INVALID if len(problems) > before else cls(tuple(node.value))
