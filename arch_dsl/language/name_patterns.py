"""Patterns of parameters' names: `{i}` stands for one step of a path, the same wherever it stands in a map, and `{i+1}`
for the number after it; `*` for any one step; `a | b` for the first of two that the model has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache

_HOLE = re.compile(r"\{([a-z]+)(\+1)?\}|\*")


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Whether a name has the form of one of some patterns."""
    return any(match(pattern, name) is not None for pattern in patterns)


def match(pattern: str, name: str) -> dict[str, str] | None:
    """What the holes of a pattern stand for in a name, or None if it has another form."""
    found = _regex(pattern).fullmatch(name)
    return None if found is None else found.groupdict()


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    """Holes match one step of a path."""
    text, end, seen = "", 0, set()
    for hole in _HOLE.finditer(pattern):
        text += re.escape(pattern[end : hole.start()])
        name = None if hole[2] else hole[1]
        text += "[^.]+" if name is None else f"(?P={name})" if name in seen else f"(?P<{name}>[^.]+)"
        seen.add(name or "")
        end = hole.end()
    return re.compile(text + re.escape(pattern[end:]))


def filled(pattern: str, holes: Mapping[str, str]) -> str:
    """A pattern with its holes filled; a `*` stays."""

    def value(hole: re.Match[str]) -> str:
        if hole[1] is None:
            return hole[0]
        return str(int(holes[hole[1]]) + 1) if hole[2] else holes[hole[1]]

    return _HOLE.sub(value, pattern)


def fillings(pattern: str, names: Iterable[str]) -> Iterator[dict[str, str]]:
    """What the holes of a pattern of ours stand for, once for each place in the model."""
    seen: set[tuple[tuple[str, str], ...]] = set()
    for alternative in pattern.split(" | "):
        for name in names:
            holes = match(alternative, name)
            if holes is not None and (key := tuple(sorted(holes.items()))) not in seen:
                seen.add(key)
                yield holes


def place(pattern: str, names: Collection[str]) -> list[str]:
    """The parameters that the first fitting alternative of a filled pattern means: one, if all is well."""
    for alternative in pattern.split(" | "):
        if alternative in names:  # no hole is left in most, and models have many names
            return [alternative]
        if _HOLE.search(alternative) and (found := [name for name in names if match(alternative, name) is not None]):
            return found
    return []
