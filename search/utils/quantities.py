"""Durations and sizes as a study spells them: `30m`, `8GB`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archlab.arch_dsl.language.errors import Problem
from archlab.arch_dsl.language.parse import INVALID
from archlab.arch_dsl.language.source import Node

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)")


_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]i?)B")


_BYTES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Duration:
    """A time: `30m`, `2h`, `90s`."""

    seconds: float

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a number with a unit."""
        found = _amount(node, path, problems, _DURATION, _SECONDS, "a time such as 90s, 30m or 2h")
        return INVALID if found is None else cls(found)


@dataclass(frozen=True)
class Memory:
    """An amount of memory: `8GB`, `500MB`, `1.5GiB`."""

    bytes: int

    @classmethod
    def parse_node(cls, node: Node, path: str, problems: list[Problem]) -> Any:
        """From a number with a unit."""
        found = _amount(node, path, problems, SIZE, _BYTES, "a size such as 8GB or 500MB")
        return INVALID if found is None else cls(int(found))


def _amount(
    node: Node, path: str, problems: list[Problem], form: re.Pattern[str], units: Mapping[str, float], what: str
) -> float | None:
    """A number above 0 with one of `units`, in the first one's; None with a problem noted where it is none."""
    match = form.fullmatch(node.value) if isinstance(node.value, str) else None
    if match and float(match[1]):
        return float(match[1]) * units[match[2]]
    found = f"'{node.value}'" if isinstance(node.value, str) else node.plain() or node.kind
    problems.append(Problem(path, f"must be {what}, found {found}", node.mark))
    return None
