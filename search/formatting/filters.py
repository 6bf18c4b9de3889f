"""The language of filters: `gate=headwise lr>=0.004 state!=failed`, the same on every page and in the command line.

Terms stand side by side and must all hold. A term is NAME OPERATOR VALUE, with `=` and `!=` (equal as a number, or as
a text whatever its case), `<`, `<=`, `>`, `>=` (numbers) or `~` (is a part of it); a VALUE may list several, `a,b`, of
which one must hold (with `!=`: none may be equal), and be quoted. A word alone is looked for in every text. `-` before
a term turns it round. It is parsed, never evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from operator import ge, gt, le, lt
from typing import Any

_PART = r"\"[^\"]*\"|'[^']*'|[^\s,\"'=!<>~]+"
_VALUE = rf"(?:{_PART})(?:,(?:{_PART}))*"
_TERM = re.compile(
    rf"(?P<no>-)?(?:(?P<name>[^\s=!<>~\"',]+)(?P<operator><=|>=|!=|=|<|>|~)(?P<value>{_VALUE})|(?P<word>{_PART}))(?=\s|$)"
)
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)([kMGT]?)")
_SUFFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_ORDER: dict[str, Callable[[float, float], bool]] = {"<": lt, "<=": le, ">": gt, ">=": ge}
_FORMS = "write NAME=VALUE, with =, !=, <, <=, >, >= or ~ (contains), or a word alone"


class BadFilter(ValueError):
    """A filter that says nothing; the message says where, what was found and what is allowed."""


@dataclass(frozen=True)
class Term:
    """One condition; without a `name` it looks for a word in every text."""

    name: str | None
    operator: str
    values: tuple[str, ...]
    negated: bool = False

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether the row satisfies it. What a row lacks (None, NaN) equals nothing and is no more nor less; a tuple
        are several values, of which one must satisfy it (with `!=`: none may be equal)."""
        asked = _each(row.get(self.name)) if self.name else [text for value in row.values() for text in _each(value)]
        if not self.name:
            asked = [value for value in asked if isinstance(value, str)]
        if self.operator == "!=":
            found = not any(_equal(value, text) for value in asked for text in self.values)
        else:
            found = any(_compare(value, self.operator, text) for value in asked for text in self.values)
        return found is not self.negated


@dataclass(frozen=True)
class Filter:
    """Terms that must all hold; none at all hold for everything."""

    terms: tuple[Term, ...] = ()

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether the row, {name: number, text or bool}, satisfies all terms."""
        return all(term.holds(row) for term in self.terms)

    def of(self, names: Iterable[str]) -> Filter:
        """The terms about these names alone; words are about everything."""
        wanted = set(names)
        return Filter(tuple(term for term in self.terms if term.name in wanted))


def parse_filter(text: str, names: Iterable[str]) -> Filter:
    """The filter that a text is. A name may be the last steps of one: `width` for `block.ffn.width`.

    Raises BadFilter with the column, for a term that is none, an unknown or ambiguous name and a value without order.
    """
    known, terms, at = list(dict.fromkeys(names)), list[Term](), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TERM.match(text, at)
        if match is None:
            found = text[at:].split()[0]
            raise BadFilter(f"column {at + 1}: '{found}' is no condition: {_FORMS}")
        terms.append(_term(match, known))
        at = match.end()
    return Filter(tuple(terms))


def _term(match: re.Match[str], known: list[str]) -> Term:
    if match["word"] is not None:
        return Term(None, "~", (match["word"].strip("\"'"),), bool(match["no"]))
    try:
        name = named(match["name"], known)
    except ValueError as error:
        raise BadFilter(f"column {match.start('name') + 1}: {error}") from None
    values = tuple(part.strip("\"'") for part in re.findall(_PART, match["value"]))
    if match["operator"] in _ORDER:
        for value in values:
            if to_number(value) is None:
                where = match.start("value") + 1
                raise BadFilter(f"column {where}: '{value}' is no number, which {match['operator']} compares")
    return Term(name, match["operator"], values, bool(match["no"]))


def named(given: str, known: Collection[str]) -> str:
    """The one of the known names that is meant: that name, or the one whose last steps it is.

    Raises ValueError with the nearest name where there is none, and with all where there are several.
    """
    if given in known:
        return given
    ends = [name for name in known if name.endswith(f".{given}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ValueError(f"'{given}' may be {' or '.join(ends)}: write more of it")
    near = get_close_matches(given, [*known, *(name.rpartition(".")[2] for name in known)], n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ValueError(f"there is no '{given}' here{hint} (there is: {', '.join(known)})")


def to_number(text: str) -> float | None:
    """`4e-3` and `1.5M` as numbers; None for anything else."""
    match = _NUMBER.fullmatch(text)
    return float(match[1]) * _SUFFIX[match[2]] if match else None


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _lacks(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _equal(value: Any, text: str) -> bool:
    if isinstance(value, bool):
        return text.lower() in (("yes", "true", "1", "✓") if value else ("no", "false", "0"))
    number = to_number(text)
    if _lacks(value):
        return text.lower() in ("none", "null")
    if isinstance(value, int | float):
        return number is not None and math.isclose(value, number, rel_tol=1e-9)
    return str(value).lower() == text.lower() or (number is not None and to_number(str(value)) == number)


def _compare(value: Any, operator: str, text: str) -> bool:
    if operator == "=":
        return _equal(value, text)
    if operator == "~":
        return not _lacks(value) and text.lower() in str(value).lower()
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else to_number(str(value))
    bound = to_number(text)
    return number is not None and bound is not None and _ORDER[operator](float(number), bound)
